"""How the kernels that take x as it lies are launched: along any dim, and logsumexp's gradient.

Tensors are contiguous (x of `lse_backward` may have rows apart): (outer, cols, inner), inner
contiguous. The bits depend on cols and the dtypes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from online_softmax import outerplan, rowplan
from online_softmax.cuda.launch import C_TYPE, Launch
from online_softmax.cuda.row_launch import EMIT, GRADIENT
from online_softmax.outerplan import Outer
from online_softmax.plan import VECTOR_BYTES, ceil_div
from online_softmax.ring import STATE_BYTES

LSE_BLOCK = 256  # threads of `lse_backward`, one word of 16 bytes each


def _is_whole(inner: int, *tensors: Tensor) -> bool:
    """Whether inner rows of all tensors are whole 16-byte vectors on 16-byte boundaries."""
    return all(
        inner * t.itemsize % VECTOR_BYTES == 0 and t.data_ptr() % VECTOR_BYTES == 0 for t in tensors
    )


def _launch(symbol: str, args: tuple[Tensor, ...], dim: int, n: Outer, *rest: float) -> Launch:
    shape = args[0].shape
    cols, inner = shape[dim], shape[dim + 1 :].numel()
    positions = shape[:dim].numel() * inner
    scale, zero_empty = rest
    block = n.across * n.along
    sizes = (positions, cols, inner, float(scale), int(zero_empty), n.along)
    grid = ceil_div(positions, n.across * n.width)
    shared = block * n.width * STATE_BYTES
    return Launch("outer.cu", symbol, (*args, *sizes), grid, block, shared_bytes=shared)


def outer(op: str, x: Tensor, y: Tensor, dim: int, scale: float, zero_empty: bool) -> Launch:
    """softmax or log_softmax along a dimension that is not the last; y may be wider than x."""
    n = outerplan.outer(x.shape[dim], x.itemsize, _is_whole(x.shape[dim + 1 :].numel(), x, y))
    symbol = f"outer_rows<{C_TYPE[x.dtype]}, {C_TYPE[y.dtype]}, {n.width}, {n.held}, {EMIT[op]}>"
    return _launch(symbol, (x, y), dim, n, scale, zero_empty)


def outer_backward(
    op: str, dy: Tensor, y: Tensor, dx: Tensor, dim: int, scale: float, zero_empty: bool
) -> Launch:
    """The gradient by x of softmax or log_softmax along a dimension that is not the last, from that
    by y and y itself, into dx; of any three types."""
    tensors = (dy, y, dx)
    narrowest = min(t.itemsize for t in tensors)
    whole = _is_whole(y.shape[dim + 1 :].numel(), *tensors)
    n = outerplan.outer_backward(y.shape[dim], dy.itemsize + y.itemsize, narrowest, whole)
    types = ", ".join(C_TYPE[t.dtype] for t in tensors)
    symbol = f"outer_rows_backward<{types}, {n.width}, {n.held}, {GRADIENT[op]}>"
    return _launch(symbol, tensors, dim, n, scale, zero_empty)


def lse_backward(
    dlse: Tensor,
    x: Tensor,
    lse: Tensor,
    dx: Tensor,
    inner: int,
    scale: float,
    zero_empty: bool,
) -> Launch:
    """The gradient of logsumexp by x into dx.

    Args:
        dlse: (outer * inner), of x's dtype or float32, any stride.
        x: (outer, cols * inner), unit column stride.
        lse: as dlse, float32.
        dx: x's dtype and number of elements, contiguous.
        inner: positions after the reduced dimensions; 1 if these are the last.
        scale, zero_empty: as for the forward.
    """
    total, plane = dx.numel(), x.shape[1]
    lead = dx.data_ptr() % VECTOR_BYTES // dx.itemsize  # elements before dx in its first word
    words = ceil_div(total + lead, VECTOR_BYTES // dx.itemsize)
    kinds = f"{C_TYPE[x.dtype]}, {C_TYPE[dlse.dtype]}, {'true' if inner > 1 else 'false'}"
    strides = (x.stride(0), dlse.stride(0), lse.stride(0))
    args = (x, dlse, lse, dx, total, plane, inner, *strides, float(scale), int(zero_empty))
    grid = ceil_div(words, LSE_BLOCK)
    return Launch("lse_backward.cu", f"lse_backward<{kinds}>", args, grid, LSE_BLOCK)


OUTER_COLS = (2, 8, 40, 200, 700, 2000, 5000, 20000)
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def instances(dtypes: Sequence[torch.dtype] = tuple(C_TYPE)) -> list[tuple[str, str]]:
    """Every (file, symbol) that softmax, log_softmax and logsumexp launch here for x of these
    types, whole or not: what a compile run compiles. y and its gradient have x's type or float32;
    another mix is compiled when it is asked for."""
    found: dict[tuple[str, str], None] = {}

    def note(work: Launch) -> None:
        found[work.file, work.symbol] = None

    for dtype in dtypes:
        for result in dict.fromkeys((dtype, WIDER.get(dtype, dtype))):
            for inner in (16, 3):
                for cols in OUTER_COLS:
                    x = torch.empty((2, cols, inner), dtype=dtype, device="meta")
                    y = x.to(result)
                    for op in rowplan.FORWARD:
                        note(outer(op, x, y, 1, 1.0, False))
                        note(outer_backward(f"{op}_backward", y, y, x, 1, 1.0, False))
            for inner in (1, 16):
                x = torch.empty((2, 16), dtype=dtype, device="meta")
                row = torch.empty(2, dtype=result, device="meta")
                note(lse_backward(row, x, row.float(), x, inner, 1.0, False))
    return list(found)
