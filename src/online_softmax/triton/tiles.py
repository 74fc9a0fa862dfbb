"""What the kernels of attention share: tiles of rows, of scores and of their gradient.

Scores are in base 2 inside: times LOG2_E, which is folded into the scale. Queries and keys come as
two-dimensional indices, (n, 1) and (1, n) or the other way round, so that a tile may lie either
way. What is None is not there, and costs nothing.
"""

import triton
import triton.language as tl

from online_softmax.triton.online import INF, LN_2, LOG2_E, exponential, is_finite, join, lse

# float32 products in three steps on the tensor cores; half types are exact there.
PRECISION = tl.constexpr("tf32x3")
LARGEST = tl.constexpr(2.0**127)  # of which LOG2_E times as much is finite
# A fused multiply-add is asked for where it is meant. Triton's default depends on its version.
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a b in float32."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def add_product(total: tl.tensor, a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """total + a b in float32."""
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def offsets(strides: tl.tuple, batch: tl.tensor, head: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Elements from the start of a tensor with these strides; 64 bits."""
    return batch * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]


@triton.jit
def place(
    cu_q_ptr: tl.tensor, cu_k_ptr: tl.tensor, batch: tl.tensor, q_len: tl.tensor, k_len: tl.tensor
) -> tl.tuple:
    """Where a sequence stands: (batch, q_start, k_start, q_len, k_len) to go on with.

    Packed sequences, where cu_q_ptr is not None, have their own lengths and are all in batch 0.
    """
    q_start, k_start = batch * 0, batch * 0
    if cu_q_ptr is not None:
        q_start += tl.load(cu_q_ptr + batch)
        k_start += tl.load(cu_k_ptr + batch)
        q_len = (tl.load(cu_q_ptr + batch + 1) - q_start).to(tl.int32)
        k_len = (tl.load(cu_k_ptr + batch + 1) - k_start).to(tl.int32)
        batch *= 0
    return batch, q_start, k_start, q_len, k_len


@triton.jit
def load_tile(
    ptr: tl.tensor,
    offset: tl.tensor,  # (rows,) elements from ptr to each row
    is_row: tl.tensor,  # (rows,) bool: others are 0; None: all are there
    DIM: tl.constexpr,  # elements of a row
    BLOCK_DIM: tl.constexpr,  # the power of two that holds them
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """(rows, BLOCK_DIM), 0 behind the end of a row.

    WIDEN: in float32, as the interpreter cannot calculate with bfloat16.
    """
    dim = tl.arange(0, BLOCK_DIM)
    at = ptr + offset[:, None] + dim[None, :]
    if is_row is None:
        if DIM == BLOCK_DIM:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=(dim < DIM)[None, :], other=0.0)
    else:
        if DIM == BLOCK_DIM:
            x = tl.load(at, mask=is_row[:, None], other=0.0)
        else:
            x = tl.load(at, mask=is_row[:, None] & (dim < DIM)[None, :], other=0.0)
    if WIDEN:
        x = x.to(tl.float32)
    return x


@triton.jit
def tile_at(
    first: tl.tensor, stride: tl.tensor, batch: tl.tensor, start: tl.tensor, BLOCK: tl.constexpr
) -> tl.tuple:
    """Where a tile of rows begins, and its rows from there: 32 bits, as strides are below 2^24."""
    return first + (batch * 0 + start) * stride, tl.arange(0, BLOCK) * stride


@triton.jit
def load_row(
    ptr: tl.tensor, offset: tl.tensor, is_row: tl.tensor, other: tl.constexpr
) -> tl.tensor:
    """A number a row; is_row as in load_tile."""
    if is_row is None:
        return tl.load(ptr + offset)
    else:  # noqa: RET505
        return tl.load(ptr + offset, mask=is_row, other=other)


