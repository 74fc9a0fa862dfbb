"""How linear_cross_entropy is cut, and the memory that this takes: of shapes alone.

low: blocks of the vocabulary, with all tokens in each; fast: groups of the tokens, with the whole
vocabulary in each. Logits of a block are float32 (float64) and their gradient is of the type of the
products, so an element of a block takes `logits + item` bytes, or `logits` where the gradient goes
over the logits. In a group the logits are made and used up chunk by chunk, their gradients are kept
for one product: sums over few groups cost little traffic, over one none.
"""

from __future__ import annotations

from typing import NamedTuple

from online_softmax.plan import ceil_div

MIB = 1 << 20
# Blocks of 8,064 columns at 8,192 tokens in bfloat16, 16 for a vocabulary of 128,256: products
# large enough to fill a GPU many times over, and with the 128 MiB of the input's gradient in
# float32 well under the 800 MB that the operation may take at that size.
LOW_BLOCK_BYTES = 384 * MIB
# All tokens are one group where the gradient by their logits takes no more than float32 sums of
# the weight's gradient would, as in bfloat16 at that size: 2.1 GB. Then a chunk has 1,024 tokens.
# Beside sums, which leave 1.1 GB of 3.2, a group has 2,816 and a chunk 384.
FAST_GROUP_BYTES = 704 * MIB
FAST_CHUNK_BYTES, FAST_CHUNK_BYTES_BESIDE_SUMS = 512 * MIB, 192 * MIB
# Every block adds to the whole of a float32 sum, which is read and written for it: 8 bytes an
# element against 2 operations for each column (token), so a product of few waits for memory. With a
# great many tokens, or classes, this and not the number of bytes decides.
LEAST_COLS, LEAST_TOKENS = 1024, 256
TILE = 128  # columns or tokens of a tile of a product: a block that is cut has whole ones

# On a CPU rows are folded so many logits a thread at a time: 512 KiB of float32, which stay in a
# core's cache while a gradient's dozen operations go over them.
CPU_NUMBERS = 1 << 17

ROW_MULTIPLE = 64  # elements: rows of every type begin on boundaries of 128 bytes

PARTIAL_BYTES = 20  # of a part of a row, at most; crossentropy_shard.cu
PART_BYTES = 12 << 10  # the fewest of a row's logits in one part, but for its last
ROW_BYTES = 64  # loss, lse, what rounding took from it, the target and the like
CLASS_BYTES = 8  # the weights of the classes, in float32


def block_cols(tokens: int, classes: int, logits: int, item: int) -> int:
    """Columns of a block of `low`; the last block may have fewer.

    logits: bytes of a logit; item: of its gradient, 0 where that goes over the logits.

    >>> block_cols(8192, 128_256, 4, 2)
    8064
    """
    return _cut(classes, LOW_BLOCK_BYTES // (max(tokens, 1) * (logits + item)), LEAST_COLS)


class Cut(NamedTuple):
    """Tokens of a group of `fast`, and of a chunk of it; the last ones may have fewer."""

    group: int
    chunk: int


def fast_cut(tokens: int, features: int, classes: int, logits: int, item: int, sums: int) -> Cut:
    """How `fast` cuts the tokens.

    logits, item: as for `block_cols`; sums: bytes of an element of what sums the weight's gradient
    over several groups, 0 where the gradient itself does.

    >>> fast_cut(8192, 4096, 128_256, 4, 2, 4)
    Cut(group=8192, chunk=1024)
    >>> fast_cut(8192, 4096, 128_256, 4, 2, 0)
    Cut(group=2816, chunk=384)
    """
    a_token = max(classes, 1) * (item or logits)
    is_one = tokens * a_token <= max(FAST_GROUP_BYTES, classes * features * sums)
    group = max(tokens, 1) if is_one else _cut(tokens, FAST_GROUP_BYTES // a_token, LEAST_TOKENS)
    if not item:
        return Cut(group, group)  # over their logits
    most = FAST_CHUNK_BYTES if is_one else FAST_CHUNK_BYTES_BESIDE_SUMS
    return Cut(group, _cut(group, most // (max(classes, 1) * logits), LEAST_TOKENS))


def cpu_rows(cols: int, threads: int) -> int:
    """Rows of logits that a CPU has in hand at a time.

    >>> cpu_rows(8000, 1), cpu_rows(1 << 20, 2)
    (16, 1)
    """
    return max(CPU_NUMBERS * threads // max(cols, 1), 1)


def row_stride(cols: int) -> int:
    """Elements from a row of a block to the next."""
    return ceil_div(cols, ROW_MULTIPLE) * ROW_MULTIPLE


def _cut(total: int, most: int, least: int) -> int:
    """Pieces of about one size, of whole tiles, and at most so large, unless that is too small."""
    most = max(most // TILE * TILE, least)
    if total <= most:
        return max(total, 1)
    return ceil_div(ceil_div(total, ceil_div(total, most)), TILE) * TILE


def most_bytes(
    memory: str,
    tokens: int,
    features: int,
    classes: int,
    logits: int,
    item: int,
    rescales: bool = False,
) -> int:
    """What forward and backward take at once, beside what is given and the gradients themselves.

    On CUDA with its kernels, of one dtype throughout, and without the workspace that torch keeps
    for cuBLAS. logits: 4, or 8 for float64; item: bytes of an element of the products; rescales:
    whether that is float16, whose range the gradient by the logits may leave.

    >>> most_bytes("low", 8192, 4096, 128_256, 4, 2) < 600e6
    True
    >>> most_bytes("fast", 8192, 4096, 128_256, 4, 2) < 2.7e9
    True
    """
    beside = item if item < logits else 0
    sums = logits if beside else 0  # else the gradients are sums already
    if memory == "low":
        cols = block_cols(tokens, classes, logits, beside)
        block = tokens * row_stride(cols) * (logits + beside)
        held = tokens * features * sums + (cols * features * sums if rescales else 0)
        rows, pieces, wide = tokens, ceil_div(classes, cols), cols
    else:
        group, rows = fast_cut(tokens, features, classes, logits, beside, 0 if rescales else sums)
        block = group * row_stride(classes) * (beside or logits)
        block += rows * row_stride(classes) * logits if beside else 0
        held = classes * logits
        if rescales:  # sums until the backward
            held += (tokens + classes) * features * sums
        elif group < tokens:
            held += classes * features * sums
        pieces, wide = 1, classes
    parts = pieces * ceil_div(wide * logits, PART_BYTES)
    partials = 2 * rows * parts * PARTIAL_BYTES
    return block + held + partials + tokens * ROW_BYTES + classes * CLASS_BYTES
