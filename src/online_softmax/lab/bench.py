"""The clock: cold L2, contenders interleaved, a CUDA graph of calls over rotating buffers.

A graph has no host gaps; buffers of at least three times the L2 keep it cold; contenders take turns
(A B C A B C), so that a drifting clock hits all alike. Times are microseconds a call.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from online_softmax import catalogue, jit, plan
from online_softmax.lab.ceilings import copy_call
from online_softmax.lab.refusal import one_line
from online_softmax.lab.rotation import (
    ROUND_US,
    SLOW_US,
    Buffers,
    Call,
    Graph,
    Recorder,
    Rotation,
)

ROUNDS = 3
REPLAYS = 9  # per contender and round
QUICK_REPLAYS = 3  # to rank block sizes


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median of the rounds' medians; 20th, 80th percentile of all replays.

    `median_us` is the figure that counts. By a CPU's clock (cpuclock.py) it is the least of all
    calls, below the 20th percentile, and a round's figure is the least of the round.
    """

    median_us: float
    p20_us: float
    p80_us: float
    rounds_us: tuple[float, ...] = ()  # the figure of each round
    block: int = 0  # threads a block of the best variant
    every: dict[int, float] = field(default_factory=dict)  # block -> quick median, all tried
    refused: str = ""  # why there is no time

    @classmethod
    def of(cls, per_round: Sequence[Sequence[float]]) -> Timing:
        """The same of the times of each round."""
        every = sorted(us for one in per_round for us in one)
        medians = tuple(median(one) for one in per_round)
        low, high = every[len(every) // 5], every[len(every) * 4 // 5]
        return cls(median(medians), low, high, medians)

    @classmethod
    def refusal(cls, error: BaseException) -> Timing:
        """Of a contender that raised."""
        nan = float("nan")
        return cls(nan, nan, nan, refused=one_line(error))


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
            timings[name] = Timing.refusal(error)
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
    return timings | {name: Timing.of(per_round) for name, per_round in samples.items()}


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
