"""First and second derivatives of token_stats, in differentiable torch operations.

(lse, entropy, the target's log-probability) of a token are functions of x alone, so with
z = scale x, p = softmax(z), H = -sum(p log p) and L = dlse lse + dentropy H + dlog_prob log p_t,
a = dlse - dlog_prob, b = dentropy, along v with h = scale v, h' = h - sum(p h):

    first      lse' = sum(p h), H' = -sum(p h (log p + H)), (log p_t)' = h'_t
    gradient   dx = scale (p (a - b (log p + H)) + dlog_prob [t])
    second     scale p (a h' - b (h' (log p + H + 1) + H'))

The second is symmetric: it is the tangent of the gradient along v, and the gradient of dx by x for
an upstream v. p is computed again from x, so that third derivatives are right as well; what was
saved is a constant to nobody. Sums are in float32 or float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax import statsops
from online_softmax.reference.cross_entropy import Targets
from online_softmax.reference.ops import result_dtype, scaled

Three = tuple[Tensor, Tensor, Tensor | None]  # of lse, entropy, log_prob
Upstream = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Tokens(NamedTuple):
    """What every formula needs."""

    log_p: Tensor
    p: Tensor
    above: Tensor  # log p + H; where p is 0 it counts for nothing and is H
    entropy: Tensor

    @classmethod
    def of(cls, x: Tensor, scale: float) -> _Tokens:
        log_p = torch.log_softmax(scaled(x, None, scale), -1)
        p = log_p.exp()
        finite = torch.where(p == 0, 0.0, log_p)
        entropy = -(p * finite).sum(-1)
        return cls(log_p, p, finite + entropy.unsqueeze(-1), entropy)

    def along(self, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """lse' and h' (less its mean), and H'; the first two with a last dimension."""
        h = v.to(self.p.dtype) * scale
        mean = (self.p * h).sum(-1, keepdim=True)
        return mean, h - mean, -(self.p * h * self.above).sum(-1)


def tangent(x: Tensor, target: Tensor | None, v: Tensor, scale: float) -> Three:
    """The derivatives of (lse, entropy, log_prob) along v, which is of x's shape.

    The gradients of dx by their upstream gradients, for an upstream v, are the same.
    """
    mean, rest, by_entropy = _Tokens.of(x, scale).along(v, scale)
    if target is None:
        return mean.squeeze(-1), by_entropy, None
    rows = Targets.of(target, x.shape[-1], statsops.NO_CLASS_IGNORED)
    at = rest.gather(-1, rows.place.unsqueeze(-1)).squeeze(-1)
    return mean.squeeze(-1), by_entropy, torch.where(rows.counts, at, 0.0)


def second(upstream: Upstream, x: Tensor, target: Tensor | None, v: Tensor, scale: float) -> Tensor:
    """The second derivative along v: the gradient of dx by x for an upstream v, in x's dtype."""
    dlse, dentropy, dlog_prob = upstream
    tokens = _Tokens.of(x, scale)
    _, rest, along_entropy = tokens.along(v, scale)
    inner = torch.zeros_like(rest)
    if dlse is not None:
        inner = inner + dlse.unsqueeze(-1) * rest
    if dlog_prob is not None and target is not None:
        counts = Targets.of(target, x.shape[-1], statsops.NO_CLASS_IGNORED).counts
        inner = inner - torch.where(counts, dlog_prob, 0.0).unsqueeze(-1) * rest
    if dentropy is not None:
        by_entropy = rest * (tokens.above + 1) + along_entropy.unsqueeze(-1)
        inner = inner - dentropy.unsqueeze(-1) * by_entropy
    return (scale * tokens.p * inner).to(result_dtype(x.dtype))


def backward_tangent(
    dlse: Tensor | None,
    dentropy: Tensor | None,
    dlog_prob: Tensor | None,
    x: Tensor,
    target: Tensor | None,
    tangents: Upstream,
    x_tangent: Tensor | None,
    scale: float,
) -> Tensor:
    """The derivative of dx along tangents of the three gradients and of x; None: a constant."""
    tokens = _Tokens.of(x, scale)
    dx = statsops.gradient(tokens.log_p, tokens.entropy, *tangents, target, scale)
    dx = dx.to(result_dtype(x.dtype))
    if x_tangent is None:
        return dx
    return dx + second((dlse, dentropy, dlog_prob), x, target, x_tangent, scale)
