"""How the kernels around cross-entropy's rows are launched: the losses of all rows in one, and a
gradient multiplied by what arrives for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from online_softmax import rowplan
from online_softmax.cuda.launch import C_TYPE, Launch
from online_softmax.cuda.row_launch import is_whole
from online_softmax.plan import WARP, ceil_div

FILE = "crossentropy_reduce.cu"
# Rows that a block sums, all of them in one where they are no more; threads; blocks at most, one
# for each thread of the block that sums theirs.
BLOCK_ROWS, BLOCK, MOST_BLOCKS = 8192, 1024, 1024
RESCALE_BLOCK, RESCALE_VECTORS = 256, 4  # threads; vectors a thread, as in the kernel
RESCALE_BLOCKS = 2048  # at most: more than a device holds, few to start where none has work


def reduce(
    loss: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    parts: Tensor | None,
    result: Tensor,
    divisor: Tensor,
    cols: int,
    ignore_index: int,
    is_mean: bool,
    inverts: bool = False,
    overlaps: bool = False,
) -> list[Launch]:
    """The sum of the losses, or their mean, into result; what the mean divides by into divisor.

    Args:
        loss: (rows) float32; None: the divisor alone.
        target: (rows) int64.
        weight: (cols) float32, or None.
        parts: (blocks(rows), 2) float64; None where that is 1.
        result: 0-dim, float32, float16 or bfloat16.
        divisor: 0-dim float32: the weights of the rows that count, without `is_mean` 1; or, with
            `inverts`, the inverse of that.
        overlaps: start while the stream's kernel before still runs, which writes the losses and
            neither targets nor weights: those are read before it has ended.
    """
    rows, count = len(target), blocks(len(target))
    y, block = C_TYPE[result.dtype], min(ceil_div(rows, WARP) * WARP, BLOCK)
    flags = int(loss is not None), int(is_mean)
    given = (result if loss is None else loss, target, divisor if weight is None else weight)
    room = divisor if parts is None else parts
    sizes = (rows, cols, ignore_index, *flags, int(weight is not None), int(inverts))
    args = (*given, room, result, divisor, *sizes)
    work = [Launch(FILE, f"cross_entropy_reduce<{y}>", args, count, block, dependent=overlaps)]
    if count > 1:
        tail = (room, result, divisor, count, *flags, int(inverts))
        threads = ceil_div(count, WARP) * WARP
        symbol = f"cross_entropy_reduce_parts<{y}>"
        work.append(Launch(FILE, symbol, tail, 1, threads, dependent=True))
    return work


def blocks(rows: int) -> int:
    """Blocks that sum so many rows; their order, and so the bits, follows from it."""
    return max(min(ceil_div(rows, BLOCK_ROWS), MOST_BLOCKS), 1)


def rescale(
    made: Tensor,
    upstream: Tensor,
    total: Tensor | None,
    target: Tensor,
    out: Tensor,
    ignore_index: int,
) -> list[Launch]:
    """made times upstream / total into out, which is made or apart from it.

    Args:
        made, out: (rows, cols) of unit column stride and one type.
        upstream: (rows) of any stride, of their type or float32.
        total: 0-dim float32; None: 1.
        target: (rows) int64; the others' rows stay as they are.
    """
    rows, cols = made.shape
    words = rowplan.vectors_a_row(cols, made.itemsize)
    shares = rows * ceil_div(words, RESCALE_BLOCK * RESCALE_VECTORS)
    whole = "true" if is_whole(made, out) else "false"
    kinds = f"{C_TYPE[made.dtype]}, {C_TYPE[upstream.dtype]}, {whole}"
    strides = (made.stride(0), out.stride(0), upstream.stride(0))
    args = (
        made, upstream, out if total is None else total, target, out, rows, cols, *strides,
        ignore_index, int(total is not None),
    )  # fmt: skip
    symbol, grid = f"cross_entropy_rescale<{kinds}>", min(shares, RESCALE_BLOCKS)
    return [Launch(FILE, symbol, args, grid, RESCALE_BLOCK)]


def instances(dtypes: Sequence[torch.dtype] = tuple(C_TYPE)) -> list[tuple[str, str]]:
    """Every (file, symbol) that logits of these types take: what a compile run compiles."""
    found: dict[tuple[str, str], None] = {}
    row, one = torch.empty(2, device="meta"), torch.empty((), device="meta")
    for dtype in dtypes:
        work = []
        for result in dict.fromkeys((dtype, torch.float32)):  # float32 under autocast
            y, many = one.to(result), row.expand(2).new_empty(BLOCK_ROWS + 1)
            work += reduce(many, many, None, row, y, one, 1, 0, True)
            for gap in (0, 1):
                made = torch.empty((2, 16 + gap), dtype=dtype, device="meta")[:, gap:]
                work += rescale(made, row.to(result), None, row, made, 0)
        for each in work:
            found[each.file, each.symbol] = None
    return list(found)
