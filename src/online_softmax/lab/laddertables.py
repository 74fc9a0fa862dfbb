"""The ladder's tables in Markdown: README's, and those of the lessons."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from online_softmax.catalogue import KERNELS
from online_softmax.lab import profilefile
from online_softmax.lab.results import Result, Run
from online_softmax.plan import ELEMENT_BYTES

MAIN = ("float32", 32768, 4096)  # the cell of README's table and picture


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
    lines = [found for run in runs for r in run.results if r.name in names for found in _why(r)]
    return "\n\n".join([table(head, rows), *dict.fromkeys(lines)])


def _result_cell(result: Result | None) -> str:
    return "—" if result is None else _us(result.median_us)


def _why(result: Result) -> list[str]:
    """What to say below a table of a result without a time."""
    if result.median_us is not None:
        return []
    return [f"—: {result.reasons[0].split(':')[0] if result.reasons else 'not timed'}."]


def lesson_table(runs: list[Run], name: str) -> str:
    """One rung over all stored cells, with its best block size."""
    head = ("rows x cols", "µs", "GB/s", "of copy", "x torch", "threads a block")
    rows, lines = [], []
    for run in runs:
        for r in run.results:
            if r.name == name:
                block = "—" if r.median_us is None else str(r.block)
                rows.append(
                    (_title(run), _us(r.median_us), _gbs(r.gbs), _percent(r.of_copy),
                     _number(r.of_torch), block)
                )  # fmt: skip
                lines += _why(r)
    note = f"{runs[0].header.device}, cold L2; GB/s counts one read and one write."
    return "\n\n".join([table(head, rows), *dict.fromkeys(lines), note])


def traffic_table(folder: Path) -> str:
    """Bytes an element that each rung moves, by the GPU's counters: a table for each run of
    `profile` that a folder has, the smaller matrices first."""
    paths = sorted(folder.glob("ncu-*.json*"))
    runs = [run for path in paths for run in profilefile.read(path)]
    runs.sort(key=lambda run: (run.header.dtype, run.header.rows * run.header.cols))
    return "\n\n".join(map(_traffic, runs))


def _traffic(run: profilefile.Profile) -> str:
    head = ("rung", "predicted reads", "loads from L1", "reads from L2", "reads from DRAM",
            "writes to L2", "µs")  # fmt: skip
    h, item = run.header, ELEMENT_BYTES[run.header.dtype]
    rows = []
    for line in run.lines:
        if not line.counters:
            continue
        predicted = None if line.reads_predicted is None else line.reads_predicted * item
        moved = (line.counters.get(n) for n in ("l1_load", "l2_read", "dram_read", "l2_write"))
        figures = [None if f is None else round(f, 1) for f in (predicted, *moved)]
        us = _us(line.counters.get("time_us"))
        rows.append((f"`{line.name}`", *map(_number, figures), us))
    note = (
        f"Bytes per element, {h.rows:,} x {h.cols:,} {h.dtype}, {h.device}; caches emptied before "
        f"each kernel, planned block sizes. An element is {item} bytes; the prediction is reads "
        "that the algorithm has, times that."
    )
    return table(head, rows) + "\n\n" + note
