"""The catalogue: every runnable kernel is one record. Dispatch, tests and benchmarks read it."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from online_softmax import invariance, plan, rowchoice, rowplan
from online_softmax.arches import Arch
from online_softmax.plan import Numbers, Problem

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
DTYPES = (*FLOATS, torch.float64)
RUNG_ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")


@dataclass(frozen=True)
class Kernel:
    """One runnable kernel.

    `run(x, y, numbers)` fills y with the softmax of each row of x: both (rows, cols) of one dtype,
    x with unit column stride, y contiguous and apart from x. On the CPU a CUDA kernel runs through
    host execution (its counts are returned), a Triton kernel through the interpreter.
    """

    name: str
    backend: str  # "cuda", "triton", "torch" or "reference"
    idea: str
    run: Callable[[Tensor, Tensor, Any], Any]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    arches: tuple[str, ...] = ()  # compiled for in CI
    reads: int = 0  # reads per element; 0: not ours to say
    rung: bool = False  # a step of the ladder, with a lesson
    operations: tuple[str, ...] = ("softmax",)  # what `kernel=` may ask of it

    @property
    def is_row_kernel(self) -> bool:
        """Whether it is one of the kernels that ship for the row operations."""
        return self.name in rowplan.IDEAS

    def reasons(self, problem: Problem, block: int | None = None, op: str = "softmax") -> list[str]:
        """Why this kernel cannot run a problem, with `block` threads if given; empty: it can."""
        if op not in self.operations:
            return [f"{self.name} computes {', '.join(self.operations)}, not {op}"]
        if self.is_row_kernel:
            return rowplan.reasons(self.name, op, problem)
        return plan.reasons(self.name, problem, block)

    def numbers(self, problem: Problem, block: int | None = None, op: str = "softmax") -> Any:
        """Launch numbers (plan.Numbers, rowplan.Row) for a problem; `block` overrides a rung's."""
        if self.is_row_kernel:
            p = problem
            return rowplan.forced(self.name, op, p.cols, p.dtype, p.arch)
        if self.backend in ("torch", "reference"):
            return Numbers(0, "no launch numbers: PyTorch chooses")
        return plan.numbers(self.name, problem, block)


def launches(record: Kernel, x: Tensor, y: Tensor, numbers: Any) -> list[Any]:
    """The launches by which a CUDA kernel fills y with the softmax of x's rows."""
    from online_softmax.cuda import launch, row_launch

    if record.is_row_kernel:
        return [*row_launch.forward("softmax", x, y, 1.0, False, numbers, streams(x, 2))]
    return [*launch.RUNG[record.name].build(x, y, numbers)]


def _run_cuda(name: str, x: Tensor, y: Tensor, numbers: Any) -> Any:
    from online_softmax.cuda import launch

    return launch.run(launches(KERNELS[name], x, y, numbers), x.device)


