"""The static report: registers, spills, shared memory, occupancy, widths of loads and stores.

All of it from compiled code: it needs no GPU, and says nothing of what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from online_softmax import catalogue, jit, plan
from online_softmax.catalogue import KERNELS
from online_softmax.lab import info, profilecalls, profiledriver, rung, sass, tritoncode
from online_softmax.lab.profilefile import Code, Line
from online_softmax.lab.results import Figures, Result
from online_softmax.lab.rung import Setting
from online_softmax.plan import Problem
from online_softmax.triton import Build

NOT_OURS = "no code of this project: PyTorch's own kernels come compiled"
NO_RECORD = "registers and widths are shown of softmax, log_softmax, logsumexp and the backwards"


def report(lines: Sequence[Line], problem: Problem, op: str, arches: Sequence[str]) -> list[Line]:
    """The lines with `figures` for each architecture, and `code` for the first."""
    dtype = getattr(torch, problem.dtype)
    setting = Setting(problem, problem.rows, dtype, torch.device("cpu"))
    running = [line for line in lines if not line.reasons]
    ours = {line.name: line for line in running if line.kernel in KERNELS}
    found = [rung.blank(KERNELS[line.kernel]) for line in ours.values()]
    compiling = rung.compile_triton(found, setting, arches)
    codes = _triton_codes(found, setting, arches[0])
    done = []
    for line in lines:
        if line.name in profilecalls.NAMES and not line.reasons:
            every_figure, code = profilecalls.report(line.name, problem, arches)
            line = replace(line, figures=every_figure, code=code)
        elif line.name not in ours:
            missing = "" if line.reasons else NOT_OURS if line.name == "torch" else NO_RECORD
            line = replace(line, code=Code(missing=missing) if missing else None)
        elif KERNELS[line.kernel].backend == "triton":
            result = rung.blank(KERNELS[line.kernel])
            each = [rung.figures(result, setting, arch, compiling.result()) for arch in arches]
            figures = tuple(figure for figure in each if figure)
            line = replace(line, figures=figures, code=codes[line.kernel])
        elif KERNELS[line.kernel].backend == "cuda":
            every = [_cuda(line.name, op, replace(problem, arch=arch)) for arch in arches]
            line = replace(line, figures=tuple(f for f, _ in every), code=every[0][1])
        else:
            line = replace(line, code=Code(missing=NOT_OURS))
        done.append(line)
    return done


def _triton_codes(results: Sequence[Result], setting: Setting, arch: str) -> dict[str, Code]:
    builds: dict[str, Build] = {
        result.kernel: rung.triton_build(result, setting, arch)
        for result in results
        if result.backend == "triton"
    }
    lacking = catalogue.lacks("triton") or info.no_triton_cache() if builds else None
    if lacking:
        return {name: Code(missing=lacking) for name in builds}
    return dict(zip(builds, tritoncode.codes([*builds.values()]) if builds else (), strict=True))


def _cuda(name: str, op: str, problem: Problem) -> tuple[Figures, Code]:
    """The worst figures of a kernel's launches, and the sum of what stands in their code."""
    arch, dtype = problem.arch, getattr(torch, problem.dtype)
    if arch not in plan.ARCHES:
        missing = f"the planner has no facts about {arch}"
        return Figures(arch, missing=missing), Code(missing=missing)
    given = profiledriver.tensors(op, problem.rows, problem.cols, dtype, "meta")
    try:
        work = profiledriver.launches(name, op, given, problem)
        figures = rung.cuda_figures(work, arch)
    except jit.Unavailable as error:
        return Figures(arch, missing=str(error)), Code(missing=str(error))
    return figures, sass.together(_code(each, arch) for each in work)


def _code(work: Any, arch: str) -> Code:
    image = jit.compile(work.file, work.symbol, arch)
    return sass.code(image.code, image.entry)
