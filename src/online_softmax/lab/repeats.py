"""A cell measured several times: once more where its clock was throttled, and as often as asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from online_softmax.lab import clocks, doubts, opbench
from online_softmax.lab.benchclock import Setting
from online_softmax.lab.benchfile import Entry, Row
from online_softmax.lab.contender import Contender
from online_softmax.lab.grid import Cell

RETRIES = 2  # of a cell whose clock was throttled by what may pass; then it stands as it is, marked


def measure(cell: Cell, lines: Sequence[Contender], setting: Setting, repeat: int = 1) -> Row:
    """Measure a cell so many times, the whole of it, as one row.

    Args:
        cell: the cell.
        lines: its contenders, the same each time.
        setting: where it runs.
        repeat: how often. The median of a contender is then that of its medians, and its rounds
            are those of every time, so that its spread has what lies between two times in it.
    """
    return merged([_once(cell, lines, setting) for _ in range(repeat)])


def _once(cell: Cell, lines: Sequence[Contender], setting: Setting) -> Row:
    row = opbench.measure(cell, lines, setting)
    for _ in range(RETRIES):
        if not clocks.is_passing(tuple(row.clocks.get("reasons", ()))):
            break
        row = opbench.measure(cell, lines, setting)
    return doubts.marked(row, setting.limits)


def merged(rows: Sequence[Row]) -> Row:
    """Several measurements of one cell as one."""
    last = rows[-1]
    if len(rows) == 1:
        return last
    names = dict.fromkeys(entry.name for row in rows for entry in row.entries)
    every = [[entry for row in rows if (entry := row.entry(name))] for name in names]
    spent: dict[str, float] = {}
    for row in rows:
        for what, seconds in row.spent.items():
            spent[what] = round(spent.get(what, 0.0) + seconds, 4)
    return replace(
        last,
        entries=tuple(map(_entry, every)),
        seconds=round(sum(row.seconds for row in rows), 3),
        spent=spent,
        why=next((row.why for row in rows if row.why), ""),
        repeats=len(rows),
        clocks=_clocks([row.clocks for row in rows]),
    )


def _entry(found: Sequence[Entry]) -> Entry:
    """A contender's measurements as one. What was wrong once, or had no time once, has none; of
    several clocks that of the first counts."""
    bad = [e for e in found if e.ok is False] or [e for e in found if e.median_us is None]
    if bad:
        return bad[0]
    first = found[0]
    same = [e for e in found if e.clock == first.clock]
    medians = tuple(e.median_us for e in same if e.median_us is not None)
    middle = median(medians)
    over = first.median_us / middle if first.median_us and middle else 1.0
    return replace(
        first,
        max_error=_most(e.max_error for e in found),
        share_max=_most(e.share_max for e in found),
        median_us=middle,
        p20_us=_least(e.p20_us for e in same),
        p80_us=_most(e.p80_us for e in same),
        rounds_us=tuple(us for e in same for us in e.rounds_us),
        repeats_us=medians,
        do_bench_us=_middle([e.do_bench_us for e in same]),
        gbs=None if first.gbs is None else first.gbs * over,
        tflops=None if first.tflops is None else first.tflops * over,
        doubt=next((e.doubt for e in found if e.doubt), ""),
    )


def _most(values: Any) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _least(values: Any) -> float | None:
    return min((v for v in values if v is not None), default=None)


def _middle(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None


def _clocks(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """From the first reading to the last, with every reason."""
    known = [each for each in found if each]
    if not known:
        return {}
    reasons = dict.fromkeys(name for each in known for name in each.get("reasons", ()))
    return {"before": known[0]["before"], "after": known[-1]["after"], "reasons": tuple(reasons)}
