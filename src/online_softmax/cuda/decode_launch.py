"""How the kernels of decode.cu are launched: a few queries over many keys, in parts."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from online_softmax import decodeplan as plan
from online_softmax.attentionplan import Options
from online_softmax.cuda.launch import C_TYPE, Launch
from online_softmax.decodeplan import Cut
from online_softmax.float32 import NORMAL, held
from online_softmax.plan import WARP, ceil_div

LOG2_E = 1 / math.log(2)

FILE = "decode.cu"
TILE = plan.ROWS
# Parts, at most, that a block merges with all dims of a row; where there are more, it has PIECE of
# them. Either way by the number of parts alone: a sum's order follows from it.
FEW_PARTS, PIECE = 32, plan.PIECE
SINKS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # as the kernel numbers them
MOST_PIECE = 128  # dims of a warp's vectors
MERGE_BLOCK = {True: 128, False: 256}  # threads, by whether they are few


def memory(q: Tensor, parts: int) -> int:
    """Float32 elements that the states (m, d, o) of all parts of q's rows take."""
    return parts * (q.numel() // q.shape[-1]) * (q.shape[-1] + 2)


def parts(
    q: Tensor, k: Tensor, v: Tensor, o: Options, cut: Cut, multiprocessors: int, made: Tensor
) -> Launch:
    """The states of each part of the keys.

    Args:
        q: (batch, heads, q_len, head_dim), float16 or bfloat16, dims contiguous.
        k, v: (batch, kv_heads, k_len, head_dim), alike; rows on 16 bytes, as those of q.
        o: the options.
        cut: the launch numbers.
        multiprocessors: of the device.
        made: (memory()) float32, the results.
    """
    (batch, heads, k_len, dim), q_len = k.shape, q.shape[2]
    count = ceil_div(k_len, cut.keys)
    group = q.shape[1] // heads
    scale, diagonal = o.scale_for(dim), o.diagonal(q_len, k_len)
    factor, cap = scale * LOG2_E, 0.0
    if o.softcap is not None:
        factor = math.copysign(min(abs(scale) / held(o.softcap), NORMAL[1]), scale)
        cap = held(o.softcap) * LOG2_E
    first = -q_len if o.left < 0 else max(diagonal - o.left, -q_len)
    last = k_len if o.right < 0 else min(diagonal + o.right, k_len)
    sizes = batch, heads, group, q_len, k_len, count, cut.keys
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    args = (q, k, v, made, factor, cap, *sizes, *strides, first, last)
    symbol = _symbol(q.dtype, dim, ceil_div(group * q_len, TILE), cut, o.is_plain(dim))
    grid = min(batch * heads * count, multiprocessors * cut.resident)
    return Launch(FILE, symbol, args, grid, cut.warps * WARP)


def merge(
    made: Tensor,
    parts: int,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    m: Tensor | None,
    d: Tensor | None,
    nan_empty: bool,
    overlaps: bool,
) -> Launch:
    """All parts merged into out and lse, and into m and d where they are given.

    Args:
        made: what `parts` gives.
        parts: of the keys.
        sinks: (heads) float32, float16 or bfloat16, contiguous, or None.
        out: (batch, heads, q_len, head_dim) contiguous, of any of the three types.
        lse, m, d: (batch, heads, q_len) float32, contiguous.
        nan_empty: out of a query that sees no key is NaN, else 0.
        overlaps: start while the stream's kernel before still runs, and wait for it.
    """
    (_, heads, q_len, dim), rows = out.shape, lse.numel()
    has_state = m is not None and d is not None
    tensors = (made, lse if sinks is None else sinks, out, lse)
    states = (m, d) if has_state else (lse, lse)
    kind = 0 if sinks is None else SINKS[sinks.dtype]
    flags = kind, int(has_state), int(nan_empty)
    args = (*tensors, *states, rows, heads, q_len, parts, *flags)
    symbol, block, pieces = _merge_symbol(out.dtype, dim, parts)
    return Launch(FILE, symbol, args, rows * pieces, block, dependent=overlaps)


def _merge_symbol(dtype: torch.dtype, dim: int, parts: int) -> tuple[str, int, int]:
    """The instance, its threads, and the pieces of a row."""
    is_few = parts <= FEW_PARTS
    piece, block = min(dim, MOST_PIECE) if is_few else PIECE, MERGE_BLOCK[is_few]
    return f"decode_merge<{C_TYPE[dtype]}, {dim}, {piece}, {block}>", block, dim // piece


def _symbol(dtype: torch.dtype, dim: int, tiles: int, cut: Cut, is_plain: bool) -> str:
    plain = "true" if is_plain else "false"
    return f"decode_parts<{C_TYPE[dtype]}, {dim}, {tiles}, {cut.warps}, {cut.resident}, {plain}>"


def instances() -> list[tuple[str, str]]:
    """Every (file, symbol): what a compile run compiles."""
    found: dict[tuple[str, str], None] = {}
    for dtype, dim in itertools.product((torch.float16, torch.bfloat16), plan.DIMS):
        for tiles, plain in itertools.product(range(1, plan.tiles(dim) + 1), (True, False)):
            for k_len in (1 << power for power in range(21)):
                cut = plan.cut(dim, tiles * TILE, k_len)
                found[FILE, _symbol(dtype, dim, tiles, cut, plain)] = None
        for of, count in itertools.product((dtype, torch.float32), (2, 2 * FEW_PARTS)):
            found[FILE, _merge_symbol(of, dim, count)[0]] = None
    return list(found)
