"""The row kernels on plain CUDA tensors: views as matrices, the planner's numbers, the launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from online_softmax import catalogue, float32, invariance, keptcalls, rowchoice, rowplan
from online_softmax.cuda.launch import Launch
from online_softmax.plan import Problem
from online_softmax.reference.ops import FP8, beside, result_dtype
from online_softmax.rowplan import Row

NAMES = tuple(rowplan.IDEAS)
# Of a scale. Further down it could become 0, and 0 times the infinite padding of a row is NaN;
# further up scale log2(e) becomes infinite, and times a difference of 0 it is NaN too.
SCALES = float32.NORMAL


def takes(x: Tensor, dtype: torch.dtype | None, scale: float, kernel: str = "") -> bool:
    """Whether a row kernel may compute a forward of x into dtype (None: x's, bfloat16 for fp8)."""
    return (
        has_kernels(x)
        and _takes_types(x.dtype, dtype)
        and SCALES[0] <= scale <= SCALES[1]
        and (not kernel or kernel in NAMES)
        and x.numel() > 0
    )


def _takes_types(given: torch.dtype, wanted: torch.dtype | None) -> bool:
    if given in FP8:
        return wanted is None or wanted in catalogue.FLOATS
    is_widened = wanted == torch.float32 and given in catalogue.HALVES
    return given in catalogue.FLOATS and (wanted in (None, given) or is_widened)


def has_kernels(x: Tensor) -> bool:
    return x.is_cuda and catalogue.lacks("cuda") is None


def without_fp8(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x in a type that kernels take: fp8 in a 16-bit one that holds all its values, so that no
    value changes; the one that the result has, if it has one."""
    if x.dtype not in FP8:
        return x
    return x.to(torch.float16 if dtype == torch.float16 else torch.bfloat16)


def numbers(op: str, matrix: Tensor, kernel: str = "") -> Row:
    """Launch numbers for a (rows, cols) matrix, of the planned kernel or of the named one.

    Raises:
        ValueError: the kernel cannot run this.
    """
    if not kernel:
        row = rowchoice.chosen(op, _problem(matrix), invariance.setting.is_on)
        if matrix.shape[0] * row.cluster * row.parts <= rowplan.MAX_GRID:
            return row
        kernel = row.kernel
    problem = _problem(matrix)
    if op in rowplan.LOSSES:  # which have no record of their own
        if why := rowplan.reasons(kernel, op, problem):
            raise ValueError(f"{op}(): kernel {kernel!r} cannot run this: {'; '.join(why)}")
        return rowplan.forced(kernel, op, problem.cols, problem.dtype, problem.arch)
    chosen: Row = catalogue.forced(kernel, problem, op).numbers(problem, op=op)
    return chosen


def _problem(matrix: Tensor) -> Problem:
    return replace(catalogue.problem_of(matrix), device="cuda")  # also under host execution


def _run(work: list[Launch], device: torch.device) -> None:
    from online_softmax.cuda import launch

    launch.run(work, device)


def _outer(launch: Callable[..., Launch], dim: int, tensors: tuple[Tensor, ...]) -> list[Launch]:
    """The launches of `launch(*tensors, dim)` along a dim that is not the last: several where one
    has more blocks than a grid.

    tensors: contiguous, of one shape. A block has at least one position.
    """
    x = tensors[0]
    slices = x.numel() // x.shape[dim]
    if slices <= rowplan.MAX_GRID:
        return [launch(*tensors, dim)]
    shape = x.shape[:dim].numel(), x.shape[dim], x.shape[dim + 1 :].numel()
    most = max(rowplan.MAX_GRID // shape[2], 1)  # outer positions
    parts = zip(*(t.view(shape).split(most) for t in tensors), strict=True)
    return [launch(*part, 1) for part in parts]


def forward(
    op: str,
    x: Tensor,
    dim: int,
    dtype: torch.dtype | None,
    scale: float,
    zero_empty: bool,
    kernel: str,
    out: Tensor | None,
) -> Tensor:
    """softmax or log_softmax along dim, into `out` (contiguous; x itself, or apart) or a tensor of
    its own. `takes` has said yes."""
    from online_softmax.cuda import outer_launch, row_launch

    given, x = x, without_fp8(x, dtype)
    rank = x.dim()
    is_last = rank == 0 or dim % rank == rank - 1
    y_dtype, options = dtype or x.dtype, (dim, dtype, scale, zero_empty, kernel)
    if not is_last and not kernel:  # whatever its strides: the same bits
        y = torch.empty(x.shape, dtype=y_dtype, device=x.device) if out is None else out
        launch = partial(outer_launch.outer, op, scale=scale, zero_empty=zero_empty)
        whole = x.contiguous()
        work = _outer(launch, dim % rank, (whole, y))
        _run(work, x.device)
        keptcalls.keep_in_one(op, options, work, (given, whole), (y, y))
        return y
    matrix = catalogue.as_rows(x, (dim,))
    row = numbers(op, matrix, kernel)
    if is_last:
        y = torch.empty(x.shape, dtype=y_dtype, device=x.device) if out is None else out
        target = y.view(matrix.shape)
    else:
        target = torch.empty(matrix.shape, dtype=y_dtype, device=x.device)
    streams = catalogue.streams(matrix, 2)
    work = row_launch.forward(op, matrix, target, scale, zero_empty, row, streams)
    _run(work, x.device)
    if is_last:
        keptcalls.keep_in_one(op, options, work, (given, matrix), (y, target))
        return y
    moved = target.view(x.movedim(dim, -1).shape).movedim(-1, dim)
    return moved.contiguous() if out is None else out.copy_(moved)


def backward(
    op: str,
    dy: Tensor,
    y: Tensor,
    dim: int,
    dtype: torch.dtype | None,
    scale: float,
    zero_empty: bool,
    out: Tensor | None = None,
) -> Tensor | None:
    """The gradient by x, in dtype (None: y's), into `out` (contiguous, apart from dy and y) or a
    tensor of its own; None where no kernel computes it."""
    given, options, dtype = (dy, y), (dim, dtype, scale, zero_empty), dtype or y.dtype
    floats = all(each in catalogue.FLOATS for each in (dy.dtype, y.dtype, dtype))
    if not (floats and takes(y, None, scale) and dy.device == y.device):
        return None
    from online_softmax.cuda import outer_launch, row_launch

    dx = torch.empty(y.shape, dtype=dtype, device=y.device) if out is None else out
    name, rank = f"{op}_backward", max(y.dim(), 1)
    y = y.contiguous()
    if dim % rank != rank - 1:
        launch = partial(outer_launch.outer_backward, name, scale=scale, zero_empty=zero_empty)
        whole = dy.contiguous()
        work = _outer(launch, dim % rank, (whole, y, dx))
        _run(work, y.device)
        keptcalls.keep_in_one(name, options, work, (given[1], y), (dx, dx), (given[0], whole))
        return dx
    if dy.dtype == y.dtype == dtype:
        target = dx
    else:  # the row kernels have one type: float32 holds all of them, and rounds once
        dy, y = dy.float(), y.float()
        target = dx if dtype == torch.float32 else torch.empty_like(y)
    rows_dy, rows_y = catalogue.as_rows(dy, (-1,)), catalogue.as_rows(y, (-1,))
    row, streams = numbers(name, rows_y, ""), catalogue.streams(rows_y, 3)
    rows_dx = target.view(rows_y.shape)
    work = row_launch.backward(name, rows_dy, rows_y, rows_dx, scale, zero_empty, row, streams)
    _run(work, y.device)
    pairs = (given[1], rows_y), (dx, rows_dx), (given[0], rows_dy)
    keptcalls.keep_in_one(name, options, work, *pairs)
    return dx if target is dx else dx.copy_(target)


def logsumexp(
    x: Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
    scale: float,
    kernel: str,
) -> Tensor:
    """logsumexp over dims, in dtype (None: x's). `takes` has said yes."""
    from online_softmax.cuda import row_launch

    given, x = x, without_fp8(x, dtype)
    rank = max(x.dim(), 1)
    over = {dim % rank for dim in dims} if dims else set(range(rank))
    matrix = catalogue.as_rows(x, tuple(over))
    y = torch.empty((matrix.shape[0], 1), dtype=dtype or x.dtype, device=x.device)
    row, streams = numbers("logsumexp", matrix, kernel), catalogue.streams(matrix, 1)
    work = row_launch.forward("logsumexp", matrix, y, scale, False, row, streams)
    _run(work, x.device)
    if keepdim:
        lse = y.view([1 if d in over else size for d, size in enumerate(x.shape)])
    else:
        lse = y.view([size for d, size in enumerate(x.shape) if d not in over])
    options = (dims, keepdim, dtype, scale, kernel)
    keptcalls.keep_in_one("logsumexp", options, work, (given, matrix), (lse, y))
    return lse


def logsumexp_backward(
    dlse: Tensor,
    x: Tensor,
    lse: Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
    scale: float,
    zero_empty: bool,
) -> Tensor | None:
    """The gradient of `logsumexp` by x; None where no kernel computes it."""
    floats = all(t.dtype in catalogue.FLOATS and t.device == x.device for t in (dlse, lse))
    if not (floats and takes(x, None, scale) and dtype in (None, result_dtype(x.dtype))):
        return None
    from online_softmax.cuda import outer_launch

    x = without_fp8(x, None)
    if not keepdim:
        dims = dims or tuple(range(x.dim()))
        dlse, lse = beside(dlse, x, dims), beside(lse, x, dims)
    if dlse.dtype != x.dtype:
        dlse = dlse.float()
    sizes = list(x.shape) or [1]
    first, last = _widest_run(sizes, dims)
    # A value for each position of the run: repeated along reduced dims that lie apart from it.
    each = [1 if first <= d <= last else size for d, size in enumerate(sizes)]
    dlse, lse = (t.expand(each).reshape(-1) for t in (dlse, lse.float()))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner = math.prod(sizes[last + 1 :])
    planes = x.reshape(math.prod(sizes[:first]), -1)
    if planes.shape[1] > 1 and planes.stride(1) != 1:
        planes = planes.contiguous()
    work = outer_launch.lse_backward(dlse, planes, lse, dx, inner, scale, zero_empty)
    _run([work], x.device)
    return dx


def _widest_run(sizes: list[int], dims: tuple[int, ...]) -> tuple[int, int]:
    """The first and last of neighbouring reduced dims: those of most elements, if apart."""
    runs: list[list[int]] = []
    for dim in sorted(dim % len(sizes) for dim in dims or range(len(sizes))):
        if runs and runs[-1][1] == dim - 1:
            runs[-1][1] = dim
        else:
            runs.append([dim, dim])
    first, last = max(runs, key=lambda run: math.prod(sizes[run[0] : run[1] + 1]))
    return first, last
