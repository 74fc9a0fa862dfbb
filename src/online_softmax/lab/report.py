"""Draw the documents' tables and pictures again from stored results: `make readme`.

A table stands between two markers, `<!-- NAME:begin -->` and `<!-- NAME:end -->`; what is between
them belongs to this file. `--check` writes nothing and fails if anything would change.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from online_softmax.catalogue import KERNELS
from online_softmax.lab import benchfile, benchpage
from online_softmax.lab.benchfile import Part
from online_softmax.lab.benchtable import Table
from online_softmax.lab.results import Result, Run, read

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
TRAFFIC = RESULTS / "ncu-4096x4096-float32.json"
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
LESSONS = ROOT / "docs" / "lessons"
PICTURE = ROOT / "docs" / "ladder.png"
DRAWN = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
MAIN = ("float32", 32768, 4096)  # the cell of README's table and picture
ACCURACY = ROOT / "docs" / "accuracy.md"
SECTIONS = ("means", "below", "slower", "few", "host", "fusion", "accuracy", "large", "small",
            "refusals")  # fmt: skip
NOTHING = "No results are stored yet."
NO_TABLE = "The stored results have none."
NO_CELL = "None."
FOLD = "<details>\n<summary>{}</summary>\n\n{}\n\n</details>"
MARKERS = "<!-- {0}:begin -->\n{1}\n<!-- {0}:end -->"


def stored(folder: Path = RESULTS) -> list[Run]:
    """Every stored run of the ladder, the main cell first, then by type and size."""
    runs = [run for path in sorted(folder.glob("ladder-*.jsonl")) for run in read(path)]
    order = {"float32": 0, "bfloat16": 1, "float16": 2}
    return sorted(
        runs,
        key=lambda r: (
            cell(r) != MAIN,
            order.get(r.header.dtype, 9),
            -r.header.rows,
            r.header.cols,
        ),
    )


def cell(run: Run) -> tuple[str, int, int]:
    """What identifies a run: type, rows, columns."""
    return run.header.dtype, run.header.rows, run.header.cols


def _us(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return "—"
    if 0 < value < 0.01:
        return "under 0.01"
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _gbs(value: float | None) -> str:
    return "—" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    if value is None:
        return "—"
    if value < 0.0005:
        return "under 0.1 %"
    return f"{100 * value:.1f} %" if value < 0.1 else f"{100 * value:.0f} %"


def table(head: Iterable[str], rows: Iterable[Iterable[str]], text: int = 1) -> str:
    """A Markdown table; the first columns are text, the others numbers."""
    head = list(head)
    lines = [head, ["---"] * text + ["---:"] * (len(head) - text), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _title(run: Run) -> str:
    h = run.header
    return f"{h.rows:,} x {h.cols:,} {h.dtype}"


def ladder_table(runs: list[Run]) -> str:
    """README's table: every rung on the main cell, its time and what it costs."""
    by_cell = {cell(run): run for run in runs}
    main = by_cell[MAIN]
    head = ("rung", "idea", "reads", "exps", "registers", "µs", "of copy", "x torch")
    rows = []
    for r in main.results:
        figures = r.figures[0] if r.figures else None
        is_rung = r.name in KERNELS and KERNELS[r.name].rung
        lesson = f"[`{r.name}`](docs/lessons/{r.name}.md)" if is_rung else f"`{r.name}`"
        idea = f"what `softmax` picks here: {r.kernel}" if r.name == "production" else r.idea
        rows.append(
            (
                lesson,
                idea,
                _number(r.reads),
                _number(r.exps if r.exps is not None else r.exps_predicted),
                str(figures.registers) if figures and figures.registers else "—",
                _us(r.median_us),
                _percent(r.of_copy),
                _number(r.of_torch),
            )
        )
    rows.append(
        ("copy", "one read, one write and nothing else: the limit", "1", "0", "—",
         _us(main.header.copy_us), "100 %", "—")
    )  # fmt: skip
    h = main.header
    note = (
        f"{_title(main)} on an {h.device}; reads and exponentials per element; cold L2, median of "
        f"three interleaved rounds; torch {h.versions.get('torch')}. "
        "Raw data: [benchmarks/results/h200](benchmarks/results/h200)."
    )
    return table(head, rows, text=2) + "\n\n" + note


def cells_table(runs: list[Run]) -> str:
    """Every stored cell: microseconds of every rung, and of a copy."""
    names = [r.name for r in runs[0].results if r.name != "production"]
    head = ("rows x cols", "copy", *(f"`{name}`" for name in names))
    rows = []
    for run in runs:
        found = {r.name: r for r in run.results}
        timed = [_result_cell(found.get(name)) for name in names]
        rows.append((_title(run), _us(run.header.copy_us), *timed))
    return table(head, rows)


def _result_cell(result: Result | None) -> str:
    if result is None:
        return "—"
    return "cannot" if result.reasons and result.median_us is None else _us(result.median_us)


def lesson_table(runs: list[Run], name: str) -> str:
    """One rung over all stored cells, with its best block size."""
    head = ("rows x cols", "µs", "GB/s", "of copy", "x torch", "threads a block")
    rows = []
    for run in runs:
        for r in run.results:
            if r.name == name:
                if r.median_us is None:
                    why = r.reasons[0] if r.reasons else "not timed"
                    rows.append((_title(run), why.split(":")[0], "—", "—", "—", "—"))
                    continue
                rows.append(
                    (_title(run), _us(r.median_us), _gbs(r.gbs), _percent(r.of_copy),
                     _number(r.of_torch), str(r.block))
                )  # fmt: skip
    h = runs[0].header
    return table(head, rows) + f"\n\n{h.device}, cold L2; GB/s counts one read and one write."


