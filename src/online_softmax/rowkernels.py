"""The row kernels on plain CUDA tensors: views as matrices, the planner's numbers, the launches."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from online_softmax import catalogue, rowplan
from online_softmax.cuda.launch import Launch
from online_softmax.rowplan import Row

NAMES = tuple(rowplan.IDEAS)
# Between these a scale is a normal number of float32, and scale log2(e) is finite. Further down it
# could become 0, and 0 times the infinite padding of a row is NaN; further up that product becomes
# infinite, and times a difference of 0 it is NaN too.
SCALES = (2.0**-126, 2.0**127)


def takes(x: Tensor, dtype: torch.dtype | None, scale: float, kernel: str = "") -> bool:
    """Whether a row kernel may compute a forward of x into dtype (None: x's)."""
    return (
        _has_kernels(x)
        and x.dtype in catalogue.FLOATS
        and (dtype in (None, x.dtype) or (dtype == torch.float32 and x.dtype in catalogue.HALVES))
        and SCALES[0] <= scale <= SCALES[1]
        and (not kernel or kernel in NAMES)
        and x.numel() > 0
    )


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and catalogue.lacks("cuda") is None


def numbers(op: str, matrix: Tensor, kernel: str = "") -> Row:
    """Launch numbers for a (rows, cols) matrix, of the planned kernel or of the named one.

    Raises:
        ValueError: the kernel cannot run this.
    """
    if not kernel:
        name = catalogue.dtype_name(matrix.dtype)
        row = rowplan.numbers(op, matrix.shape[1], name, catalogue.arch_of(matrix))
        if matrix.shape[0] * row.cluster * row.parts <= rowplan.MAX_GRID:
            return row
        kernel = row.kernel
    problem = replace(catalogue.problem_of(matrix), device="cuda")  # also under host execution
    chosen: Row = catalogue.forced(kernel, problem, op).numbers(problem, op=op)
    return chosen


def _run(work: list[Launch], device: torch.device) -> None:
    from online_softmax.cuda import launch

    launch.run(work, device)


def _outer(op: str, x: Tensor, y: Tensor, dim: int, scale: float, zero_empty: bool) -> list[Launch]:
    """The launches along a dim that is not the last: several where one has more blocks than a grid.

    x and y: contiguous, of one shape. A block has one outer position, and at least one inner one.
    """
    from online_softmax.cuda import row_launch

    slices = x.numel() // x.shape[dim]
    if slices <= rowplan.MAX_GRID:
        return [row_launch.outer(op, x, y, dim, scale, zero_empty)]
    shape = x.shape[:dim].numel(), x.shape[dim], x.shape[dim + 1 :].numel()
    most = max(rowplan.MAX_GRID // shape[2], 1)  # outer positions
    pairs = zip(x.view(shape).split(most), y.view(shape).split(most), strict=True)
    return [row_launch.outer(op, part, to, 1, scale, zero_empty) for part, to in pairs]


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
    from online_softmax.cuda import row_launch

    rank = x.dim()
    is_last = rank == 0 or dim % rank == rank - 1
    y_dtype = dtype or x.dtype
    if not is_last and not kernel and y_dtype == x.dtype:  # whatever its strides: the same bits
        y = torch.empty(x.shape, dtype=y_dtype, device=x.device) if out is None else out
        _run(_outer(op, x.contiguous(), y, dim % rank, scale, zero_empty), x.device)
        return y
    matrix = catalogue.as_rows(x, (dim,))
    row = numbers(op, matrix, kernel)
    if is_last:
        y = torch.empty(x.shape, dtype=y_dtype, device=x.device) if out is None else out
        target = y.view(matrix.shape)
    else:
        target = torch.empty(matrix.shape, dtype=y_dtype, device=x.device)
    streams = catalogue.streams(matrix, 2)
    _run(row_launch.forward(op, matrix, target, scale, zero_empty, row, streams), x.device)
    if is_last:
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
) -> Tensor | None:
    """The gradient by x; None unless dy, y and the gradient have one type and dim is the last."""
    same = dy.dtype == y.dtype and dtype in (None, y.dtype)
    is_last = y.dim() == 0 or dim % y.dim() == y.dim() - 1
    if not (same and is_last and takes(y, None, scale) and dy.device == y.device):
        return None
    from online_softmax.cuda import row_launch

    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    rows_dy, rows_y = catalogue.as_rows(dy, (-1,)), catalogue.as_rows(y.contiguous(), (-1,))
    name = f"{op}_backward"
    row, streams = numbers(name, rows_y, ""), catalogue.streams(rows_y, 3)
    target = dx.view(rows_y.shape)
    work = row_launch.backward(name, rows_dy, rows_y, target, scale, zero_empty, row, streams)
    _run(work, y.device)
    return dx


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

    rank = max(x.dim(), 1)
    over = {dim % rank for dim in dims} if dims else set(range(rank))
    matrix = catalogue.as_rows(x, tuple(over))
    y = torch.empty((matrix.shape[0], 1), dtype=dtype or x.dtype, device=x.device)
    row, streams = numbers("logsumexp", matrix, kernel), catalogue.streams(matrix, 1)
    _run(row_launch.forward("logsumexp", matrix, y, scale, False, row, streams), x.device)
    if keepdim:
        return y.view([1 if d in over else size for d, size in enumerate(x.shape)])
    return y.view([size for d, size in enumerate(x.shape) if d not in over])
