"""The row operations on plain tensors: which implementation runs a call. No autograd, no subclass.

Arguments are checked above, in api.py; results are contiguous. dim and dims count from either end.
Where no kernel of ours stands, a CPU tensor goes to ATen in float32 (float64), whose semantics are
ours, and any other to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from online_softmax import catalogue, keptcalls, rowkernels, rowplan
from online_softmax.reference import ops
from online_softmax.reference.ops import result_dtype, sum_dtype

ANY_OPTION = ("torch", "reference")  # the kernels that every operation and option has

_is_batch = torch._C._functorch.is_legacy_batchedtensor
_DEFINITION = {"softmax": ops.softmax, "log_softmax": ops.log_softmax}
_BACKWARD = {"softmax": ops.softmax_backward, "log_softmax": ops.log_softmax_backward}
_EMPTY = {"softmax": 0.0, "log_softmax": -math.inf}


def forward(
    op: str,
    x: Tensor,
    dim: int,
    dtype: torch.dtype | None,
    scale: float,
    zero_empty: bool,
    kernel: str,
    out: Tensor | None = None,
) -> Tensor:
    """softmax or log_softmax of a plain tensor.

    Args:
        op: "softmax" or "log_softmax".
        x: any shape and strides; float16, bfloat16, float32, float64 or fp8.
        dtype: of the result; None: x's, bfloat16 for fp8.
        scale: at least 0 and finite; multiplies x in the dtype of the sums.
        zero_empty: what a slice that is all -inf gives: probability 0 instead of NaN.
        kernel: the name of a kernel to force, or "".
        out: filled and returned, if given: of x's shape and the result's dtype, on x's device; it
            is x itself (in place) or shares no element with it.

    Raises:
        ValueError: the named kernel cannot run this.
    """
    known = keptcalls.again_in_one(op, (dim, dtype, scale, zero_empty, kernel), x, out)
    if known is not None:
        return known
    x = with_values(x)
    if rowkernels.takes(x, dtype, scale, kernel):
        target = out if out is not None and out.is_contiguous() else None
        y = rowkernels.forward(op, x, dim, dtype, scale, zero_empty, kernel, target)
        return y if out is None or target is not None else out.copy_(y)
    straight = out if out is not None and _takes_writes(out, x) else None
    is_plain = op == "softmax" and scale == 1.0 and not zero_empty
    if is_plain and (dtype is None or dtype == x.dtype) and x.dtype not in ops.FP8:
        y = catalogue.softmax(x, dim, kernel, straight)
    elif is_plain and dtype == torch.float32 and x.dtype.itemsize < dtype.itemsize:
        # What autocast asks for; nothing rounds.
        y = catalogue.softmax(x.to(dtype), dim, kernel, straight)
    elif _takes_aten(op, x, dtype, scale, kernel):
        y = _aten(op, x, dim, dtype, scale, zero_empty)
    else:
        y = _DEFINITION[op](x, dim, dtype=dtype, scale=scale, zero_empty=zero_empty).contiguous()
    return y if out is None or y is out else out.copy_(y)


def backward(
    op: str,
    dy: Tensor,
    y: Tensor,
    dim: int,
    dtype: torch.dtype | None,
    scale: float,
    zero_empty: bool,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient by x, from that by y and y itself; dtype is that of x (None: y's).

    `out` is filled and returned, if given: contiguous, of y's shape, of that dtype, on y's device,
    apart from dy and y.
    """
    dx = keptcalls.again_in_one(f"{op}_backward", (dim, dtype, scale, zero_empty), y, out, dy)
    if dx is not None:
        return dx
    dy, y = with_values(dy), with_values(y)
    dx = rowkernels.backward(op, dy, y, dim, dtype, scale, zero_empty, out)
    if dx is not None:
        return dx
    dx = _BACKWARD[op](dy, y, dim, dtype=dtype, scale=scale, zero_empty=zero_empty)
    return dx if out is None else out.copy_(dx)


def logsumexp(
    x: Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
    scale: float,
    kernel: str,
) -> Tensor:
    """The natural logarithm of the sum of exp(scale x) over dims; arguments as for `forward`."""
    dims = tuple(dims)
    known = keptcalls.again_in_one("logsumexp", (dims, keepdim, dtype, scale, kernel), x)
    if known is not None:
        return known
    x = with_values(x)
    if rowkernels.takes(x, dtype, scale, kernel):
        return rowkernels.logsumexp(x, dims, keepdim, dtype, scale, kernel)
    if not _takes_aten("logsumexp", x, dtype, scale, kernel):
        y = ops.logsumexp(x, dims, keepdim, dtype=dtype, scale=scale)
    else:
        y = _own(torch.logsumexp, ops.scaled(x, dtype, scale), dims, keepdim)
    return y.to(dtype or result_dtype(x.dtype)).contiguous()


