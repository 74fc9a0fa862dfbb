"""Launch numbers of softmax and log_softmax along a dimension that is not the last, and backward.

Pure Python, standard library only, as rowplan.py is. Numbers follow from the length of the
dimension and the types, never from the other dimensions: a slice has the same bits in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from online_softmax.plan import VECTOR_BYTES, ceil_div, next_power_of_two
from online_softmax.rowtables import GROUP_BLOCK


@dataclass(frozen=True)
class Outer:
    """Launch numbers along a dimension that is not the last."""

    width: int  # neighbouring elements a thread: 16 bytes of them, or one
    held: int  # elements of the dimension that a thread keeps; 0: two reads
    across: int  # threads along the outer and inner positions, which changes no bit
    along: int  # threads along the dimension


def outer(cols: int, item_bytes: int, whole: bool) -> Outer:
    """Numbers for `cols` elements along the dimension; whole: inner rows are whole 16-byte vectors,
    which changes nothing about the order of a sum. Short dimensions stay in registers in float32;
    16-bit types read twice, as measured."""
    width = VECTOR_BYTES // item_bytes if whole else 1
    if item_bytes == 4 and cols <= 256:
        along = next_power_of_two(ceil_div(cols, 8))
        return Outer(width, 8, max(16, GROUP_BLOCK // along), along)
    if item_bytes == 4 and cols <= 2048:
        return Outer(width, 16, 4, max(next_power_of_two(ceil_div(cols, 16)), 8))
    return _outer_read_twice(cols, width)


def outer_backward(cols: int, read_bytes: int, item_bytes: int, whole: bool) -> Outer:
    """The same for a backward: read_bytes are those of an element of dy and of y together,
    item_bytes those of the narrowest of dy, y and dx. From register counts, nothing measured: what
    is held, as it lay in memory, takes 64 registers."""
    widest = VECTOR_BYTES // item_bytes
    held = 8 if widest * read_bytes <= 32 else 4
    width = widest if whole else 1
    along = next_power_of_two(ceil_div(cols, held))
    if along <= 32:
        return Outer(width, held, max(16, GROUP_BLOCK // along), along)
    if along <= 128:
        return Outer(width, held, 4, along)
    return _outer_read_twice(cols, width)


def _outer_read_twice(cols: int, width: int) -> Outer:
    if cols <= 64:
        return Outer(width, 0, 32, 4)
    if cols <= 16384:
        return Outer(width, 0, 16, 16 if cols <= 2048 else 32)
    return Outer(width, 0, 4, 128)
