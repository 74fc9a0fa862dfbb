"""Two baselines after Triton's tutorials, written anew: what a person has after an afternoon.

Softmax as in "Fused Softmax": a program has a row, the row is one block in registers. Attention as
in "Fused Attention": a program has a tile of queries of one head and walks the keys in tiles, with
no cut along the keys and one set of launch numbers. The recurrence is the package's own.

Triton's tutorials 02 and 06, triton-lang.org; P. Tillet, H. T. Kung, D. Cox: Triton, MAPL 2019;
T. Dao: FlashAttention-2, arXiv:2307.08691.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from online_softmax.lab.refusal import Refusal
from online_softmax.triton.online import INF, LOG2_E, absorb_tile

MOST_COLS = 65536  # of a row in one block: what torch.compile and Liger stop at too
HEAD_DIMS = (16, 32, 64, 128)
BLOCK_Q, BLOCK_K, STAGES = 128, 64, 3


@triton.jit
def _softmax_row(
    x_ptr: tl.tensor,  # (rows, cols), cols contiguous
    y_ptr: tl.tensor,  # the same
    cols: tl.int32,
    BLOCK: tl.constexpr,  # a power of two, at least cols
) -> None:
    """A row: read once, written once."""
    col = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * cols
    x = tl.load(x_ptr + first + col, mask=col < cols, other=-INF).to(tl.float32)
    raised = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + first + col, raised / tl.sum(raised, 0), mask=col < cols)


def softmax(x: Tensor, y: Tensor) -> None:
    """softmax of a (rows, cols) matrix along its columns, into y."""
    rows, cols = x.shape
    if cols > MOST_COLS:
        raise Refusal(f"the tutorial's row is one block: at most {MOST_COLS:,} columns")
    block = triton.next_power_of_2(cols)
    warps = 4 if block < 2048 else 8 if block < 8192 else 16
    _softmax_row[(rows,)](x, y, cols, BLOCK=block, num_warps=warps)


@triton.jit
def _attend(
    q_ptr: tl.tensor,  # (heads of all batches, q_len, DIM), contiguous, as are the others
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    length: tl.int32,
    scale: tl.float32,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """A tile of queries of a head, over all keys up to its last."""
    head = tl.program_id(1).to(tl.int64) * length * DIM
    query = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dim = tl.arange(0, DIM)
    here = head + query[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + here, mask=query[:, None] < length, other=0.0)
    m = tl.full((BLOCK_Q,), -INF, tl.float32)
    d = tl.zeros((BLOCK_Q,), tl.float32)
    o = tl.zeros((BLOCK_Q, DIM), tl.float32)
    stop = length
    if CAUSAL:
        stop = tl.minimum(length, (tl.program_id(0) + 1) * BLOCK_Q)
    for start in range(0, stop, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        there = head + key[:, None] * DIM + dim[None, :]
        k = tl.load(k_ptr + there, mask=key[:, None] < length, other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision="ieee")
        is_seen = key[None, :] < length
        if CAUSAL:
            is_seen = is_seen & (key[None, :] <= query[:, None])
        z = tl.where(is_seen, z, -INF)
        m, d, p, w = absorb_tile(m, d, z, scale * LOG2_E)
        v = tl.load(v_ptr + there, mask=key[:, None] < length, other=0.0)
        o = tl.dot(p.to(v.dtype), v, o * w[:, None], input_precision="ieee")
    o = o / d[:, None]
    tl.store(out_ptr + here, o.to(out_ptr.dtype.element_ty), mask=query[:, None] < length)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, block_q: int = BLOCK_Q, block_k: int = BLOCK_K
) -> Tensor:
    """Attention of (batch, heads, length, head_dim) tensors of one shape, contiguous."""
    if k.shape != q.shape or v.shape != q.shape:
        raise Refusal("the tutorial's attention has as many keys as queries, and heads of them")
    batch, heads, length, dim = q.shape
    if dim not in HEAD_DIMS:
        raise Refusal(f"the tutorial's attention takes head_dim {', '.join(map(str, HEAD_DIMS))}")
    out = torch.empty_like(q)
    grid = (triton.cdiv(length, block_q), batch * heads)
    warps = 4 if dim <= 64 else 8
    _attend[grid](
        q, k, v, out, length, dim**-0.5, CAUSAL=causal, DIM=dim, BLOCK_Q=block_q, BLOCK_K=block_k,
        num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    return out
