"""A benchmark's results as tables: for a terminal, and for docs/performance.md.

Nothing is rounded before it is compared, and a cell without a time says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from online_softmax.lab import (
    accuracy,
    benchfile,
    benchtable,
    doubts,
    fitting,
    fusedtables,
    fusion,
    goals,
    hostcost,
    lineartable,
    lossverdicts,
    steptables,
    tune,
    verdicts,
)
from online_softmax.lab.benchfile import Entry, Part, Row
from online_softmax.lab.benchtable import NONE, Table
from online_softmax.lab.grid import Cell
from online_softmax.lab.marks import doubted
from online_softmax.lab.moresizes import MORE_OPS

COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal, in an error's text
FIGURE = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")
Prices = Mapping[tuple[Cell, str], float]  # tune.prices


def cell_tables(rows: Sequence[Row], title: str = "", prices: Prices | None = None) -> list[Table]:
    """Every cell, a table for each operation and type; with prices where some are known."""
    tables = []
    prices = prices or {}
    for (op, dtype), group in benchtable.groups(rows).items():
        rivals = benchtable.rivals(group)
        # Ours under another setting, "ours, ..." say, stands beside with its own time.
        further = benchtable.ours(group)[1:]
        paid = [prices.get((row.cell, row.values)) for row in group]
        has_second = any(goals.is_held(row) for row in group)  # a clock of its own: not on a CPU
        head = ["rows x cols", "ceiling µs", "µs", "GB/s", "of ceiling"]
        head += ["do_bench µs"] if has_second else []
        lines = []
        for row, price in zip(group, paid, strict=True):
            ours = row.entry("ours") or Entry("ours", "ours")
            gbs = NONE if ours.gbs is None else f"{ours.gbs:,.0f}"
            line = [benchtable.size(row), benchtable.time(row.entry("ceiling"))]
            line += ["n/a" if row.cell.is_empty else benchtable.time(ours), gbs]
            line += [benchtable.share(goals.of_ceiling(row))]
            line += [benchtable.us(ours.do_bench_us)] if has_second else []
            line += [benchtable.times(price)] if any(paid) else []
            line += [benchtable.time(row.entry(name)) for name in further]
            lines.append((*line, *(benchtable.beside(row, name) for name in rivals)))
        more = ["price"] if any(paid) else []
        more += [f"{name} µs" for name in further] + [f"x {name}" for name in rivals]
        tables.append(Table(f"{op} {dtype}{title}", (*head, *more), tuple(lines), fold=op))
    return tables


def refusals_table(rows: Sequence[Row]) -> Table:
    """What has no time, or another clock, and why."""
    found = [
        (row, name, COLOUR.sub("", why))
        for row in rows
        for name, why in [("the cell", row.why), *((each.name, each.why) for each in row.entries)]
        if why
    ]
    return _reasons("Without a time, or timed by do_bench alone", found)


def doubts_table(rows: Sequence[Row]) -> Table:
    """Times that are not to be believed, and why."""
    title = "Times to doubt, past a limit; and cells of a throttled clock"
    return _reasons(title, doubts.lines(rows))


def _reasons(title: str, given: Iterable[tuple[Row, str, str]]) -> Table:
    """Rows, contenders and reasons. Reasons of one contender that differ in their figures alone are
    one line, with the figures of the first."""
    counted: dict[tuple[str, str, str], list[tuple[Row, str]]] = {}
    for row, name, why in given:
        counted.setdefault((row.op, name, FIGURE.sub("#", why)), []).append((row, why))
    lines = []
    for (op, name, _), found in counted.items():
        first, why = found[0]
        cell = f"{first.dtype} {benchtable.size(first)}"
        lines.append((op, name, why, cell, str(len(found))))
    head = ("operation", "contender", "why", "first", "cells")
    return Table(title, head, tuple(lines), text=4)


def _others(parts: Sequence[Part], kind: str) -> list[Table]:
    """Tables of what stands beside cells in a file, by its kind."""
    found = [other for part in parts for other in part.others if other["kind"] == kind]
    if kind == "tuning":
        return [Table(*tune.table(values)) for values in found]
    if kind == "accuracy":
        return [Table(*accuracy.table(found))]
    if kind == "fusion":
        return [Table(*fusion.table(found))]
    if kind == "linear":
        return [Table(*each) for each in lineartable.tables(found)]
    return [Table(*each) for values in found[-1:] for each in hostcost.tables(values)]


def _folded(make: Callable[[Sequence[Row]], Table], rows: Sequence[Row]) -> list[Table]:
    """A table an operation, shut."""
    groups = benchtable.operations(rows)
    return [replace(make(group), fold=op) for op, group in groups.items()]


def sections(parts: Sequence[Part], is_page: bool = False) -> dict[str, list[Table]]:
    """Everything that stored parts say, by section; the verdicts last, where a terminal shows them.

    Lines of cuts that no longer run are left out (goals.today). A page has of the small cells those
    with every rival alone, and no rankings of cuts: its readers have the files too. What is long it
    keeps shut, operation by operation, under a summary.
    """
    parts = [doubted(part) for part in parts]
    every = benchtable.ordered(map(goals.today, benchfile.latest(parts)))
    rows = [row for row in every if not row.cell.is_fused]
    others = [other for part in parts for other in part.others]
    tuned = [other for other in others if other["kind"] == "tuning"]
    prices = tune.prices(tuned)
    small = [r for r in rows if not r.cell.is_large and (r.cell.has_rivals or not is_page)]
    refusals, errors = [refusals_table(every)], [verdicts.accuracy_table(rows)]
    if is_page:
        refusals = _folded(refusals_table, rows)
        errors = [verdicts.exact_table(rows), *_folded(verdicts.accuracy_table, rows)]
    found = {
        "tuning": [] if is_page else _others(parts, "tuning"),
        "host": _others(parts, "host"),
        "fusion": _others(parts, "fusion"),
        "losses": [lossverdicts.in_forward_table(rows), lossverdicts.stats_table(rows)],
        "linear": _others(parts, "linear"),
        "attention": fusedtables.tables([row for row in every if row.op not in MORE_OPS]),
        "steps": [] if is_page else [Table(*each) for each in steptables.stored_tables(others)],
        "more": fusedtables.tables([row for row in every if row.op in MORE_OPS]),
        "errors": _others(parts, "accuracy"),
        "large": cell_tables([r for r in rows if r.cell.is_large]),
        "small": cell_tables(small, ", other cells", prices),
        "refusals": refusals,
        "doubts": [doubts_table(every)],
        "accuracy": errors,
        "few": [verdicts.few_table(rows)],
        "means": [verdicts.means_table(rows)],
    }
    found = {name: [each for each in tables if each.rows] for name, tables in found.items()}
    if not rows:
        return found
    below, slower = [verdicts.below_table(rows)], [verdicts.slower_table(rows)]
    if is_page:
        below, slower = verdicts.below_tables(rows), verdicts.slower_tables(rows)
    if not any(map(goals.is_held, rows)):
        below = []  # a CPU has no goals
    return found | {"below": below, "slower": slower}


# ---- on a terminal


def render(parts: Sequence[Part], console: Console) -> None:
    """Print every table."""
    for header in circumstances(parts):
        console.print(Text(header))
    found = [table for tables in sections(parts).values() for table in tables]
    render_tables(found, console)
    console.print()
    for text in marks(parts):
        console.print(Text(text, "dim"))


def marks(parts: Sequence[Part]) -> list[str]:
    """What the marks in the tables mean, a line each."""
    rows = [row for part in map(doubted, parts) for row in part.rows]
    every = [(entry.clock, entry.rounds_us) for row in rows for entry in row.entries]
    linear = [line for part in parts for line in part.others if line["kind"] == "linear"]
    apart = [doubts.is_apart(*each) for each in every]
    apart += [lineartable.is_apart(line, entry) for line in linear for entry in line["entries"]]
    beaten = [lineartable.is_beaten(line, entry) for line in linear for entry in line["entries"]]
    by_other = any(clock == "do_bench" for clock, _ in every)
    star = " *: no graph held it; by do_bench, both." if by_other else ""
    found = [f"x RIVAL: times as fast.{star}"] if any(not row.cell.is_fused for row in rows) else []
    if any(row.cell.is_fused for row in rows):
        found.append("A table with its unit in the title: a rival's column is its own speed in it.")
    doubt = any(entry.doubt for row in rows for entry in row.entries)
    if doubt or any(beaten):
        found.append(f"{doubts.MARK}: not to be believed, and counted nowhere.")
    if any(apart):
        found.append(
            f"{doubts.APART_MARK}: the middle of its rounds is over {doubts.APART_TIMES:g} times "
            "the least: the processor was busy, and a run when it is not may say less."
        )
    return found


def render_tables(found: Iterable[Table], console: Console) -> None:
    """Print tables, one below the other."""
    for each in found:
        console.print()
        console.print(Text(each.title, "bold"))
        if not each.rows:
            console.print(Text("  none"))
            continue
        rows = [[Text(cell) for cell in line] for line in each.rows]
        fitting.show(console, _fields(each, console.is_terminal), rows, _keys(each))


def _fields(table: Table, is_terminal: bool) -> list[fitting.Field]:
    """Words to the left; on a pipe, which has room, anything may be broken between words."""
    count = len(table.head)
    return [
        fitting.Field(
            heading, "left" if at < table.text else "right",
            not is_terminal or at < table.text or (at == count - 1 and heading == "why"),
        )
        for at, heading in enumerate(table.head)
    ]  # fmt: skip


def _keys(table: Table) -> int:
    """The columns that say what a line is of: the words, or all before the first time."""
    if table.text:
        return 1
    return next((at for at, heading in enumerate(table.head) if "µs" in heading), 1)


def _rivals_said(part: Part) -> str:
    versions = part.header.rivals.items()
    return "".join(f", {name} {v}" for name, v in versions if name in ("quack", "liger") and v)


def circumstances(parts: Iterable[Part]) -> list[str]:
    """What a result must state: card, driver, versions, commit, date, clock; a line for the runs
    that differ in date alone, or in that some asked for no rival that others name."""
    found: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        h = part.header
        said = [h.device, f"driver {h.machine.get('driver_version') or 'unknown'}"]
        if h.device == "cpu":
            said = [f"CPU {h.machine.get('cpu', '')}, {h.machine.get('threads', 1)} threads"]
        versions = h.versions.items()
        said += [f"{name} {v}" for name, v in versions if name in ("torch", "triton") and v]
        rest = f", commit {h.versions.get('commit') or 'unknown'}; {{}}. {h.clock}."
        found.setdefault((", ".join(said), rest), []).append(part)
    lines = []
    for (first, rest), alike in found.items():
        named = sorted({_rivals_said(part) for part in alike} - {""}) or [""]
        for rivals in named:
            mine = [p for p in alike if _rivals_said(p) in ("", rivals)]
            lines.append(first + rivals + rest.format(_dates(mine)))
    return lines


def _dates(parts: Sequence[Part]) -> str:
    dates = sorted({part.header.date for part in parts})
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
