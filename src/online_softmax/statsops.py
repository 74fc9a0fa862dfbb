"""token_stats on plain tensors: by its kernels, or by torch's operations. No autograd, no subclass.

Arguments are checked above, in stats.py; a target that is no class has a log-probability of NaN and
rank 0. What is given of each token stands in logits' shape without the last dimension, contiguous,
its floats in float32 (float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from online_softmax import ceops, rowops, statskernels
from online_softmax.reference.cross_entropy import Targets
from online_softmax.reference.ops import result_dtype, scaled, sum_dtype
from online_softmax.rowops import with_values
from online_softmax.statskernels import Stats

NO_CLASS_IGNORED = -1  # an index that is no class


def forward(x: Tensor, target: Tensor | None, top_k: int, scale: float) -> Stats:
    """Statistics of softmax(scale x) of each token.

    Args:
        x: (..., classes) of any strides; a float type or fp8.
        target: (...) int64, or None.
        top_k: at most the number of classes.
        scale: above 0.

    Returns:
        Stats of shape (...), (..., top_k) and (..., 2); None for what was not asked for.
    """
    run = by_kernels if statskernels.takes(x, scale) else _by_torch
    return run(x, target, top_k, scale)


def by_kernels(x: Tensor, target: Tensor | None, top_k: int, scale: float) -> Stats:
    """The same where `statskernels.takes` has said yes."""
    rows, shape = ceops.as_rows(x, -1), x.shape[:-1]
    targets = None if target is None else with_values(target).reshape(-1)
    found = statskernels.forward(rows, targets, top_k=top_k, scale=scale)
    return Stats(*(None if t is None else t.reshape((*shape, *t.shape[1:])) for t in found))  # type: ignore[arg-type]


def backward(
    dlse: Tensor | None,
    dentropy: Tensor | None,
    dlog_prob: Tensor | None,
    x: Tensor,
    target: Tensor | None,
    entropy: Tensor,
    state: Tensor,
    scale: float,
) -> Tensor:
    """The gradient by x, contiguous, in x's shape and dtype (bfloat16 for fp8).

    Args:
        dlse, dentropy, dlog_prob: (...) the gradients by what `forward` gave; None: there is none.
        x, target, scale: as in the forward.
        entropy, state: from the forward.
    """
    upstream = (dlse, dentropy, dlog_prob)
    if not statskernels.takes(x, scale):
        log_p = (scaled(x, None, scale) - state[..., :1]) - state[..., 1:]
        dx = gradient(log_p, entropy, *upstream, target, scale)
        return dx.to(result_dtype(x.dtype)).contiguous()
    return backward_by_kernels(*upstream, x, target, entropy, state, scale)


def backward_by_kernels(
    dlse: Tensor | None,
    dentropy: Tensor | None,
    dlog_prob: Tensor | None,
    x: Tensor,
    target: Tensor | None,
    entropy: Tensor,
    state: Tensor,
    scale: float,
) -> Tensor:
    """The same where the kernels ran the forward."""
    rows = ceops.as_rows(x, -1)
    targets = None if target is None else with_values(target).reshape(-1)
    of_lse, of_entropy, of_log_prob = (
        None if g is None else with_values(g).reshape(-1) for g in (dlse, dentropy, dlog_prob)
    )
    dx = statskernels.backward(
        of_lse,
        of_entropy,
        of_log_prob,
        rows,
        targets,
        entropy.reshape(-1),
        state.reshape(-1, 2),
        scale=scale,
    )
    return ceops.from_rows(dx, x, -1)


def fake(x: Tensor, target: Tensor | None, top_k: int) -> Stats:
    """Empty tensors of the results' shapes and dtypes; None as `forward` has it."""
    shape, dtype = x.shape[:-1], sum_dtype(x.dtype)

    def new(*last: int, dtype: torch.dtype = dtype) -> Tensor:
        return x.new_empty((*shape, *last), dtype=dtype)

    return Stats(
        lse=new(),
        entropy=new(),
        log_prob=None if target is None else new(),
        rank=None if target is None else new(dtype=torch.int64),
        top_log_probs=new(top_k) if top_k else None,
        top_indices=new(top_k, dtype=torch.int64) if top_k else None,
        state=new(2),
    )


