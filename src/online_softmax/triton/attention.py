"""Attention in Triton, the forward: queries walk the keys, their states (m, d, o) in registers.

A program owns a tile of queries of one sequence: of one head, or of all heads that share keys where
queries are few. Where they are few and keys many, several programs have a part of the keys each,
and a second kernel merges their states; parts follow from the number of keys alone, those of a
packed sequence from its own. The order of all sums does too, so a sequence has the same bits in any
batch.

T. Dao: FlashAttention-2, arXiv:2307.08691; the flash-decoding note of the same project (2023).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from online_softmax.attentionplan import MAX_PARTS, PART_KEYS
from online_softmax.triton.online import INF, LN_2, absorb_tile, merge_lanes, weight
from online_softmax.triton.tiles import (
    add_product,
    factor,
    finish,
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

MERGED_AT_ONCE = tl.constexpr(64)  # parts at most, whose outputs a program holds together
MOST_PARTS = tl.constexpr(MAX_PARTS)
(SHORT, SHORT_PART), (_, LONG_PART) = (tuple(map(tl.constexpr, cut)) for cut in PART_KEYS)


@triton.jit
def own_part_keys(k_len: tl.tensor) -> tl.tensor:
    """attentionplan.part_keys, of a length that is known here alone."""
    keys = tl.where(k_len <= SHORT, SHORT_PART, LONG_PART)
    while keys < tl.cdiv(k_len, MOST_PARTS):
        keys *= 2
    return keys


@triton.jit(do_not_specialize=["q_len", "k_len", "blocks", "parts", "part_keys", "left", "right"])
def forward(
    q_ptr: tl.tensor,  # (batch, heads, q_len, DIM), DIM contiguous
    k_ptr: tl.tensor,  # (batch, heads / GROUP, k_len, DIM)
    v_ptr: tl.tensor,  # (batch, heads / GROUP, k_len, VALUE_DIM)
    out_ptr: tl.tensor,  # (batch, heads, q_len, VALUE_DIM); of parts: o, (parts, ...) float32
    lse_ptr: tl.tensor,  # (batch, heads, q_len) float32; of parts: None
    m_ptr: tl.tensor,  # (batch, heads, q_len) float32 or None; of parts: in base 2, (parts, ...)
    d_ptr: tl.tensor,  # as m
    sinks_ptr: tl.tensor,  # (heads,) or None
    bias_ptr: tl.tensor,  # (batch, heads, q_len, k_len) or None
    mask_ptr: tl.tensor,  # the same, bytes, or None
    cu_q_ptr: tl.tensor,  # (batch + 1,) first token of each batch, or None: not packed
    cu_k_ptr: tl.tensor,
    q_strides: tl.tuple,  # of batch, head, row; elements
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    out_strides: tl.tuple,  # of batch, head, row, part
    row_strides: tl.tuple,  # of lse, m and d: of batch, head, row, part
    bias_strides: tl.tuple,  # of batch, head, query, key
    mask_strides: tl.tuple,
    q_len: tl.int32,  # the longest of packed sequences
    k_len: tl.int32,
    heads: tl.int32,
    blocks: tl.int32,  # tiles of queries
    parts: tl.int32,
    part_keys: tl.int32,  # keys of a part, a multiple of BLOCK_K; packed sequences have their own
    scale: tl.float32,
    softcap: tl.tensor,  # float32, or None: Triton 3.6 takes no None for a scalar type
    left: tl.tensor,  # int32 or None
    right: tl.tensor,  # int32 or None
    TOP_LEFT: tl.constexpr,
    NAN_EMPTY: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    IS_PART: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with merge_parts, which waits before it reads: sm_90 on
    GROUP: tl.constexpr,  # heads that share keys
    PACK: tl.constexpr,  # heads a program has queries of: 1 or GROUP
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """A tile of queries over the keys that they see. Reads those once, writes a row a query.

    One exponential a score, one a row and tile; tiles that all queries see whole have no mask.
    """
    pid = tl.program_id(0)
    part = pid % parts
    pid //= parts
    block = pid % blocks
    pid //= blocks
    if right is not None:  # the longest first, so that the last to run are short
        block = blocks - 1 - block
    head_first = pid % (heads // PACK) * PACK
    batch = (pid // (heads // PACK)).to(tl.int64)
    batch, q_start, k_start, q_len, k_len = place(cu_q_ptr, cu_k_ptr, batch, q_len, k_len)
    if block * BLOCK_Q >= q_len * PACK:
        return
    if IS_PART and cu_k_ptr is not None:
        part_keys = own_part_keys(k_len)
        if part * part_keys >= k_len:  # fewer parts than the longest sequence has
            return
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_row = row < q_len * PACK
    query, head = row // PACK, head_first + row % PACK
    diagonal = k_len - q_len
    if TOP_LEFT:
        diagonal = 0

    at = offsets(q_strides, batch, head, q_start + query)
    q = load_tile(q_ptr, at, is_row, DIM, BLOCK_DIM, WIDEN)
    k_ptr += offsets(k_strides, batch, head_first // GROUP, k_start)
    v_ptr += offsets(v_strides, batch, head_first // GROUP, k_start)
    low, high = 0, k_len
    if IS_PART:
        low, high = part * part_keys, tl.minimum(k_len, part * part_keys + part_keys)
    first = block * BLOCK_Q // PACK
    last = (tl.minimum(block * BLOCK_Q + BLOCK_Q, q_len * PACK) - 1) // PACK
    begin, whole, edge, end = tile_range(first, last, low, high, diagonal, left, right, BLOCK_K)

    m = tl.full((BLOCK_Q,), -INF, tl.float32)
    d = tl.zeros((BLOCK_Q,), tl.float32)
    o = tl.zeros((BLOCK_Q, BLOCK_VALUE), tl.float32)
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
                z, _ = scores(
                    product(q, tl.trans(k)), query[:, None], key[None, :], batch, head[:, None],
                    q_len, k_len, diagonal, bias_ptr, bias_strides, mask_ptr, mask_strides,
                    scale, softcap, left, right, IS_PLAIN, phase == 1,
                )  # fmt: skip
                m, d, p, w = absorb_tile(m, d, z, factor(scale, IS_PLAIN))
                v_tile, at_v = tile_at(v_ptr, v_strides[2], batch, tile, BLOCK_K)
                v = load_tile(v_tile, at_v, is_key, VALUE_DIM, BLOCK_VALUE, WIDEN)
                o = add_product(o * w[:, None], p.to(v.dtype), v)

    if OVERLAPS:  # not before: what waits would take room from tiles that do not
        gdc_launch_dependents()
    at = offsets(row_strides, batch, head, q_start + query) + part * row_strides[3]
    at_out = offsets(out_strides, batch, head, q_start + query) + part * out_strides[3]
    if IS_PART:
        tl.store(m_ptr + at, m, mask=is_row)
        tl.store(d_ptr + at, d, mask=is_row)
        o = tl.where((m == -INF)[:, None], 0.0, o)
        store_tile(out_ptr, at_out, is_row, o, VALUE_DIM, BLOCK_VALUE)
    else:
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head).to(tl.float32)
        share, lse = finish(m, d, sink)
        empty = 0.0
        if NAN_EMPTY:
            empty = float("nan")
        out = tl.where((m == -INF)[:, None], empty, o * share[:, None])
        store_tile(out_ptr, at_out, is_row, out, VALUE_DIM, BLOCK_VALUE)
        tl.store(lse_ptr + at, lse, mask=is_row)
        if m_ptr is not None:
            tl.store(m_ptr + at, m * LN_2, mask=is_row)
            tl.store(d_ptr + at, d, mask=is_row)


@triton.jit(do_not_specialize=["q_len", "k_len", "rows", "parts"])
def merge_parts(
    o_ptr: tl.tensor,  # (parts, rows, VALUE_DIM) float32, not divided
    m_parts_ptr: tl.tensor,  # (parts, rows) float32, in base 2
    d_parts_ptr: tl.tensor,  # (parts, rows)
    out_ptr: tl.tensor,  # (batch, heads, q_len, VALUE_DIM)
    lse_ptr: tl.tensor,  # (rows,) float32, as rows of (batch, heads, q_len)
    m_ptr: tl.tensor,  # (rows,) float32 or None
    d_ptr: tl.tensor,
    sinks_ptr: tl.tensor,  # (heads,) or None
    cu_q_ptr: tl.tensor,  # as for forward
    cu_k_ptr: tl.tensor,
    out_strides: tl.tuple,  # of batch, head, row
    row_strides: tl.tuple,  # of lse, and of a part's m and d
    q_len: tl.int32,  # the longest of packed sequences
    k_len: tl.int32,
    heads: tl.int32,
    rows: tl.int32,
    parts: tl.int32,
    NAN_EMPTY: tl.constexpr,
    OVERLAPS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    PIECES: tl.constexpr,  # programs a query, each with as many elements of BLOCK_VALUE
    PARTS: tl.constexpr,  # the power of two that holds them, 2 or more
) -> None:
    """The states of one query over all parts of the keys, merged: a piece of its output, and of
    the first piece's program the rest. Reads o once."""
    if OVERLAPS:
        gdc_wait()
    pid, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    PIECE: tl.constexpr = BLOCK_VALUE // PIECES
    AT_ONCE: tl.constexpr = min(PARTS, MERGED_AT_ONCE)
    query, head = pid % q_len, pid // q_len % heads
    batch = (pid // q_len // heads).to(tl.int64)
    batch, q_start, _k_start, q_len, k_len = place(cu_q_ptr, cu_k_ptr, batch, q_len, k_len)
    if query >= q_len:
        return
    if cu_k_ptr is not None:
        parts = tl.minimum(parts, tl.cdiv(k_len, own_part_keys(k_len)))
    row = offsets(row_strides, batch, head, q_start + query)
    part = tl.arange(0, PARTS)
    at = part.to(tl.int64) * rows + row
    m_part = tl.load(m_parts_ptr + at, mask=part < parts, other=-INF)
    d_part = tl.load(d_parts_ptr + at, mask=part < parts, other=0.0)
    m, d = merge_lanes(m_part, d_part, PARTS, True)
    dim = piece * PIECE + tl.arange(0, PIECE)
    o = tl.zeros((PIECE,), tl.float32)
    for first in range(0, parts, AT_ONCE):
        some = first + tl.arange(0, AT_ONCE)
        at_some = some.to(tl.int64) * rows + row
        w = weight(tl.load(m_parts_ptr + at_some, mask=some < parts, other=-INF), m, True)
        is_there = (some < parts)[:, None] & (dim < VALUE_DIM)[None, :]
        at_o = o_ptr + at_some[:, None] * VALUE_DIM + dim[None, :]
        o += tl.sum(tl.load(at_o, mask=is_there, other=0.0) * w[:, None], 0)
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
    share, lse = finish(m, d, sink)
    empty = 0.0
    if NAN_EMPTY:
        empty = float("nan")
    out = tl.where(m == -INF, empty, o * share)
    at_out = offsets(out_strides, batch, head, q_start + query)
    tl.store(out_ptr + at_out + dim, out, mask=dim < VALUE_DIM)
    if piece == 0:
        tl.store(lse_ptr + row, lse)
        if m_ptr is not None:
            tl.store(m_ptr + row, m * LN_2)
            tl.store(d_ptr + row, d)
