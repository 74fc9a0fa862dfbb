"""One rung at a time: can it run here, is it right, what does it read, write and take.

Where a kernel runs through host execution its counts are exact; where it does not (Triton, or a GPU
without a compiler) they are what its algorithm predicts, and the result says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from online_softmax import catalogue, jit, plan
from online_softmax.catalogue import KERNELS, Kernel
from online_softmax.cuda import host
from online_softmax.cuda.launch import RUNG, Launch
from online_softmax.lab import info, judge
from online_softmax.lab.results import Figures, Result
from online_softmax.plan import Numbers, Problem
from online_softmax.triton import ALIGNED, Build, compile_all

if TYPE_CHECKING:
    from online_softmax.lab.bench import Timing

Built = Mapping[Build, jit.Resources | str]  # a sentence where Triton gave no figures

CHECKED_ELEMENTS = 2**24  # compared with float64 a rung: it takes the CPU a second


@dataclass(frozen=True)
class Setting:
    """What a ladder runs on."""

    problem: Problem  # as asked; where there is no GPU, for one of `problem.arch`
    rows: int  # that run: fewer than asked where a CPU would take too long
    dtype: torch.dtype
    device: torch.device
    block: int = 0  # threads a block of every kernel; 0: the planner's
    interpreted_rows: int = 0  # that Triton's interpreter runs; 0: there is no interpreter

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def rows_of(self, record: Kernel) -> int:
        """The rows that a kernel runs."""
        return self.interpreted_rows or self.rows if record.backend == "triton" else self.rows

    def numbers(self, record: Kernel, block: int = 0) -> Any:
        """Launch numbers as for the problem asked for, also where fewer rows run."""
        numbers = record.numbers(self.problem, block or self.block or None)
        if (
            isinstance(numbers, Numbers) and numbers.blocks
        ):  # a fixed grid is cut as its rows are, so that its blocks still loop
            cut = plan.ceil_div(numbers.blocks * self.rows, max(self.problem.rows, 1))
            numbers = replace(numbers, blocks=max(cut, 1))
        return numbers


def blank(record: Kernel) -> Result:
    """A result of which nothing is known yet."""
    return Result(record.name, record.name, record.backend, record.idea)


def refusals(record: Kernel, setting: Setting) -> list[str]:
    """Why a kernel cannot run here, each a sentence; empty: it can."""
    reasons = record.reasons(setting.problem, setting.block or None)
    if record.backend == "cuda":
        missing = catalogue.lacks("cuda") if setting.on_gpu else info.no_compiler()
    else:
        missing = catalogue.lacks(record.backend)
        if record.backend == "triton" and not missing:
            missing = info.no_triton_cache() if setting.on_gpu else _not_interpreted()
    return [*reasons, missing] if missing else reasons


def _not_interpreted() -> str | None:
    from online_softmax.triton import rows

    if rows.interpreted():
        return None
    return "this process compiles Triton's kernels: set TRITON_INTERPRET=1 to run them on a CPU"


def spread(x: Tensor, count: int) -> Tensor:
    """x, or `count` of its rows, the first and the last among them, evenly."""
    if count >= len(x):
        return x
    places = [i * (len(x) - 1) // max(count - 1, 1) for i in range(count)]
    return x[places]


def checked_rows(x: Tensor) -> int:
    """How many rows are compared with float64: all, or as many as CHECKED_ELEMENTS allow."""
    return min(len(x), max(CHECKED_ELEMENTS // max(x.shape[1], 1), 2))


def run(result: Result, record: Kernel, setting: Setting, x: Tensor, block: int = 0) -> Result:
    """Run a kernel once, into NaN, and compare with float64. Counts come along on a CPU."""
    numbers = setting.numbers(record, block)
    result = replace(result, block=numbers.block)
    y = judge.output(x.shape[0], x.shape[1], x.dtype, x.device)
    try:
        counts = record.run(x, y, numbers)
    except host.Fault as fault:  # what a GPU would hang on or leave undefined
        return replace(result, ok=False, why=str(fault))
    # Triton's interpreter truncates where it should round to bfloat16: one unit instead of half.
    truncates = record.backend == "triton" and not setting.on_gpu and x.dtype == torch.bfloat16
    got, given = (spread(each, checked_rows(x)) for each in (y, x))
    verdict = judge.check(got, given, ulps=1.0 if truncates else 0.5)
    result = replace(
        result, ok=verdict.ok, max_error=verdict.max_error, why=verdict.why, rows=len(x)
    )
    spilled = judge.spilled(y)
    if spilled:
        result = replace(result, ok=False, why=f"it wrote {spilled} elements outside its result")
    return count(result, record, setting, x.shape, numbers, counts)


def count(
    result: Result,
    record: Kernel,
    setting: Setting,
    shape: Sequence[int],
    numbers: Numbers,
    counts: Any,
) -> Result:
    """Reads, writes and exponentials per element of a matrix of that shape.

    `counts` are host execution's; anything else means there are none, and the algorithm's figures
    stand in for reads and writes.
    """
    elements = max(shape[0] * shape[1], 1)
    predicted = _predicted_exps(record, replace(setting.problem, rows=shape[0]), numbers)
    if predicted is not None:
        result = replace(result, exps_predicted=predicted / elements)
    if isinstance(counts, host.Counts):
        return replace(
            result,
            is_counted=True,
            reads=counts.reads / elements,
            writes=counts.writes / elements,
            exps=counts.exps / elements,
        )
    return replace(result, reads=float(record.reads), writes=1.0) if record.reads else result


def count_on_cpu(result: Result, record: Kernel, setting: Setting, x: Tensor) -> Result:
    """The same for a kernel that ran on a GPU: its counts on a few rows, by host execution."""
    numbers, counts = setting.numbers(record, result.block), None
    if record.backend == "cuda" and not info.no_compiler():
        counts = record.run(x, torch.empty_like(x), numbers)
    return count(result, record, setting, x.shape, numbers, counts)


def ideal_bytes(x: Tensor) -> int:
    """The least a softmax moves: one read and one write."""
    return 2 * x.numel() * x.element_size()


def timed(
    result: Result, timings: Mapping[str, Timing], timing: Timing, setting: Setting, x: Tensor
) -> Result:
    """The result with its time, and what that is of the copy, of the datasheet and beside torch."""
    bandwidth = info.bandwidth(setting.device.index or 0)[0]
    gbs = ideal_bytes(x) / timing.median_us / 1e3
    return replace(
        result,
        median_us=timing.median_us,
        p20_us=known(timing.p20_us),
        p80_us=known(timing.p80_us),
        rounds_us=timing.rounds_us,
        gbs=gbs,
        of_datasheet=gbs / bandwidth if bandwidth else None,
        of_copy=known(timings["copy"].median_us / timing.median_us),
        of_torch=known(timings["torch"].median_us / timing.median_us),
        every_us={str(block): us for block, us in timing.every.items()},
    )


def known(value: float) -> float | None:
    """A figure that a refused contender left out is None."""
    return None if math.isnan(value) else value


def figures(result: Result, setting: Setting, arch: str, built: Built) -> Figures | None:
    """Registers and the rest on an architecture, without a GPU; None for kernels that are not ours.

    `built` has the `triton_build` of each result of a Triton kernel, unless there is no Triton.
    """
    record = KERNELS[result.kernel]
    if record.backend not in ("cuda", "triton"):
        return None
    if arch not in plan.ARCHES:
        return Figures(arch, missing=f"the planner has no facts about {arch}")
    if record.backend == "cuda":
        try:
            return _cuda_figures(record, setting, setting.numbers(record, result.block), arch)
        except jit.Unavailable as error:
            return Figures(arch, missing=str(error))
    build = triton_build(result, setting, arch)
    return _triton_figures(build, built[build]) if build in built else None


def triton_build(result: Result, setting: Setting, arch: str) -> Build:
    """What to ask Triton's compiler for: the kernel as it is launched, on a contiguous matrix."""
    numbers = setting.numbers(KERNELS[result.kernel], result.block)
    return Build(
        result.kernel.removeprefix("triton_"),
        setting.dtype,
        arch,
        numbers.tile,
        numbers.block // plan.WARP,
        is_whole=setting.problem.cols % ALIGNED == 0,
    )


