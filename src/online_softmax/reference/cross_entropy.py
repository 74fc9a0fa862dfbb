"""Cross-entropy of rows from its definition: the oracle, and the backend without a kernel of ours.

Of a row z = cap(scale x) with the target's class y, weights w (1 without any), K classes, the
smoothing e and p = softmax(z):

    q_j   = (1 - e) w_y [j = y] + e w_j / K         what -log p_j counts for
    loss  = sum_j q_j (-log p_j) + z_loss lse^2      -log p_j = (m - z_j) + log d
    dz_j  = p_j (dloss (sum(q) + 2 z_loss lse) + dlse) - dloss q_j
    dx_j  = slope(x_j) dz_j

cap(t) is c tanh(t / c) for softcap c, else t. All in float32, or in float64 if x is. A row whose
target is `ignore_index` has loss 0; one whose target is no class has loss NaN; neither has a
gradient, whatever x and dloss hold there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from online_softmax.reference.online import State, log_prob
from online_softmax.reference.online import lse as lse_of
from online_softmax.reference.ops import held_in, result_dtype, scaled, sum_dtype


class Options(NamedTuple):
    """What the loss of a row depends on beside its logits, target and weights."""

    ignore_index: int = -100  # rows with this target have loss 0
    label_smoothing: float = 0.0  # in [0, 1], the share of all classes in the target
    z_loss: float = 0.0  # times lse^2 is added to the loss of a row that counts
    softcap: float | None = None  # c of c tanh(scale x / c); None: no cap
    scale: float = 1.0  # multiplies the logits first


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    lse_rest: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The loss and the log-sum-exp of each row.

    Args:
        logits: (..., K), of any strides; float16, bfloat16, float32, float64 or fp8.
        target: (...) int64, a class in [0, K) or `ignore_index`.
        weight: (K,) of each class, or None.
        lse_rest: (...), of lse's dtype, to be filled with what rounding took from lse, for
            `backward`: without it a gradient is only as exact as lse is.
        options: those of `Options`.

    Returns:
        (loss, lse), both (...) in float32 or float64, lse of cap(scale x), a natural logarithm.
    """
    o = Options(**options)
    z = capped(logits, o.softcap, o.scale)
    state = State.of(z)
    lse = lse_of(state)
    rows = Targets.of(target, z.shape[-1], o.ignore_index)
    loss = -_at(rows.place, z, state)
    if weight is not None:
        loss = loss * _of_class(weight, rows.place).to(z.dtype)
    if o.label_smoothing:
        others = -log_prob(z, state)
        if weight is not None:
            others = others * weight.to(z.dtype)
        loss = (1 - o.label_smoothing) * loss + o.label_smoothing * others.mean(-1)
    if o.z_loss:
        loss = loss + o.z_loss * lse.square()
    if lse_rest is not None:
        lse_rest.copy_(lost_of_lse(state.m, torch.log(state.d), lse))
    return rows.losses(loss), lse


