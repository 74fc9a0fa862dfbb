"""The gradient of attention in Triton, by the formulas of reference/attention_gradient.py.

`prepare` makes two numbers a query, then each kernel owns a tile of one result and walks all that
adds to it: `by_keys` of dk and dv, `by_queries` of dq, `by_bias` of dbias. Scores are computed
again in each. Nothing is added by atomics, so the same inputs give the same bits.
"""

import triton
import triton.language as tl

from online_softmax.triton.online import INF, LOG2_E, is_finite, join
from online_softmax.triton.tiles import (
    add_product,
    gradient,
    load_row,
    load_tile,
    offsets,
    place,
    product,
    scores,
    store_tile,
    stretch,
    tile_at,
    tile_range,
)

LENGTHS = ["q_len", "k_len", "blocks", "left", "right"]


@triton.jit(do_not_specialize=["q_len", "blocks"])
def prepare(
    dout_ptr: tl.tensor,  # (batch, heads, q_len, VALUE_DIM), VALUE_DIM contiguous
    out_ptr: tl.tensor,  # the same
    lse_ptr: tl.tensor,  # (batch, heads, q_len) float32
    dlse_ptr: tl.tensor,  # the same, or None
    sinks_ptr: tl.tensor,  # (heads,) or None
    cu_q_ptr: tl.tensor,  # (batch + 1,) or None
    lse2_ptr: tl.tensor,  # (batch, heads, q_len) float32, written: lse in base 2, +inf if empty
    delta_ptr: tl.tensor,  # written: what dp is lessened by
    share_ptr: tl.tensor,  # written if there are sinks: what keys count for
    dsink_ptr: tl.tensor,  # written: this query's part of the gradient by the sink; or None
    dout_strides: tl.tuple,
    out_strides: tl.tuple,
    row_strides: tl.tuple,
    q_len: tl.int32,
    heads: tl.int32,
    blocks: tl.int32,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> None:
    """What every tile of gradients wants to know of a query."""
    pid = tl.program_id(0)
    block = pid % blocks
    head = pid // blocks % heads
    batch = (pid // blocks // heads).to(tl.int64)
    batch, q_start, _, q_len, _ = place(cu_q_ptr, cu_q_ptr, batch, q_len, q_len)
    query = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_row = query < q_len
    at = offsets(row_strides, batch, head, q_start + query)
    lse = tl.load(lse_ptr + at, mask=is_row, other=-INF)
    is_counted = is_row & (lse != -INF)  # of the others nothing is read, not even NaN
    at_dout = offsets(dout_strides, batch, head, q_start + query)
    at_out = offsets(out_strides, batch, head, q_start + query)
    dout = load_tile(dout_ptr, at_dout, is_counted, VALUE_DIM, BLOCK_VALUE, True)
    out = load_tile(out_ptr, at_out, is_counted, VALUE_DIM, BLOCK_VALUE, True)
    delta = tl.sum(dout * out, 1)
    # +inf has no weight for any score; of a row whose lse is +inf or NaN the gradient is NaN.
    lse2 = tl.where(is_finite(lse), lse * LOG2_E, float("nan"))
    tl.store(lse2_ptr + at, tl.where(lse == -INF, INF, lse2), mask=is_row)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        _, share, w_sink = join(lse, sink)
        share = tl.where(is_counted, share / (share + w_sink), 0.0)
        tl.store(share_ptr + at, share, mask=is_row)
        if dsink_ptr is not None:
            tl.store(dsink_ptr + at, -(1.0 - share) * delta, mask=is_row)
        delta *= share
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, mask=is_counted, other=0.0)
    tl.store(delta_ptr + at, delta, mask=is_row)


@triton.jit(do_not_specialize=LENGTHS)
def by_keys(
    q_ptr: tl.tensor,  # (batch, heads, q_len, DIM), DIM contiguous
    k_ptr: tl.tensor,  # (batch, heads / GROUP, k_len, DIM)
    v_ptr: tl.tensor,  # (batch, heads / GROUP, k_len, VALUE_DIM)
    dout_ptr: tl.tensor,  # (batch, heads, q_len, VALUE_DIM)
    lse2_ptr: tl.tensor,  # from prepare
    delta_ptr: tl.tensor,
    share_ptr: tl.tensor,  # or None
    dk_ptr: tl.tensor,  # (batch, heads / GROUP, k_len, DIM), written
    dv_ptr: tl.tensor,  # (batch, heads / GROUP, k_len, VALUE_DIM), written
    bias_ptr: tl.tensor,  # (batch, heads, q_len, k_len) or None
    mask_ptr: tl.tensor,
    cu_q_ptr: tl.tensor,  # (batch + 1,) or None
    cu_k_ptr: tl.tensor,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    dout_strides: tl.tuple,
    row_strides: tl.tuple,
    dk_strides: tl.tuple,
    dv_strides: tl.tuple,
    bias_strides: tl.tuple,
    mask_strides: tl.tuple,
    q_len: tl.int32,
    k_len: tl.int32,
    heads: tl.int32,
    blocks: tl.int32,  # tiles of keys
    scale: tl.float32,
    softcap: tl.tensor,  # float32 or None
    left: tl.tensor,  # int32 or None
    right: tl.tensor,  # int32 or None
    TOP_LEFT: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """dk and dv of a tile of keys: walks the queries that see it, of all heads that share it.

    Tiles lie with keys down and queries across, so that p and ds are multiplied as they are.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    kv_head = pid // blocks % (heads // GROUP)
    batch = (pid // blocks // (heads // GROUP)).to(tl.int64)
    batch, q_start, k_start, q_len, k_len = place(cu_q_ptr, cu_k_ptr, batch, q_len, k_len)
    if block * BLOCK_K >= k_len:
        return
    key = block * BLOCK_K + tl.arange(0, BLOCK_K)
    is_key = key < k_len
    diagonal = k_len - q_len
    if TOP_LEFT:
        diagonal = 0
    at = offsets(k_strides, batch, kv_head, k_start + key)
    k = load_tile(k_ptr, at, is_key, DIM, BLOCK_DIM, WIDEN)
    at = offsets(v_strides, batch, kv_head, k_start + key)
    v = load_tile(v_ptr, at, is_key, VALUE_DIM, BLOCK_VALUE, WIDEN)
    last = tl.minimum(block * BLOCK_K + BLOCK_K, k_len) - 1
    begin, whole, edge, end = tile_range(
        block * BLOCK_K, last, 0, q_len, -diagonal, right, left, BLOCK_Q
    )
    if left is None:  # the last queries see the keys whole too; those behind them have no p
        edge = end

    dk = tl.zeros((BLOCK_K, BLOCK_DIM), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_VALUE), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        row_first = offsets(row_strides, batch, head, q_start)
        q_first = q_ptr + offsets(q_strides, batch, head, q_start)
        dout_first = dout_ptr + offsets(dout_strides, batch, head, q_start)
        for phase in tl.static_range(3):
            start, stop = stretch(begin, whole, edge, end, phase)
            if (
                phase == 1
                or (phase == 0 and right is not None)
                or (phase == 2 and left is not None)
            ):
                for tile in range(start, stop, BLOCK_Q):
                    query = tile + tl.arange(0, BLOCK_Q)
                    is_row = query < q_len
                    tile_first, at_row = tile_at(row_first, row_strides[2], batch, tile, BLOCK_Q)
                    lse2 = load_row(lse2_ptr + tile_first, at_row, is_row, INF)
                    delta = load_row(delta_ptr + tile_first, at_row, is_row, 0.0)
                    keys_share = None
                    if share_ptr is not None:
                        share = load_row(share_ptr + tile_first, at_row, is_row, 0.0)
                        keys_share = share[None, :]
                    if phase != 1 or bias_ptr is not None or mask_ptr is not None:
                        is_row = lse2 != INF  # of a query that sees no key nothing is read
                    q_tile, at_q = tile_at(q_first, q_strides[2], batch, tile, BLOCK_Q)
                    q = load_tile(q_tile, at_q, is_row, DIM, BLOCK_DIM, WIDEN)
                    dout_tile, at_dout = tile_at(dout_first, dout_strides[2], batch, tile, BLOCK_Q)
                    dout = load_tile(dout_tile, at_dout, is_row, VALUE_DIM, BLOCK_VALUE, WIDEN)
                    z, slope = scores(
                        product(k, tl.trans(q)), query[None, :], key[:, None], batch, head,
                        q_len, k_len, diagonal, bias_ptr, bias_strides, mask_ptr, mask_strides,
                        scale, softcap, left, right, IS_PLAIN, phase == 1,
                    )  # fmt: skip
                    p, _, ds = gradient(
                        z, slope, product(v, tl.trans(dout)), lse2[None, :], delta[None, :],
                        keys_share, scale, softcap, IS_PLAIN,
                    )  # fmt: skip
                    if share_ptr is not None:
                        p *= keys_share
                    dv = add_product(dv, p.to(dout.dtype), dout)
                    dk = add_product(dk, ds.to(q.dtype), q)
    at = offsets(dk_strides, batch, kv_head, k_start + key)
    store_tile(dk_ptr, at, is_key, dk * scale, DIM, BLOCK_DIM)
    at = offsets(dv_strides, batch, kv_head, k_start + key)
    store_tile(dv_ptr, at, is_key, dv, VALUE_DIM, BLOCK_VALUE)


@triton.jit(do_not_specialize=LENGTHS)
def by_queries(
    q_ptr: tl.tensor,  # (batch, heads, q_len, DIM), DIM contiguous
    k_ptr: tl.tensor,  # (batch, heads / GROUP, k_len, DIM)
    v_ptr: tl.tensor,  # (batch, heads / GROUP, k_len, VALUE_DIM)
    dout_ptr: tl.tensor,  # (batch, heads, q_len, VALUE_DIM)
    lse2_ptr: tl.tensor,  # from prepare
    delta_ptr: tl.tensor,
    share_ptr: tl.tensor,  # or None
    dq_ptr: tl.tensor,  # (batch, heads, q_len, DIM), written
    bias_ptr: tl.tensor,  # (batch, heads, q_len, k_len) or None
    mask_ptr: tl.tensor,
    cu_q_ptr: tl.tensor,  # (batch + 1,) or None
    cu_k_ptr: tl.tensor,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    dout_strides: tl.tuple,
    row_strides: tl.tuple,
    dq_strides: tl.tuple,
    bias_strides: tl.tuple,
    mask_strides: tl.tuple,
    q_len: tl.int32,
    k_len: tl.int32,
    heads: tl.int32,
    blocks: tl.int32,  # tiles of queries
    scale: tl.float32,
    softcap: tl.tensor,  # float32 or None
    left: tl.tensor,  # int32 or None
    right: tl.tensor,  # int32 or None
    TOP_LEFT: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """dq of a tile of queries: walks the keys that they see."""
    pid = tl.program_id(0)
    block = pid % blocks
    if right is not None:  # the longest first
        block = blocks - 1 - block
    head = pid // blocks % heads
    batch = (pid // blocks // heads).to(tl.int64)
    batch, q_start, k_start, q_len, k_len = place(cu_q_ptr, cu_k_ptr, batch, q_len, k_len)
    if block * BLOCK_Q >= q_len:
        return
    query = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_row = query < q_len
    diagonal = k_len - q_len
    if TOP_LEFT:
        diagonal = 0
    at = offsets(row_strides, batch, head, q_start + query)
    lse2 = tl.load(lse2_ptr + at, mask=is_row, other=INF)
    delta = tl.load(delta_ptr + at, mask=is_row, other=0.0)
    keys_share = None
    if share_ptr is not None:
        keys_share = tl.load(share_ptr + at, mask=is_row, other=0.0)[:, None]
    at = offsets(q_strides, batch, head, q_start + query)
    q = load_tile(q_ptr, at, lse2 != INF, DIM, BLOCK_DIM, WIDEN)
    at = offsets(dout_strides, batch, head, q_start + query)
    dout = load_tile(dout_ptr, at, lse2 != INF, VALUE_DIM, BLOCK_VALUE, WIDEN)
    k_ptr += offsets(k_strides, batch, head // GROUP, k_start)
    v_ptr += offsets(v_strides, batch, head // GROUP, k_start)
    last = tl.minimum(block * BLOCK_Q + BLOCK_Q, q_len) - 1
    begin, whole, edge, end = tile_range(
        block * BLOCK_Q, last, 0, k_len, diagonal, left, right, BLOCK_K
    )

    dq = tl.zeros((BLOCK_Q, BLOCK_DIM), tl.float32)
    for phase in tl.static_range(3):
        start, stop = stretch(begin, whole, edge, end, phase)
        if phase > 0 or left is not None:
            for tile in range(start, stop, BLOCK_K):
                key = tile + tl.arange(0, BLOCK_K)
                is_key = None
                if phase != 1:
                    is_key = key < k_len
                k_tile, at_k = tile_at(k_ptr, k_strides[2], batch, tile, BLOCK_K)
                k = load_tile(k_tile, at_k, is_key, DIM, BLOCK_DIM, WIDEN)
                v_tile, at_v = tile_at(v_ptr, v_strides[2], batch, tile, BLOCK_K)
                v = load_tile(v_tile, at_v, is_key, VALUE_DIM, BLOCK_VALUE, WIDEN)
                z, slope = scores(
                    product(q, tl.trans(k)), query[:, None], key[None, :], batch, head,
                    q_len, k_len, diagonal, bias_ptr, bias_strides, mask_ptr, mask_strides,
                    scale, softcap, left, right, IS_PLAIN, phase == 1,
                )  # fmt: skip
                _, _, ds = gradient(
                    z, slope, product(dout, tl.trans(v)), lse2[:, None], delta[:, None],
                    keys_share, scale, softcap, IS_PLAIN,
                )  # fmt: skip
                dq = add_product(dq, ds.to(k.dtype), k)
    at = offsets(dq_strides, batch, head, q_start + query)
    store_tile(dq_ptr, at, is_row, dq * scale, DIM, BLOCK_DIM)