def compile_triton(
    results: Iterable[Result], setting: Setting, arches: Sequence[str]
) -> Future[Built]:
    """Compile the Triton kernels among them, in another process, beside what goes on here."""
    wanted = dict.fromkeys(
        triton_build(result, setting, arch)
        for result in results
        for arch in arches
        if result.backend == "triton" and not catalogue.lacks("triton")
    )
    lacking = info.no_triton_cache()

    def build() -> Built:
        found = [lacking] * len(wanted) if lacking else compile_all([*wanted])
        return dict(zip(wanted, found, strict=True))

    pool = ThreadPoolExecutor(max_workers=1)
    compiling: Future[Built] = pool.submit(build)
    pool.shutdown(wait=False)
    return compiling


def _triton_figures(build: Build, taken: jit.Resources | str) -> Figures:
    if isinstance(taken, str):
        return Figures(build.arch, missing=taken)
    occupancy = jit.occupancy(taken, plan.ARCHES[build.arch], build.num_warps * plan.WARP)
    return _figures(build.arch, [(taken, taken.shared_bytes, occupancy)])


def _cuda_figures(record: Kernel, setting: Setting, numbers: Numbers, arch: str) -> Figures:
    shape = setting.problem.rows, setting.problem.cols
    x = torch.empty(shape, dtype=setting.dtype, device="meta")  # launches are made without memory
    return cuda_figures(catalogue.launches(record, x, x, numbers), arch)


