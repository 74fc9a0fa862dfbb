"""Launch numbers of cuda/decode.cu: attention of a few queries of 16 bits. Standard library only.

What is chosen here follows from head_dim and from the queries and keys of a sequence, never from
the batch, so that a sequence keeps its bits whatever else is computed beside it.
"""

from __future__ import annotations

from typing import NamedTuple

from online_softmax.attentionplan import MAX_PARTS
from online_softmax.plan import ceil_div, next_power_of_two


class Cut(NamedTuple):
    """Launch numbers of a decode by cuda/decode.cu."""

    keys: int  # of a part
    warps: int  # of a block
    resident: int  # blocks of a multiprocessor


DIMS = (64, 128, 256)  # head_dim that it takes
ROWS = 8  # of queries that one of its products takes
PIECE = 32  # dims that a block merges of a row, at least

# By head_dim and products beside each other, then by the most keys; past the last, the last with so
# many keys that there are no more than MAX_PARTS. Chosen by the clock on an H200 among parts of 128
# to 4,096 keys and of the warps that registers hold, for 1, 8 and 64 sequences of 32 heads on 8:
# few keys start on more multiprocessors, many write fewer states.
_CUTS = {
    (64, 1): ((8192, Cut(512, 4, 4)), (1 << 20, Cut(1024, 4, 4))),
    (64, 2): ((8192, Cut(512, 4, 3)), (1 << 20, Cut(1024, 4, 3))),
    (128, 1): (
        (8192, Cut(256, 4, 3)),
        (16384, Cut(512, 4, 3)),
        (65536, Cut(1024, 6, 2)),
        (131072, Cut(2048, 6, 2)),
        (1 << 20, Cut(4096, 6, 2)),
    ),
    (128, 2): ((8192, Cut(512, 4, 2)), (1 << 20, Cut(2048, 4, 2))),
    (256, 1): ((16384, Cut(512, 4, 2)), (1 << 20, Cut(1024, 4, 2))),
}


def tiles(dim: int) -> int:
    """Products beside each other, at most: as many as registers hold."""
    return 2 if (dim, 2) in _CUTS else 1


def cut(dim: int, rows: int, k_len: int) -> Cut:
    """Launch numbers of cuda/decode.cu, by the number of keys and the shapes alone.

    Args:
        dim: one of DIMS.
        rows: queries of all heads that share keys, up to ROWS tiles(dim).

    >>> cut(128, 4, 4096)
    Cut(keys=256, warps=4, resident=3)
    """
    cuts = _CUTS[dim, ceil_div(rows, ROWS)]
    found = next((each for limit, each in cuts if k_len <= limit), cuts[-1][1])
    least = ceil_div(k_len, MAX_PARTS)
    return found if found.keys >= least else found._replace(keys=next_power_of_two(least))
