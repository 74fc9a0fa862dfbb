"""Every operation from its definition: the oracle, and the backend where no kernel of ours runs.

All sums are in float32, or in float64 if the input or the result is float64; one rounding at the
end. `scale` multiplies the input in that type, before the maximum: a scale of 0 makes NaN of an
infinite element, as x * 0 does. A slice is empty if all of it is -inf, or if it has no element.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from online_softmax.float32 import held
from online_softmax.reference.online import State, log_prob, prob
from online_softmax.reference.online import lse as lse_of

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a result or gradient if none is asked for: the input's, bfloat16 for fp8."""
    return torch.bfloat16 if dtype in FP8 else dtype


def held_in(softcap: float, dtype: torch.dtype) -> float:
    """A softcap to calculate with in `dtype`: beyond float32 it would be 0 or infinite there."""
    return softcap if dtype == torch.float64 else held(softcap)


def sum_dtype(*dtypes: torch.dtype | None) -> torch.dtype:
    """The dtype in which sums run: float64 if any of these is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def is_autocast(device_type: str) -> bool:
    """Whether autocast is on for a type of device; torch refuses to say for meta."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def scaled(x: Tensor, dtype: torch.dtype | None, scale: float) -> Tensor:
    """x times scale, in the dtype of the sums; x itself if nothing changes."""
    wide = x.to(sum_dtype(x.dtype, dtype)) if x.is_floating_point() else x
    return wide if scale == 1.0 else wide * scale


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    zero_empty: bool = False,
) -> Tensor:
    """exp(z - m) / d along `dim`, where z = scale * x.

    Args:
        x: any shape, device and strides; float16, bfloat16, float32, float64, or fp8.
        dim: the dimension along which the result sums to 1.
        dtype: of the result; None: x's, bfloat16 for fp8.
        scale: multiplies x, in the dtype of the sums.
        zero_empty: an empty slice gives 0 instead of NaN.

    Returns:
        x's shape, rounded once. NaN in slices that are all -inf or hold NaN or +inf.

    Raises:
        NotImplementedError: x is of another dtype.
        IndexError: dim is out of range.

    >>> softmax(torch.tensor([1.0, 5.0, 3.0]))
    tensor([0.0159, 0.8668, 0.1173])
    >>> softmax(torch.tensor([0.0, 2.0]), scale=0.5)
    tensor([0.2689, 0.7311])
    """
    z = scaled(x, dtype, scale)
    state = State.of(z, dim)
    y = _if_empty(zero_empty, state, 0.0, prob(z, state, dim), dim)
    return y.to(dtype or result_dtype(x.dtype))


def log_softmax(
    x: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    zero_empty: bool = False,
) -> Tensor:
    """(z - m) - log d along `dim`, the natural logarithm of `softmax`; arguments as there.

    `zero_empty` is about the probability: an empty slice then gives -inf, the logarithm of 0.

    >>> log_softmax(torch.tensor([0.0, -95.0, -200.0]))
    tensor([   0.,  -95., -200.])
    """
    z = scaled(x, dtype, scale)
    state = State.of(z, dim)
    y = _if_empty(zero_empty, state, -math.inf, log_prob(z, state, dim), dim)
    return y.to(dtype or result_dtype(x.dtype))


def logsumexp(
    x: Tensor,
    dim: int | tuple[int, ...] = -1,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> Tensor:
    """m + log d along one or several dims, a natural logarithm; arguments as for `softmax`.

    -inf for slices that are all -inf or have no element, +inf for those with +inf, NaN for NaN.
    `keepdim` keeps each reduced dimension with length 1.

    >>> logsumexp(torch.tensor([[1.0, 2.0], [-torch.inf, -torch.inf]]))
    tensor([2.3133,   -inf])
    >>> logsumexp(torch.zeros(2, 3), (0, 1))
    tensor(1.7918)
    """
    dims = dim if isinstance(dim, tuple) else (dim,)
    z = scaled(x, dtype, scale)
    if len(dims) == 1:
        lse = lse_of(State.of(z, dims[0]))
    else:
        lse = lse_of(State.of(z.movedim(dims, _last(len(dims))).flatten(-len(dims)), -1))
    lse = lse.to(dtype or result_dtype(x.dtype))
    return beside(lse, x, dims) if keepdim else lse


def _last(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0))


def beside(value: Tensor, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A value of each slice of x, its reduced dims put back with length 1."""
    if x.dim():
        for dim in sorted(dim % x.dim() for dim in dims):
            value = value.unsqueeze(dim)
    return value


def _if_empty(zero_empty: bool, state: State, value: float, y: Tensor, dim: int) -> Tensor:
    if not zero_empty:
        return y
    is_empty = state.m == -math.inf
    return torch.where(is_empty.unsqueeze(dim) if y.dim() else is_empty, value, y)


# ---- gradients


def softmax_backward(
    dy: Tensor,
    y: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    zero_empty: bool = False,
) -> Tensor:
    """dx = scale y (dy - sum(dy y)).

    Args:
        dy: gradient by y; any floating dtype and strides.
        y: what `softmax` gave; of dy's shape.
        dtype: of the result, x's; None: y's.
        zero_empty: a slice of y that is all 0 has gradient 0, whatever dy is there.

    Returns:
        A contiguous tensor of y's shape.
    """
    wide = sum_dtype(dy.dtype, y.dtype, dtype)
    dy_wide, y_wide = dy.to(wide), y.to(wide)
    dx = y_wide * (dy_wide - (dy_wide * y_wide).sum(dim, keepdim=True))
    dx = dx if scale == 1.0 else dx * scale
    if zero_empty:
        dx = torch.where((y == 0).all(dim, keepdim=True), 0.0, dx)
    return dx.to(dtype or y.dtype).contiguous()


def log_softmax_backward(
    dy: Tensor,
    y: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    zero_empty: bool = False,
) -> Tensor:
    """dx = scale (dy - exp(y) sum(dy)), y what `log_softmax` gave; else as `softmax_backward`.

    With `zero_empty` it is a slice of y that is all -inf whose gradient is 0.
    """
    wide = sum_dtype(dy.dtype, y.dtype, dtype)
    dy_wide = dy.to(wide)
    dx = dy_wide - y.to(wide).exp() * dy_wide.sum(dim, keepdim=True)
    dx = dx if scale == 1.0 else dx * scale
    if zero_empty:
        dx = torch.where((y == -math.inf).all(dim, keepdim=True), 0.0, dx)
    return dx.to(dtype or y.dtype).contiguous()


def logsumexp_backward(
    dlse: Tensor,
    x: Tensor,
    lse: Tensor,
    dims: tuple[int, ...],
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    zero_empty: bool = False,
) -> Tensor:
    """dx = scale dlse exp(scale x - lse).

    Args:
        dlse: gradient by lse, in its shape.
        x: the input.
        lse: what `logsumexp` gave, best before it was rounded to a half type.
        dims, keepdim: as the result was made.
        dtype: of the result; None: x's, bfloat16 for fp8.
        zero_empty: an empty slice has gradient 0 instead of NaN.

    Returns:
        A contiguous tensor of x's shape.
    """
    wide = sum_dtype(dlse.dtype, x.dtype, lse.dtype)
    if not keepdim:
        dlse, lse = beside(dlse, x, dims), beside(lse, x, dims)
    share = torch.exp(scaled(x, wide, scale) - lse.to(wide))
    dx = share * (dlse.to(wide) * scale)
    if zero_empty:
        dx = torch.where(lse == -math.inf, 0.0, dx)
    return dx.to(dtype or result_dtype(x.dtype)).contiguous()
