"""The public functions: check the arguments once, then call the op.

A call like one before, with no option but dim, dtype and scale, starts its kernel again at once.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from online_softmax import library
from online_softmax.arguments import (
    check_bool,
    check_dim,
    check_dims,
    check_dtype,
    check_empty,
    check_input,
    check_kernel,
    check_out,
    check_scale,
)

Empty = Literal["nan", "zero"]
_again = library.again


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
    empty: Empty = "nan",
    kernel: str | None = None,
) -> Tensor:
    """Softmax of `scale * x` along `dim`: exp(z - max) / sum(exp(z - max)), z = scale * x.

    Accumulates in float32 (float64 if the input or the result is float64); the result is rounded
    once. As in torch, a slice that is all -inf, holds +inf or holds NaN gives NaN in all of it and
    nowhere else. Differentiable, twice and in forward mode.

    Args:
        x: any shape; float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2; any
            strides, any device.
        dim: the dimension along which the result sums to 1.
        dtype: of the result: float16, bfloat16, float32 or float64. None: x's, bfloat16 for fp8,
            and float32 for half types under CUDA autocast. x is read as it is, never rounded to
            `dtype` first.
        scale: at least 0 and finite; multiplies x in float32 (float64) before the maximum, so that
            0 * inf gives NaN as in torch.
        out: filled and returned: of x's shape and the result's dtype, on x's device; any strides.
            x itself: in place. Of another shape it is resized, with a warning if it had elements.
        empty: what a slice that is all -inf gives. "nan": NaN. "zero": 0, with gradient 0.
        kernel: force one kernel of `online_softmax.KERNELS` by name, "v2_vectorized" for example.
            None: the planner chooses (`online_softmax.explain` says what and why).

    Returns:
        A contiguous tensor of x's shape, or `out`.

    Raises:
        TypeError: x or out is not a tensor, dim not an integer, dtype not a dtype.
        IndexError: dim is out of range.
        NotImplementedError: a dtype that is not listed above, or not a dense tensor.
        ValueError: scale, empty or kernel is none of these; or the named kernel cannot run this
            problem; with the reasons.
        RuntimeError: out has another dtype or device, shares part of x's memory, or is given where
            a gradient would be recorded.
        online_softmax.jit.Unavailable: on a CUDA device, the driver refuses what NVRTC makes.

    Examples:
        >>> import torch
        >>> softmax(torch.tensor([1.0, 5.0, 3.0]))
        tensor([0.0159, 0.8668, 0.1173])
        >>> softmax(torch.tensor([[0.0, 8.0], [-torch.inf, -torch.inf]]), scale=0.125, empty="zero")
        tensor([[0.2689, 0.7311],
                [0.0000, 0.0000]])

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
    """
    if (
        out is None
        and kernel is None
        and empty == "nan"
        and type(dim) is int
        and type(scale) is float
        and (known := _again("softmax", x, (dim, dtype, scale, False, ""))) is not None
    ):
        return known
    return _along("softmax", x, dim, dtype, scale, out, empty, kernel)


def log_softmax(
    x: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
    empty: Empty = "nan",
    kernel: str | None = None,
) -> Tensor:
    """Natural logarithm of `softmax`: (z - max) - log(sum(exp(z - max))), z = scale * x.

    Never the logarithm of a probability that underflowed, and in this order of operations: beside a
    maximum of 1e7 the log of the sum is kept.

    Args:
        x, dim, dtype, scale, out, kernel: as for `softmax`.
        empty: what a slice that is all -inf gives. "nan": NaN. "zero": -inf, the logarithm of a
            probability of 0, with gradient 0.

    Returns:
        A contiguous tensor of x's shape, or `out`.

    Raises what `softmax` raises.

    Examples:
        >>> import torch
        >>> log_softmax(torch.tensor([0.0, -95.0, -200.0]))
        tensor([   0.,  -95., -200.])
    """
    if (
        out is None
        and kernel is None
        and empty == "nan"
        and type(dim) is int
        and type(scale) is float
        and (known := _again("log_softmax", x, (dim, dtype, scale, False, ""))) is not None
    ):
        return known
    return _along("log_softmax", x, dim, dtype, scale, out, empty, kernel)


def logsumexp(
    x: Tensor,
    dim: int | tuple[int, ...] = -1,
    keepdim: bool = False,
    *,
    scale: float = 1.0,
    empty: Empty = "nan",
    kernel: str | None = None,
) -> Tensor:
    """log(sum(exp(scale * x))) along one or several dimensions, a natural logarithm.

    Accumulates in float32 (float64 for float64 input), over all of `dim` at once; the result is
    rounded once, and the gradient starts from it as it was before. As in torch, a slice that is all
    -inf or has no element gives -inf, one with +inf gives +inf, one with NaN gives NaN.
    Differentiable, twice and in forward mode.

    Args:
        x: as for `softmax`.
        dim: one dimension, or several different ones.
        keepdim: whether the result keeps them, with length 1.
        scale: as for `softmax`.
        empty: the gradient of a slice that is all -inf. "nan": NaN, as in torch. "zero": 0. The
            value is -inf in both.
        kernel: as for `softmax`.

    Returns:
        x's shape without `dim`; x's dtype, bfloat16 for fp8, and float32 for half types under CUDA
        autocast.

    Raises:
        TypeError: x is not a tensor, dim no integer and no tuple of them, or keepdim no bool.
        IndexError: a dim is out of range.
        NotImplementedError: x has a dtype that `softmax` does not take, or is not dense.
        ValueError: scale, empty or kernel is none of these; or the named kernel cannot run this.
        RuntimeError: a dimension is named twice, or none is.

    Examples:
        >>> import torch
        >>> logsumexp(torch.tensor([[1.0, 2.0], [-torch.inf, -torch.inf]]))
        tensor([2.3133,   -inf])
        >>> logsumexp(torch.zeros(2, 3), dim=(0, 1))
        tensor(1.7918)
    """
    if (
        kernel is None
        and type(dim) is int
        and type(keepdim) is bool
        and type(scale) is float
        and empty == "nan"
        and (known := _again("logsumexp", x, ((dim,), keepdim, None, scale, ""))) is not None
    ):
        return known
    if not isinstance(x, Tensor) and has_torch_function_unary(x):
        options = {"scale": scale, "empty": empty, "kernel": kernel}
        return handle_torch_function(logsumexp, (x,), x, dim, keepdim, **options)
    check_input("logsumexp", x)
    return library.logsumexp(
        x,
        check_dims("logsumexp", x, dim),
        check_bool("logsumexp", "keepdim", keepdim),
        check_scale("logsumexp", scale),
        empty != "nan" and check_empty("logsumexp", empty),
        "" if kernel is None else check_kernel("logsumexp", kernel),
    )


def _along(
    op: str,
    x: Tensor,
    dim: int,
    dtype: torch.dtype | None,
    scale: float,
    out: Tensor | None,
    empty: str,
    kernel: str | None,
) -> Tensor:
    if not isinstance(x, Tensor) and has_torch_function_unary(x):  # torch.fx's Proxy, for example
        options = {"dtype": dtype, "scale": scale, "out": out, "empty": empty, "kernel": kernel}
        public = softmax if op == "softmax" else log_softmax
        return handle_torch_function(public, (x,), x, dim, **options)
    check_input(op, x)
    if out is not None:
        check_out(op, out)
    return library.along(
        op,
        x,
        check_dim(op, x, dim),
        None if dtype is None else check_dtype(op, dtype),
        check_scale(op, scale),
        empty != "nan" and check_empty(op, empty),
        "" if kernel is None else check_kernel(op, kernel),
        out,
    )
