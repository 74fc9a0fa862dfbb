"""softmax and log_softmax of the rows of a matrix, in Triton: three passes over a row, or two.

One program owns one row and walks it in blocks of BLOCK columns. A block is UNROLL slices of LANES
columns; lane i has column i of each slice and keeps a state of its own, so the loop exchanges
nothing between lanes. After the loop the lanes' states are merged, in an order given by the column
alone: a row has the same bits wherever it lies and however many rows there are.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from online_softmax.triton.online import (
    INF,
    absorb,
    empty,
    exponential,
    log_prob,
    maximum,
    merge_lanes,
    prob,
    row_max,
    row_sum,
)

# A block's maximum costs its lanes two exponentials, so this many elements share them. Of 4096 x
# 4096 float32 on an H200 eight gained next to nothing and two lost; the runs were not stored.
UNROLL = tl.constexpr(4)  # load_block spells them out
# A fused d_a w_a + d_b w_b would round by which side is which. Said here, since Triton's default
# depends on its version.
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def emit(x: tl.tensor, m: tl.tensor, d: tl.tensor, EMIT: tl.constexpr) -> tl.tensor:
    """What a row's state makes of an element."""
    tl.static_assert(EMIT == "softmax" or EMIT == "log_softmax")
    if EMIT == "softmax":
        return prob(x, m, d)
    else:  # noqa: RET505
        return log_prob(x, m, d)


@triton.jit
def load_slice(
    x_ptr: tl.tensor, lane: tl.tensor, left: tl.tensor, EVICT: tl.constexpr
) -> tl.tensor:
    """A slice in float32, -inf where `left` columns have ended.

    Always widened here: the interpreter cannot calculate with bfloat16. EVICT keeps the row in the
    caches until its last reading, a gain on an H200; the runs were not stored.
    """
    x = tl.load(x_ptr + lane, mask=lane < left, other=-INF, eviction_policy=EVICT)
    return x.to(tl.float32)


@triton.jit
def load_block(
    x_ptr: tl.tensor, lane: tl.tensor, left: tl.tensor, LANES: tl.constexpr, EVICT: tl.constexpr
) -> tl.tuple:
    """UNROLL slices, which are four, all on their way at once."""
    return (
        load_slice(x_ptr, lane, left, EVICT),
        load_slice(x_ptr + LANES, lane, left - LANES, EVICT),
        load_slice(x_ptr + 2 * LANES, lane, left - 2 * LANES, EVICT),
        load_slice(x_ptr + 3 * LANES, lane, left - 3 * LANES, EVICT),
    )


