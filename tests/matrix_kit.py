"""What the tests of the row kernels share: matrices that lie anywhere, and host execution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from online_softmax import rowplan
from online_softmax.cuda import host, row_launch
from online_softmax.plan import Problem
from online_softmax.rowplan import Row

ARCH = "sm_90a"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = tuple(rowplan.IDEAS)
LAYOUTS = ((0, 0), (1, 0), (3, 5))  # elements before the first row, and between rows
WIDTHS = (1, 6, 8, 15, 33, 257, 1024, 2051)

needs_compiler = pytest.mark.skipif(
    host.compiler() is None, reason="host execution needs g++ or clang++"
)


def run(launches: list) -> None:
    for launch in launches:
        if launch.grid:
            host.launch(launch)


def matrix(rows: int, cols: int, dtype: torch.dtype, start: int, gap: int) -> Tensor:
    return (torch.randn(rows, cols + start + gap) * 3).to(dtype)[:, start : start + cols]


def awkward(cols: int, dtype: torch.dtype, start: int, gap: int) -> Tensor:
    x = matrix(5, cols, dtype, start, gap)
    if cols > 2:
        x[1], x[2, 1], x[3, 0] = -math.inf, math.nan, math.inf
    return x


def expected(op: str, x: Tensor, scale: float, zero_empty: bool) -> Tensor:
    wide = x.double() * scale
    if op == "logsumexp":
        return torch.logsumexp(wide, -1, keepdim=True)
    y = torch.softmax(wide, -1) if op == "softmax" else torch.log_softmax(wide, -1)
    if zero_empty:
        y[(wide == -math.inf).all(-1)] = 0.0 if op == "softmax" else -math.inf
    return y


def forward(op: str, x: Tensor, row: Row, scale: float = 1.0, zero_empty: bool = False) -> Tensor:
    y = torch.full((len(x), 1 if op == "logsumexp" else x.shape[1]), 7.0, dtype=x.dtype)
    run(row_launch.forward(op, x, y, scale, zero_empty, row, streams=True))
    return y


def close(got: Tensor, want: Tensor, atol: float) -> None:
    eps = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=4e-6 + eps, atol=atol, equal_nan=True)


def rows_of(kernel: str, op: str, cols: int, dtype: torch.dtype) -> Row | None:
    problem = Problem(5, cols, str(dtype).removeprefix("torch."), arch=ARCH)
    if rowplan.reasons(kernel, op, problem):
        return None
    return rowplan.forced(kernel, op, cols, problem.dtype, ARCH)


def placed(values: Tensor, position: int) -> Tensor:
    """A copy that begins so many elements past a 16-byte boundary."""
    base = torch.empty(values.numel() + 16, dtype=values.dtype)
    first = -base.data_ptr() % 16 // values.itemsize + position
    return base[first : first + values.numel()].view(values.shape).copy_(values)
