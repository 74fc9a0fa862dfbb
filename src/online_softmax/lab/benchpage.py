"""A benchmark's results as tables: for a terminal, and for docs/performance.md.

Nothing is rounded before it is compared, and a cell without a time says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from online_softmax.lab import accuracy, benchfile, fusion, goals, hostcost, tune
from online_softmax.lab.benchfile import Entry, Part, Row
from online_softmax.lab.contenders import RIVALS
from online_softmax.lab.goals import Beside
from online_softmax.lab.grid import Cell

NONE = "—"


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading; the first `text` columns are words, the others numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: int = 1


# ---- cells of a table


def _us(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _times(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _size(row: Row) -> str:
    order = "" if row.values == "normal" else f" {row.values}"
    return f"{row.rows:,} x {row.cols:,}{order}"


def _name(row: Row) -> str:
    return f"{row.op} {row.dtype} {_size(row)}"


def _beside(row: Row, name: str) -> str:
    """How many times as fast as a rival; or what the rival did instead."""
    entry = row.entry(name)
    if entry is None:
        return NONE
    if entry.median_us is None:
        return "wrong" if entry.ok is False else "refuses"
    mark = "*" if entry.clock == "do_bench" else ""
    return _times(goals.times(row.entry("ours"), entry)) + mark


def _time(entry: Entry | None) -> str:
    if entry is None:
        return NONE
    if entry.median_us is None:
        return "WRONG" if entry.ok is False else "none"
    return _us(entry.median_us) + ("*" if entry.clock == "do_bench" else "")


# ---- the tables


def _groups(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.op, row.dtype), []).append(row)
    return found


def _rivals(rows: Iterable[Row]) -> list[str]:
    there = {entry.name for row in rows for entry in row.entries if entry.kind == "rival"}
    return [name for name in RIVALS if name in there]


def _ours(rows: Iterable[Row]) -> list[str]:
    """The lines of ours, "ours" the first."""
    there = (entry.name for row in rows for entry in row.entries if entry.kind == "ours")
    return list(dict.fromkeys(("ours", *there)))


Prices = Mapping[tuple[Cell, str], float]  # tune.prices


def cell_tables(rows: Sequence[Row], title: str = "", prices: Prices | None = None) -> list[Table]:
    """Every cell, a table for each operation and type; with prices where some are known."""
    tables = []
    prices = prices or {}
    for (op, dtype), group in _groups(rows).items():
        rivals = _rivals(group)
        # Ours under another setting, "ours, ..." say, stands beside with its own time.
        further = _ours(group)[1:]
        paid = [prices.get((row.cell, row.values)) for row in group]
        head = ("rows x cols", "ceiling µs", "µs", "GB/s", "of ceiling", "do_bench µs")
        lines = []
        for row, share in zip(group, paid, strict=True):
            ours = row.entry("ours") or Entry("ours", "ours")
            gbs = NONE if ours.gbs is None else f"{ours.gbs:,.0f}"
            line = [_size(row), _time(row.entry("ceiling")), _time(ours), gbs]
            line += [_share(goals.of_ceiling(row)), _us(ours.do_bench_us)]
            line += [_times(share)] if any(paid) else []
            line += [_time(row.entry(name)) for name in further]
            lines.append((*line, *(_beside(row, name) for name in rivals)))
        more = ["price"] if any(paid) else []
        more += [f"{name} µs" for name in further] + [f"x {name}" for name in rivals]
        tables.append(Table(f"{op} {dtype}{title}", (*head, *more), tuple(lines)))
    return tables


def means_table(rows: Sequence[Row]) -> Table:
    """Geometric means over the main cells, the goal in brackets."""
    main = [row for row in rows if row.cell.is_main and row.values == "normal"]
    rivals = _rivals(main)
    lines = []
    for (op, dtype), group in _groups(main).items():
        wanted = goals.MEANS.get((op, goals.ITEM_BYTES[dtype]), {})
        line = [f"{op} {dtype}", str(len(group))]
        line.append(_share(goals.geometric_mean(map(goals.of_ceiling, group))))
        for name in rivals:
            mean = goals.geometric_mean(goals.times(r.entry("ours"), r.entry(name)) for r in group)
            least = f" ({wanted[name]:g})" if name in wanted and mean is not None else ""
            line.append(_times(mean) + least)
        lines.append(tuple(line))
    head = ("operation", "cells", "of ceiling", *(f"x {name} (goal)" for name in rivals))
    return Table("Geometric means over the main cells", head, tuple(lines))


def below_table(rows: Sequence[Row]) -> Table:
    """The cells below their goal."""
    found = goals.below_goal(rows)
    lines = tuple((_name(row), _share(share), f"{wanted:g}") for row, share, wanted in found)
    return Table("Cells below their goal", ("cell", "of ceiling", "goal"), lines)


def _beside_line(each: Beside) -> tuple[str, ...]:
    ours = each.row.entry(each.name)
    spread = max(ours.spread_us if ours else 0.0, each.rival.spread_us)
    mark = "*" if each.rival.clock == "do_bench" else ""
    return (_name(each.row), each.rival.name, _time(ours), _us(each.rival.median_us) + mark,
            _times(each.times), _us(spread))  # fmt: skip


BESIDE_HEAD = ("cell", "fastest rival", "µs", "its µs", "times as fast", "spread µs")


def slower_table(rows: Sequence[Row]) -> Table:
    """The cells in which a rival is faster, beyond the noise."""
    lines = tuple(_beside_line(each) for each in goals.slower(rows))
    title = "Cells slower than the fastest rival, by more than 2 % and more than the spread"
    return Table(title, BESIDE_HEAD, lines, text=2)


def few_table(rows: Sequence[Row]) -> Table:
    """Few long rows beside the fastest rival: mean and worst cell of each operation and type."""
    lines = []
    for (op, dtype), group in _groups(rows).items():
        for name in _ours(group):
            found = goals.few(group, name)
            if not found:
                continue
            mean = goals.geometric_mean(each.times for each in found)
            worst = min(found, key=lambda each: each.times)
            late = sum(each.times * goals.FEW_ROWS_SLOWER < 1 for each in found)
            lines.append((f"{op} {dtype}", name, str(len(found)), _times(mean), str(late),
                          _size(worst.row), _times(worst.times)))  # fmt: skip
    head = ("operation", "", "cells", "mean", "over 10 % slower", "worst cell", "there")
    title = f"At most {goals.FEW_ROWS} rows of {goals.FEW_ROWS_COLS:,} columns and more: "
    return Table(title + "times as fast as the fastest rival", head, tuple(lines), text=2)


def accuracy_table(rows: Sequence[Row]) -> Table:
    """Errors of the main cells beside torch's, over the size of their row."""
    lines = []
    for row in rows:
        ours, torch, right = row.entry("ours"), row.entry("torch"), goals.is_as_exact(row)
        if row.cell.is_main and ours and torch and right is not None:
            errors = (ours.share_max, torch.share_max, ours.share_mean, torch.share_mean)
            shown = (NONE if each is None else f"{each:.2e}" for each in errors)
            lines.append((_name(row), *shown, "yes" if right else "NO"))
    head = ("cell", "largest error", "torch's", "mean error", "torch's", "at most torch's + 2⁻²³")
    return Table("Errors beside torch's, against float64", head, tuple(lines))