# ---- torch's operations


def _by_torch(x: Tensor, target: Tensor | None, top_k: int, scale: float) -> Stats:
    wide = sum_dtype(x.dtype)
    log_p = rowops.forward("log_softmax", x, -1, wide, scale, False, "")
    lse = rowops.logsumexp(x, (-1,), False, wide, scale, "")
    largest = scaled(x, None, scale).amax(-1)
    # Of a row that is not normal the gradient by lse is 0 but where that is no number.
    rest = torch.where(largest.isfinite(), -log_p.amax(-1), 0.0)
    state = torch.stack((largest, rest), -1)
    fields = (lse, *made_of(x.to(wide), log_p, target, top_k), state)
    return Stats(*(None if t is None else t.contiguous() for t in fields))  # type: ignore[arg-type]


def made_of(
    x: Tensor, log_p: Tensor, target: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The fields after lse, in torch's operations; differentiable by log_p.

    Args:
        x: (..., classes) that rank and order are of, in a type that torch compares.
        log_p: the logarithms of their probabilities.
    """
    p = log_p.exp()
    # 0 log 0 is 0, and 0 less it is no -0.
    entropy = 0.0 - (p * torch.where(p == 0, 0.0, log_p)).sum(-1)
    log_prob = rank = top_log_probs = top_indices = None
    if target is not None:
        log_prob, rank = _of_target(x.detach(), log_p, target)
    if top_k:
        # torch.topk says nothing about ties.
        top_indices = x.detach().sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
        top_log_probs = log_p.detach().gather(-1, top_indices)
    return entropy, log_prob, rank, top_log_probs, top_indices


def _of_target(x: Tensor, log_p: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Its log-probability and rank."""
    rows = Targets.of(target, x.shape[-1], NO_CLASS_IGNORED)
    place = rows.place.unsqueeze(-1)
    log_prob = torch.where(rows.counts, log_p.gather(-1, place).squeeze(-1), torch.nan)
    above = (x > x.gather(-1, place)).sum(-1)
    return log_prob, torch.where(rows.counts, above + 1, 0)


def gradient(
    log_p: Tensor,
    entropy: Tensor,
    dlse: Tensor | None,
    dentropy: Tensor | None,
    dlog_prob: Tensor | None,
    target: Tensor | None,
    scale: float,
) -> Tensor:
    """The gradient by logits, of log_p's dtype, by torch's operations, one given at least.

    With H the entropy and t the target: scale (p (dlse - dlog_prob - dentropy (log p + H)) +
    dlog_prob [t]). All of it is NaN where H is, but for what lse gives.
    """
    p, inner, to_target = log_p.exp(), None, None
    if dlog_prob is not None and target is not None:
        rows = Targets.of(target, log_p.shape[-1], NO_CLASS_IGNORED)
        to_target = torch.where(rows.counts, dlog_prob, 0.0)
        to_target = torch.where(entropy.isnan() & rows.counts, torch.nan, to_target).unsqueeze(-1)
        inner = -to_target
    if dlse is not None:
        inner = dlse.unsqueeze(-1) if inner is None else inner + dlse.unsqueeze(-1)
    if dentropy is not None:
        finite = torch.where(p == 0, 0.0, log_p)
        by_entropy = dentropy.unsqueeze(-1) * (finite + entropy.unsqueeze(-1))
        inner = -by_entropy if inner is None else inner - by_entropy
    if inner is None:
        return torch.zeros_like(p)
    dx = p * inner
    if to_target is not None:
        dx = dx.scatter_add(-1, rows.place.unsqueeze(-1), to_target)
    return scale * dx
