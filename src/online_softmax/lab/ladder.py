"""The ladder, climbed: every rung run, judged, counted and, on a GPU, timed. Prints nothing.

Without a GPU the CUDA rungs run through host execution, which counts what they read, write and
raise to a power; Triton's run through its interpreter, which does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from online_softmax import catalogue, jit
from online_softmax.catalogue import KERNELS, Kernel
from online_softmax.lab import budget, info, inputs, judge, options, rung
from online_softmax.lab.budget import Step
from online_softmax.lab.inputs import Matrix
from online_softmax.lab.results import Header, Result, Run
from online_softmax.lab.rung import Setting
from online_softmax.lab.triton_figures import Compiler
from online_softmax.plan import Numbers, Problem

if TYPE_CHECKING:
    from online_softmax.lab.bench import Timing

RUNGS = tuple(name for name, kernel in KERNELS.items() if kernel.rung)
NAMES = (*RUNGS, "torch", "production")
OTHER = "torch."  # before the name of a rival that is no record: torch.compile
CPU_ARCHES = ("sm_80", "sm_90a")  # whose registers are shown where there is no GPU
SECONDS = options.SECONDS  # for the kernels on a CPU, all together; compiling comes on top
CLOCK = (
    "CUDA graph of calls over rotating buffers of at least 3 x L2; contenders interleaved; "
    "median of three rounds"
)

Progress = Callable[[str, int, int], None]  # what comes next, steps done, steps in all
Results = dict[str, Result]


def climb(
    matrix: Matrix,
    *,
    arches: Sequence[str] = (),
    only: Sequence[str] = (),
    block: int = 0,
    seconds: float = SECONDS,
    rivals: Sequence[str] = ("torch",),
    command: str = "",
    progress: Progress | None = None,
) -> Run:
    """Run the ladder on a matrix: on the GPU if there is one, else on the CPU.

    Args:
        matrix: the input. On a CPU as many of its first rows as `seconds` allow, all columns.
        arches: whose registers and occupancy to give. Where there is no GPU, `production` is chosen
            for the first. Default: the GPU's, else CPU_ARCHES.
        only: some of NAMES; default all.
        block: threads a block of every kernel; 0: the planner's, on a GPU the best of a sweep.
        seconds: what running the kernels on a CPU may take in all.
        rivals: timed beside the rungs on a GPU, of bench.RIVALS.
        command: for the record.
        progress: called before each step.
    """
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    )
    if device is None:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels' module is imported
    arches = tuple(arches) or ((jit.device_arch(device),) if device else CPU_ARCHES)
    setting = _setting(matrix, arches[0], block, device)
    chosen, why = catalogue.choose(setting.problem)
    names = [name for name in NAMES if not only or name in only]
    records = [KERNELS[name] for name in names if name != "production"]
    if "production" in names and chosen not in records:
        records.append(chosen)

    results: Results = {
        r.name: replace(rung.blank(r), reasons=tuple(rung.refusals(r, setting))) for r in records
    }
    running = [r for r in records if not results[r.name].reasons]
    steps = 2 * len(running) + len(records) + 1 + (len(running) if device else 0)
    step = _stepper(progress, steps)
    timings: dict[str, Timing] = {}
    compiler = None
    if device:
        x = matrix.take(setting.rows).to(device)
        timings = _on_gpu(results, running, setting, x, rivals, chosen.name, step)
        _count_beside_gpu(results, running, setting, x, step)
    else:
        with budget.one_torch_thread():
            setting = budget.affordable(setting, running, matrix, seconds, step)
            compiler = _triton_compiler(results, setting, arches)
            x = matrix.take(setting.rows)
            _run_all(results, running, setting, x, step)
    if "production" in names:
        results["production"] = _production(results[chosen.name], why, setting, timings, x)
    compiler = compiler or _triton_compiler(results, setting, arches)
    for name, result in results.items():
        step(f"{name}: registers")
        ours = arches if result.kernel in KERNELS else ()
        found = [rung.figures(result, setting, arch, compiler) for arch in ours]
        results[name] = replace(result, figures=tuple(each for each in found if each))
    header = _header(matrix, setting, x, arches, command, timings)
    others = [name for name in results if name.startswith(OTHER)]
    return Run(header, tuple(results[name] for name in [*names, *others]))


def _setting(matrix: Matrix, arch: str, block: int, device: torch.device | None) -> Setting:
    # Without a GPU the kernels get the numbers that they would have on one.
    problem = Problem(matrix.rows, matrix.cols, inputs.short_name(matrix.dtype), arch=arch)
    if device:
        here = torch.cuda.get_device_properties(device).multi_processor_count
        problem = replace(problem, arch=jit.device_arch(device), sm_count=here)
    return Setting(problem, matrix.rows, matrix.dtype, device or torch.device("cpu"), block)


def _stepper(progress: Progress | None, total: int) -> Step:
    done = iter(range(total))

    def step(text: str) -> None:
        if progress:
            progress(text, next(done, total), total)

    return step


def _run_all(
    results: Results, records: Sequence[Kernel], setting: Setting, x: Tensor, step: Step
) -> None:
    for record in records:
        step(f"{record.name}: run and compared with float64")
        part = rung.spread(x, setting.rows_of(record))
        results[record.name] = rung.run(results[record.name], record, setting, part)


def _triton_compiler(results: Results, setting: Setting, arches: Sequence[str]) -> Compiler | None:
    """Start compiling Triton's kernels beside everything else."""
    requests = [
        rung.triton_request(result, setting, arch)
        for result in results.values()
        for arch in arches
        if result.backend == "triton" and info.has_triton()
    ]
    return Compiler(requests) if requests else None


