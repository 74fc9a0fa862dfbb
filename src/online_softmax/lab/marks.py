"""What a reader of a report must know of a time: above its limit, impossible, throttled.

What is not to be believed, `doubts` says, of stored rows anew: what they say themselves stands
where it finds nothing. A report does not draw it and counts it nowhere. A share a little above
100 % is a result, and its mark says how it can be. Pure functions of what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from online_softmax.arches import ARCHES
from online_softmax.lab import clocks, doubts, goals
from online_softmax.lab.benchfile import Entry, Part, Row
from online_softmax.lab.doubts import Limits
from online_softmax.lab.results import Header, Result, Run

OVER, IMPOSSIBLE, THROTTLED = "over the limit", "impossible", "throttled"
WITHIN = "by no more than the rounds are apart"
BEYOND = (
    "by more than the rounds are apart: the limit is a kernel that moves the same bytes, of one "
    "launch shape for every size, and not the card's bandwidth, below which this stays"
)


@dataclass(frozen=True)
class Mark:
    """One thing to know of a row."""

    word: str  # OVER, IMPOSSIBLE or THROTTLED
    why: str  # a sentence

    @property
    def is_result(self) -> bool:
        """Whether the figure counts all the same."""
        return self.word != IMPOSSIBLE

    @property
    def text(self) -> str:
        return f"{self.word}: {self.why}"


def peak_gbs(device: str, runs: Iterable[Run] = ()) -> float | None:
    """A device's memory bandwidth by its datasheet, GB/s; None: not known.

    >>> peak_gbs("NVIDIA H200"), peak_gbs("a GPU")
    (4800, None)
    """
    for run in runs:
        if run.header.device == device and run.header.datasheet_gbs:
            return run.header.datasheet_gbs
    words = set(re.split(r"\W+", device))
    facts = [each for each in ARCHES.values() if set(each.card.split()) <= words]
    return facts[0].bandwidth_gbs if facts else None


def limits(device: str, runs: Iterable[Run] = ()) -> Limits:
    """What a device can do at best; a CPU is held to nothing."""
    if device == "cpu":
        return Limits()
    return doubts.of_card(device, peak_gbs(device, runs), "card's datasheet")


def doubted(part: Part, runs: Iterable[Run] = ()) -> Part:
    """A part whose times that are not to be believed say so, also where they did not when they
    were stored; and why by what is known now, which may be more."""
    held = limits(part.header.device, runs)

    def again(row: Row) -> Row:
        entries = (replace(e, doubt=doubts.why(e, row, held) or e.doubt) for e in row.entries)
        return replace(row, entries=tuple(entries))

    return replace(part, rows=tuple(again(row) for row in part.rows))


def of_row(row: Row) -> list[Mark]:
    """What there is to know of a cell of `bench`, doubts among it."""
    found = [Mark(IMPOSSIBLE, f"{each.name}: {each.doubt}") for each in row.entries if each.doubt]
    ours, ceiling, share = row.entry("ours"), row.entry("ceiling"), goals.of_ceiling(row)
    if ours and ceiling and share and share > 1:
        found.append(_over(share, ours, ceiling))
    if row.is_throttled:
        found.append(Mark(THROTTLED, clocks.said(row.clocks).partition(": ")[2]))
    return found


def _over(share: float, ours: Entry, ceiling: Entry) -> Mark:
    by_us = (share - 1) * (ours.median_us or 0.0)
    is_noise = by_us <= max(ours.spread_us, ceiling.spread_us)
    return Mark(OVER, f"{100 * share:.1f} % of the limit, {WITHIN if is_noise else BEYOND}")


def of_rung(result: Result, header: Header) -> list[Mark]:
    """The same of a rung of the ladder."""
    gbs, peak, share = result.gbs, header.datasheet_gbs, result.of_copy
    if gbs and peak and gbs > peak and header.is_cold_l2:
        why = "a cache was warm, or a launch was timed and not its run"
        return [Mark(IMPOSSIBLE, f"{gbs:,.0f} GB/s, the memory's are {peak:,.0f}: {why}")]
    if not share or share <= 1 or not result.median_us:
        return []
    spread = max(result.rounds_us, default=0.0) - min(result.rounds_us, default=0.0)
    is_noise = (share - 1) * result.median_us <= spread
    return [Mark(OVER, f"{100 * share:.1f} % of a copy, {WITHIN if is_noise else BEYOND}")]