def backward(
    dloss: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    lse_rest: Tensor | None = None,
    dlse: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The gradient by the logits, in their shape and dtype (bfloat16 for fp8).

    Args:
        dloss: (...) gradient by the loss; None: it has none.
        lse, lse_rest: (...) what `forward` gave.
        dlse: (...) gradient by lse; None: it has none. It reaches rows that do not count too.
        logits, target and the rest: as for `forward`.
    """
    o = Options(**options)
    z = capped(logits, o.softcap, o.scale)
    lse = lse.to(z.dtype)
    log_p = z - lse.unsqueeze(-1)
    share = torch.exp(log_p if lse_rest is None else log_p - lse_rest.unsqueeze(-1))
    p = torch.where(lse.unsqueeze(-1).isfinite(), share, math.nan)
    above = Upstream.of(dloss, dlse, p, lse, target, weight, *o[:3])
    dx = above.where_counted(slope(z, o.softcap, o.scale) * above.gradient(p))  # NaN is in z, too
    return dx.to(result_dtype(logits.dtype))


def forward_with_gradient(
    logits: Tensor,
    target: Tensor,
    dloss: Tensor,
    weight: Tensor | None = None,
    *,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`forward` and `backward` in one, for a dloss (0-dim or of target's shape) known before.

    out: of the gradient's shape and dtype, to be filled; it may be logits.
    """
    rest = torch.empty(target.shape, dtype=sum_dtype(logits.dtype), device=logits.device)
    options["lse_rest"] = rest
    loss, lse = forward(logits, target, weight, **options)
    upstream = dloss.expand(target.shape)
    dx = backward(upstream, logits, target, lse, weight, **options)
    return loss, lse, dx if out is None else out.copy_(dx)


# ---- the parts, in differentiable operations


class Targets(NamedTuple):
    """Which rows count, and where their target is."""

    counts: Tensor  # (...) bool: the target is a class
    is_ignored: Tensor  # (...) bool
    place: Tensor  # (...) int64: the target; 0 in rows that do not count

    @classmethod
    def of(cls, target: Tensor, classes: int, ignore_index: int) -> Targets:
        is_ignored = target == ignore_index
        counts = (target >= 0) & (target < classes) & ~is_ignored
        return cls(counts, is_ignored, torch.where(counts, target, 0))

    def losses(self, loss: Tensor) -> Tensor:
        """The loss where a row counts, 0 where it is ignored, else NaN."""
        other = torch.where(self.is_ignored, 0.0, math.nan).to(loss.dtype)
        return torch.where(self.counts, loss, other)

    def weights(self, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What each row counts for in the mean: its class's weight, and 0 where it does not."""
        if weight is None:
            return self.counts.to(dtype)
        return torch.where(self.counts, _of_class(weight, self.place).to(dtype), 0.0)


def capped(x: Tensor, softcap: float | None, scale: float) -> Tensor:
    """c tanh(scale x / c), or scale x without a cap, in the dtype of the sums."""
    z = scaled(x, None, scale)
    if softcap is None:
        return z
    cap = held_in(softcap, z.dtype)
    return cap * torch.tanh(z / cap)


def slope(z: Tensor, softcap: float | None, scale: float) -> Tensor | float:
    """The derivative of z = capped(x) by x."""
    return scale if softcap is None else scale * (1 - (z / held_in(softcap, z.dtype)).square())


def shares(
    rows: Targets, weight: Tensor | None, label_smoothing: float, like: Tensor
) -> tuple[Tensor, Tensor]:
    """q, of like's shape and dtype, and its sum along a row."""
    one = rows.weights(weight, like.dtype) * (1 - label_smoothing)
    q = torch.zeros_like(like)
    if like.shape[-1]:
        q = q.scatter(-1, rows.place.unsqueeze(-1), one.unsqueeze(-1))
    if not label_smoothing:
        return q, one
    each = torch.ones_like(like[..., 0]) if weight is None else weight.to(like.dtype).mean()
    by_class = 1.0 if weight is None else weight.to(like.dtype)
    return q + by_class * (label_smoothing / max(like.shape[-1], 1)), one + label_smoothing * each


class Upstream(NamedTuple):
    """What arrives from above, by z: dz = a p - b in the formula above."""

    a: Tensor  # (...)
    b: Tensor  # (..., K)
    a_by_lse: Tensor | None  # (...) the derivative of a by lse; None: it has none
    counts: Tensor | None  # (...) bool: the other rows have no gradient; None: all may have one

    @classmethod
    def of(
        cls,
        dloss: Tensor | None,
        dlse: Tensor | None,
        p: Tensor,
        lse: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
    ) -> Upstream:
        rows = Targets.of(target, p.shape[-1], ignore_index)
        given = torch.zeros_like(lse) if dloss is None else dloss.to(lse.dtype)
        given = torch.where(rows.counts, given, 0.0)
        q, total = shares(rows, weight, label_smoothing, p)
        a, a_by_lse = given * total, None
        if z_loss:
            a_by_lse = 2 * z_loss * given
            a = a + a_by_lse * lse
        if dlse is not None:
            a = a + dlse.to(lse.dtype)
        return cls(a, given.unsqueeze(-1) * q, a_by_lse, rows.counts if dlse is None else None)

    def gradient(self, p: Tensor) -> Tensor:
        return self.where_counted(self.a.unsqueeze(-1) * p - self.b)

    def where_counted(self, dz: Tensor) -> Tensor:
        return dz if self.counts is None else torch.where(self.counts.unsqueeze(-1), dz, 0.0)


def _at(index: Tensor, z: Tensor, state: State) -> Tensor:
    """The log-probability of one element of each row."""
    if not z.shape[-1]:  # no class: no row counts
        return torch.zeros_like(state.m)
    return log_prob(z.gather(-1, index.unsqueeze(-1)), state).squeeze(-1)


def lost_of_lse(m: Tensor, log_d: Tensor, lse: Tensor) -> Tensor:
    """What rounding took from lse = m + log d, to the last bit; 0 where m is not finite."""
    added = lse - m  # the exact sum of two floats, after Knuth
    lost = (m - (lse - added)) + (log_d - added)
    return torch.where(m.isfinite(), lost, 0.0)


def _of_class(weight: Tensor, index: Tensor) -> Tensor:
    return weight[index] if weight.shape[0] else torch.zeros_like(index)