# ---- on a GPU


def _on_gpu(
    results: Results,
    records: Sequence[Kernel],
    setting: Setting,
    x: Tensor,
    rivals: Sequence[str],
    chosen: str,
    step: Step,
) -> dict[str, Timing]:
    """Run all, time what is right; judge the block size that won too, where the planner has not."""
    from online_softmax.lab import bench

    _run_all(results, records, setting, x, step)
    ours = [r for r in records if results[r.name].ok and r.backend in ("cuda", "triton")]
    if setting.block:
        calls: dict[str, bench.Call] = {"copy": bench.copy_call, "torch": bench.RIVALS["torch"]()}
        calls |= {r.name: _call(r, setting.numbers(r)) for r in ours}
        step("timed, with copy and torch")
        timings = bench.interleaved(bench.Buffers(x), calls)
    else:
        names = [r.name for r in ours]
        timings = bench.time_ladder(
            x,
            names,
            rivals=tuple(dict.fromkeys(("torch", *rivals))),
            production=chosen if results[chosen].ok else None,
            progress=lambda name: step(f"{name}: timed"),
        )
    for rival in sorted((set(rivals) - {"torch"}) & set(timings)):
        results[OTHER + rival] = _rival(rival, timings, setting, x)
    for record in [*ours, KERNELS["torch"]]:
        result, timing = results.get(record.name), timings[record.name]
        if result is None or result.ok is False:
            continue
        if timing.refused:
            results[record.name] = replace(result, reasons=(timing.refused,))
            continue
        if timing.block and timing.block != result.block:
            result = rung.run(result, record, setting, x, timing.block)
        results[record.name] = (
            rung.timed(result, timings, timing, setting, x) if result.ok else result
        )
    return timings


def _rival(rival: str, timings: dict[str, Timing], setting: Setting, x: Tensor) -> Result:
    """A rival's row; a wrong one gets no time."""
    from online_softmax.lab import bench

    result = Result(OTHER + rival, OTHER + rival, "torch", f"torch.softmax under torch.{rival}")
    if timings[rival].refused:
        return replace(result, reasons=(timings[rival].refused,))
    verdict = judge.check(bench.RIVALS[rival]()(x, torch.empty_like(x)), x)
    result = replace(result, ok=verdict.ok, max_error=verdict.max_error, why=verdict.why)
    return rung.timed(result, timings, timings[rival], setting, x) if verdict.ok else result


def _call(record: Kernel, numbers: Numbers) -> Callable[[Tensor, Tensor], object]:
    return lambda x, y: record.run(x, y, numbers)


def _count_beside_gpu(
    results: Results, records: Sequence[Kernel], setting: Setting, x: Tensor, step: Step
) -> None:
    for record in records:
        step(f"{record.name}: counted on the CPU")
        counted = rung.count_on_cpu(results[record.name], record, setting, _few(setting, x))
        results[record.name] = counted


def _few(setting: Setting, x: Tensor) -> Tensor:
    return x[: budget.few_rows(setting.problem)].cpu()


# ---- what the whole run says


def _production(
    result: Result, why: str, setting: Setting, timings: dict[str, Timing], x: Tensor
) -> Result:
    """The line of what ships: the chosen rung with the planner's own block size, no sweep."""
    shipped, record = replace(result, name="production", chosen_because=why), KERNELS[result.name]
    timing = timings.get("production")
    if timing is None or timing.refused:
        return shipped
    shipped = rung.timed(replace(shipped, block=timing.block), timings, timing, setting, x)
    return rung.count_on_cpu(shipped, record, setting, _few(setting, x))


def _header(
    matrix: Matrix,
    setting: Setting,
    x: Tensor,
    arches: Sequence[str],
    command: str,
    timings: dict[str, Timing],
) -> Header:
    notes = list(matrix.notes)
    special = inputs.specials(x)
    if special:
        notes.append(f"of the values, {special}")
    if setting.rows < matrix.rows:
        notes.append(
            f"{setting.rows:,} of {matrix.rows:,} rows: host execution is for counting, "
            "not for speed"
        )
    if setting.interpreted_rows and setting.interpreted_rows < setting.rows:
        notes.append(
            f"Triton's rungs took {setting.interpreted_rows:,} rows, spread over all: its "
            "interpreter is slower still"
        )
    header = Header(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        device=torch.cuda.get_device_name(setting.device) if setting.on_gpu else "cpu",
        source=matrix.source,
        rows=setting.rows,
        rows_asked=matrix.rows,
        cols=matrix.cols,
        dtype=inputs.short_name(matrix.dtype),
        arches=tuple(arches),
        versions=info.versions(),
        notes=tuple(notes),
        counted_rows=budget.few_rows(setting.problem) if setting.on_gpu else setting.rows,
        checked_rows=rung.checked_rows(x),
        bytes_moved=rung.ideal_bytes(x),
    )
    if not setting.on_gpu:
        return header
    from online_softmax.lab import bench

    copy_us = rung.known(timings["copy"].median_us)
    gbs, whose = info.bandwidth(setting.device.index or 0)
    return replace(
        header,
        machine=bench.machine(),
        is_cold_l2=True,
        clock=CLOCK,
        copy_us=copy_us,
        copy_gbs=rung.ideal_bytes(x) / copy_us / 1e3 if copy_us else None,
        datasheet_gbs=gbs,
        datasheet=whose,
    )
