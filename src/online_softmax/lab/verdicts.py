"""What a benchmark's rows amount to, as tables: means, cells below a goal, cells behind a rival."""

from __future__ import annotations

from collections.abc import Sequence

from online_softmax.lab import benchtable, goals
from online_softmax.lab.benchfile import Row
from online_softmax.lab.benchtable import NONE, Table
from online_softmax.lab.goals import Beside

BELOW_HEAD = ("cell", "of ceiling", "goal")
BESIDE_HEAD = ("cell", "fastest rival", "µs", "its µs", "times as fast", "spread µs")


def means_table(rows: Sequence[Row]) -> Table:
    """Geometric means over the main cells, of a GPU with the goal in brackets."""
    main = [row for row in rows if row.cell.is_main and row.values == "normal"]
    rivals, is_held = benchtable.rivals(main), all(map(goals.is_held, main))
    lines = []
    for (op, dtype), group in benchtable.groups(main).items():
        wanted = goals.MEANS.get((op, goals.ITEM_BYTES[dtype]), {}) if is_held else {}
        line = [f"{op} {dtype}", str(len(group))]
        line.append(benchtable.share(goals.geometric_mean(map(goals.of_ceiling, group))))
        for name in rivals:
            mean = goals.geometric_mean(goals.times(r.entry("ours"), r.entry(name)) for r in group)
            least = f" ({wanted[name]:g})" if name in wanted and mean is not None else ""
            line.append(benchtable.times(mean) + least)
        lines.append(tuple(line))
    said = " (goal)" if is_held else ""
    head = ("operation", "cells", "of ceiling", *(f"x {name}{said}" for name in rivals))
    return Table("Geometric means over the main cells", head, tuple(lines))


# ---- below a goal


def below_table(rows: Sequence[Row]) -> Table:
    """The cells below their goal, a line each."""
    lines = tuple(
        (benchtable.name(row), benchtable.share(share), f"{wanted:g}")
        for row, share, wanted in goals.below_goal(rows)
    )
    return Table("Cells below their goal", BELOW_HEAD, lines)


def below_tables(rows: Sequence[Row]) -> list[Table]:
    """The same by what they have in common: a line an operation and type, a column a width."""
    found = goals.below_goal(rows)
    tables = []
    for kind in goals.KINDS:
        here = [each for each in found if goals.kind(each[0].cell) == kind]
        widths = sorted({row.cols for row, _, _ in here})
        lines: dict[tuple[str, str], dict[int, str]] = {}
        for row, share, wanted in here:
            said = f"{benchtable.share(share)} ({wanted:g})"
            lines.setdefault((row.op, row.dtype), {})[row.cols] = said
        head = ("of ceiling (goal)", *(f"{cols:,}" for cols in widths))
        shown = tuple(
            (f"{op} {dtype}", *(line.get(cols, "") for cols in widths))
            for (op, dtype), line in lines.items()
        )
        tables.append(Table(f"{kind}: {len(here)} cells", head, shown))
    return [each for each in tables if each.rows] or [below_table([])]


# ---- behind a rival


def _beside_line(each: Beside) -> tuple[str, ...]:
    ours = each.row.entry(each.name)
    spread = max(ours.spread_us if ours else 0.0, each.rival.spread_us)
    return (benchtable.name(each.row), each.rival.name, benchtable.time(ours),
            benchtable.time(each.rival), benchtable.times(each.times),
            benchtable.us(spread))  # fmt: skip


def slower_table(rows: Sequence[Row]) -> Table:
    """The cells in which a rival is faster, beyond the noise."""
    lines = tuple(_beside_line(each) for each in goals.slower(rows))
    title = "Cells slower than the fastest rival, by more than 2 % and more than the spread"
    return Table(title, BESIDE_HEAD, lines, text=2)