@triton.jit
def columns_left(cols: tl.tensor, start: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """How many columns of the block at `start` exist, narrow enough for one compare a lane."""
    return tl.minimum(cols - start, BLOCK).to(tl.int32)


@triton.jit
def write_row(
    x_row: tl.tensor,
    y_row: tl.tensor,
    cols: tl.tensor,
    m: tl.tensor,
    d: tl.tensor,
    EMIT: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """The last pass: reads the row once, writes it once."""
    BLOCK: tl.constexpr = UNROLL * LANES
    lane = tl.arange(0, LANES)
    for start in range(0, cols, BLOCK):
        left = columns_left(cols, start, BLOCK)
        xs = load_block(x_row + start, lane, left, LANES, "evict_first")
        for k in tl.static_range(UNROLL):
            tl.store(
                y_row + start + k * LANES + lane,
                emit(xs[k], m, d, EMIT),
                mask=lane < left - k * LANES,
                eviction_policy="evict_first",  # nothing here reads it again
            )


@triton.jit
def online(
    x_ptr: tl.tensor,  # (rows, cols) input, columns contiguous
    y_ptr: tl.tensor,  # (rows, cols) output, columns contiguous
    cols: tl.int64,
    x_row_stride: tl.int64,  # elements from row to row; 64 bits, so that row * stride is too
    y_row_stride: tl.int64,
    EMIT: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """One row in two passes: fold to a state, write. Reads 2 cols elements, writes cols.

    1 + 2 / UNROLL exponentials an element in the first pass, one in the second.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_row_stride
    BLOCK: tl.constexpr = UNROLL * LANES
    lane = tl.arange(0, LANES)
    m, d = empty(LANES)
    for start in range(0, cols, BLOCK):
        left = columns_left(cols, start, BLOCK)
        m, d = absorb(m, d, load_block(x_row + start, lane, left, LANES, "evict_last"))
    m, d = merge_lanes(m, d, LANES)
    write_row(x_row, y_ptr + row * y_row_stride, cols, m, d, EMIT, LANES)


@triton.jit
def two_pass(
    x_ptr: tl.tensor,  # (rows, cols) input, columns contiguous
    y_ptr: tl.tensor,  # (rows, cols) output, columns contiguous
    cols: tl.int64,
    x_row_stride: tl.int64,  # elements from row to row; 64 bits, so that row * stride is too
    y_row_stride: tl.int64,
    EMIT: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """One row in three passes: maximum, sum, write. Reads 3 cols elements, writes cols.

    One exponential an element in the second pass and one in the third.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_row_stride
    BLOCK: tl.constexpr = UNROLL * LANES
    lane = tl.arange(0, LANES)
    m, d = empty(LANES)
    for start in range(0, cols, BLOCK):
        left = columns_left(cols, start, BLOCK)
        xs = load_block(x_row + start, lane, left, LANES, "evict_last")
        for k in tl.static_range(UNROLL):
            m = maximum(m, xs[k])
    m = row_max(m)
    for start in range(0, cols, BLOCK):
        left = columns_left(cols, start, BLOCK)
        xs = load_block(x_row + start, lane, left, LANES, "evict_last")
        for k in tl.static_range(UNROLL):
            d += exponential(xs[k] - m)
    d = row_sum(d, LANES)
    write_row(x_row, y_ptr + row * y_row_stride, cols, m, d, EMIT, LANES)


KERNELS = {"online": online, "two_pass": two_pass}


def softmax(
    x: Tensor, y: Tensor, kernel: str = "online", block: int = 4096, num_warps: int = 8
) -> None:
    """Fill y with the softmax of each row of x.

    Args:
        x: (rows, cols) float16, bfloat16 or float32, columns contiguous; any row stride, any
            alignment, up to 2^31 - 1 rows. NaN in y where a row holds NaN or +inf, or is all -inf.
        y: like x, with a row stride of its own. Must not overlap x.
        kernel: "online" or "two_pass".
        block: columns a step, a power of two, 8 or more. The bits of a row depend on its values,
            its length, the kernel and this, and on nothing else.
        num_warps: warps a row, a power of two.

    Nothing is checked here. Launches on the current stream of x's device, and nothing at all for an
    empty matrix.
    """
    _launch(x, y, "softmax", kernel, block, num_warps)


def log_softmax(
    x: Tensor, y: Tensor, kernel: str = "online", block: int = 4096, num_warps: int = 8
) -> None:
    """Fill y with the natural logarithm of the softmax of each row of x; arguments as there."""
    _launch(x, y, "log_softmax", kernel, block, num_warps)


def interpreted() -> bool:
    """True if these kernels run on the CPU: TRITON_INTERPRET was set before Triton's import."""
    return not isinstance(online, triton.JITFunction)


def _launch(x: Tensor, y: Tensor, emits: str, kernel: str, block: int, num_warps: int) -> None:
    rows, cols = x.shape
    if not rows or not cols:
        return
    if not x.is_cuda and not interpreted():
        raise RuntimeError(
            f"Triton kernels run on CUDA tensors, x is on {x.device}; to run them on the CPU, "
            "interpreted, set TRITON_INTERPRET=1 before Triton is imported"
        )
    # numpy, which interprets, warns of inf - inf even where it is then dropped; a GPU does not.
    with np.errstate(all="ignore") if interpreted() else torch.cuda.device_of(x):
        KERNELS[kernel][(rows,)](
            x,
            y,
            cols,
            x.stride(0),
            y.stride(0),
            EMIT=emits,
            LANES=block // UNROLL.value,
            num_warps=num_warps,
            **OPTIONS,
        )
