"""First and second derivatives of the row operations, in differentiable torch operations.

With s the scale, p = softmax(s x) and sums along the slice:
    softmax      dx = s p (dy - sum(dy p))
    log_softmax  dx = s (dy - p sum(dy))
    logsumexp    dx = s p dlse,  p = exp(s x - lse)
A `tangent` is the forward-mode derivative of an operation; `gradients` are those of its backward
operation by dy and by what was saved, for an upstream g; `backward_tangent` is the forward-mode
derivative of the backward operation. Sums are in float32 or float64; each result has the dtype of
what it is the derivative of. With zero_empty, an empty slice is a constant.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax.reference.ops import beside, result_dtype, scaled, sum_dtype


class Along(NamedTuple):
    """Options of softmax and log_softmax, in the order of the op's arguments."""

    dim: int
    dtype: torch.dtype | None  # of the result; of dx in the backward operation
    scale: float
    zero_empty: bool

    def in_batch(self) -> Along:
        """The same along each example, where a batch dimension was put in front."""
        return self if self.dim < 0 else self._replace(dim=self.dim + 1)

    def of_scalars(self) -> Along:
        """Each example is a scalar, seen as a row of one element."""
        return self._replace(dim=-1)


class Over(NamedTuple):
    """Options of logsumexp, in the order of the op's arguments."""

    dims: tuple[int, ...]
    keepdim: bool
    dtype: torch.dtype | None  # of the result; of dx in the backward operation
    scale: float
    zero_empty: bool

    def in_batch(self) -> Over:
        return self._replace(dims=tuple(d if d < 0 else d + 1 for d in self.dims))

    def of_scalars(self) -> Over:
        return self._replace(dims=(-1,), keepdim=True)


def _widen(*tensors: Tensor) -> list[Tensor]:
    wide = sum_dtype(*(t.dtype for t in tensors))
    return [t.to(wide) for t in tensors]


def _sum(t: Tensor, dim: int) -> Tensor:
    return t.sum(dim, keepdim=True)


def _zeros(tangent: Tensor | None, primal: Tensor) -> Tensor:
    return torch.zeros_like(primal) if tangent is None else tangent


# ---- softmax


def softmax_tangent(y: Tensor, x_tangent: Tensor, o: Along) -> Tensor:
    p, v = _widen(y, x_tangent)
    return (o.scale * p * (v - _sum(v * p, o.dim))).to(y.dtype)


def softmax_gradients(dy: Tensor, y: Tensor, g: Tensor, o: Along) -> tuple[Tensor, Tensor]:
    wide_dy, p, wide_g = _widen(dy, y, g)
    dot_dy, dot_g = _sum(wide_dy * p, o.dim), _sum(wide_g * p, o.dim)
    by_dy = o.scale * p * (wide_g - dot_g)
    by_y = o.scale * (wide_g * (wide_dy - dot_dy) - wide_dy * dot_g)
    return by_dy.to(dy.dtype), by_y.to(y.dtype)


def softmax_backward_tangent(
    dy: Tensor, y: Tensor, dy_tangent: Tensor | None, y_tangent: Tensor | None, o: Along
) -> Tensor:
    wide_dy, p, v, w = _widen(dy, y, _zeros(dy_tangent, dy), _zeros(y_tangent, y))
    dot, dot_tangent = _sum(wide_dy * p, o.dim), _sum(v * p + wide_dy * w, o.dim)
    return (o.scale * (w * (wide_dy - dot) + p * (v - dot_tangent))).to(o.dtype or y.dtype)


# ---- log_softmax


def _unless_empty(value: Tensor, y: Tensor, o: Along) -> Tensor:
    if not o.zero_empty:
        return value
    return torch.where((y == -math.inf).all(o.dim, keepdim=True), 0.0, value)


def log_softmax_tangent(y: Tensor, x_tangent: Tensor, o: Along) -> Tensor:
    wide_y, v = _widen(y, x_tangent)
    tangent = o.scale * (v - _sum(v * wide_y.exp(), o.dim))
    return _unless_empty(tangent, y, o).to(y.dtype)


def log_softmax_gradients(dy: Tensor, y: Tensor, g: Tensor, o: Along) -> tuple[Tensor, Tensor]:
    wide_dy, wide_y, wide_g = _widen(dy, y, g)
    p = wide_y.exp()
    by_dy = _unless_empty(o.scale * (wide_g - _sum(wide_g * p, o.dim)), y, o)
    by_y = -o.scale * wide_g * p * _sum(wide_dy, o.dim)
    return by_dy.to(dy.dtype), by_y.to(y.dtype)


def log_softmax_backward_tangent(
    dy: Tensor, y: Tensor, dy_tangent: Tensor | None, y_tangent: Tensor | None, o: Along
) -> Tensor:
    wide_dy, wide_y, v, w = _widen(dy, y, _zeros(dy_tangent, dy), _zeros(y_tangent, y))
    p = wide_y.exp()
    tangent = o.scale * (v - p * (_sum(v, o.dim) + w * _sum(wide_dy, o.dim)))
    return _unless_empty(tangent, y, o).to(o.dtype or y.dtype)


# ---- logsumexp


def _share(x: Tensor, lse: Tensor, o: Over) -> Tensor:
    """p, of x's shape, in the dtype of the sums."""
    beside_x = lse if o.keepdim else beside(lse, x, o.dims)
    share = torch.exp(scaled(x, lse.dtype, o.scale) - beside_x)
    return torch.where(beside_x == -math.inf, 0.0, share) if o.zero_empty else share


def logsumexp_tangent(x: Tensor, lse: Tensor, x_tangent: Tensor, o: Over) -> Tensor:
    share = _share(x, lse, o)
    return (o.scale * (share * x_tangent.to(share.dtype)).sum(o.dims, o.keepdim)).to(lse.dtype)


def logsumexp_gradients(
    dlse: Tensor, x: Tensor, lse: Tensor, g: Tensor, o: Over
) -> tuple[Tensor, Tensor, Tensor]:
    share = _share(x, lse, o)
    upstream, wide_g = dlse.to(share.dtype), g.to(share.dtype)
    weighted = o.scale * wide_g * share
    by_dlse = weighted.sum(o.dims, o.keepdim)
    by_z = weighted * (upstream if o.keepdim else beside(upstream, x, o.dims))
    by_lse = -by_z.sum(o.dims, o.keepdim)
    by_x = (o.scale * by_z).to(result_dtype(x.dtype))
    return by_dlse.to(dlse.dtype), by_x, by_lse.to(lse.dtype)


def logsumexp_backward_tangent(
    dlse: Tensor,
    x: Tensor,
    lse: Tensor,
    dlse_tangent: Tensor | None,
    x_tangent: Tensor | None,
    lse_tangent: Tensor | None,
    o: Over,
) -> Tensor:
    share = _share(x, lse, o)
    rows = [dlse, _zeros(dlse_tangent, dlse), _zeros(lse_tangent, lse)]
    upstream, u, w = (
        (row if o.keepdim else beside(row, x, o.dims)).to(share.dtype) for row in rows
    )
    v = scaled(_zeros(x_tangent, x), share.dtype, o.scale)
    return (o.scale * share * (u + upstream * (v - w))).to(o.dtype or result_dtype(x.dtype))
