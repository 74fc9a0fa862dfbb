"""The clock: cold L2, contenders interleaved, a CUDA graph of calls over rotating buffers.

A graph has no host gaps; buffers of at least three times the L2 keep it cold; contenders take turns
(A B C A B C), so that a drifting clock hits all alike. Times are microseconds a call.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from online_softmax import catalogue, jit, plan
from online_softmax.lab.ceilings import copy_call

L2_FACTOR = 3  # bytes in rotation, in L2 sizes
MAX_SETS = 1024  # buffer sets: bounds memory and graph length where tensors are tiny
WARM_SETS = 256  # of tensors so tiny that MAX_SETS of them would stay in the L2 all the same
GRAPH_US = 1000.0  # a graph lasts at least this long: its own launch, a few us, vanishes
ROUNDS = 3
REPLAYS = 9  # per contender and round
ROUND_US = 200_000.0  # of a contender in a round: fewer replays for slow ones, one at least
SLOW_US = 10_000.0  # calls this slow rotate over fewer buffers
QUICK_REPLAYS = 3  # to rank block sizes

Call = Callable[..., Any]  # of a buffer set's tensors; fills the last of them, or returns its own


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median of the rounds' medians; 20th, 80th percentile of all replays."""

    median_us: float
    p20_us: float
    p80_us: float
    rounds_us: tuple[float, ...] = ()  # the median of each round
    block: int = 0  # threads a block of the best variant
    every: dict[int, float] = field(default_factory=dict)  # block -> quick median, all tried
    refused: str = ""  # why there is no time


@dataclass(frozen=True)
class Graph:
    """A captured graph of one contender's calls."""

    graph: torch.cuda.CUDAGraph
    calls: int
    estimate_us: float  # of one replay

    def replay_us(self, replays: int, round_us: float = ROUND_US) -> list[float]:
        """Microseconds a call in each of some replays; fewer, one at least, where they would take
        longer than `round_us`."""
        replays = max(1, min(replays, int(round_us / self.estimate_us)))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        events[-1].synchronize()
        return [a.elapsed_time(b) * 1000 / self.calls for a, b in pairwise(events)]


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

    def capture(self, call: Call, recorder: Recorder | None = None) -> Graph:
        """A graph of calls over all buffers, at least GRAPH_US long."""
        for tensors in self.sets[:2]:  # compiles, loads, fills the allocator
            call(*tensors)
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for tensors in self.sets[:2]:
            call(*tensors)
        end.record()
        end.synchronize()
        one_us = max(start.elapsed_time(end) * 1000 / 2, 1.0)
        used = self.sets[: self.fewest] if one_us > SLOW_US else self.sets
        times = max(1, plan.ceil_div(int(GRAPH_US / one_us), len(used)))
        graph = torch.cuda.CUDAGraph()
        # What a call allocates rotates too: kept until as many others have been allocated.
        kept: deque[Any] = deque(maxlen=len(used))
        with (recorder or Recorder()).record(graph):
            for _ in range(times):
                for tensors in used:
                    kept.append(call(*tensors))
        calls = times * len(used)
        return Graph(graph, calls, calls * one_us)


class Buffers(Rotation):
    """Copies of one input, with an output each, of at least three times the L2 in all."""

    def __init__(self, x: Tensor) -> None:
        l2_bytes = torch.cuda.get_device_properties(x.device).L2_cache_size
        count, is_cold = rotation(x.numel() * x.element_size(), l2_bytes)
        super().__init__([(x.clone(), torch.empty_like(x)) for _ in range(count)], is_cold)


