"""Every record of the catalogue on every case, and the public operations, on this machine.

Prints nothing. Whatever goes wrong is a fault with its case; a GPU that a kernel leaves unusable
ends the run, and what did not run any more says so.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from online_softmax import catalogue, jit, plan
from online_softmax.catalogue import HALVES, KERNELS, Kernel
from online_softmax.lab import budget, checkops, checkprepare, contract, info, inputs, rung
from online_softmax.lab.checkops import OPERATIONS
from online_softmax.lab.refusal import one_line
from online_softmax.lab.rung import Setting
from online_softmax.lab.waiting import Progress
from online_softmax.plan import Problem

NAMES = (*KERNELS, *OPERATIONS)
FREE_ELEMENTS = 2**27  # past so many torch's cache gives its memory back
LOST = "the device was unusable after that: nothing else was run"


@dataclass(frozen=True)
class Fault:
    """A case that went wrong."""

    case: str
    why: str  # the first wrong element, or what was raised, a sentence
    source: str = ""  # the public reports that the case restates


@dataclass
class Outcome:
    """What one record or operation did in one type."""

    name: str
    dtype: str
    kind: str  # "kernel" or "operation"
    cases: int  # that are asked of it
    passed: int = 0
    max_error: float = 0.0  # the largest among what passed: checkpage.ERROR says of what
    faults: list[Fault] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # sentence -> cases
    why_not: str = ""  # why it did not run at all, a sentence


@dataclass(frozen=True)
class Report:
    """A whole run."""

    device: str  # the GPU's name, or "cpu"
    arch: str  # "" on a CPU
    is_quick: bool
    facts: dict[str, Any]  # what `info` found
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Nothing went wrong."""
        return not any(outcome.faults for outcome in self.outcomes)

    @property
    def has_run(self) -> bool:
        """Something gave a result, right or wrong."""
        return any(outcome.passed or outcome.faults for outcome in self.outcomes)


class Task:
    """One record or operation in one type, with its cases; each is run by `one`."""

    def __init__(self, outcome: Outcome, names: Sequence[Any], one: Callable[[Any], Any]) -> None:
        self.outcome, self.names, self.one = outcome, names, one


def run(
    names: Sequence[str] = (), is_quick: bool = False, progress: Progress | None = None
) -> Report:
    """Check what NAMES names, by default all.

    Args:
        names: records of the catalogue, and operations.
        is_quick: some cases of each, and of a kernel float32 and one 16-bit type.
        progress: called before each case.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels' module is imported
    wanted = [name for name in NAMES if not names or name in names]
    with budget.one_torch_thread():
        tasks = [
            *(t for n in wanted if n in KERNELS for t in _of_record(n, is_quick, device)),
            *(t for n in wanted if n in OPERATIONS for t in _of_operation(n, is_quick, device)),
        ]
        _run(tasks, device, progress)
    arch = jit.device_arch() if device == "cuda" else ""
    said = plan.unmeasured(arch) if arch else ""
    return Report(
        torch.cuda.get_device_name() if device == "cuda" else "cpu",
        arch,
        is_quick,
        info.gather(),
        tuple(task.outcome for task in tasks),
        tuple(filter(None, (said, _how(device, is_quick)))),
    )


def _how(device: str, is_quick: bool) -> str:
    if is_quick:
        return "a quick look: some cases of each, and of a kernel float32 and one 16-bit type"
    if device == "cpu":
        return (
            "no GPU: CUDA kernels ran compiled for the CPU, Triton's through its interpreter, on "
            "the cases that a CPU can afford"
        )
    return ""


# ---- what there is to do


def _of_record(name: str, is_quick: bool, device: str) -> Iterable[Task]:
    record = KERNELS[name]
    for dtype in record.dtypes:
        if is_quick and dtype in HALVES and dtype != HALVES[list(KERNELS).index(name) % 2]:
            continue
        chosen = contract.cases_of(record, dtype, device)
        if is_quick:
            chosen = contract.quick(record, chosen, device)
        outcome = Outcome(name, inputs.short_name(dtype), "kernel", len(chosen))
        outcome.why_not = _lacks(record, dtype, device) or ""
        yield Task(outcome, chosen, _runs(record, dtype, device))


def _runs(record: Kernel, dtype: torch.dtype, device: str) -> Callable[[Any], contract.Ran]:
    return lambda case: contract.run(record, case, dtype, device)


def _lacks(record: Kernel, dtype: torch.dtype, device: str) -> str | None:
    """Why a record runs nothing here, a sentence; None: it runs."""
    problem = Problem(2, 2, inputs.short_name(dtype))
    where = torch.device(device)
    reasons = rung.refusals(record, Setting(problem, 2, dtype, where))
    missing = catalogue.lacks(record.backend) if device == "cuda" else contract.lacks(record)
    return missing or (reasons[0] if reasons else None)


def _of_operation(name: str, is_quick: bool, device: str) -> Iterable[Task]:
    for dtype in checkops.DTYPES:
        chosen = checkops.cases_of(name, device, is_quick)
        outcome = Outcome(name, inputs.short_name(dtype), "operation", len(chosen))
        yield Task(outcome, chosen, checkops.runs(name, dtype, device))


# ---- doing it


def _run(tasks: Sequence[Task], device: str, progress: Progress | None) -> None:
    total = sum(len(task.names) for task in tasks if not task.outcome.why_not)
    done, lost = 0, ""
    if device == "cpu":
        _prepare(tasks, total, progress)
    for task in tasks:
        outcome = task.outcome
        if lost and not outcome.why_not:
            outcome.why_not = lost
        for case in () if outcome.why_not else task.names:
            if progress:
                progress(f"{outcome.name} {outcome.dtype}: {case.name}", done, total)
            done += 1
            _one(outcome, case, task.one)
            if device == "cuda" and outcome.faults and _is_lost():
                lost = f"{outcome.name} {outcome.dtype} on {case.name} failed, and {LOST}"
                break
            if device == "cuda" and getattr(case, "elements", 0) > FREE_ELEMENTS:
                torch.cuda.empty_cache()


def _prepare(tasks: Sequence[Task], total: int, progress: Progress | None) -> None:
    """Compile what a CPU will run."""
    if progress:
        progress("compiling for the CPU", 0, total)
    checkprepare.compile_all(
        checkprepare.symbols(KERNELS[o.name], getattr(torch, o.dtype), task.names)
        for task in tasks
        if not (o := task.outcome).why_not and o.kind == "kernel"
        if KERNELS[o.name].backend == "cuda"
    )


def _one(outcome: Outcome, case: Any, one: Callable[[Any], contract.Ran]) -> None:
    source = getattr(case, "source", "")
    try:
        ran = one(case)
    except torch.OutOfMemoryError:
        outcome.refused["the device has too little memory left"] += 1
        return
    except Exception as error:  # noqa: BLE001  whatever it is, it is what the page is for
        outcome.faults.append(Fault(case.name, f"it raised {one_line(error)}", source))
        return
    if ran.refusals:
        outcome.refused.update(ran.refusals[:1])
    elif ran.why:
        outcome.faults.append(Fault(case.name, ran.why, source))
    else:
        outcome.passed += 1
        outcome.max_error = max(outcome.max_error, ran.max_error)


def _is_lost() -> bool:
    """Whether a fault has left the device unusable."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
