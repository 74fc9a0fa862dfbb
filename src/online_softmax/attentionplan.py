"""Attention's options as numbers, and the sizes of its tiles. Standard library only.

What is chosen here follows from dtype, head_dim, lengths and architecture, never from the batch, so
that a sequence keeps its bits whatever else is computed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from online_softmax import float32
from online_softmax.arches import ARCHES, DEFAULT_ARCH, KIB
from online_softmax.plan import ceil_div, next_power_of_two


class Options(NamedTuple):
    """What attention depends on beside its tensors, in the order of the op's arguments.

    Query i stands at key i + diagonal and sees the keys from `left` before to `right` behind it.
    """

    max_q: int  # the longest sequence of queries where sequences are packed; else 0
    max_k: int
    scale: float | None  # multiplies q k; None: 1 / sqrt(head_dim)
    left: int  # keys before a query's own that it sees; -1: all
    right: int  # keys behind it; -1: all. 0 is causal
    top_left: bool  # query 0 stands at key 0; else the last query at the last key
    softcap: float | None
    nan_empty: bool  # the output of a query that sees no key: NaN, else 0

    def scale_for(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def is_plain(self, head_dim: int) -> bool:
        """Whether a score is q k times a scale above 0 in float32 too: -inf times it stays -inf."""
        return self.softcap is None and self.scale_for(head_dim) >= float32.NORMAL[0]

    def diagonal(self, q_len: int, k_len: int) -> int:
        return 0 if self.top_left else k_len - q_len

    def seen(self, queries: slice, q_len: int, k_len: int) -> range:
        """The keys, of k_len in all, that at least one of these queries of q_len sees by its place.

        >>> Options(0, 0, None, 2, 0, False, None, False).seen(slice(4, 6), 8, 8)
        range(2, 6)
        """
        ahead = self.diagonal(q_len, k_len)
        first = 0 if self.left < 0 else max(queries.start + ahead - self.left, 0)
        stop = k_len if self.right < 0 else min(queries.stop + ahead + self.right, k_len)
        return range(first, max(stop, first))

    def sees_all(self, queries: slice, keys: slice, q_len: int, k_len: int) -> bool:
        """Whether each of these queries sees each of these keys by its place.

        >>> Options(0, 0, None, -1, 0, False, None, False).sees_all(slice(4, 6), slice(0, 5), 8, 8)
        True
        """
        ahead = self.diagonal(q_len, k_len)
        first, last = queries.start + ahead, queries.stop - 1 + ahead
        is_within = self.left < 0 or keys.start >= last - self.left
        return is_within and (self.right < 0 or keys.stop - 1 <= first + self.right)


@dataclass(frozen=True)
class Tiles:
    """Launch numbers of one kernel."""

    block_q: int  # queries a program owns or steps over
    block_k: int  # keys
    warps: int
    stages: int  # tiles under way


class Blocks(NamedTuple):
    """How the reference cuts a call: a block owns queries of some heads and walks over their keys.

    Part of a batch comes with all its heads, or one of a batch with some.
    """

    batch: int  # of a block
    kv_heads: int  # of a block, each with the heads that share it
    queries: int  # of a block, in each head
    keys: int  # of a tile


# Rows of a head and keys whose scores in float32, 512 KiB, stay in a core's cache, and how many
# such heads a thread has at a time. For 8 heads of 1,024 tokens and 64 dims and of 2,048 and 128,
# causal or not, on one core of an AMD EPYC with 1 MiB a forward took with these the least time or
# at most 6 % more, of 128 to 512 rows, 256 to 1,024 keys and 1 to 8 heads.
_CPU_QUERIES, _CPU_KEYS, _CPU_HEADS = 256, 512, 2
# Fewer queries have longer tiles, which keeps Python's part small, up to so many keys, and up to so
# many numbers of k a thread: 4,096 keys of one head of 128 dims. With four times as many a decode
# of bfloat16, whose tiles are widened, took up to twice as long there.
_CPU_MOST_KEYS, _CPU_MOST_NUMBERS = 4096, 1 << 19
_KEYS = 128  # of a tile elsewhere, with all queries of all heads, so that there are few launches


def blocks(
    lengths: tuple[int, int, int, int], group: int, dim: int, threads: int, is_cpu: bool = True
) -> Blocks:
    """How the reference cuts a call. Tiles of keys do not depend on the batch nor on the threads.

    Args:
        lengths: batch, kv_heads, q_len and k_len.
        group: heads that share keys.
        dim: the larger of head_dim and value_dim.
        threads: those that share the work on a tile.

    >>> blocks((1, 8, 2048, 2048), 1, 128, 1)
    Blocks(batch=1, kv_heads=2, queries=256, keys=512)
    >>> blocks((64, 8, 1, 65536), 4, 128, 2)
    Blocks(batch=1, kv_heads=2, queries=1, keys=4096)
    >>> blocks((64, 8, 64, 64), 1, 64, 1)
    Blocks(batch=8, kv_heads=8, queries=64, keys=2048)
    """
    batch, kv_heads, q_len, k_len = (max(n, 1) for n in lengths)
    if not is_cpu:
        return Blocks(batch, kv_heads, q_len, _KEYS)
    queries = min(q_len, max(_CPU_QUERIES // group, 1))
    scores, rows = _CPU_QUERIES * _CPU_KEYS, queries * group
    keys = min(max(scores // rows, _CPU_KEYS), _CPU_MOST_KEYS)
    held = min(keys, k_len)
    heads = min(_CPU_HEADS * scores // rows, _CPU_MOST_NUMBERS // dim) * threads // held
    heads = max(heads, 1)
    return Blocks(max(min(heads // kv_heads, batch), 1), min(heads, kv_heads), queries, keys)


MAX_HEAD_DIM = 256
TIMED_DIM = 128
FLOAT32_BYTES = 4
MIN_DIM = 16  # tensor cores multiply no less
MAX_DECODE_QUERIES = 16

# By the smallest shared memory of a block, then by the largest padded head_dim. Those of an H200 up
# to 128 were chosen by the clock among seven (backward: eleven to thirteen a kernel), at 16,384
# tokens of bfloat16; what a bias or a mask makes of them was not timed. Others are first numbers,
# from what the assembler says (tests hold registers and shared memory): the largest tiles whose
# stages fit and that spill little or nothing.
_FORWARD = {
    227 * KIB: {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 128, 8, 3), 256: Tiles(128, 64, 8, 2)},
    163 * KIB: {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 64, 8, 2)},
    0: {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 8, 1)},
}
_BY_KEYS = {
    227 * KIB: {64: Tiles(64, 64, 4, 1), 128: Tiles(32, 64, 4, 3), 256: Tiles(16, 32, 4, 1)},
    163 * KIB: {64: Tiles(32, 128, 8, 2), 128: Tiles(32, 64, 8, 2), 256: Tiles(16, 64, 8, 1)},
    0: {64: Tiles(32, 64, 4, 2), 128: Tiles(32, 64, 8, 1), 256: Tiles(16, 32, 4, 1)},
}
_BY_QUERIES = {
    227 * KIB: {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(128, 32, 8, 1)},
    163 * KIB: {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 32, 8, 2), 256: Tiles(64, 32, 8, 1)},
    0: {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 8, 1), 256: Tiles(32, 16, 4, 1)},
}
# The gradient of a bias asks for what by_queries does, without its accumulator.
_TABLES = {
    "forward": _FORWARD, "by_keys": _BY_KEYS, "by_queries": _BY_QUERIES, "bias": _BY_QUERIES
}  # fmt: skip
# float32 anywhere: products in three steps hold each operand twice.
_WIDE = {
    "forward": {64: Tiles(64, 32, 8, 1), 128: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
    "by_keys": {64: Tiles(32, 32, 8, 1), 128: Tiles(16, 16, 8, 1), 256: Tiles(16, 16, 8, 1)},
    "by_queries": {64: Tiles(32, 32, 8, 1), 128: Tiles(32, 16, 8, 1), 256: Tiles(16, 16, 8, 1)},
}
_WIDE["bias"] = _WIDE["by_queries"]

# Keys of a part, by the most keys, of what one, 8 and 64 sequences of 8 heads take on an H200
# (bfloat16, 128 dims): shorter parts start on more multiprocessors, longer ones have less to merge
# and tiles under way for more of the time. Never more than 512 parts: past the last, the power of
# two that makes so many. triton/attention.py reads them too: it knows packed lengths.
PART_KEYS = ((8192, 512), (524288, 1024))
MAX_PARTS = 512
MERGE_WARPS = 4  # of the kernel that merges them
_SMALL_TILE = 64 * 64  # scores of which there is room for some from memory too
_PIECE_DIM, _FEW_PARTS = 32, 32  # many parts of a query are merged by programs with so many dims


def tiles(kernel: str, arch: str, item_bytes: int, dim: int, has_scores: bool = False) -> Tiles:
    """The launch numbers of a kernel: "forward", "by_keys", "by_queries" or "bias".

    Args:
        arch: "sm_90a"; one that is not known counts as the default.
        item_bytes: of an element of q, k and v.
        dim: the larger of the padded dims of q and v.
        has_scores: a bias or a mask comes in tiles too, which take the room of a stage or of keys.

    >>> tiles("forward", "sm_90a", 2, 128)
    Tiles(block_q=128, block_k=128, warps=8, stages=3)
    >>> tiles("forward", "sm_90a", 2, 128, has_scores=True)
    Tiles(block_q=128, block_k=64, warps=8, stages=2)
    """
    if item_bytes == FLOAT32_BYTES:
        table = _WIDE[kernel]
    else:
        shared = ARCHES.get(arch, ARCHES[DEFAULT_ARCH]).shared_bytes_block
        table = _TABLES[kernel][max(least for least in _TABLES[kernel] if least <= shared)]
    found = table[min(limit for limit in table if limit >= dim)]
    if not has_scores or found.block_q * found.block_k <= _SMALL_TILE:
        return found
    return replace(found, block_k=min(found.block_k, 64), stages=min(found.stages, 2))


def why(arch: str, item_bytes: int, dim: int) -> str:
    """The reason for the tiles of a forward, a sentence; arguments as for `tiles`.

    >>> why("sm_90a", 2, 128)
    'its tiles were chosen by the clock among seven, on an H200'
    """
    if item_bytes == FLOAT32_BYTES:
        return "small tiles, as products in three steps hold each operand twice; nobody timed them"
    facts = ARCHES.get(arch, ARCHES[DEFAULT_ARCH])
    if facts.measured and dim <= TIMED_DIM:
        return f"its tiles were chosen by the clock among seven, on an {facts.card}"
    return "the largest tiles whose stages fit a block's shared memory; nobody timed them"


def has_dependent_launch(arch: str) -> bool:
    """Whether a kernel may start before the one before it has ended.

    >>> has_dependent_launch("sm_80"), has_dependent_launch("sm_90a")
    (False, True)
    """
    return int(arch.removeprefix("sm_").rstrip("a")) >= 90


def padded(dim: int) -> int:
    """head_dim as the kernels hold it: a power of two."""
    return max(next_power_of_two(dim), MIN_DIM)


def part_keys(k_len: int) -> int:
    """Keys of each part that a short row of queries is cut into, by the number of keys alone.

    >>> [(n, -(-n // part_keys(n))) for n in (256, 4096, 65536, 1 << 20)]
    [(256, 1), (4096, 8), (65536, 64), (1048576, 512)]
    """
    for limit, keys in PART_KEYS:
        if k_len <= limit:
            return keys
    return next_power_of_two(ceil_div(k_len, MAX_PARTS))


def most_parts(max_k: int) -> int:
    """Parts of the sequence up to max_k that has most of them.

    >>> [most_parts(n) for n in (256, 4096, 8193, 1 << 20)]
    [1, 8, 16, 512]
    """
    lengths = {max_k, *(limit for limit, _ in PART_KEYS if limit < max_k)}
    return max(ceil_div(n, part_keys(n)) for n in lengths)


def merge_pieces(parts: int, dim: int) -> int:
    """Programs that merge the parts of one query, each a piece of its padded output.

    >>> merge_pieces(8, 128), merge_pieces(512, 128), merge_pieces(512, 16)
    (1, 4, 1)
    """
    return 1 if parts <= _FEW_PARTS else max(dim // _PIECE_DIM, 1)


def decode(item_bytes: int, dim: int, rows: int) -> Tiles:
    """The launch numbers where a few queries read many keys.

    Args:
        rows: queries of all heads that share keys.
    """
    block_q = min(max(next_power_of_two(rows), MIN_DIM), 64)
    if item_bytes == FLOAT32_BYTES:
        return Tiles(min(block_q, 32), 32 if dim <= 128 else 16, 8, 1)
    return Tiles(block_q, 64, 4, 3) if dim <= 128 else Tiles(block_q, 32, 4, 2)
