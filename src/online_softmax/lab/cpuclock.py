"""The clock on a machine without a GPU: calls one by one over rotating buffers, in turn.

What it times is the CPU path, where ours is PyTorch operations. Buffers of at least three times the
last cache rotate here too; a call's time is the host's, from before to after. Other processes can
make a call longer and never shorter, so that the least of many is the figure; rounds whose least
calls are far apart say that there were too few (doubts.py).
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from online_softmax.lab import doubts
from online_softmax.lab.bench import Timing
from online_softmax.lab.benchclock import Setting
from online_softmax.lab.rotation import Call, Overwrites, Rotation, bound

CLOCK = (
    "The host's clock around each call on rotating buffers of at least 3 x the last cache; "
    "contenders interleaved; the least of all calls"
)
NOTE = (
    "torch sees no CUDA GPU here: the CPU is timed, where ours is PyTorch operations; "
    "no figure of it says anything of a GPU"
)
ROUNDS, FEWEST_ROUNDS = 5, 3  # the fewest where calls are long
# A contender's turn: so long, one call at least, so many at most. A round has many turns, so that
# what disturbs one contender for a slice of the scheduler's disturbs the others as often.
TURN_US, TURN_CALLS = 5_000.0, 16
LEAST_S, MOST_S = 0.3, 8.0  # of a cell's rounds, where a run has seconds to give
CACHE_BYTES = 32 * 2**20  # where the system does not say
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
GRID, TYPES, AGAINST = "cpu", "fp32", "torch"  # unless asked for others
SECONDS = 22.0  # of a run: with what starts before it, it ends in half a minute


def cache_bytes(folder: Path = CACHES) -> int:
    """The largest of a core's caches, as Linux says it; CACHE_BYTES elsewhere."""
    found = []
    for path in folder.glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdecimal() and text[-1:] in UNITS:
            found.append(int(text[:-1]) * UNITS[text[-1]])
    return max(found, default=CACHE_BYTES)


def free_bytes() -> int:
    """Memory that can be had without swapping; what the machine has where nobody says."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 2**33


def machine() -> dict[str, Any]:
    """What a result of a CPU must state: the processor, and how many threads ran."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {"cpu": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


# A call, and what makes its set as it was again, outside of the time.
Step = tuple[Callable[[], Any], Callable[[], None]]


@dataclass
class Share:
    """Seconds that the rounds of a cell take, granted before it begins."""

    seconds: float = LEAST_S

    def grant(self, seconds: float) -> float:
        """Of so many seconds what a cell's rounds will take, which is within bounds."""
        self.seconds = min(max(seconds, LEAST_S), MOST_S)
        return self.seconds


def setting(values: str = "normal", now: Callable[[], float] = time.perf_counter) -> Setting:
    """This machine's CPU and its clock; `now` gives seconds."""
    share = Share()

    def interleaved(
        sets: Rotation, calls: dict[str, Call], may_fail: Sequence[str]
    ) -> dict[str, Timing]:
        return _interleaved(sets, calls, may_fail, now, share.seconds)

    def turns(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        nexts: dict[str, Iterator[Step]] = {}
        for name, call in calls.items():
            call()  # what the others left of the allocator is settled
            nexts[name] = itertools.repeat((call, _nothing))
        found = _rounds(nexts, now, share.seconds)
        return {name: [min(one) for one in per_round] for name, per_round in found.items()}

    device = torch.device("cpu")
    return Setting(
        device, cache_bytes(), interleaved, interleaved, None, free_bytes, lambda: None, values,
        clock=doubts.HOST, limits=doubts.Limits(ceiling_times=doubts.CEILING_TIMES, is_host=True),
        turns=turns, grant=share.grant,
    )  # fmt: skip


def _nothing() -> None:
    """Of a call that leaves its set as it was."""


def _once_us(call: Callable[[], Any], now: Callable[[], float]) -> float:
    start = now()
    made = call()
    spent = (now() - start) * 1e6
    del made  # giving memory back is no part of the call
    return spent


def _interleaved(
    sets: Rotation,
    calls: dict[str, Call],
    may_fail: Sequence[str],
    now: Callable[[], float],
    seconds: float,
) -> dict[str, Timing]:
    """Time contenders in turn; who raises and may, has a refusal."""
    timings: dict[str, Timing] = {}
    for name, call in calls.items():
        try:
            bound(call, sets.sets[0])()  # compiles, loads
            if isinstance(call, Overwrites):
                sets.restore_first()
        except Exception as error:  # a rival may fail in any way: a row, not the end of the run
            if name not in may_fail:
                raise
            timings[name] = Timing.refusal(error)
    places = itertools.cycle(range(len(sets.sets)))  # of all contenders together

    def nexts(call: Call) -> Iterator[Step]:
        """Calls on one set after the other."""
        for place in places:
            spoils = isinstance(call, Overwrites)
            mend = functools.partial(sets.restore_one, place) if spoils else _nothing
            yield bound(call, sets.sets[place]), mend

    run = {name: nexts(call) for name, call in calls.items() if name not in timings}
    found = _rounds(run, now, seconds)
    return timings | {name: _timing(per_round) for name, per_round in found.items()}


def _timing(per_round: Sequence[Sequence[float]]) -> Timing:
    """The least of all; the least of each round."""
    least = tuple(min(one) for one in per_round)
    spread = Timing.of(per_round)
    return Timing(min(least), spread.p20_us, spread.p80_us, least)


def _rounds(
    nexts: dict[str, Iterator[Step]], now: Callable[[], float], seconds: float
) -> dict[str, list[list[float]]]:
    """Microseconds of contenders' calls, by rounds, which share the seconds: each takes turns until
    its part of them is over."""
    found: dict[str, list[list[float]]] = {name: [] for name in nexts}
    begun = now()
    for number in range(ROUNDS if nexts else 0):
        end = begun + seconds * (number + 1) / ROUNDS
        if number >= FEWEST_ROUNDS and now() >= begun + seconds:
            break
        for name in nexts:
            found[name].append([])
        while True:
            for name, calls in nexts.items():
                found[name][-1] += _turn(calls, now)
            if now() >= end:
                break
    return found


def _turn(calls: Iterator[Step], now: Callable[[], float]) -> list[float]:
    """Microseconds of each call of a contender's turn, which leaves every set as it was."""
    found: list[float] = []
    while not found or (len(found) < TURN_CALLS and sum(found) < TURN_US):
        call, mend = next(calls)
        found.append(_once_us(call, now))
        mend()
    return found