def refusals_table(rows: Sequence[Row]) -> Table:
    """What has no time, or another clock, and why; alike reasons of one contender once."""
    counted: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.why:
            counted.setdefault((row.op, "the cell", row.why), []).append(row)
        for entry in row.entries:
            if entry.why:
                counted.setdefault((row.op, entry.name, entry.why), []).append(row)
    lines = tuple(
        (op, name, why, f"{found[0].dtype} {_size(found[0])}", str(len(found)))
        for (op, name, why), found in counted.items()
    )
    head = ("operation", "contender", "why", "first", "cells")
    return Table("Without a time, or timed by do_bench alone", head, lines, text=4)


def _others(parts: Sequence[Part], kind: str) -> list[Table]:
    """Tables of what stands beside cells in a file, by its kind."""
    found = [other for part in parts for other in part.others if other["kind"] == kind]
    if kind == "tuning":
        return [Table(*tune.table(values)) for values in found]
    if kind == "accuracy":
        return [Table(*accuracy.table(found))]
    if kind == "fusion":
        return [Table(*fusion.table(found))]
    return [Table(*each) for values in found[-1:] for each in hostcost.tables(values)]


def sections(parts: Sequence[Part], is_page: bool = False) -> dict[str, list[Table]]:
    """Everything that stored parts say, by section; the verdicts last, where a terminal shows them.

    A page has of the small cells those with every rival alone, and no rankings of cuts: its readers
    have the files too.
    """
    rows = benchfile.latest(parts)
    tuned = [other for part in parts for other in part.others if other["kind"] == "tuning"]
    prices = tune.prices(tuned)
    small = [r for r in rows if not r.cell.is_large and (r.cell.has_rivals or not is_page)]
    found = {
        "tuning": [] if is_page else _others(parts, "tuning"),
        "host": _others(parts, "host"),
        "fusion": _others(parts, "fusion"),
        "errors": _others(parts, "accuracy"),
        "large": cell_tables([r for r in rows if r.cell.is_large]),
        "small": cell_tables(small, ", other cells", prices),
        "refusals": [refusals_table(rows)],
        "accuracy": [accuracy_table(rows)],
        "few": [few_table(rows)],
        "means": [means_table(rows)],
    }
    found = {name: [each for each in tables if each.rows] for name, tables in found.items()}
    verdicts = {"below": below_table(rows), "slower": slower_table(rows)} if rows else {}
    return found | {name: [each] for name, each in verdicts.items()}


# ---- on a terminal


def render(parts: Sequence[Part], console: Console) -> None:
    """Print every table."""
    for header in dict.fromkeys(map(circumstances, parts)):
        console.print(Text(header))
    for each in (table for tables in sections(parts).values() for table in tables):
        console.print()
        console.print(Text(each.title, "bold"))
        if not each.rows:
            console.print(Text("  none"))
            continue
        table = RichTable(
            box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False
        )
        for place, heading in enumerate(each.head):
            table.add_column(heading, justify="left" if place < each.text else "right")
        for line in each.rows:
            table.add_row(*map(Text, line))
        console.print(Padding(table, (0, 0, 0, 2), expand=False))
    console.print()
    console.print(Text("x RIVAL: times as fast. *: no graph held it; by do_bench, both.", "dim"))


def circumstances(part: Part) -> str:
    """What a result must state: card, driver, versions, commit, date, clock."""
    h = part.header
    said = [h.device, f"driver {h.machine.get('driver_version') or 'unknown'}"]
    said += [f"{name} {v}" for name, v in h.versions.items() if name in ("torch", "triton") and v]
    said += [f"{name} {v}" for name, v in h.rivals.items() if name in ("quack", "liger") and v]
    said.append(f"commit {h.versions.get('commit') or 'unknown'}")
    return f"{', '.join(said)}; {h.date}. {h.clock}."