def cuda_figures(launches: Iterable[Launch], arch: str) -> Figures:
    """What launches take on an architecture, the worst of each; raises jit.Unavailable."""
    found = []
    for launch in launches:
        taken = jit.resources(launch.file, launch.symbol, arch)
        occupancy = jit.occupancy(taken, plan.ARCHES[arch], launch.block, launch.shared_bytes)
        found.append((taken, taken.shared_bytes + launch.shared_bytes, occupancy))
    return _figures(arch, found)


def _figures(arch: str, found: Sequence[tuple[jit.Resources, int, float]]) -> Figures:
    """Of kernels with their shared bytes and occupancy, the worst of each."""
    return Figures(
        arch,
        registers=max(taken.registers for taken, _, _ in found),
        spill_bytes=max(taken.spill_store_bytes + taken.spill_load_bytes for taken, _, _ in found),
        stack_bytes=max(taken.stack_bytes for taken, _, _ in found),
        shared_bytes=max(shared for _, shared, _ in found),
        occupancy=min(occupancy for _, _, occupancy in found),
    )


def _predicted_exps(record: Kernel, problem: Problem, numbers: Numbers) -> float | None:
    """Exponentials in all, as the algorithm has it; None for what is not ours."""
    if record.rung and record.backend == "cuda":
        return RUNG[record.name].exps(problem, numbers)
    if record.backend != "triton" or catalogue.lacks("triton"):
        return None
    from online_softmax.triton import rows

    # Every lane of a tile evaluates, also past the row's end.
    lanes, tiles = numbers.tile // rows.UNROLL.value, plan.ceil_div(problem.cols, numbers.tile)
    exps = 2 * tiles * numbers.tile  # sum, write
    if record.name == "triton_online":
        exps += 2 * tiles * lanes + lanes  # two weights a lane and tile, one merge of all lanes
    return problem.rows * exps
