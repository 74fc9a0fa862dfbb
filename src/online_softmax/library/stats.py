"""What one distribution a token gives: the cheapest route that is right for a call.

- traced (torch.compile), and subclasses and modes that must see an op: the registered op;
- eager on plain tensors that have kernels: these, with an `autograd.Function` for the gradient;
- functorch's transforms, forward mode, and where no kernel runs: log_softmax, logsumexp and torch's
  operations, which are differentiable in every way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from online_softmax import ceops, statskernels, statsops
from online_softmax.library import routes, stats_traced
from online_softmax.library.eager import base_apply, renamed
from online_softmax.library.loss_eager import are_plain
from online_softmax.library.private import functorch_active, is_forward_mode
from online_softmax.library.stats_traced import DIFFERENTIABLE
from online_softmax.reference.ops import sum_dtype
from online_softmax.rowops import is_batch

# Not 0 in float32, where -inf times 0 is no number; times this finite logits are next to nothing.
LEAST_SCALE = 2.0**-149


class TokenStats(NamedTuple):
    """What `token_stats` says of each token; (...) is logits' shape without the classes.

    Floats are float32, float64 for float64 logits. Logarithms are natural.

    Attributes:
        lse: (...) log(sum(exp(logits / temperature))).
        entropy: (...) -sum(p log p) in nats; an element of probability 0 adds nothing.
        target_log_prob: (...) log p of the target; None without a target.
        target_rank: (...) int64, 1 + the number of logits strictly greater than the target's; None
            without a target.
        top_log_probs: (..., top_k), the largest first, of equal logits the lower index first, NaN
            before all others; None for top_k = 0.
        top_indices: (..., top_k) int64, their classes; None for top_k = 0.
    """

    lse: Tensor
    entropy: Tensor
    target_log_prob: Tensor | None
    target_rank: Tensor | None
    top_log_probs: Tensor | None
    top_indices: Tensor | None


def token_stats(x: Tensor, target: Tensor | None, top_k: int, temperature: float) -> TokenStats:
    """Arguments as for the public function, checked, of any kind of tensor."""
    scale = max(1.0 / temperature, LEAST_SCALE)
    target = None if target is None else target.to(torch.int64)
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and (functorch_active() or is_forward_mode()):
        return _composed(x, target, top_k, scale)
    if is_compiling or not are_plain(x, target):
        if not is_compiling:
            _check_target(target, x.shape[-1])
        found = stats_traced.op(x, target, top_k, scale)
        return TokenStats(*stats_traced.asked_for(found, target, top_k))  # type: ignore[arg-type]
    if not statskernels.takes(x, scale):
        return _composed(x, target, top_k, scale)
    if x.requires_grad and torch.is_grad_enabled():
        return TokenStats(*_recorded(x, target, top_k, scale))
    *stats, _ = statsops.by_kernels(x, target, top_k, scale)
    return TokenStats(*stats)  # type: ignore[arg-type]


class Recorded(Function):  # (x, target, top_k, scale) -> the fields of TokenStats
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor | None, top_k: int, scale: float
    ) -> tuple[Tensor | None, ...]:
        *stats, state = statsops.by_kernels(x, target, top_k, scale)
        ctx.mark_non_differentiable(*(t for t in stats[DIFFERENTIABLE:] if t is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, target, stats[1], state)
        ctx.scale = scale
        return tuple(stats)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        given = upstream[:DIFFERENTIABLE]
        if all(g is None for g in given):
            return None, None, None, None
        is_seen = torch.is_grad_enabled() or functorch_active() or is_forward_mode()
        is_op = is_seen or is_batch(*given) or not are_plain(*given)
        back: Any = stats_traced.op_backward if is_op else statsops.backward_by_kernels
        return back(*given, *ctx.saved_tensors, ctx.scale), None, None, None


_recorded = base_apply(renamed(Recorded, "OnlineSoftmax_token_stats"))


def _composed(x: Tensor, target: Tensor | None, top_k: int, scale: float) -> TokenStats:
    wide = x.to(sum_dtype(x.dtype))
    # Both of `wide`: their gradients are added in its type and rounded to that of x once.
    log_p = routes.along("log_softmax", wide, -1, wide.dtype, scale, False, "")
    lse = routes.logsumexp(wide, (-1,), False, scale, False, "")
    _check_target(target, x.shape[-1])
    return TokenStats(lse, *statsops.made_of(wide, log_p, target, top_k))


def _check_target(target: Tensor | None, classes: int) -> None:
    """IndexError if one is no class, where the host knows without waiting."""
    if target is None or target.device.type != "cpu":
        return
    if not functorch_active() and are_plain(target):
        ceops.check_target("token_stats", target, classes, None)
