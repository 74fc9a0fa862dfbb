"""The gradient of attention's bias in Triton: a program owns a tile and walks what shares it."""

import triton
import triton.language as tl

from online_softmax.triton.online import INF
from online_softmax.triton.tiles import (
    gradient,
    load_tile,
    offsets,
    product,
    scores,
    tile_range,
)


@triton.jit(do_not_specialize=["q_len", "k_len", "batches", "left", "right"])
def by_bias(
    q_ptr: tl.tensor,  # (batch, heads, q_len, DIM), DIM contiguous
    k_ptr: tl.tensor,  # (batch, heads / GROUP, k_len, DIM)
    v_ptr: tl.tensor,  # (batch, heads / GROUP, k_len, VALUE_DIM)
    dout_ptr: tl.tensor,  # (batch, heads, q_len, VALUE_DIM)
    lse2_ptr: tl.tensor,  # from prepare
    delta_ptr: tl.tensor,
    share_ptr: tl.tensor,  # or None
    dbias_ptr: tl.tensor,  # of the bias's own shape, contiguous, written
    bias_ptr: tl.tensor,  # (batch, heads, q_len, k_len)
    mask_ptr: tl.tensor,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    dout_strides: tl.tuple,
    row_strides: tl.tuple,
    dbias_strides: tl.tuple,
    bias_strides: tl.tuple,
    mask_strides: tl.tuple,
    q_len: tl.int32,
    k_len: tl.int32,
    heads: tl.int32,
    batches: tl.int32,
    scale: tl.float32,
    softcap: tl.tensor,  # float32 or None
    left: tl.tensor,  # int32 or None
    right: tl.tensor,  # int32 or None
    TOP_LEFT: tl.constexpr,
    SHARED: tl.constexpr,  # which of batch, heads, q_len and k_len have one element of bias
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """A tile of dbias, summed over all that shares it, in the order of batches, heads and tiles."""
    pid = tl.program_id(0)
    key_first, key_stop = 0, k_len
    if not SHARED[3]:
        key_first = pid % tl.cdiv(k_len, BLOCK_K) * BLOCK_K
        key_stop = tl.minimum(key_first + BLOCK_K, k_len)
        pid //= tl.cdiv(k_len, BLOCK_K)
    query_first, query_stop = 0, q_len
    if not SHARED[2]:
        query_first = pid % tl.cdiv(q_len, BLOCK_Q) * BLOCK_Q
        query_stop = tl.minimum(query_first + BLOCK_Q, q_len)
        pid //= tl.cdiv(q_len, BLOCK_Q)
    head_first, head_stop = 0, heads
    if not SHARED[1]:
        head_first = pid % heads
        head_stop = head_first + 1
        pid //= heads
    batch_first, batch_stop = 0, batches
    if not SHARED[0]:
        batch_first, batch_stop = pid, pid + 1
    diagonal = k_len - q_len
    if TOP_LEFT:
        diagonal = 0

    total = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    for batch_at in range(batch_first, batch_stop):
        for head_at in range(head_first, head_stop):
            batch = (pid * 0 + batch_at).to(tl.int64)
            head = pid * 0 + head_at
            for q_tile in range(query_first, query_stop, BLOCK_Q):
                query = q_tile + tl.arange(0, BLOCK_Q)
                is_row = query < q_len
                at_row = offsets(row_strides, batch, head, query)
                lse2 = tl.load(lse2_ptr + at_row, mask=is_row, other=INF)
                delta = tl.load(delta_ptr + at_row, mask=is_row, other=0.0)
                keys_share = None
                if share_ptr is not None:
                    keys_share = tl.load(share_ptr + at_row, mask=is_row, other=0.0)[:, None]
                at_q = offsets(q_strides, batch, head, query)
                q = load_tile(q_ptr, at_q, lse2 != INF, DIM, BLOCK_DIM, WIDEN)
                at_dout = offsets(dout_strides, batch, head, query)
                dout = load_tile(dout_ptr, at_dout, lse2 != INF, VALUE_DIM, BLOCK_VALUE, WIDEN)
                last = tl.minimum(q_tile + BLOCK_Q, q_len) - 1
                begin, _whole, _edge, end = tile_range(
                    q_tile, last, key_first, key_stop, diagonal, left, right, BLOCK_K
                )
                for tile in range(begin, end, BLOCK_K):
                    key = tile + tl.arange(0, BLOCK_K)
                    is_key = key < k_len
                    at_k = offsets(k_strides, batch, head // GROUP, key)
                    k = load_tile(k_ptr, at_k, is_key, DIM, BLOCK_DIM, WIDEN)
                    at_v = offsets(v_strides, batch, head // GROUP, key)
                    v = load_tile(v_ptr, at_v, is_key, VALUE_DIM, BLOCK_VALUE, WIDEN)
                    z, slope = scores(
                        product(q, tl.trans(k)), query[:, None], key[None, :], batch, head,
                        q_len, k_len, diagonal, bias_ptr, bias_strides, mask_ptr, mask_strides,
                        scale, softcap, left, right, False, False,
                    )  # fmt: skip
                    _p, dz, _ds = gradient(
                        z, slope, product(dout, tl.trans(v)), lse2[:, None], delta[:, None],
                        keys_share, scale, softcap, False,
                    )  # fmt: skip
                    total += dz

    zero = (pid * 0).to(tl.int64)
    place = dbias_ptr + (zero + batch_first) * dbias_strides[0]
    place += (zero + head_first) * dbias_strides[1]
    query = query_first + tl.arange(0, BLOCK_Q)
    key = key_first + tl.arange(0, BLOCK_K)
    at_query = query.to(tl.int64) * dbias_strides[2]
    at_key = key.to(tl.int64) * dbias_strides[3]
    if SHARED[2] and SHARED[3]:
        tl.store(place, tl.sum(tl.sum(total, 1), 0))
    elif SHARED[2]:
        tl.store(place + at_key, tl.sum(total, 0), mask=key < k_len)
    elif SHARED[3]:
        tl.store(place + at_query, tl.sum(total, 1), mask=query < q_len)
    else:
        is_there = (query < q_len)[:, None] & (key < k_len)[None, :]
        tl.store(place + at_query[:, None] + at_key[None, :], total, mask=is_there)
