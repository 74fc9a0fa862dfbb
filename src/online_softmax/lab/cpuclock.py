"""The clock on a machine without a GPU: calls one by one over rotating buffers, in turn.

What it times is the CPU path, where ours is PyTorch operations. Buffers of at least three times the
last cache rotate here too; a call's time is the host's, from before to after.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from online_softmax.lab.bench import ROUNDS, Timing
from online_softmax.lab.benchclock import Setting
from online_softmax.lab.rotation import Call, Overwrites, Rotation, bound

CLOCK = (
    "The host's clock around each call on rotating buffers of at least 3 x the last cache; "
    "contenders interleaved; median of three rounds"
)
NOTE = (
    "torch sees no CUDA GPU here: the CPU is timed, where ours is PyTorch operations; "
    "no figure of it says anything of a GPU"
)
ROUND_US = 60_000.0  # of a contender in a round; one call at least
CALLS = 9  # at most, in a round
CACHE_BYTES = 32 * 2**20  # where the system does not say
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
GRID, TYPES, AGAINST = "cpu", "fp32", "torch"  # unless asked for others
SECONDS = 25.0  # of a run: with what starts before it, it ends in half a minute


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


def setting(values: str = "normal", now: Callable[[], float] = time.perf_counter) -> Setting:
    """This machine's CPU and its clock; `now` gives seconds."""

    def interleaved(
        sets: Rotation, calls: dict[str, Call], may_fail: Sequence[str]
    ) -> dict[str, Timing]:
        return _interleaved(sets, calls, may_fail, now)

    def do_bench(call: Callable[[], Any], before: Callable[[], None] | None) -> float:
        if before:
            before()
        return _once_us(call, now)  # the same clock again: a figure more, and no better

    device = torch.device("cpu")
    return Setting(
        device, cache_bytes(), interleaved, interleaved, do_bench, free_bytes, lambda: None, values,
        clock="host",
    )  # fmt: skip


def _once_us(call: Callable[[], Any], now: Callable[[], float]) -> float:
    start = now()
    call()
    return (now() - start) * 1e6


def _interleaved(
    sets: Rotation, calls: dict[str, Call], may_fail: Sequence[str], now: Callable[[], float]
) -> dict[str, Timing]:
    """Time contenders in turn; who raises and may, has a refusal."""
    estimates: dict[str, float] = {}
    timings: dict[str, Timing] = {}
    for name, call in calls.items():
        try:
            bound(call, sets.sets[0])()  # compiles, loads
            if isinstance(call, Overwrites):
                sets.restore_first()
            estimates[name] = max(_once_us(bound(call, sets.sets[-1]), now), 1.0)
            if isinstance(call, Overwrites):
                sets.restore()
        except Exception as error:  # a rival may fail in any way: a row, not the end of the run
            if name not in may_fail:
                raise
            timings[name] = Timing.refusal(error)
    samples: dict[str, list[list[float]]] = {name: [] for name in estimates}
    turn = 0
    for _ in range(ROUNDS):
        for name, us in estimates.items():
            found = []
            for _ in range(max(1, min(CALLS, int(ROUND_US / us)))):
                tensors = sets.sets[turn % len(sets.sets)]
                turn += 1
                run = bound(calls[name], tensors)
                found.append(_once_us(run, now))
                if isinstance(calls[name], Overwrites):
                    sets.restore()
            samples[name].append(found)
    return timings | {name: Timing.of(per_round) for name, per_round in samples.items()}
