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
from online_softmax.lab.waiting import Progress
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
        rivals: of bench.RIVALS, timed beside the rungs on a GPU; torch always is.
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
    compiling = None
    if device:
        x = matrix.take(setting.rows).to(device)
        _run_all(results, running, setting, x, step)
        planned = results.get(chosen.name)  # before a sweep finds another block
        ships = chosen.name if "production" in names else ""
        timings = _time(results, running, setting, x, rivals, ships, step)
        _count_beside_gpu(results, running, setting, x, step)
    else:
        with budget.one_torch_thread():
            setting = budget.affordable(setting, running, matrix, seconds, step)
            compiling = rung.compile_triton(results.values(), setting, arches)
            x = matrix.take(setting.rows)
            _run_all(results, running, setting, x, step)
        planned = results.get(chosen.name)
    if planned and "production" in names:
        results["production"] = _production(planned, why, setting, timings, x)
    compiling = compiling or rung.compile_triton(results.values(), setting, arches)
    for name, result in results.items():
        step(f"{name}: registers")
        ours = arches if result.kernel in KERNELS else ()
        found = [rung.figures(result, setting, arch, compiling.result()) for arch in ours]
        results[name] = replace(result, figures=tuple(each for each in found if each))
    header = _header(matrix, setting, x, arches, rivals, command, timings)
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


# ---- on a GPU


def _time(
    results: Results,
    records: Sequence[Kernel],
    setting: Setting,
    x: Tensor,
    rivals: Sequence[str],
    ships: str,
    step: Step,
) -> dict[str, Timing]:
    """Time what is right, with rivals and `ships`, what the planner chose; "": leave that out.

    Judges the block size that won too, where it is not the planner's.
    """
    from online_softmax.lab import bench, ceilings, rotation

    ours = [r for r in records if results[r.name].ok and r.backend in ("cuda", "triton")]
    rivals = tuple(dict.fromkeys(("torch", *rivals)))
    if setting.block:
        calls: dict[str, rotation.Call] = {"copy": ceilings.copy_call}
        calls |= {rival: bench.RIVALS[rival]() for rival in rivals}
        calls |= {r.name: _call(r, setting.numbers(r)) for r in ours}
        step(f"timed, with copy and {', '.join(rivals)}")
        timings = bench.interleaved(rotation.Buffers(x), calls)
    else:
        timings = bench.time_ladder(
            x,
            [r.name for r in ours if r.rung],
            rivals=rivals,
            production=ships if ships and results[ships].ok else None,
            progress=lambda name: step(f"{name}: timed"),
        )
    if ships and "production" in timings:  # a kernel that is no rung has only this time
        timings.setdefault(ships, timings["production"])
    for rival in rivals[1:]:
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
    timing, y = timings[rival], torch.empty_like(x)
    if timing.refused:
        return replace(result, reasons=(timing.refused,))
    made = bench.RIVALS[rival]()(x, y)  # which some return instead of filling y
    got, given = (
        rung.spread(each, rung.checked_rows(x)) for each in (y if made is None else made, x)
    )
    verdict = judge.check(got, given)
    result = replace(
        result, ok=verdict.ok, max_error=verdict.max_error, why=verdict.why, rows=len(x)
    )
    return rung.timed(result, timings, timing, setting, x) if verdict.ok else result


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
    planned: Result, why: str, setting: Setting, timings: dict[str, Timing], x: Tensor
) -> Result:
    """The line of what ships: the chosen kernel with the planner's own numbers, no sweep."""
    shipped, record = replace(planned, name="production", chosen_because=why), KERNELS[planned.name]
    timing = timings.get("production", timings.get(planned.name)) if planned.ok else None
    if timing is None:
        return shipped
    if timing.refused:
        return replace(shipped, reasons=(timing.refused,))
    shipped = replace(shipped, block=timing.block or planned.block)
    shipped = rung.timed(shipped, timings, timing, setting, x)
    return rung.count_on_cpu(shipped, record, setting, _few(setting, x))


def _header(
    matrix: Matrix,
    setting: Setting,
    x: Tensor,
    arches: Sequence[str],
    rivals: Sequence[str],
    command: str,
    timings: dict[str, Timing],
) -> Header:
    notes = list(matrix.notes)
    special = inputs.specials(x)
    if special:
        notes.append(f"of the values, {special}")
    notes += budget.notes(setting)
    untimed = [OTHER + rival for rival in rivals if rival != "torch" and not setting.on_gpu]
    if untimed:
        notes.append(f"without {' and '.join(untimed)}: rivals are timed on a GPU only")
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
    from online_softmax.lab import bench, rotation

    copy_us = rung.known(timings["copy"].median_us)
    l2_bytes = torch.cuda.get_device_properties(setting.device).L2_cache_size
    gbs, whose = info.bandwidth(setting.device.index or 0)
    return replace(
        header,
        machine=bench.machine(),
        is_cold_l2=rotation.rotation(x.numel() * x.element_size(), l2_bytes)[1],
        clock=CLOCK,
        copy_us=copy_us,
        copy_gbs=rung.ideal_bytes(x) / copy_us / 1e3 if copy_us else None,
        datasheet_gbs=gbs,
        datasheet=whose,
    )
