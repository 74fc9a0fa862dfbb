"""The kernels of token_stats on plain CUDA tensors: no autograd.

Logits are (rows, cols) in float32, float16 or bfloat16, of unit column stride and any row stride
and alignment; targets and ranks are int64, all else is float32. z = scale x is what the statistics
are of; order and rank are x's. The bits of a row follow from its values, the columns, the type, the
options and the architecture.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax import catalogue, rowkernels
from online_softmax.plan import MAX_GRID
from online_softmax.reference.ops import FP8

MOST_COLS = 1 << 24  # ranks are added in float32, where they are exact


class Stats(NamedTuple):
    """What the forward gives of each row; None: it was not asked for."""

    lse: Tensor  # (rows) float32: the natural log-sum-exp of z
    entropy: Tensor  # (rows) float32, in nats
    log_prob: Tensor | None  # (rows) float32: of the target; NaN: it is no class
    rank: Tensor | None  # (rows) int64: 1 + how many are above the target; 0: it is no class
    top_log_probs: Tensor | None  # (rows, top_k) float32, falling
    top_indices: Tensor | None  # (rows, top_k) int64; NaN first, of equal ones the lower
    state: Tensor  # (rows, 2) float32: the largest z, and lse less that; for `backward`


def takes(logits: Tensor, scale: float = 1.0) -> bool:
    """Whether these kernels take logits (..., cols) of this device and type, and such a scale."""
    from online_softmax.cuda import tokenstats_launch

    if not rowkernels.takes(logits, None, scale) or logits.shape[-1] > MOST_COLS:
        return False
    item = 2 if logits.dtype in FP8 else logits.itemsize
    parts = tokenstats_launch.cut(logits.shape[-1], item).parts
    return logits.numel() // logits.shape[-1] * parts <= MAX_GRID


def forward(
    logits: Tensor, target: Tensor | None = None, *, top_k: int = 0, scale: float = 1.0
) -> Stats:
    """Statistics of each row: one read of the logits, nothing of their size is held.

    Past a top_k of tokenstats_launch.MOST_COUNT the rows are sorted for the top part, which holds
    several tensors of their size.

    Args:
        logits: (rows, cols); `takes` has said yes.
        target: (rows) int64, or None.
        top_k: at most cols.
        scale: z = scale logits.
    """
    from online_softmax.cuda import launch, tokenstats_launch

    x, (rows, cols) = rowkernels.without_fp8(logits, None), logits.shape

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    count = top_k if top_k <= tokenstats_launch.MOST_COUNT else 0
    results = tokenstats_launch.Results(
        state=new(rows, 2),
        lse=new(rows),
        entropy=new(rows),
        log_prob=None if target is None else new(rows),
        rank=None if target is None else new(rows, dtype=torch.int64),
        top_log_probs=new(rows, count) if count else None,
        top_indices=new(rows, count, dtype=torch.int64) if count else None,
    )
    row = tokenstats_launch.cut(cols, x.itemsize)
    target = None if target is None else target.contiguous()
    launch.run(tokenstats_launch.forward(x, target, results, scale, row), x.device)
    stats = Stats(*results[1:], state=results.state)
    return stats if count == top_k else _with_top(stats, x, top_k, scale)


def _with_top(stats: Stats, x: Tensor, top_k: int, scale: float) -> Stats:
    """By a stable sort: torch.topk says nothing about ties."""
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    z = values[:, :top_k].float() * scale
    top = (z - stats.state[:, :1]) - stats.state[:, 1:]
    return stats._replace(top_log_probs=top, top_indices=indices[:, :top_k].contiguous())


def backward(
    dlse: Tensor | None,
    dentropy: Tensor | None,
    dlog_prob: Tensor | None,
    logits: Tensor,
    target: Tensor | None,
    entropy: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient by the logits, of their type (bfloat16 for fp8): one read, one write.

    Args:
        dlse, dentropy, dlog_prob: (rows) float32 of any stride, one at least; None: it has none.
        logits, target, scale: as in the forward; the target is needed with dlog_prob.
        entropy, state: from the forward.
        out: (rows, cols) of the logits' type and unit column stride, to be filled: `logits`
            itself, or apart from them. None: a tensor of its own.
    """
    from online_softmax.cuda import launch, tokenstats_launch

    x = rowkernels.without_fp8(logits, None)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    upstream = tokenstats_launch.Upstream(dlse, dentropy, dlog_prob)
    target = None if target is None else target.contiguous()
    tensors = (x, target, entropy.contiguous(), state.contiguous(), dx)
    work = tokenstats_launch.backward(upstream, *tensors, scale, catalogue.streams(x, 2))
    launch.run(work, x.device)
    return dx
