"""Buffer sets that calls take in turn, and graphs of such calls: what the clock replays.

Sets of at least three times the L2 in all keep it cold. A call that overwrites its input gets it
back from a copy before each replay, outside of what is timed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from online_softmax import plan

L2_FACTOR = 3  # bytes in rotation, in L2 sizes
MAX_SETS = 1024  # buffer sets: bounds memory and graph length where tensors are tiny
WARM_SETS = 256  # of tensors so tiny that MAX_SETS of them would stay in the L2 all the same
GRAPH_US = 1000.0  # a graph lasts at least this long: its own launch, a few us, vanishes
ROUND_US = 200_000.0  # of a contender in a round: fewer replays for slow ones, one at least
SLOW_US = 10_000.0  # calls this slow rotate over fewer buffers

Call = Callable[..., Any]  # of a buffer set's tensors; fills the last of them, or returns its own


@dataclass(frozen=True)
class Overwrites:
    """A call that leaves something else where its first tensor was."""

    call: Call

    def __call__(self, *tensors: Tensor) -> Any:
        return self.call(*tensors)


@dataclass(frozen=True)
class Follows:
    """A call on what another made of the same tensors, such as a backward. The first runs outside
    of what is timed, on the stream of the second: autograd stays on it."""

    first: Call
    call: Call  # of what the first made, then a set's tensors

    def __call__(self, *tensors: Tensor) -> Any:
        return self.call(self.first(*tensors), *tensors)


def bound(call: Call, tensors: Sequence[Tensor]) -> Callable[[], Any]:
    """What is timed of a call, on these tensors; what comes before it is done now."""
    if not isinstance(call, Follows):
        return lambda: call(*tensors)
    made = call.first(*tensors)
    return lambda: call.call(made, *tensors)


@dataclass(frozen=True)
class Graph:
    """A captured graph of one contender's calls."""

    graph: torch.cuda.CUDAGraph
    calls: int
    estimate_us: float  # of one replay
    restore: Callable[[], None] | None = None  # before each replay, where calls overwrite
    runs: Sequence[Callable[[], Any]] = ()  # what was captured: it keeps what a backward reads

    def replay_us(self, replays: int, round_us: float = ROUND_US) -> list[float]:
        """Microseconds a call in each of some replays; fewer, one at least, where they would take
        longer than `round_us`."""
        replays = max(1, min(replays, int(round_us / self.estimate_us)))
        if self.restore:
            return self._restored_us(replays, self.restore)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        events[-1].synchronize()
        return [a.elapsed_time(b) * 1000 / self.calls for a, b in pairwise(events)]

    def _restored_us(self, replays: int, restore: Callable[[], None]) -> list[float]:
        """The same, each replay on the input as it was, which is there again at the end."""
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
        for start, end in pairs:
            restore()
            start.record()
            self.graph.replay()
            end.record()
        restore()
        pairs[-1][1].synchronize()
        return [start.elapsed_time(end) * 1000 / self.calls for start, end in pairs]


def set_count(set_bytes: int, l2_bytes: int) -> tuple[int, bool]:
    """How many buffer sets rotate, and whether they keep the L2 cold: L2_FACTOR times the L2 in
    all, unless tensors are too small for MAX_SETS of them.

    >>> set_count(128 * 2**20, 60 * 2**20)
    (2, True)
    >>> set_count(128 * 2**10, 60 * 2**20)
    (1024, False)
    >>> set_count(2048, 60 * 2**20)
    (256, False)
    """
    set_bytes = max(set_bytes, 1)
    count = max(plan.ceil_div(L2_FACTOR * l2_bytes, set_bytes), 2)
    if count > MAX_SETS:
        count = MAX_SETS if MAX_SETS * set_bytes >= l2_bytes else WARM_SETS
    return count, count * set_bytes >= L2_FACTOR * l2_bytes


def rotation(input_bytes: int, l2_bytes: int) -> tuple[int, bool]:
    """`set_count` of sets that are an input and an output of the same size."""
    return set_count(2 * input_bytes, l2_bytes)


class Recorder:
    """Captures graphs on one stream and into one pool of memory: what a contender's calls allocate
    is where those of the one before did. All but the first need a graph of the pool to be alive."""

    def __init__(self) -> None:
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def record(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What `torch.cuda.graph` does, but for emptying torch's cache: with a capture for each
        contender of each cell, to allocate anew would take longer than to measure."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool)
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of the capture: what failed says more
                    graph.capture_end()
                raise
            graph.capture_end()


class Rotation:
    """Buffer sets that calls take in turn; a call gets the tensors of one set."""

    def __init__(self, sets: Sequence[tuple[Tensor, ...]], is_cold: bool) -> None:
        self.sets, self.is_cold = list(sets), is_cold
        # As few as displace each other: enough for a call so slow that many would take minutes.
        self.fewest = len(self.sets) // L2_FACTOR + 1
        self.kept: list[Tensor] = []

    def keep(self) -> None:
        """Keep copies of the first tensors, for `restore`; once."""
        self.kept = self.kept or [tensors[0].clone() for tensors in self.sets]

    def restore(self) -> None:
        """The first tensors as they were kept. Then the copies are read, so that the L2 holds clean
        lines and none of a set's."""
        for tensors, x in zip(self.sets, self.kept, strict=False):
            tensors[0].copy_(x)
        for x in self.kept:
            x.amax()

    def restore_first(self) -> None:
        """The first set's alone."""
        self.restore_one(0)

    def restore_one(self, place: int) -> None:
        """One set's alone."""
        self.sets[place][0].copy_(self.kept[place])

    def capture(self, call: Call, recorder: Recorder | None = None) -> Graph:
        """A graph of calls over all buffers, at least GRAPH_US long; of a call that overwrites its
        input one turn, or the second would run on what the first left."""
        spoils = isinstance(call, Overwrites)
        if spoils:
            self.keep()
        recorder = recorder or Recorder()
        torch.cuda.synchronize()
        # A backward runs on its forward's stream, so both have to be on the one that is captured.
        follows = isinstance(call, Follows)
        with torch.cuda.stream(recorder.stream) if follows else contextlib.nullcontext():
            runs = [bound(call, tensors) for tensors in self.sets]
            for run in runs[:2]:  # compiles, loads, fills the allocator
                run()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for run in runs[:2]:
                run()
            end.record()
            end.synchronize()
        one_us = max(start.elapsed_time(end) * 1000 / 2, 1.0)
        used = runs[: self.fewest] if one_us > SLOW_US else runs
        times = 1 if spoils else max(1, plan.ceil_div(int(GRAPH_US / one_us), len(used)))
        graph = torch.cuda.CUDAGraph()
        # What a call allocates rotates too: kept until as many others have been allocated.
        kept: deque[Any] = deque(maxlen=len(used))
        try:
            with recorder.record(graph):
                for _ in range(times):
                    for run in used:
                        kept.append(run())
        finally:
            if spoils:
                self.restore()
        calls = times * len(used)
        return Graph(graph, calls, calls * one_us, self.restore if spoils else None, runs)


class Buffers(Rotation):
    """Copies of one input, with an output each, of at least three times the L2 in all."""

    def __init__(self, x: Tensor) -> None:
        l2_bytes = torch.cuda.get_device_properties(x.device).L2_cache_size
        count, is_cold = rotation(x.numel() * x.element_size(), l2_bytes)
        super().__init__([(x.clone(), torch.empty_like(x)) for _ in range(count)], is_cold)
