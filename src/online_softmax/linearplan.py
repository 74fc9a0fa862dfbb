"""How linear_cross_entropy is cut, and the memory that this takes: of shapes alone.

low: blocks of the vocabulary, with all tokens in each; fast: chunks of the tokens, with the whole
vocabulary in each. Logits of a block are float32 (float64) and their gradient is of the type of the
products, so an element of a block takes `logits + item` bytes, or `logits` where the gradient goes
over the logits.
"""

from __future__ import annotations

from online_softmax.plan import ceil_div

MIB = 1 << 20
# Blocks of 8,064 columns at 8,192 tokens in bfloat16, 16 for a vocabulary of 128,256: products
# large enough to fill a GPU many times over, and with the 128 MiB of the input's gradient in
# float32 well under the 800 MB that the operation may take at that size.
LOW_BLOCK_BYTES = 384 * MIB
# A chunk of 1,024 tokens there: what float32 sums of the weight's gradient leave of 3.2 GB.
FAST_CHUNK_BYTES = 768 * MIB
# Every block adds to the whole of a float32 sum, which is read and written for it: 8 bytes an
# element against 2 operations for each column (token), so a product of few waits for memory. With a
# great many tokens, or classes, this and not the number of bytes decides.
LEAST_COLS, LEAST_TOKENS = 1024, 256
TILE = 128  # columns or tokens of a tile of a product: a block that is cut has whole ones

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


def chunk_tokens(tokens: int, classes: int, logits: int, item: int) -> int:
    """Tokens of a chunk of `fast`; the last chunk may have fewer.

    >>> chunk_tokens(8192, 128_256, 4, 2)
    1024
    """
    return _cut(tokens, FAST_CHUNK_BYTES // (max(classes, 1) * (logits + item)), LEAST_TOKENS)


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
    >>> most_bytes("fast", 8192, 4096, 128_256, 4, 2) < 3.1e9
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
        rows = chunk_tokens(tokens, classes, logits, beside)
        block = rows * row_stride(classes) * (logits + beside)
        held = (tokens + classes) * features * logits + classes * logits
        pieces, wide = 1, classes
    parts = pieces * ceil_div(wide * logits, PART_BYTES)
    partials = 2 * rows * parts * PARTIAL_BYTES
    return block + held + partials + tokens * ROW_BYTES + classes * CLASS_BYTES
