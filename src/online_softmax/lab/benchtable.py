"""What the tables of a benchmark share: the record, the text of its cells, and rows in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from online_softmax.lab import doubts, goals, grid
from online_softmax.lab.benchfile import Entry, Row
from online_softmax.lab.contenders import RIVALS
from online_softmax.lab.refusal import ABSENT

NONE = "—"


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading; the first `text` columns are words, the others numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: int = 1
    fold: str = ""  # of a page: shut under this name, with its neighbours of the same; "": open


# ---- cells of a table


def us(value: float | None) -> str:
    """Microseconds, three digits or more."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def share(value: float | None) -> str:
    """A part of the ceiling."""
    return NONE if value is None else f"{value:.3f}"


def times(value: float | None) -> str:
    """How many times as fast."""
    return NONE if value is None else f"{value:.2f}"


def size(row: Row) -> str:
    """Rows, columns, and the order of the input's values where it is not the usual one."""
    order = "" if row.values == "normal" else f" {row.values}"
    return f"{row.rows:,} x {row.cols:,}{order}"


def name(row: Row) -> str:
    """A cell in full."""
    return f"{row.op} {row.dtype} {size(row)}"


def mark(entry: Entry) -> str:
    """Behind a figure: a star where no graph held the call, doubts.MARK where the time is not to be
    believed, and doubts.APART_MARK where a CPU's rounds are far apart."""
    found = ("*" if entry.clock == "do_bench" else "") + (doubts.MARK if entry.doubt else "")
    is_apart = doubts.is_apart(entry.clock, entry.rounds_us)
    return found + (doubts.APART_MARK if is_apart else "")


def time(entry: Entry | None) -> str:
    """A contender's time, with its marks."""
    if entry is None:
        return NONE
    if entry.median_us is None:
        return "WRONG" if entry.ok is False else "none"
    return us(entry.median_us) + mark(entry)


def _silent(entry: Entry) -> str:
    return "absent" if entry.why.startswith(ABSENT) else "refuses"


def beside(row: Row, rival: str) -> str:
    """How many times as fast as a rival; or what the rival did instead."""
    entry = row.entry(rival)
    if entry is None:
        return NONE
    if entry.median_us is None:
        return "wrong" if entry.ok is False else _silent(entry)
    return times(goals.times(row.entry("ours"), entry)) + mark(entry)


# ---- rows of a benchmark


def _place(known: Sequence[str], word: str) -> tuple[int, str]:
    return (known.index(word) if word in known else len(known), word)


def ordered(rows: Iterable[Row]) -> list[Row]:
    """By operation, type, columns and rows: the shards of several GPUs come interleaved."""
    return sorted(
        rows,
        key=lambda row: (
            _place(grid.EVERY_OP, row.op),
            _place(grid.DTYPES, row.dtype),
            row.cols,
            row.rows,
            row.values != "normal",
            row.sizes,
        ),
    )


def groups(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by operation and type."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.op, row.dtype), []).append(row)
    return found


def operations(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by operation."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.op, []).append(row)
    return found


def rivals(rows: Iterable[Row]) -> list[str]:
    """The rivals that have a line somewhere."""
    there = {entry.name for row in rows for entry in row.entries if entry.kind == "rival"}
    return [name for name in RIVALS if name in there]


def ours(rows: Iterable[Row]) -> list[str]:
    """The lines of ours, "ours" the first."""
    there = (entry.name for row in rows for entry in row.entries if entry.kind == "ours")
    return list(dict.fromkeys(("ours", *there)))


def short(count: int) -> str:
    """A power of two for an axis.

    >>> short(512), short(4096), short(4194304)
    ('512', '4K', '4M')
    """
    for unit, letter in ((2**20, "M"), (2**10, "K")):
        if count >= unit:
            return f"{count // unit}{letter}"
    return str(count)