def logsumexp_saving(
    x: Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """`logsumexp`, and the same before it was rounded: what its gradient is computed from.

    The second is float32 (float64 if x or the result is); it is the first if that is as wide.
    """
    wide = sum_dtype(x.dtype, dtype)
    saved = logsumexp(x, dims, keepdim, wide, scale, kernel)
    lse_dtype = dtype or result_dtype(x.dtype)
    return saved.to(lse_dtype), saved


def logsumexp_backward(
    dlse: Tensor,
    x: Tensor,
    lse: Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype | None,
    scale: float,
    zero_empty: bool,
) -> Tensor:
    """The gradient of `logsumexp` by x in dtype (None: x's), from what `logsumexp_saving` saved."""
    dlse, x, lse = with_values(dlse), with_values(x), with_values(lse)
    args = (dlse, x, lse, tuple(dims), keepdim)
    dx = rowkernels.logsumexp_backward(*args, dtype, scale, zero_empty)
    if dx is not None:
        return dx
    return ops.logsumexp_backward(*args, dtype=dtype, scale=scale, zero_empty=zero_empty)


def _takes_writes(out: Tensor, x: Tensor) -> bool:
    """Whether a kernel may write into out by address, while it reads x."""
    return out.is_contiguous() and not out.is_neg() and out.data_ptr() != x.data_ptr()


def with_values(t: Tensor) -> Tensor:
    """t, or a copy where its memory does not hold its values: a kernel reads memory.

    A tensor may have a negation pending (`z.conj().imag`), or stand for zeros without any memory
    (what autograd passes for a gradient that is not there).
    """
    if t.is_neg():
        return t.resolve_neg()
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if t._is_zerotensor() else t


def is_batch(*tensors: Tensor | None) -> bool:
    """Whether one stands for a batch of gradients (`is_grads_batched`): it has no memory, only
    torch's operations know it."""
    return any(t is not None and _is_batch(t) for t in tensors)


# ---- which implementation


def has_kernel(op: str, *tensors: Tensor) -> bool:
    """Whether a kernel of this project, not torch, runs an op on these tensors.

    Args:
        op: "softmax", "softmax_backward" and so on.
        tensors: x; or dy and what was saved.
    """
    if not tensors[0].is_cuda:
        return False
    if catalogue.lacks("cuda") is None:
        known = op in rowplan.OPERATIONS or op in rowplan.ELEMENTWISE
        types = catalogue.FLOATS if op in rowplan.BACKWARD else (*catalogue.FLOATS, *ops.FP8)
    else:
        known = op == "softmax" and catalogue.lacks("triton") is None
        types = catalogue.FLOATS
    return known and all(t.dtype in types for t in tensors)


def _takes_aten(op: str, x: Tensor, dtype: torch.dtype | None, scale: float, kernel: str) -> bool:
    """Whether ATen computes this; False: the reference. ValueError: the named kernel cannot."""
    if kernel in rowkernels.NAMES:
        if x.numel() == 0:  # nothing for a kernel to do, if it would
            one = torch.empty(1, dtype=x.dtype, device=x.device)
            if rowkernels.takes(one, dtype, scale, kernel):
                return False
        missing = catalogue.lacks("cuda") if x.is_cuda else None
        wanted = (
            "it takes CUDA tensors of float16, bfloat16, float32 or fp8, gives x's dtype or "
            "float32 (of fp8 any of these three) and wants a scale from 2^-126 to "
            f"2^127; this is {x.dtype} on {x.device}, to be given as "
            f"{dtype or result_dtype(x.dtype)}, with scale {scale:g}"
        )
        raise ValueError(f"{op}(): kernel {kernel!r} cannot run this: {missing or wanted}")
    if kernel and kernel not in ANY_OPTION:
        what = "softmax with dtype, scale, empty or fp8 input" if op == "softmax" else op
        raise ValueError(
            f"{op}(): kernel {kernel!r} cannot run this: {kernel} computes plain softmax in its "
            f"input's dtype, not {what}"
        )
    return kernel == "torch" or (not kernel and x.device.type == "cpu")


def _own(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """torch's own kernel, also while `override_torch` is in force."""
    catalogue.atens_own.depth += 1
    try:
        return function(*arguments)
    finally:
        catalogue.atens_own.depth -= 1


def _aten(
    op: str, x: Tensor, dim: int, dtype: torch.dtype | None, scale: float, zero_empty: bool
) -> Tensor:
    z = ops.scaled(x, dtype, scale)
    y = _own(torch.softmax if op == "softmax" else torch.log_softmax, z, dim)
    if zero_empty:
        y = torch.where((z == -math.inf).all(dim, keepdim=True), _EMPTY[op], y)
    return y.to(dtype or result_dtype(x.dtype)).contiguous()