def traffic_table(path: Path = TRAFFIC) -> str:
    """Bytes an element that each rung moves, by the GPU's counters (benchmarks/traffic.py)."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    head = ("rung", "loads from L1", "reads from L2", "reads from DRAM", "writes to L2", "µs")
    columns = ("l1_load", "l2_read", "dram_read", "l2_write")
    rows = [
        (f"`{name}`", *(_number(round(f[c], 1)) for c in columns), _us(f["time"]))
        for name, f in stored["rungs"].items()
    ]
    size = f"{stored['rows']:,} x {stored['cols']:,} {stored['dtype']}"
    gpu = stored["machine"]["gpu"]
    note = (
        f"Bytes per element, {size}, {gpu}; caches emptied before each kernel, planned block "
        "sizes. An element is 4 bytes."
    )
    return table(head, rows) + "\n\n" + note


def stored_bench(folder: Path = RESULTS, kind: str = "bench") -> list[Part]:
    """Every stored run of `bench`; of `bench --tune` or `--accuracy`: "tuning", "accuracy"."""
    return benchfile.read(sorted(folder.glob(f"{kind}-*.jsonl")))


def _escaped(line: Iterable[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in line]


def performance(text: str, parts: list[Part], tuned: Sequence[Part] = ()) -> str:
    """docs/performance.md with its tables drawn from stored runs; without any, it says so. Of
    rankings of cuts the tables have the price."""
    return _drawn(text, SECTIONS, parts, benchpage.sections([*parts, *tuned], is_page=True))


def errors(text: str, parts: list[Part]) -> str:
    """docs/accuracy.md with its table of errors drawn from stored runs."""
    return _drawn(text, ("errors",), parts, benchpage.sections(parts, is_page=True))


def _shown(tables: Sequence[Table]) -> str:
    """Tables one after another, those that fold shut under their name."""
    drawn = []
    for fold, alike in itertools.groupby(tables, key=lambda each: each.fold):
        group = list(alike)
        bodies = [
            (f"**{each.title}**\n\n" if len(group) > 1 else "")
            + (table(each.head, map(_escaped, each.rows), each.text) if each.rows else NO_CELL)
            for each in group
        ]
        body = "\n\n".join(bodies)
        drawn.append(FOLD.format(fold, body) if fold else body)
    return "\n\n".join(drawn)


def _drawn(
    text: str, names: Sequence[str], parts: list[Part], found: dict[str, list[Table]]
) -> str:
    said = benchpage.circumstances(parts)
    bodies = {"circumstances": "\n".join(f"- {each}" for each in said) or NOTHING}
    for name in names:
        bodies[name] = _shown(found.get(name, [])) or (NO_TABLE if parts else NOTHING)
    for name, body in bodies.items():
        text = replaced(text, name, body)
    return text


def replaced(text: str, name: str, body: str) -> str:
    """The text with what stands between a name's markers replaced; ValueError without markers."""
    pattern = re.compile(rf"<!-- {name}:begin -->.*?<!-- {name}:end -->", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no markers for {name!r}")
    return pattern.sub(lambda _: MARKERS.format(name, body), text)


def documents(runs: list[Run]) -> dict[Path, str]:
    """Every document with generated parts, as it should read."""
    text = README.read_text(encoding="utf-8")
    text = replaced(text, "ladder", ladder_table(runs))
    wanted = {README: text}
    page = PERFORMANCE.read_text(encoding="utf-8")
    wanted[PERFORMANCE] = performance(page, stored_bench(), stored_bench(kind="tuning"))
    page = ACCURACY.read_text(encoding="utf-8")
    wanted[ACCURACY] = errors(page, stored_bench(kind="accuracy"))
    for path in sorted(LESSONS.glob("*.md")):
        lesson = path.read_text(encoding="utf-8")
        parts: dict[str, Callable[[], str]] = {
            "measured": lambda path=path: lesson_table(runs, path.stem),  # type: ignore[misc]
            "cells": lambda: cells_table(runs),
            "traffic": traffic_table,
        }
        for name, body in parts.items():
            if f"<!-- {name}:begin -->" in lesson:
                lesson = replaced(lesson, name, body())
        wanted[path] = lesson
    return wanted


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it would")
    options = parser.parse_args(arguments)
    runs = stored()
    stale = [
        path for path, text in documents(runs).items() if path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        name = path.relative_to(ROOT)
        if options.check:
            sys.stderr.write(f"{name} is not what the stored results say: make readme\n")
        else:
            path.write_text(documents(runs)[path], encoding="utf-8")
            sys.stdout.write(f"{name} written\n")
    if not options.check:
        from online_softmax.lab import benchplot, plot

        plot.draw(next(run for run in runs if cell(run) == MAIN), PICTURE)
        rows = benchfile.latest(stored_bench())
        paths = {op: ROOT / "docs" / f"performance-{op}.png" for op in DRAWN}
        for op, path in paths.items():
            benchplot.draw(rows, op, path)
        for path in (PICTURE, *paths.values()):
            sys.stdout.write(f"{path.relative_to(ROOT)} drawn\n")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
