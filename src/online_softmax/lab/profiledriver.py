"""What runs under Nsight Compute: each kernel once warm, unseen; then once more, seen.

python -m online_softmax.lab.profiledriver NAME,NAME ROWS COLS DTYPE OP

Before each name a kernel of torch's that only spins marks where it starts. Prints nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from online_softmax import catalogue, invariance, rowchoice, rowplan
from online_softmax.catalogue import KERNELS
from online_softmax.lab import profilecalls
from online_softmax.lab.grid import LOSS_OPS, OPS, WRITING
from online_softmax.plan import Problem

MARK = "spin_kernel"  # in the profiler's name of the kernel that stands before each name
EVERY_OP = (*OPS, *LOSS_OPS)
SEED = 1


def tensors(
    op: str, rows: int, cols: int, dtype: torch.dtype, device: str = "cuda"
) -> tuple[Tensor, ...]:
    """What the calls of an operation take: one set, as lab/buffersets.py lays them out."""
    if device == "meta":
        x, generator = torch.empty(rows, cols, dtype=dtype, device=device), None
    else:
        generator = torch.Generator(device).manual_seed(SEED)
        x = torch.randn(rows, cols, generator=generator, device=device).to(dtype)
    if op in LOSS_OPS:
        target = torch.randint(cols, (rows,), generator=generator, device=device)
        return x, target, torch.empty_like(x) if op in WRITING else torch.empty((), device=device)
    if op == "logsumexp":
        return x, torch.empty(rows, dtype=dtype, device=device)
    if op in rowplan.BACKWARD:
        forward = torch.log_softmax if op.startswith("log") else torch.softmax
        return torch.randn_like(x), forward(x, -1), torch.empty_like(x)
    return x, torch.empty_like(x)


def shipped(op: str, problem: Problem) -> str:
    """The kernel of the catalogue that runs an operation on rows; "" of a loss, which has none."""
    if op in LOSS_OPS:
        return ""
    if op == "softmax":
        return catalogue.choose(problem)[0].name
    return rowchoice.chosen(op, problem, invariance.setting.is_on).kernel


def launches(name: str, op: str, given: tuple[Tensor, ...], problem: Problem) -> list[Any]:
    """The launches of a CUDA kernel of the catalogue, or of "production", for a problem."""
    from online_softmax.cuda import row_launch

    if name == "production":
        name = shipped(op, problem)
        numbers = rowchoice.chosen(op, problem, invariance.setting.is_on)
    else:
        numbers = KERNELS[name].numbers(problem, op=op)
    if op == "softmax":
        x, y = given
        return catalogue.launches(KERNELS[name], x, y, numbers)
    streams = catalogue.streams(given[0], 1 if op == "logsumexp" else len(given))
    if op in rowplan.BACKWARD:
        dy, y, dx = given
        return row_launch.backward(op, dy, y, dx, 1.0, False, numbers, streams)
    x, out = given
    out = out.view(-1, 1) if op == "logsumexp" else out
    return row_launch.forward(op, x, out, 1.0, False, numbers, streams)


def call(name: str, op: str) -> Callable[..., Any]:
    """The call of a kernel of the catalogue by name, of what ships or of torch."""
    from online_softmax.cuda import launch
    from online_softmax.lab import contenders

    _, ours, rivals = contenders.makers(op)
    if name == "production":
        return ours["ours"](op)
    if name == "torch":
        return rivals["torch"](op)
    record: Any = KERNELS[name]

    def run(*given: Tensor) -> Any:
        problem = replace(catalogue.problem_of(given[0]), device="cuda")
        if record.backend == "triton":
            return record.run(*given, record.numbers(problem))
        return launch.run(launches(name, op, given, problem), given[0].device)

    return run


def bound(
    names: Sequence[str], op: str, problem: Problem, device: str = "cuda"
) -> list[Callable[[], Any]]:
    """The calls of kernels on one set of an operation's tensors, and of operations by name on
    their own."""
    on_rows = [name for name in names if name not in profilecalls.NAMES]
    dtype, given = getattr(torch, problem.dtype), tuple[Tensor, ...]()
    if on_rows:
        given = tensors(op, problem.rows, problem.cols, dtype, device)
    found: list[Callable[[], Any]] = []
    for name in names:
        if name in on_rows:
            found.append(functools.partial(call(name, op), *given))
        else:
            found.append(profilecalls.call(name, problem, device))
    return found


def main(words: list[str]) -> None:
    """Run what the words name."""
    names, rows, cols, dtype, op = words
    problem = Problem(int(rows), int(cols), dtype)
    calls = bound(names.split(","), op, problem)
    for each in calls:
        each()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for each in calls:
        torch.cuda._sleep(1)
        each()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
