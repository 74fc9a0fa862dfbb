"""How the kernels of token_stats are launched: symbols, template arguments, grids.

Logits are (rows, cols) with unit column stride, and so is their gradient. Targets and ranks are
int64, all else is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax import rowplan
from online_softmax.cuda.launch import C_TYPE, Launch
from online_softmax.cuda.row_launch import WIDTHS, grid_of_shares, is_whole, lies, text_of
from online_softmax.plan import WARP, ceil_div, next_power_of_two
from online_softmax.rowplan import Row

FILE, BACKWARD_FILE = "tokenstats.cu", "tokenstats_backward.cu"
MOST_COUNT = 128  # of the first elements, TopList of tokenstats_top.cuh
MOST_GROUPS = 256  # tokenstats_top.cuh
VECTORS = 8  # a lane of a long row holds: 16-bit elements fill the two masks of Marks
WARPS = 8  # a part at most
MERGED = 4  # parts a warp merges
MERGE_WARPS = 8  # a row at most
SPREAD_FLOATS = 4


class Results(NamedTuple):
    """What the forward fills; None: it is not asked for."""

    state: Tensor  # (rows, 2): the largest z, and log d
    lse: Tensor  # (rows)
    entropy: Tensor  # (rows)
    log_prob: Tensor | None  # (rows)
    rank: Tensor | None  # (rows) int64
    top_log_probs: Tensor | None  # (rows, count)
    top_indices: Tensor | None  # (rows, count) int64


class Upstream(NamedTuple):
    """Gradients by lse, entropy and the target's log-probability, (rows) of any stride; None: it
    has none."""

    lse: Tensor | None
    entropy: Tensor | None
    log_prob: Tensor | None


def cut(cols: int, item_bytes: int, vectors: int = VECTORS, warps: int = WARPS) -> Row:
    """The parts of a row, a block each: from the columns alone. At most `vectors` a lane and
    `warps` a part."""
    words = rowplan.vectors_a_row(cols, item_bytes)
    if words <= vectors * WARP:
        return Row("split", next_power_of_two(ceil_div(words, WARP)), 0, WARP)
    shares = ceil_div(words, vectors * WARP)

    def cut_by(most: int) -> tuple[int, int]:
        parts = ceil_div(shares, most)
        return parts, ceil_div(shares, parts)

    def cost(most: int) -> tuple[int, int]:  # warps without a share, more than a few; and parts
        parts, a_part = cut_by(most)
        return max(parts * a_part - shares - shares // 32, 0), parts

    parts, a_part = cut_by(min(range(max(warps - 2, 1), warps + 1), key=cost))
    return Row("split", vectors, 0, a_part * WARP, parts=parts)


def groups(row: Row, count: int) -> int:
    """Groups of a warp, a power of two, of whose largest elements the count-th is a bound: half as
    many again in all, so that hardly more than `count` elements reach it."""
    warps = row.block // WARP
    wanted = next_power_of_two(ceil_div(3 * max(count, 20), 2 * warps))
    return min(wanted, WARP, MOST_GROUPS // next_power_of_two(warps))


def forward(
    x: Tensor, target: Tensor | None, results: Results, scale: float, row: Row
) -> list[Launch]:
    """Each row's statistics, in two launches; the number of top_indices says how many."""
    rows, cols = x.shape
    top = results.top_indices
    count = 0 if top is None else top.shape[1]
    parts, x_type = rows * row.parts, C_TYPE[x.dtype]
    spreads = torch.empty((parts, SPREAD_FLOATS), dtype=torch.float32, device=x.device)
    keys = torch.empty(parts * count, dtype=torch.int64, device=x.device)
    lie = "WHOLE_WORDS" if is_whole(x) else "APART"  # words as of an aligned row in any case
    kinds = f"{x_type}, {row.vectors}, {lie}, {text_of(target is not None)}"
    targets = spreads if target is None else target
    sizes = (rows, cols, x.stride(0), row.parts, count)
    fold = f"token_stats_fold<{kinds}, {text_of(count > 0)}>"
    fold_args = (x, targets, spreads, keys, *sizes, groups(row, count), float(scale))
    filled = [spreads if each is None else each for each in results]  # which nobody fills
    lists = next_power_of_two(ceil_div(count, WARP)) if count else 0
    merge = f"token_stats_merge<{x_type}, {lists}, {text_of(target is not None)}>"
    merge_args = (x, targets, spreads, keys, *filled, *sizes, float(scale))
    block = min(ceil_div(row.parts, MERGED), MERGE_WARPS) * WARP if count else WARP
    return [
        Launch(FILE, fold, fold_args, parts, row.block),
        Launch(FILE, merge, merge_args, rows, block, dependent=True),
    ]


def backward(
    upstream: Upstream,
    x: Tensor,
    target: Tensor | None,
    entropy: Tensor,
    state: Tensor,
    dx: Tensor,
    scale: float,
    streams: bool,
) -> list[Launch]:
    """The gradient by the logits into dx, which may be x."""
    rows, cols = x.shape
    row = rowplan.shares("token_stats_backward", cols, x.itemsize)
    flags = f"{lies(x, dx)}, {text_of(streams)}"
    symbol = f"token_stats_backward<{C_TYPE[x.dtype]}, {row.vectors}, {row.lanes}, {flags}>"
    given = [entropy if g is None else g for g in upstream]  # which nobody reads
    has_target = target is not None and upstream.log_prob is not None
    has = int(upstream.lse is not None), int(upstream.entropy is not None), int(has_target)
    strides = (x.stride(0), dx.stride(0), *(g.stride(0) for g in given))
    args = (
        x, entropy if target is None else target, *given, entropy, state, dx, rows, cols, *strides,
        *has, row.parts, float(scale),
    )  # fmt: skip
    return [Launch(BACKWARD_FILE, symbol, args, grid_of_shares(row, rows), row.block)]


def instances(
    widths: Sequence[int] = WIDTHS, dtypes: Sequence[torch.dtype] = tuple(C_TYPE)
) -> list[tuple[str, str]]:
    """Every (file, symbol) that rows of these widths launch, whole or not: what a compile run
    compiles."""
    found: dict[tuple[str, str], None] = {}
    for dtype in dtypes:
        for cols in widths:
            for gap in (0, 1):  # whole rows, and others
                x = torch.empty((2, cols + gap), dtype=dtype, device="meta")[:, gap:]
                one = x[:, 0]  # stands for others: only its strides are read
                row = cut(cols, x.itemsize)
                for target in (None, one):
                    for count in (0, 20, 50, MOST_COUNT):
                        top = x[:, :1].expand(2, count) if count else None
                        results = Results(one, one, one, one, one, top, top)
                        work = forward(x, target, results, 1.0, row)
                        work += backward(Upstream(one, one, one), x, one, one, one, x, 1.0, True)
                        for launch in work:
                            found[launch.file, launch.symbol] = None
    return list(found)