def _from_to(values: Sequence[str]) -> str:
    """First and last of what is in order.

    >>> _from_to(["1", "4", "256"]), _from_to(["4"])
    ('1 to 256', '4')
    """
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def slower_tables(rows: Sequence[Row]) -> list[Table]:
    """The same, a line an operation and rival; each cell in tables that a page keeps shut."""
    behind: dict[tuple[str, str], list[Beside]] = {}
    for each in goals.slower(rows):
        behind.setdefault((each.row.op, each.rival.name), []).append(each)
    if not behind:
        return [slower_table([])]
    lines = []
    for (op, rival), found in behind.items():
        timed = [row for row in rows if row.op == op and _is_timed(row, rival)]
        dtypes = ", ".join(dict.fromkeys(each.row.dtype for each in found))
        many = [f"{each:,}" for each in sorted({each.row.rows for each in found})]
        widths = [f"{each:,}" for each in sorted({each.row.cols for each in found})]
        speeds = sorted(each.times for each in found)
        lines.append((op, rival, dtypes, _from_to(many), ", ".join(widths), str(len(found)),
                      f"{len(timed):,}", _from_to([f"{each:.2f}" for each in speeds])))  # fmt: skip
    head = (
        "operation",
        "fastest rival",
        "types",
        "rows",
        "columns",
        "cells",
        "of",
        "times as fast",
    )
    summary = Table("Cells slower than the fastest rival", head, tuple(lines), text=5)
    cells = [slower_table(group) for group in benchtable.operations(rows).values()]
    names = benchtable.operations(rows)
    return [summary] + [
        Table(each.title, each.head, each.rows, each.text, f"{op}, cell by cell")
        for op, each in zip(names, cells, strict=True)
        if each.rows
    ]


def _is_timed(row: Row, name: str) -> bool:
    entry = row.entry(name)
    return entry is not None and entry.median_us is not None


def few_table(rows: Sequence[Row]) -> Table:
    """Few long rows beside the fastest rival: mean and worst cell of each operation and type."""
    lines = []
    for (op, dtype), group in benchtable.groups(rows).items():
        for name in benchtable.ours(group):
            found = goals.few(group, name)
            if not found:
                continue
            mean = goals.geometric_mean(each.times for each in found)
            worst = min(found, key=lambda each: each.times)
            late = sum(each.times * goals.FEW_ROWS_SLOWER < 1 for each in found)
            lines.append((f"{op} {dtype}", name, str(len(found)), benchtable.times(mean), str(late),
                          benchtable.size(worst.row), benchtable.times(worst.times)))  # fmt: skip
    head = ("operation", "", "cells", "mean", "over 10 % slower", "worst cell", "there")
    title = f"At most {goals.FEW_ROWS} rows of {goals.FEW_ROWS_COLS:,} columns and more: "
    return Table(title + "times as fast as the fastest rival", head, tuple(lines), text=2)


# ---- errors


def exact_table(rows: Sequence[Row]) -> Table:
    """Errors of the main cells beside torch's, a line an operation and type."""
    lines = []
    main = [row for row in rows if row.cell.is_main and goals.is_as_exact(row) is not None]
    for (op, dtype), group in benchtable.groups(main).items():
        right = sum(bool(goals.is_as_exact(row)) for row in group)
        line = [f"{op} {dtype}", str(len(group)), str(right)]
        for name in ("ours", "torch"):
            known = [row.entry(name) for row in group]
            largest = max(e.share_max for e in known if e and e.share_max is not None)
            line.append(f"{largest:.2e}")
        lines.append(tuple(line))
    head = ("operation", "cells", "at most torch's + 2⁻²³", "largest error", "torch's")
    return Table("Errors beside torch's, against float64", head, tuple(lines))


def accuracy_table(rows: Sequence[Row]) -> Table:
    """Errors of the main cells beside torch's, over the size of their row."""
    lines = []
    for row in rows:
        ours, torch, right = row.entry("ours"), row.entry("torch"), goals.is_as_exact(row)
        if row.cell.is_main and ours and torch and right is not None:
            errors = (ours.share_max, torch.share_max, ours.share_mean, torch.share_mean)
            shown = (NONE if each is None else f"{each:.2e}" for each in errors)
            lines.append((benchtable.name(row), *shown, "yes" if right else "NO"))
    head = ("cell", "largest error", "torch's", "mean error", "torch's", "at most torch's + 2⁻²³")
    return Table("Errors beside torch's, against float64", head, tuple(lines))
