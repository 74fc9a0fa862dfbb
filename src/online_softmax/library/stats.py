"""What one distribution a token gives: by kernels of its own, or by log_softmax and torch.

The kernels run in eager mode on plain CUDA tensors; under torch.compile, transforms, forward mode,
subclasses and modes, and for second derivatives, it is the composition, which is differentiable in
every way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from online_softmax import ceops, statskernels
from online_softmax.library import routes
from online_softmax.library.eager import base_apply, renamed
from online_softmax.library.loss_eager import are_plain
from online_softmax.library.private import functorch_active, is_forward_mode
from online_softmax.reference.cross_entropy import Targets
from online_softmax.reference.ops import sum_dtype
from online_softmax.rowops import with_values

NO_CLASS_IGNORED = -1  # an index that is no class
DIFFERENTIABLE = 3  # lse, entropy, target_log_prob: the first fields of TokenStats


class TokenStats(NamedTuple):
    """Of each token, in logits' shape without the last dimension; floats are float32 (float64)."""

    lse: Tensor  # (...) natural log-sum-exp of logits / temperature
    entropy: Tensor  # (...) in nats
    target_log_prob: Tensor | None  # (...) natural logarithm; None without a target
    target_rank: Tensor | None  # (...) int64, from 1; None without a target
    top_log_probs: Tensor | None  # (..., top_k), falling; None for top_k 0
    top_indices: Tensor | None  # (..., top_k) int64; None for top_k 0


def token_stats(x: Tensor, target: Tensor | None, top_k: int, temperature: float) -> TokenStats:
    """Arguments as for the public function, checked, of any kind of tensor."""
    scale = 1.0 / temperature
    target = None if target is None else target.to(torch.int64)
    if not _has_kernels(x, target, scale):
        return _composed(x, target, top_k, scale)
    if x.requires_grad and torch.is_grad_enabled():
        return TokenStats(*_recorded(x, target, top_k, scale))
    return _by_kernels(x, target, top_k, scale)[0]


def _has_kernels(x: Tensor, target: Tensor | None, scale: float) -> bool:
    """Whether the kernels run a call: the one place where that is decided."""
    if torch.compiler.is_compiling() or functorch_active() or is_forward_mode():
        return False
    return are_plain(x, target) and statskernels.takes(x, scale)


# ---- kernels


def _by_kernels(
    x: Tensor, target: Tensor | None, top_k: int, scale: float
) -> tuple[TokenStats, Tensor]:
    """The statistics, and what the backward needs beside them."""
    rows, shape = ceops.as_rows(x, -1), x.shape[:-1]
    targets = None if target is None else with_values(target).reshape(-1)
    *found, state = statskernels.forward(rows, targets, top_k=top_k, scale=scale)
    shaped = [None if t is None else t.reshape((*shape, *t.shape[1:])) for t in found]
    return TokenStats(*shaped), state  # type: ignore[arg-type]


class Recorded(Function):  # (x, target, top_k, scale) -> the fields of TokenStats
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor | None, top_k: int, scale: float
    ) -> tuple[Tensor | None, ...]:
        stats, state = _by_kernels(x, target, top_k, scale)
        ctx.mark_non_differentiable(*(t for t in stats[DIFFERENTIABLE:] if t is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, target, stats.entropy, state)
        ctx.scale = scale
        return tuple(stats)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, target, entropy, state = ctx.saved_tensors
        given = upstream[:DIFFERENTIABLE]
        if all(g is None for g in given):
            return None, None, None, None
        tensors = [None if g is None else with_values(g) for g in given]
        if torch.is_grad_enabled() or not are_plain(*tensors):
            return _gradient(given, x, target, ctx.scale), None, None, None
        rows = ceops.as_rows(x, -1)
        targets = None if target is None else with_values(target).reshape(-1)
        dlse, dentropy, dlog_prob = (None if g is None else g.reshape(-1) for g in tensors)
        dx = statskernels.backward(
            dlse, dentropy, dlog_prob, rows, targets, entropy.reshape(-1), state, scale=ctx.scale
        )
        return ceops.from_rows(dx, x, -1), None, None, None


_recorded = base_apply(renamed(Recorded, "OnlineSoftmax_token_stats"))


def _gradient(
    upstream: tuple[Tensor | None, ...], x: Tensor, target: Tensor | None, scale: float
) -> Tensor:
    """The gradient by x, itself differentiable where a gradient is recorded."""
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        stats = _composed(x, target, 0, scale)[:DIFFERENTIABLE]
        pairs = [(t, g) for t, g in zip(stats, upstream, strict=True) if g is not None]
        results, gradients = zip(*pairs, strict=True)
        (dx,) = torch.autograd.grad(results, (x,), gradients, create_graph=is_recorded)
    return dx


# ---- torch's operations


def _composed(x: Tensor, target: Tensor | None, top_k: int, scale: float) -> TokenStats:
    wide = x.to(sum_dtype(x.dtype))
    log_p = routes.along("log_softmax", x, -1, wide.dtype, scale, False, "")
    lse = routes.logsumexp(wide, (-1,), False, scale, False, "")
    p = log_p.exp()
    entropy = -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)  # 0 log 0 is 0
    log_prob = rank = top_log_probs = top_indices = None
    if target is not None:
        log_prob, rank = _of_target(wide.detach(), log_p, target)
    if top_k:
        # torch.topk says nothing about ties.
        top_indices = wide.detach().sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
        top_log_probs = log_p.detach().gather(-1, top_indices)
    return TokenStats(lse, entropy, log_prob, rank, top_log_probs, top_indices)


def _of_target(x: Tensor, log_p: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Its log-probability and rank; NaN and 0 of a target that is no class."""
    classes = x.shape[-1]
    is_seen = not torch.compiler.is_compiling() and not functorch_active() and are_plain(target)
    if target.device.type == "cpu" and is_seen:
        ceops.check_target("token_stats", target, classes, None)
    rows = Targets.of(target, classes, NO_CLASS_IGNORED)
    place = rows.place.unsqueeze(-1)
    log_prob = torch.where(rows.counts, log_p.gather(-1, place).squeeze(-1), torch.nan)
    above = (x > x.gather(-1, place)).sum(-1)
    return log_prob, torch.where(rows.counts, above + 1, 0)
