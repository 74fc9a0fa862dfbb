"""The cells of `bench` in a report: every contender's time as the page draws it, and their marks.

A cell is written short: thousands of them stand in one page. web/report.js has the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from online_softmax.lab import benchplot, benchtable, goals, grid, marks
from online_softmax.lab.benchfile import Entry, Row
from online_softmax.lab.benchpage import COLOUR
from online_softmax.lab.reportsheet import Sheet, Value, compact

RAGGED, LARGE, WARM, FEW = 1, 2, 4, 8  # bits of a cell's flags
FEW_ROWS = max(grid.SMALL_ROWS)  # rows up to which a matrix is among the small ones


def names(rows: Sequence[Row]) -> list[str]:
    """The contenders: the ceiling, ours, the rivals in their order, what else there is."""
    there = list(dict.fromkeys(entry.name for row in rows for entry in row.entries))
    first = ["ceiling", *benchtable.ours(rows)[:1], *benchtable.rivals(rows)]
    return [name for name in dict.fromkeys([*first, *there]) if name in there]


def plain(rows: Sequence[Row]) -> dict[str, Any]:
    """All cells, of the usual input or not, in the order of the tables."""
    contenders, reasons, cells = names(rows), dict[str, int](), []
    for row in rows:
        flags = RAGGED * (goals.kind(row.cell) == goals.RAGGED) + LARGE * row.cell.is_large
        flags += WARM * (row.is_cold_l2 is False) + FEW * (row.rows <= FEW_ROWS)
        entries = [_entry(row, name, reasons) for name in contenders]
        said = [each.text for each in marks.of_row(row)]
        said += [row.why] if row.why else []
        cells.append([row.op, row.dtype, row.rows, row.cols, row.values, flags, row.ideal_bytes,
                      entries, said])  # fmt: skip
    ops = list(benchtable.operations(rows))
    return {
        "contenders": contenders, "cells": cells, "reasons": list(reasons), "ops": ops,
        "limits": {op: benchplot.CEILING.get(op, "an addition") for op in ops},
        "losses": [op for op in ops if op in grid.LOSS_OPS],
    }  # fmt: skip


def _entry(row: Row, name: str, reasons: dict[str, int]) -> Any:
    """[µs, p20, p80, of the ceiling, ours times as fast, whether do_bench timed it, whether it is
    doubted], zeros at its end left out; a number, of the reason, where there is no time; None: it
    was not asked."""
    entry = row.entry(name)
    if entry is None:
        return None
    if not entry.median_us:
        why = COLOUR.sub("", entry.why or ("wrong" if entry.ok is False else "not timed"))
        return reasons.setdefault(why, len(reasons))
    ceiling, ours = row.entry("ceiling"), row.entry("ours")
    is_late = entry.clock == "do_bench"
    share = None if is_late else goals.times(entry, ceiling)
    ratios = (entry.p20_us, entry.p80_us, share, goals.times(ours, entry))
    flags = [int(is_late), int(bool(entry.doubt))]
    while flags and not flags[-1]:
        flags.pop()
    return [compact(entry.median_us), *(compact(each, 5) for each in ratios), *flags]


def marked(rows: Sequence[Row]) -> Sheet:
    """The cells with something to know of ours, a line each."""
    lines: list[tuple[Value, ...]] = [
        (row.op, row.dtype, row.rows, row.cols, goals.of_ceiling(row), each.word, each.why)
        for row in rows
        for each in marks.of_row(row)
    ]
    columns = (("operation", "code"), ("type", "text"), ("rows", "count"), ("columns", "count"),
               ("of the limit", "share"), ("mark", "text"), ("why", "text"))  # fmt: skip
    return Sheet("Marked cells", columns, tuple(lines))


def cells_sheet(rows: Sequence[Row], op: str, dtype: str) -> Sheet:
    """The cells of one operation and type, as the page shows them too."""
    mine = [row for row in rows if (row.op, row.dtype) == (op, dtype)]
    rivals = benchtable.rivals(mine)
    further = benchtable.ours(mine)[1:]
    lines = [_line(row, further, rivals) for row in mine]
    columns = [("rows", "count"), ("columns", "count"), ("limit µs", "us"), ("µs", "us"),
               ("GB/s", "count"), ("of the limit", "share")]  # fmt: skip
    columns += [(f"{name} µs", "us") for name in further]
    for name in rivals:
        columns += [(f"{name} µs", "us"), (f"times {name}", "times")]
    return Sheet(f"{op} {dtype}", (*columns, ("note", "text")), tuple(lines))


def _line(row: Row, further: Sequence[str], rivals: Sequence[str]) -> tuple[Value, ...]:
    ours, ceiling = row.entry("ours"), row.entry("ceiling")
    line: list[Value] = [row.rows, row.cols, ceiling.median_us if ceiling else None]
    line += [ours.median_us, ours.gbs] if ours else [None, None]
    line.append(goals.of_ceiling(row))
    line += [_us(row.entry(name)) for name in further]
    for name in rivals:
        entry = row.entry(name)
        line += [_us(entry), goals.times(ours, entry)]
    return (*line, note(row))


def _us(entry: Entry | None) -> float | None:
    return entry.median_us if entry else None


def note(row: Row) -> str:
    """What is not in a line's figures."""
    said = [] if row.values == "normal" else [f"{row.values} values"]
    said += [row.why] if row.why else []
    said += ["L2 warm"] if row.is_cold_l2 is False else []
    late = [e.name for e in row.entries if e.clock == "do_bench" and e.median_us]
    said += [f"{', '.join(late)} by do_bench"] if late else []
    return "; ".join(said)


def few_sheet(rows: Sequence[Row]) -> Sheet:
    """Few rows beside the fastest rival, all operations and types."""
    lines: list[tuple[Value, ...]] = []
    for row in rows:
        found = goals.beside_fastest(row)
        if row.rows <= FEW_ROWS and not row.cell.is_large and row.values == "normal" and found:
            ours = row.entry("ours")
            lines.append((row.op, row.dtype, row.rows, row.cols, ours.median_us if ours else None,
                          found.rival.name, found.rival.median_us, found.times))  # fmt: skip
    columns = (("operation", "code"), ("type", "text"), ("rows", "count"), ("columns", "count"),
               ("µs", "us"), ("fastest rival", "text"), ("its µs", "us"),
               ("times as fast", "times"))  # fmt: skip
    return Sheet("Few rows beside the fastest rival", columns, tuple(lines))
