"""What host execution will run, compiled beforehand: together, and files beside each other.

One by one, when it is first launched, an instance takes about as long as six among others.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from online_softmax import catalogue
from online_softmax.catalogue import Kernel
from online_softmax.cuda import host
from online_softmax.cuda.host import execute, toolchain
from online_softmax.lab import judge
from online_softmax.lab.judge import Case

TOGETHER = 40  # instances in one unit: the compiler's memory grows with them


def symbols(record: Kernel, dtype: torch.dtype, chosen: Iterable[Case]) -> dict[str, list[str]]:
    """The instances that a record launches on cases, by file."""
    found: dict[str, dict[str, None]] = {}
    for case in chosen:
        x = judge.lay_out(case, dtype)
        problem = replace(catalogue.problem_of(x), device="cuda")
        if record.reasons(problem):
            continue
        y = judge.output(case.rows, case.cols, dtype)
        for launch in catalogue.launches(record, x, y, record.numbers(problem)):
            if launch.grid:
                found.setdefault(launch.file, {})[launch.symbol] = None
    return {file: list(names) for file, names in found.items()}


def compile_all(wanted: Iterable[dict[str, list[str]]]) -> None:
    """Compile and load instances by file. What the compiler refuses is left to the launch that
    asks for it, whose case it is then."""
    files: dict[str, dict[str, None]] = {}
    for each in wanted:
        for file, names in each.items():
            files.setdefault(file, {}).update(dict.fromkeys(names))
    units = [
        (file, tuple(names)[start : start + TOGETHER])
        for file, names in files.items()
        for start in range(0, len(names), TOGETHER)
    ]
    with ThreadPoolExecutor(execute.processors()) as pool:
        made = list(pool.map(_compiled, units))
    for (file, unit), is_made in zip(units, made, strict=True):
        if is_made:
            host.build(file, unit)


def _compiled(unit: tuple[str, tuple[str, ...]]) -> bool:
    file, names = unit
    try:
        toolchain.build(execute.source_path(file), names)
    except (host.CompileError, host.CompilerMissing):
        return False
    return True