@triton.jit
def store_tile(
    ptr: tl.tensor,
    offset: tl.tensor,
    is_row: tl.tensor,
    x: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """The counterpart of load_tile; rounds once, to what ptr points to."""
    dim = tl.arange(0, BLOCK_DIM)
    at = ptr + offset[:, None] + dim[None, :]
    tl.store(at, x, mask=is_row[:, None] & (dim < DIM)[None, :])


@triton.jit
def tile_range(
    first: tl.tensor,
    last: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    diagonal: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Where tiles begin that queries first..last see a part of, see whole, and see a part of again.

    A query sees from `before` in front of its place, query + diagonal, to `after` behind; None: no
    limit. Keys are low..high, low a multiple of BLOCK. For keys in place of queries: the diagonal
    negative, before and after exchanged.

    Returns (begin, whole, edge, end): tiles from begin and from edge on want a mask.
    """
    begin, end = low, high
    whole, edge = low, high
    if before is not None:
        begin = tl.maximum(begin, first + diagonal - before)
        whole = tl.maximum(whole, last + diagonal - before)
    if after is not None:
        end = tl.minimum(end, last + diagonal + after + 1)
        edge = tl.minimum(edge, first + diagonal + after + 1)
    begin = begin // BLOCK * BLOCK
    whole = tl.cdiv(whole, BLOCK) * BLOCK
    edge = tl.maximum(tl.maximum(edge, 0) // BLOCK * BLOCK, whole)
    return begin, whole, edge, end


@triton.jit
def stretch(
    begin: tl.tensor, whole: tl.tensor, edge: tl.tensor, end: tl.tensor, PHASE: tl.constexpr
) -> tl.tuple:
    """The first tile and the end of each of the three that tile_range tells apart."""
    if PHASE == 0:
        return begin, tl.minimum(whole, end)
    elif PHASE == 1:  # noqa: RET505
        return whole, edge
    else:
        return edge, end


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """By its series near 0, where 1 - t would lose digits: the first term left out is 5e-8 x."""
    t = tl.exp2(tl.abs(x) * -2.0 * LOG2_E)
    far = tl.where(x < 0, -1.0, 1.0) * (1.0 - t) / (1.0 + t)
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0) + square * square * (2.0 / 15.0))
    return tl.where(tl.abs(x) < 0.1, near, far)


@triton.jit
def scores(
    qk: tl.tensor,  # a tile of q k
    query: tl.tensor,
    key: tl.tensor,
    batch: tl.tensor,
    head: tl.tensor,  # a scalar, or of query's shape
    q_len: tl.tensor,
    k_len: tl.tensor,
    diagonal: tl.tensor,
    bias_ptr: tl.tensor,  # (batch, heads, q_len, k_len), strides 0 where it is shared
    bias_strides: tl.tuple,
    mask_ptr: tl.tensor,  # the same, bytes
    mask_strides: tl.tuple,
    scale: tl.tensor,
    softcap: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    IS_PLAIN: tl.constexpr,  # the scores are q k times a scale above 0, and no more
    IS_WHOLE: tl.constexpr,  # all queries see all keys of the tile, and all keys are there
) -> tl.tuple:
    """(z, slope): z times factor() is a score in base 2, -inf where a query does not see a key;
    slope, the cap's, is there where a cap is."""
    slope = qk
    if IS_PLAIN:
        z = qk
    else:
        z = qk * scale
        if softcap is not None:
            t = tanh(z / softcap)
            z = softcap * t
            slope = 1.0 - t * t
        z *= LOG2_E
    if bias_ptr is not None or mask_ptr is not None:
        is_there = (query < q_len) & (key < k_len)
    if bias_ptr is not None:
        at = bias_ptr + offsets(bias_strides, batch, head, query)
        at += key.to(tl.int64) * bias_strides[3]
        z += in_base_2(tl.load(at, mask=is_there, other=0.0).to(tl.float32))
    if not IS_WHOLE:
        is_seen = key < k_len
        if left is not None:
            is_seen &= key >= query + diagonal - left
        if right is not None:
            is_seen &= key <= query + diagonal + right
        z = tl.where(is_seen, z, -INF)
    if mask_ptr is not None:
        at = mask_ptr + offsets(mask_strides, batch, head, query)
        at += key.to(tl.int64) * mask_strides[3]
        z = tl.where(tl.load(at, mask=is_there, other=0) != 0, z, -INF)
    return z, slope


@triton.jit
def factor(scale: tl.tensor, IS_PLAIN: tl.constexpr) -> tl.tensor:
    """What turns z into a score in base 2."""
    if IS_PLAIN:
        return scale * LOG2_E
    else:  # noqa: RET505
        return 1.0


@triton.jit
def in_base_2(x: tl.tensor) -> tl.tensor:
    """x LOG2_E, finite where x is: a bias may hide keys by the least number that there is."""
    return tl.where(is_finite(x), tl.clamp(x, -LARGEST, LARGEST), x) * LOG2_E


@triton.jit
def finish(m: tl.tensor, d: tl.tensor, sink: tl.tensor) -> tl.tuple:
    """(share, lse) of a state in base 2: what o is multiplied with, and the natural logarithm of
    the sum without the sink. The sink is in natural units, of m's shape, or None."""
    m_all, d_all, share = m, d, 1.0
    if sink is not None:
        m_all, share, w_sink = join(m, in_base_2(sink), True)
        d_all = d * share + w_sink
    share = tl.where(is_finite(m_all), share / d_all, float("nan"))
    return tl.where(m == -INF, 0.0, share), lse(m * LN_2, d)


@triton.jit
def gradient(
    z: tl.tensor,  # as scores() gives it
    slope: tl.tensor,
    dp: tl.tensor,  # dout v of the tile
    lse2: tl.tensor,  # of each query, in base 2; +inf: no p
    delta: tl.tensor,  # what dp is lessened by
    keys_share: tl.tensor,  # what keys count for beside a sink; None: all
    scale: tl.tensor,
    softcap: tl.tensor,
    IS_PLAIN: tl.constexpr,
) -> tl.tuple:
    """(p, dz, ds): the shares of the keys among themselves, the gradient by a score, and that by
    q k but for the scale."""
    p = exponential(tl.fma(z, factor(scale, IS_PLAIN), -lse2), True)
    if keys_share is not None:
        dp *= keys_share
    dz = p * (dp - delta)
    ds = dz
    if softcap is not None:
        ds *= slope
    return p, dz, ds
