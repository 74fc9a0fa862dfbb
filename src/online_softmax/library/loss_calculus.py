"""First and second derivatives of cross-entropy, in differentiable torch operations.

The pair (loss, lse) of each row is a function of x alone, so with z = cap(scale x), p = softmax(z),
L = dloss loss + dlse lse, a = dloss (sum(q) + 2 z_loss lse) + dlse (q: reference/cross_entropy.py):

    gradient   dx  = z' (a p - dloss q)
    second, along v with h = v z':
               z' (a p (h - sum(h p)) + 2 z_loss dloss sum(h p) p) + v z'' (a p - dloss q)

The second is symmetric: it is the tangent of the gradient along v, and the gradient of dx by x for
an upstream v. lse is computed again from x, so that third derivatives are right as well; what was
saved of it is a constant to nobody. Sums are in float32 or float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax.ceops import Options
from online_softmax.reference.cross_entropy import Targets, Upstream, capped, shares, slope
from online_softmax.reference.ops import held_in, result_dtype


class LossOptions(NamedTuple):
    """Options of the op, in the order of its arguments."""

    dim: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    scale: float

    @property
    def of_row(self) -> Options:
        return Options(*self[1:])

    def in_batch(self) -> LossOptions:
        """The same along each example, where a batch dimension was put in front."""
        return self if self.dim < 0 else self._replace(dim=self.dim + 1)


class _Rows(NamedTuple):
    """What every formula needs; classes along the last dimension."""

    z: Tensor
    slope: Tensor | float
    p: Tensor
    lse: Tensor  # (...)

    @classmethod
    def of(cls, x: Tensor, o: LossOptions) -> _Rows:
        z = capped(x.movedim(o.dim, -1), o.softcap, o.scale)
        return cls(z, slope(z, o.softcap, o.scale), torch.softmax(z, -1), torch.logsumexp(z, -1))

    def upstream(
        self,
        dloss: Tensor | None,
        dlse: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        o: LossOptions,
    ) -> Upstream:
        options = (o.ignore_index, o.label_smoothing, o.z_loss)
        return Upstream.of(dloss, dlse, self.p, self.lse, target, weight, *options)


def tangent(
    x: Tensor, target: Tensor, weight: Tensor | None, v: Tensor, o: LossOptions
) -> tuple[Tensor, Tensor]:
    """The derivatives of (loss, lse) along v, which is of x's shape.

    The gradients of dx by dloss and dlse, for an upstream v, are the same.
    """
    rows = _Rows.of(x, o)
    h = v.movedim(o.dim, -1).to(rows.z.dtype) * rows.slope
    by_lse = (rows.p * h).sum(-1)
    counts = Targets.of(target, rows.p.shape[-1], o.ignore_index)
    q, total = shares(counts, weight, o.label_smoothing, rows.p)
    if o.z_loss:
        total = total + 2 * o.z_loss * rows.lse
    return torch.where(counts.counts, total * by_lse - (q * h).sum(-1), 0.0), by_lse


def second(
    dloss: Tensor | None,
    dlse: Tensor | None,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    v: Tensor,
    o: LossOptions,
) -> Tensor:
    """The second derivative along v: the gradient of dx by x for an upstream v, in x's dtype."""
    rows = _Rows.of(x, o)
    above = rows.upstream(dloss, dlse, target, weight, o)
    v = v.movedim(o.dim, -1).to(rows.z.dtype)
    h = v * rows.slope
    mean = (rows.p * h).sum(-1, keepdim=True)
    inner = above.a.unsqueeze(-1) * (h - mean)
    if above.a_by_lse is not None:
        inner = inner + above.a_by_lse.unsqueeze(-1) * mean
    result = rows.slope * (rows.p * inner)
    if o.softcap is not None:  # z'' = -2 z z' scale / c^2
        cap = held_in(o.softcap, rows.z.dtype)
        curvature = -2 * o.scale * (rows.z / cap) * (rows.slope / cap)
        result = result + v * curvature * (above.a.unsqueeze(-1) * rows.p - above.b)
    return above.where_counted(result).movedim(-1, o.dim).to(result_dtype(x.dtype))


def backward_tangent(
    dloss: Tensor | None,
    dlse: Tensor | None,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    dloss_tangent: Tensor | None,
    dlse_tangent: Tensor | None,
    x_tangent: Tensor | None,
    o: LossOptions,
) -> Tensor:
    """The derivative of dx along tangents of dloss, dlse and x; None: that one is constant."""
    rows = _Rows.of(x, o)
    above = rows.upstream(dloss_tangent, dlse_tangent, target, weight, o)
    dx = above.where_counted(rows.slope * above.gradient(rows.p))
    dx = dx.movedim(-1, o.dim).to(result_dtype(x.dtype))
    if x_tangent is None:
        return dx
    return dx + second(dloss, dlse, x, target, weight, x_tangent, o)
