"""Profiling: what kernels should move, what host execution counts, what the GPU's counters say.

Prints nothing. Without counters, and with a sentence why, the static report stands in their place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import NamedTuple

import torch

from online_softmax import catalogue, jit, plan
from online_softmax.catalogue import KERNELS
from online_softmax.cuda import host
from online_softmax.lab import (
    budget,
    info,
    ncu,
    profilecalls,
    profilecounters,
    profiledriver,
    profilestatic,
)
from online_softmax.lab.profilefile import Header, Line, Profile
from online_softmax.lab.waiting import Progress
from online_softmax.plan import Problem

LADDER = "ladder"
RUNGS = tuple(name for name, record in KERNELS.items() if record.rung)
NAMES = (*(name for name in KERNELS if name != "reference"), "production", *profilecalls.NAMES)
DRIVER = "online_softmax.lab.profiledriver"
NO_NCU = (
    "no counters: Nsight Compute (ncu) is not on PATH; it comes with the CUDA toolkit, or alone "
    "from https://developer.nvidia.com/nsight-compute"
)
NO_PERMISSION = (
    f"no counters: the driver shows them to its administrator alone ({ncu.NO_PERMISSION}): run as "
    "root (of a container, with --cap-add SYS_ADMIN), or allow everybody, with the line `options "
    "nvidia NVreg_RestrictProfilingToAdminUsers=0` in a file of /etc/modprobe.d, and reboot"
)
CAPABILITY = {"9.0": "sm_90a", "10.0": "sm_100a"}  # the others: sm_ and the digits


class Asked(NamedTuple):
    """What to profile."""

    names: tuple[str, ...]  # of NAMES
    rows: int
    cols: int
    dtype: str
    op: str
    arches: tuple[str, ...] = ()  # whose code the static report shows; default: the GPU's
    command: str = ""


class Here(NamedTuple):
    """The GPU at hand."""

    name: str
    arch: str
    sm_count: int


def here() -> Here | None:
    """The GPU at hand; None: torch sees none."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Here(properties.name, jit.device_arch(), properties.multi_processor_count)


def run(
    asked: Asked, raw: Callable[[str], None] | None = None, progress: Progress | None = None
) -> Profile:
    """Profile under ncu; where that cannot be, say why in the header and report what is static.

    Args:
        asked: kernels and problem.
        raw: gets ncu's CSV as it came.
        progress: called before each step.
    """
    device, step = here(), _stepper(progress, 3)
    problem = Problem(asked.rows, asked.cols, asked.dtype)
    if device:
        problem = replace(problem, arch=device.arch, sm_count=device.sm_count)
    elif asked.arches:
        problem = replace(problem, arch=asked.arches[0])
    step("counted by host execution")
    lines = _lines(asked, problem, backends_run=device is not None)
    header = _header(asked, device, problem)
    tool, notes = ncu.find(), []
    if device is None:
        notes.append(f"no counters: {info.NO_GPU.partition(':')[0]}, and they are a GPU's")
    elif tool is None:
        notes.append(NO_NCU)
    elif running := [line.name for line in lines if not line.reasons]:
        step(f"{len(running)} kernels under Nsight Compute")
        words = [",".join(running), str(asked.rows), str(asked.cols), asked.dtype, asked.op]
        answer = ncu.ask(tool, [sys.executable, "-m", DRIVER, *words])
        if raw:
            raw(answer.csv)
        try:
            found = profilecounters.add(lines, answer.csv, asked.rows * asked.cols)
        except ValueError as error:
            notes.append(_no_counters(answer, error))
        else:
            notes += profilecounters.left_out(found, is_asked=True)
            header = replace(header, ncu=ncu.version(tool), device=device.name)
            return Profile(replace(header, notes=(*header.notes, *notes)), tuple(found))
    step("compiled, for the static report")
    lines = profilestatic.report(lines, problem, asked.op, header.arches)
    return Profile(replace(header, notes=(*header.notes, *notes)), tuple(lines))


