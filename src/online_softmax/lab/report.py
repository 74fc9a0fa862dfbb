"""Draw the documents' tables and pictures again from stored results: `make readme`.

A table stands between two markers, `<!-- NAME:begin -->` and `<!-- NAME:end -->`; what is between
them belongs to this file. `--check` writes nothing and fails if anything would change.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from online_softmax.lab import benchfile, benchpage, chinese, losspage
from online_softmax.lab.attentiontables import decode_table, products_table
from online_softmax.lab.benchfile import Part
from online_softmax.lab.benchtable import Table
from online_softmax.lab.laddertables import (
    MAIN,
    cell,
    cells_table,
    ladder_table,
    lesson_table,
    table,
    traffic_table,
)
from online_softmax.lab.results import Run, read

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
TRAFFIC = RESULTS  # the runs of `profile` in it
ATTENTION = RESULTS / "bench-attention.jsonl"
README = ROOT / "README.md"
CHINESE = ROOT / "README.zh.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
IN_CHINESE = ROOT / "docs" / "performance.zh.md"  # without the longest tables: links to them
LESSONS = ROOT / "docs" / "lessons"
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


def stored_bench(folder: Path = RESULTS, kind: str = "bench") -> list[Part]:
    """Every stored run of `bench`; of `bench --tune` or `--accuracy`: "tuning", "accuracy"."""
    return benchfile.read(sorted(folder.glob(f"{kind}-*.jsonl")), warnings.warn)


def _escaped(line: Iterable[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in line]


def performance(text: str, parts: list[Part], tuned: Sequence[Part] = ()) -> str:
    """docs/performance.md with its tables drawn from stored runs; without any, it says so. Of
    rankings of cuts the tables have the price."""
    found = benchpage.sections([*parts, *tuned], is_page=True)
    for name, body in losspage.bodies(benchfile.latest(parts), found, _shown).items():
        text = replaced(text, name, body)
    return _drawn(text, SECTIONS, parts, found)


def translated(text: str, english: str) -> str:
    """A Chinese page with the tables that it has between markers as the English one has them."""
    for name, body in re.findall(r"<!-- (\w+):begin -->\n(.*?)\n<!-- \1:end -->", english, re.S):
        if f"<!-- {name}:begin -->" in text:
            text = replaced(text, name, chinese.said(body))
    return text


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
    """Every document with generated parts, as it should read; `*.zh.md` in Chinese."""
    ladder = ladder_table(runs)
    text = CHINESE.read_text(encoding="utf-8")
    wanted = {CHINESE: replaced(text, "ladder", chinese.said(ladder))}
    text = README.read_text(encoding="utf-8")
    wanted[README] = replaced(text, "ladder", ladder)
    page = PERFORMANCE.read_text(encoding="utf-8")
    wanted[PERFORMANCE] = performance(page, stored_bench(), stored_bench(kind="tuning"))
    page = IN_CHINESE.read_text(encoding="utf-8")
    wanted[IN_CHINESE] = translated(page, wanted[PERFORMANCE])
    page = ACCURACY.read_text(encoding="utf-8")
    wanted[ACCURACY] = errors(page, stored_bench(kind="accuracy"))
    for path in sorted(LESSONS.glob("*.md")):
        lesson = path.read_text(encoding="utf-8")
        rung, _, language = path.stem.partition(".")
        parts: dict[str, Callable[[], str]] = {
            "measured": lambda rung=rung: lesson_table(runs, rung),  # type: ignore[misc]
            "cells": lambda: cells_table(runs),
            "traffic": lambda: traffic_table(TRAFFIC),
            "products": lambda: products_table(ATTENTION),
            "decode": lambda: decode_table(ATTENTION),
        }
        for name, body in parts.items():
            if f"<!-- {name}:begin -->" in lesson:
                lesson = replaced(lesson, name, chinese.said(body()) if language else body())
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
        from online_softmax.lab import pictures, plot

        for place, make in pictures.stored(RESULTS).items():
            plot.write(make(), ROOT / "docs" / place)
            sys.stdout.write(f"docs/{place} drawn\n")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