def _run_triton(name: str, x: Tensor, y: Tensor, numbers: Numbers) -> None:
    from online_softmax.triton import rows

    rows.softmax(x, y, kernel=name, block=numbers.tile, num_warps=numbers.block // plan.WARP)


class _AtensOwn(threading.local):
    """How deep this thread is in code that wants torch's own kernels, whoever overrides them."""

    depth = 0


atens_own = _AtensOwn()


def _run_torch(x: Tensor, y: Tensor, numbers: Numbers) -> None:
    # ATen's half-type kernels on the CPU sum in the half type in places; float32 is right.
    wide = x.dtype if x.dtype == torch.float64 or x.is_cuda else torch.float32
    atens_own.depth += 1
    try:
        if y.dtype == wide:
            torch.softmax(x, -1, out=y)
        else:  # by so many rows that what is wide stays in a cache
            step = max(2**16 // max(x.shape[1], 1), 1)
            for part, out in zip(x.split(step), y.split(step), strict=True):
                out.copy_(torch.softmax(part, -1, dtype=wide))
    finally:
        atens_own.depth -= 1


def _run_reference(x: Tensor, y: Tensor, numbers: Numbers) -> None:
    import online_softmax.reference.ops as ops

    y.copy_(ops.softmax(x, -1))


def _catalogue() -> dict[str, Kernel]:
    # The ladder's table names what is CUDA; importing it initialises nothing.
    from online_softmax.cuda.launch import LADDER

    records = [
        Kernel(
            r.name, "cuda", r.idea, partial(_run_cuda, r.name), FLOATS, RUNG_ARCHES, r.reads, True
        )
        for r in LADDER
    ]
    records += [
        Kernel(
            f"triton_{kernel}",
            "triton",
            idea,
            partial(_run_triton, kernel),
            FLOATS,
            RUNG_ARCHES,
            reads,
            True,
        )
        for kernel, idea, reads in (
            ("two_pass", "safe's three reads in Triton: maximum, sum, write", 3),
            ("online", "the online recurrence in Triton: fold, write", 2),
        )
    ]
    records += [
        Kernel(
            name,
            "cuda",
            idea,
            partial(_run_cuda, name),
            arches=RUNG_ARCHES,
            reads=rowplan.READS[name],
            operations=tuple(
                op for op in rowplan.OPERATIONS if op != "logsumexp" or name not in rowplan.NEEDS
            ),
        )
        for name, idea in rowplan.IDEAS.items()
    ]
    records += [
        Kernel(name, name, idea, run, DTYPES, operations=(*rowplan.FORWARD, "logsumexp"))
        for name, idea, run in (
            ("torch", "PyTorch's own softmax", _run_torch),
            ("reference", "the definition, in PyTorch", _run_reference),
        )
    ]
    return {record.name: record for record in records}


KERNELS: dict[str, Kernel] = _catalogue()


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """A type as the planner and people name it: "float32"."""
    return str(dtype).removeprefix("torch.")


def problem_of(x: Tensor) -> Problem:
    """The planner's view of a (rows, cols) tensor."""
    arch, sm_count = plan.DEFAULT_ARCH, 0
    if x.is_cuda:
        arch, sm_count = _device_facts(x.device.index)
    return Problem(
        x.shape[0],
        x.shape[1],
        dtype_name(x.dtype),
        device=x.device.type,
        arch=arch,
        sm_count=sm_count,
    )


def arch_of(x: Tensor) -> str:
    """The architecture of a tensor's device."""
    return _device_facts(x.device.index)[0] if x.is_cuda else plan.DEFAULT_ARCH


@functools.cache
def _arch_facts(arch: str) -> Arch:
    return Problem(0, 0, arch=arch).facts


def streams(matrix: Tensor, tensors: int) -> bool:
    """Whether a row kernel on so many matrices of this size should have them leave the L2 first."""
    l2_bytes = _arch_facts(arch_of(matrix)).l2_bytes
    return rowplan.leaves_l2(matrix.numel() * matrix.itemsize * tensors, l2_bytes)


@functools.cache
def _device_facts(index: int) -> tuple[str, int]:
    from online_softmax import jit

    return jit.device_arch(index), torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def lacks(backend: str) -> str | None:
    """What a backend needs and this installation lacks, a sentence; None: nothing. Asks no GPU."""
    if backend == "cuda":
        from online_softmax import jit

        return jit.missing()
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'online-softmax[triton]' (Linux only)"
    return None


def choose(problem: Problem) -> tuple[Kernel, str]:
    """The kernel that `softmax` runs for a problem, and the reason.

    CUDA kernels need cuda-bindings; without it, CUDA tensors go to Triton, without that to torch's
    own softmax, and the reason says so.
    """
    name, why = plan.choose(problem)
    if name in plan.RUNGS:  # a kernel of ours: what ships in place of the rung that teaches it
        row = rowchoice.chosen("softmax", problem, invariance.setting.is_on)
        if not rowplan.reasons(row.kernel, "softmax", problem):
            name, why = row.kernel, row.why
    missing = lacks(KERNELS[name].backend)
    if missing is None:
        return KERNELS[name], why
    for other in ("triton_online", "torch"):
        record = KERNELS[other]
        if lacks(record.backend) is None and not record.reasons(problem):
            return record, f"{other} in place of {name}: {missing}"
    raise AssertionError("torch takes every problem")


def as_rows(x: Tensor, dims: Sequence[int]) -> Tensor:
    """x as a (rows, cols) matrix, cols over dims, with unit column stride; copied only where its
    strides forbid a view."""
    rank = x.dim()
    if rank == 0:
        return x.reshape(1, 1)
    last = sorted(dim % rank for dim in dims)
    if last != list(range(rank - len(last), rank)):
        x = x.permute([d for d in range(rank) if d not in last] + last)
    cols = x.shape[rank - len(last) :].numel()
    matrix = x.reshape(x.numel() // max(cols, 1), cols)
    if cols > 1 and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    return matrix


def softmax(x: Tensor, dim: int, kernel: str, out: Tensor | None = None) -> Tensor:
    """softmax of a plain tensor along dim by the named kernel, or by the planner's choice if "".

    The slices along dim become the rows of a matrix; only where strides forbid a view is x copied.
    x's memory holds its values: no negation is pending. `out`, if given, is filled and returned:
    contiguous, of x's shape and dtype, apart from x.
    """
    if x.numel() == 0 and not kernel:
        return torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    is_last = x.dim() == 0 or dim % x.dim() == x.dim() - 1
    matrix = as_rows(x, (dim,))
    problem = problem_of(matrix)
    record = choose(problem)[0] if not kernel else forced(kernel, problem)
    if out is not None and is_last:
        y = out
    else:  # no view: a caller may write into it
        shape = x.shape if is_last else x.movedim(dim, -1).shape
        y = torch.empty(shape, dtype=x.dtype, device=x.device)
    record.run(matrix, y.view(matrix.shape), record.numbers(problem))
    if is_last:
        return y
    y = y.movedim(-1, dim)
    return y.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(y)


def forced(name: str, problem: Problem, op: str = "softmax") -> Kernel:
    """A kernel by name for an operation; ValueError, with the reasons, where it cannot run."""
    record = KERNELS[name]
    refusals = record.reasons(problem, op=op)
    missing = lacks(record.backend)
    if missing and not refusals:
        refusals = [missing]
    if refusals:
        raise ValueError(f"{op}(): kernel {name!r} cannot run this: {'; '.join(refusals)}")
    return record
