"""The public functions: check the arguments once, then call the op."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from online_softmax import catalogue, library


def softmax(x: Tensor, dim: int = -1, *, kernel: str | None = None) -> Tensor:
    """Softmax of `x` along `dim`: exp(x - max) / sum(exp(x - max)).

    Accumulates in float32 (float64 for float64 input); the result is rounded once. As in torch, a
    slice that is all -inf, holds +inf or holds NaN gives NaN in all of it and nowhere else.
    Differentiable, twice and in forward mode.

    Args:
        x: any shape; float16, bfloat16, float32 or float64; any strides, any device.
        dim: the dimension along which the result sums to 1.
        kernel: force one kernel of `online_softmax.KERNELS` by name, "v2_vectorized" for example.
            None: the planner chooses (`online_softmax.explain` says what and why).

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError: x is not a tensor.
        IndexError: dim is out of range.
        NotImplementedError: x is not of a floating-point type, or not a dense tensor.
        ValueError: no kernel has that name, or it cannot run this problem; with the reasons.
        online_softmax.jit.Unavailable: on a CUDA device, the driver refuses what NVRTC makes.

    Example:
        >>> import torch
        >>> softmax(torch.tensor([1.0, 5.0, 3.0]))
        tensor([0.0159, 0.8668, 0.1173])

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
    """
    if not isinstance(x, Tensor):
        if has_torch_function_unary(x):  # torch.fx's Proxy, for example
            return handle_torch_function(softmax, (x,), x, dim, kernel=kernel)
        raise TypeError(f"softmax(): x must be a Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"one of layout {x.layout}"
        raise NotImplementedError(f"softmax(): x must be a dense tensor, got {kind}")
    if not x.dtype.is_floating_point:
        raise NotImplementedError(
            f"softmax(): x must be of a floating-point type, got {x.dtype}: convert it first, "
            "x.float() for example"
        )
    if x.dtype not in catalogue.DTYPES:
        wanted = ", ".join(str(dtype) for dtype in catalogue.DTYPES)
        raise NotImplementedError(f"softmax(): x must be one of {wanted}, got {x.dtype}")
    rank = max(x.dim(), 1)
    if type(dim) is not int:
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(f"softmax(): dim must be an int, got {dim!r}")
        dim = operator.index(dim)  # a NumPy integer, for example
    if not -rank <= dim < rank:
        raise IndexError(
            f"softmax(): dim must be in [{-rank}, {rank - 1}] for a tensor of {x.dim()} "
            f"dimensions, got {dim}"
        )
    if kernel is not None and kernel not in catalogue.KERNELS:
        raise ValueError(
            f"softmax(): no kernel is named {kernel!r}; there are {', '.join(catalogue.KERNELS)}"
        )
    return library.softmax(x, dim, kernel or "")