def from_csv(asked: Asked, text: str) -> Profile:
    """A run from ncu's CSV as `raw` kept it, of the kernels, problem and operation asked for.

    Raises:
        ValueError: it is no CSV of ncu's, or of another run; one line says what.
    """
    launches = ncu.read(text)
    capability = launches[0].capability if launches else ""
    arch = CAPABILITY.get(capability, f"sm_{capability.replace('.', '')}")
    if arch not in plan.ARCHES:
        raise ValueError(f"it is of a GPU of compute capability {capability or 'unknown'}")
    problem = Problem(asked.rows, asked.cols, asked.dtype, arch=arch)
    lines = _lines(asked, problem, backends_run=False)
    found = profilecounters.add(lines, text, asked.rows * asked.cols)
    header = _header(asked, None, problem)
    notes = (*header.notes, *profilecounters.left_out(found, is_asked=False))
    device = f"a GPU of compute capability {capability}"
    return Profile(replace(header, device=device, arches=(arch,), notes=notes), tuple(found))


def _stepper(progress: Progress | None, total: int) -> Callable[[str], None]:
    done = iter(range(total))
    return lambda text: progress(text, next(done, total), total) if progress else None


# ---- before anything runs on a GPU


def _lines(asked: Asked, problem: Problem, backends_run: bool) -> list[Line]:
    return [_line(name, asked.op, problem, backends_run) for name in asked.names]


def _line(name: str, op: str, problem: Problem, backends_run: bool) -> Line:
    """What a kernel should read, what host execution counts; or why it does not run."""
    if name in profilecalls.NAMES:
        reasons = profilecalls.reasons(name, problem)
        least = 0 if reasons else profilecalls.least_bytes(name, problem)
        return Line(name, "", profilecalls.IDEAS[name], tuple(reasons), least_bytes=least)
    kernel = profiledriver.shipped(op, problem) if name == "production" else name
    record = KERNELS.get(kernel)
    if record is None:
        return Line(name, "", "what `online_softmax` runs, its other kernels included")
    idea = record.idea if kernel == name else f"what ships here: {kernel}"
    reasons = record.reasons(problem, op=op) if name not in ("production", "torch") else []
    missing = catalogue.lacks(record.backend) if backends_run else None
    reasons = [*reasons, missing] if missing else reasons
    line = Line(name, kernel, idea, tuple(reasons))
    if reasons or not record.reads:
        return line
    line = replace(line, reads_predicted=_predicted(record, op))
    if record.backend != "cuda" or info.no_compiler():
        return line
    rows = min(budget.few_rows(problem), problem.rows)
    given = profiledriver.tensors(op, rows, problem.cols, getattr(torch, problem.dtype), "cpu")
    counts = sum(
        (
            host.launch(each)
            for each in profiledriver.launches(name, op, given, problem)
            if each.grid
        ),
        host.Counts(0, 0, 0),
    )
    elements = rows * problem.cols
    return replace(
        line,
        reads=counts.reads / elements,
        writes=counts.writes / elements,
        exps=counts.exps / elements,
    )


def _predicted(record: catalogue.Kernel, op: str) -> float:
    """Elements read for each of the matrix: of a backward there are two matrices; logsumexp reads
    once whatever its kernel."""
    if op == "logsumexp":
        return 1.0
    return float(record.reads * (2 if op.endswith("_backward") else 1))


def _header(asked: Asked, device: Here | None, problem: Problem) -> Header:
    from online_softmax.lab import bench

    lacking = info.no_compiler()
    return Header(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=asked.command,
        device="",
        rows=asked.rows,
        cols=asked.cols,
        dtype=asked.dtype,
        op=asked.op,
        arches=asked.arches or (problem.arch,),
        versions=info.versions(),
        machine=bench.machine() if device else {},
        notes=(f"nothing is counted: {lacking}",) if lacking else (),
    )


# ---- what there is to say


def _no_counters(answer: ncu.Answer, error: ValueError) -> str:
    if ncu.NO_PERMISSION in answer.csv + answer.said:
        return NO_PERMISSION
    return f"no counters: ncu gave none: {answer.why if answer.code else error}"
