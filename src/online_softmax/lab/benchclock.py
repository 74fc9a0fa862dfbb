"""Where a benchmark runs and what times it: the GPU with the project's clock, or a test's fake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from online_softmax.lab import bench, clocks, doubts, info
from online_softmax.lab.arena import Arena
from online_softmax.lab.bench import Timing
from online_softmax.lab.benchfile import Entry
from online_softmax.lab.rotation import Call, Rotation

VALUES = ("normal", "ascending")  # ascending: the worst for a running maximum
DO_BENCH_WARMUP_MS, DO_BENCH_MS = 1, 10
WARMUPS, RESTORED_CALLS = 2, 9  # of a call that overwrites its input, by the same clock
# Of a contender in a round: about four replays of a graph. There are three rounds, and thousands of
# cells.
ROUND_US = 4_000.0
# Memory that torch's cache leaves to what allocates beside it: modules, kernels' local memory.
SPARE_BYTES = 16 * 2**30

# A call, and what gives its input back before each, outside of the time; None: nothing.
Bench = Callable[[Callable[[], Any], Callable[[], None] | None], float]
Interleaved = Callable[[Rotation, dict[str, Call], Sequence[str]], dict[str, Timing]]

Turns = Callable[[dict[str, Callable[[], Any]]], dict[str, list[float]]]  # the least of each round


@dataclass(frozen=True)
class Setting:
    """Where cells run and what times them."""

    device: torch.device
    l2_bytes: int
    interleaved: Interleaved
    quick: Interleaved  # one short round, to rank many
    do_bench: Bench | None  # microseconds; None: there is no second clock
    free_bytes: Callable[[], int]  # what torch's cache could give back among them
    synchronize: Callable[[], None]
    values: str = "normal"
    arena: Arena = field(default_factory=Arena)  # the memory that cells share
    clock: str = "graph"  # what an entry says of its times
    limits: doubts.Limits = field(default_factory=doubts.Limits)  # times that beat them are doubted
    watch: clocks.Watch = lambda: None  # the GPU's clocks now; None: nobody can tell
    note: str = ""  # what is not recorded here, and why, a sentence
    turns: Turns | None = None  # of a CPU: what times calls that have no buffer sets
    grant: Callable[[float], float] | None = None  # of a CPU: seconds that a cell's rounds take


class Broken(RuntimeError):  # noqa: N818 a state of the device
    """A contender left the device unusable; the message says which, `entry` is its row."""

    def __init__(self, message: str, entry: Entry) -> None:
        super().__init__(message)
        self.entry = entry


def gpu_setting(values: str = "normal") -> Setting:
    """The GPU and the project's clock."""

    def interleaved(
        sets: Rotation, calls: dict[str, Call], may_fail: Sequence[str]
    ) -> dict[str, Timing]:
        return bench.interleaved(sets, calls, may_fail=may_fail, round_us=ROUND_US)

    def quick(sets: Rotation, calls: dict[str, Call], may_fail: Sequence[str]) -> dict[str, Timing]:
        return bench.interleaved(sets, calls, 1, bench.QUICK_REPLAYS, may_fail, ROUND_US)

    def do_bench(call: Callable[[], Any], before: Callable[[], None] | None) -> float:
        if before:
            cache = torch.empty(2 * l2_bytes, dtype=torch.uint8, device=device)
            return _restored_us(call, before, cache)
        from triton import testing

        found = testing.do_bench(
            call, warmup=DO_BENCH_WARMUP_MS, rep=DO_BENCH_MS, return_mode="median"
        )
        return float(found) * 1000

    def free_bytes() -> int:
        free = torch.cuda.mem_get_info()[0]
        if free < SPARE_BYTES:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    l2_bytes = properties.L2_cache_size
    limits = doubts.of_card(properties.name, *info.bandwidth(device.index))
    watch, note = clocks.watcher(str(getattr(properties, "uuid", "")))
    return Setting(
        device, l2_bytes, interleaved, quick, do_bench, free_bytes, torch.cuda.synchronize, values,
        limits=limits, watch=watch or (lambda: None), note=note,
    )  # fmt: skip


def _restored_us(call: Callable[[], Any], before: Callable[[], None], cache: Tensor) -> float:
    """What do_bench does, zeros through the L2 before each call, of a call that needs its input
    again: median microseconds. `cache` is larger than the L2."""
    events: list[list[torch.cuda.Event]] = []
    for _ in range(WARMUPS + RESTORED_CALLS):
        events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        before()
        cache.zero_()
        events[-1][0].record()
        call()
        events[-1][1].record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) * 1000 for start, end in events[WARMUPS:])
