"""Which times are not to be believed, those that beat a limit; and which are of a throttled clock.

A time that beats what memory or the tensor cores allow is the time of something else: of a launch
that nobody waited for, of a cache that the call before had filled, of work left out. It is kept, is
marked wherever it is shown, and no comparison counts it. A cell whose clock was throttled is listed
and counts, but where two runs are compared. A time of a CPU whose rounds are far apart is marked
too, and counts: the least of them is the best that is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from online_softmax.lab import clocks
from online_softmax.lab.fusedsizes import MERGE, parsed

if TYPE_CHECKING:
    from online_softmax.lab.benchfile import Entry, Row

# Of the ceiling measured beside it. Of what is stored of H200s nothing passed 1.016 times.
CEILING_TIMES = 1.05
# Of the datasheet's bandwidth, for tensors that stay in the L2: no L2 is so many times as fast.
L2_TIMES = 5.0
MARK = "!"  # behind a time that is doubted
HOST = "host"  # the clock of a CPU, as an entry names it
WARM = "its input lay in the cache, or nothing waited for it"
PARTS_READ = "it reads the parts alone, and its speed is counted with a write that it leaves out"
APART_MARK = "~"  # behind a time of a CPU whose rounds are far apart
# The middle round's least call over the least of all: where it is more, most rounds never had the
# processor for themselves.
APART_TIMES = 1.2
# Dense products on the tensor cores by the datasheet, in TFLOP/s of 16-bit types, of the cards of
# which it was looked up (SXM modules; NVIDIA's data sheets of A100, H100, H200).
PEAK_TFLOPS = {"H200": 989.5, "H100": 989.5, "A100": 312.0}
PEAK_TYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Limits:
    """What the card can do at best; None: not known, and nothing is held to it."""

    gbs: float | None = None  # memory, GB/s
    gbs_of: str = ""  # whose figure that is
    tflops: dict[str, float] = field(default_factory=dict)  # by type
    ceiling_times: float | None = None  # more than so much of the measured ceiling is doubted
    is_host: bool = False  # of a CPU: products too are held to the ceiling


def of_card(name: str, gbs: float | None, gbs_of: str) -> Limits:
    """The limits of a card by its name.

    >>> of_card("NVIDIA H200", 4800.0, "datasheet").tflops["bfloat16"]
    989.5
    """
    words = re.split(r"\W+", name)
    peak = next((tflops for card, tflops in PEAK_TFLOPS.items() if card in words), None)
    tflops = dict.fromkeys(PEAK_TYPES, peak) if peak else {}
    return Limits(gbs, gbs_of, tflops, CEILING_TIMES)  # type: ignore[arg-type]


def why(entry: Entry, row: Row, limits: Limits) -> str:
    """Why a contender's time is not to be believed, a sentence; "": nothing speaks against it."""
    if entry.median_us is None:
        return ""
    if not entry.median_us > 0:
        return "its time is not above 0: nothing waited for it"
    if limits.gbs and entry.gbs:
        times = entry.gbs / limits.gbs
        if row.is_cold_l2 is False and times > L2_TIMES:
            return f"{entry.gbs:,.0f} GB/s are {times:.1f} times the memory's: no L2 is so fast"
        if row.is_cold_l2 and times > 1:
            said = PARTS_READ if _leaves_out_the_write(entry, row) else WARM
            return f"{entry.gbs:,.0f} GB/s are {times:.0%} of the {limits.gbs_of}: {said}"
    peak = limits.tflops.get(row.dtype)
    if peak and entry.tflops and entry.tflops > peak:
        share = entry.tflops / peak
        return (
            f"{entry.tflops:,.0f} TFLOP/s are {share:.0%} of the datasheet's {peak:g}: products "
            "were left out, or nothing waited for it"
        )
    ceiling = row.entry("ceiling")
    if entry.kind == "ceiling" or not limits.ceiling_times or not ceiling:
        return ""
    # Products as one matrix product are of another shape: on a GPU what beats them is no wonder.
    if row.flops and not limits.is_host:
        return ""
    if not ceiling.median_us or ceiling.clock != entry.clock:
        return ""
    share = ceiling.median_us / entry.median_us
    if share <= limits.ceiling_times:
        return ""
    return f"it takes {1 / share:.2f} times what the ceiling takes beside it, which it cannot"


def _leaves_out_the_write(entry: Entry, row: Row) -> bool:
    """The ceiling of merges of more than two parts: mergecontenders."""
    is_merge = entry.kind == "ceiling" and row.op == MERGE
    return is_merge and parsed(row.sizes).get("parts", 0) > 2


def apart(rounds_us: Sequence[float]) -> float:
    """How many times the least round the middle one is.

    >>> apart([2.0, 3.0, 5.0]), apart([])
    (1.5, 1.0)
    """
    return median(rounds_us) / min(rounds_us) if rounds_us and min(rounds_us) > 0 else 1.0


def is_apart(clock: str, rounds_us: Sequence[float]) -> bool:
    """Whether a time of a CPU is of rounds that are far apart."""
    return clock == HOST and apart(rounds_us) > APART_TIMES


def marked(row: Row, limits: Limits) -> Row:
    """The row with each of its entries that is doubted saying why."""
    return replace(row, entries=tuple(replace(e, doubt=why(e, row, limits)) for e in row.entries))


def lines(rows: Iterable[Row]) -> list[tuple[Row, str, str]]:
    """What is doubted: the row, the contender or "the cell", and why."""
    found = []
    for row in rows:
        if row.is_throttled:
            found.append((row, "the cell", clocks.said(row.clocks)))
        found += [(row, entry.name, entry.doubt) for entry in row.entries if entry.doubt]
    return found