def interleaved(
    buffers: Rotation,
    contenders: dict[str, Call],
    rounds: int = ROUNDS,
    replays: int = REPLAYS,
    may_fail: Sequence[str] = (),
    round_us: float = ROUND_US,
) -> dict[str, Timing]:
    """Time contenders against each other in this process. A rival that raises, one named in
    `may_fail`, becomes a refusal; any other's error is an error. A contender has at most `replays`
    in a round, fewer where they would take longer than `round_us`."""
    recorder = Recorder()
    graphs: dict[str, Graph] = {}
    timings: dict[str, Timing] = {}
    for name, call in contenders.items():
        try:
            graphs[name] = buffers.capture(call, recorder)
        except Exception as error:  # a rival may fail in any way: a row, not the end of the run
            if name not in may_fail:
                raise
            nan = float("nan")
            timings[name] = Timing(nan, nan, nan, refused=f"{type(error).__name__}: {error}"[:300])
            torch.cuda.synchronize()
            recorder = Recorder()  # a pool may not outlive its first graph's failure
    samples: dict[str, list[list[float]]] = {name: [] for name in graphs}
    for name, graph in graphs.items():  # warm clocks, and a time without the host's part
        (once_us,) = graph.replay_us(1)
        estimate_us = min(graph.estimate_us, once_us * graph.calls)
        graphs[name] = replace(graph, estimate_us=max(estimate_us, 1.0))
    for _ in range(rounds):
        for name, graph in graphs.items():
            if graph.estimate_us < min(SLOW_US, round_us / 2):
                graph.replay_us(1)  # the previous contender's last lines leave the L2
            samples[name].append(graph.replay_us(replays, round_us))
    for name, per_round in samples.items():
        every = sorted(us for one in per_round for us in one)
        medians = tuple(median(one) for one in per_round)
        low, high = every[len(every) // 5], every[min(len(every) * 4 // 5, len(every) - 1)]
        timings[name] = Timing(median(medians), low, high, medians)
    return timings


def _variant(record: catalogue.Kernel, numbers: Any) -> Call:
    return lambda x, y: record.run(x, y, numbers)


def _torch_call(x: Tensor, y: Tensor) -> None:
    torch.softmax(x, -1, out=y)


def _compiled_call() -> Call:
    compiled = torch.compile(lambda x: torch.softmax(x, -1), dynamic=False)
    return lambda x, y: compiled(x)


RIVALS: dict[str, Callable[[], Call]] = {"torch": lambda: _torch_call, "compile": _compiled_call}


def time_ladder(
    x: Tensor,
    kernels: Sequence[str],
    sweep: bool = True,
    rivals: Sequence[str] = ("torch",),
    production: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Timing]:
    """Time rungs on a (rows, cols) CUDA tensor beside a copy kernel and rivals, in one run.

    Every block size of plan.sweep is ranked first; the best then meets the others in three
    interleaved rounds. `production` names the kernel that ships, timed once more with the planned
    numbers. Keys: the kernels', "copy", the rivals', "production". Kernels must have been checked.
    """
    buffers = Buffers(x)
    problem = catalogue.problem_of(x)
    best: dict[str, Call] = {}
    blocks: dict[str, int] = {}
    every: dict[str, dict[int, float]] = {}
    for name in kernels:
        if progress:
            progress(name)
        record = catalogue.KERNELS[name]
        variants = plan.sweep(name, problem) if sweep else [record.numbers(problem)]
        tried: dict[str, Call] = {str(n.block): _variant(record, n) for n in variants}
        ranked = interleaved(buffers, tried, 1, QUICK_REPLAYS) if len(tried) > 1 else {}
        every[name] = {int(b): t.median_us for b, t in ranked.items() if not t.refused}
        first = variants[0].block
        blocks[name] = min(every[name], key=every[name].__getitem__, default=first)
        best[name] = tried[str(blocks[name])]
    contenders = {"copy": copy_call, **{name: RIVALS[name]() for name in rivals}, **best}
    if production:
        record = catalogue.KERNELS[production]
        planned = record.numbers(problem)
        contenders["production"] = _variant(record, planned)
        blocks["production"] = planned.block
    if progress:
        progress("rounds")
    timings = interleaved(buffers, contenders, may_fail=rivals)
    return {
        name: Timing(
            t.median_us, t.p20_us, t.p80_us, t.rounds_us, blocks.get(name, 0),
            every.get(name, {}), t.refused,
        )
        for name, t in timings.items()
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """What a result must state: card, driver, versions, clocks."""
    facts: dict[str, Any] = {"torch": torch.__version__}
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "nvrtc": None if jit.missing() else jit.nvrtc_version(),
        }
        facts |= _driver(str(getattr(properties, "uuid", "")))
    return facts


def _driver(uuid: str) -> dict[str, Any]:
    """Driver, clocks, temperature and power of a GPU; of any where nvidia-smi does not know it."""
    fields = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    for which in ([f"--id=GPU-{uuid}"], []):
        try:
            answer = subprocess.run(
                [*query, *which], capture_output=True, text=True, timeout=20, check=True
            )
            values = [v.strip() for v in answer.stdout.splitlines()[0].split(",")]
        except (OSError, subprocess.SubprocessError, IndexError):
            continue
        return dict(zip(fields.split(","), values, strict=False))
    return {"driver_version": None}
