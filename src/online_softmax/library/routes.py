"""The way in: the cheapest of three routes that is right for a call.

No single registration gives opcheck, fullgraph, vmap, forward mode and double backward together:

- traced (torch.compile), and subclasses and modes that must see an op: the registered op;
- eager with a gradient, and every functorch transform: an `autograd.Function` for each direction;
- eager with nothing recorded: the kernel itself.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from online_softmax import keptcalls, rowops
from online_softmax.library import eager, traced
from online_softmax.library.calculus import Along, Over
from online_softmax.library.operations import LOGSUMEXP
from online_softmax.library.private import (
    dispatch_modes,
    function_mode_count,
    functorch_active,
    is_forward_mode,
)
from online_softmax.library.traced import autocast_dtype, is_plain
from online_softmax.reference.ops import result_dtype, sum_dtype

_FLOAT32 = torch.float32
_again = keptcalls.again_in_one
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast = torch.is_autocast_enabled
_recorded_softmax = {name: eager.forward_entry[name] for name in ("softmax", "log_softmax")}
_recorded_logsumexp = eager.forward_entry["logsumexp"]


def takes_op(x: Tensor) -> bool:
    if _is_compiling():
        return True
    return not is_plain(x) and not functorch_active()  # whose levels the op does not know


def is_recorded(x: Tensor) -> bool:
    return (x.requires_grad and _is_grad_enabled()) or functorch_active() or is_forward_mode()


def again(op: str, x: Any, options: keptcalls.Options) -> Tensor | None:
    """The result of a call like one before, by its kernel alone; None: the call goes the whole way.

    Asked before the arguments are checked: an equal call has passed the checks. Wherever another
    route than the kernel itself may be right, the answer is None; a float32 result under autocast
    as well, unless x is float32.

    Args:
        op: what is computed.
        x: what the user gave.
        options: as `rowops` hands them to `keptcalls.again_in_one`; dims of type int, a scale of
            type float, which equal no number that the checks would refuse.
    """
    if (
        # First: Dynamo sees nothing of what follows. Other tracing has modes, or tensors of a type.
        _is_dynamo_compiling()
        or type(x) is not Tensor
        or (x.requires_grad and _is_grad_enabled())
        or dispatch_modes()
        or function_mode_count()
        or functorch_active()
        or is_forward_mode()
        or (x.dtype is not _FLOAT32 and _is_autocast("cuda"))
    ):
        return None
    return _again(op, options, x)


def along(
    op: str,
    x: Tensor,
    dim: int,
    dtype: torch.dtype | None,
    scale: float,
    zero_empty: bool,
    kernel: str,
    out: Tensor | None = None,
) -> Tensor:
    """softmax or log_softmax; arguments as for `rowops.forward`, of any kind of tensor.

    Raises:
        RuntimeError: `out` is given where a gradient would be recorded or a transform is at work.
    """
    if out is not None:  # as torch's, a call with out= does not go through autocast
        wanted = dtype or result_dtype(x.dtype)
        return _along_out(op, x, dim, wanted, scale, zero_empty, kernel, out)
    if dtype is None and x.dtype is not _FLOAT32 and x.is_cuda and _is_autocast("cuda"):
        dtype = autocast_dtype(x, dtype)
    if takes_op(x):
        return traced.ops[op](x, dim, dtype, scale, zero_empty, kernel)
    if is_recorded(x):
        return _recorded_softmax[op](x, Along(dim, dtype, scale, zero_empty), kernel)
    return rowops.forward(op, x, dim, dtype, scale, zero_empty, kernel)


def logsumexp(
    x: Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    scale: float,
    zero_empty: bool,
    kernel: str,
) -> Tensor:
    """logsumexp; arguments as for `rowops.logsumexp`, of any kind of tensor."""
    dtype = None
    if x.dtype is not _FLOAT32 and x.is_cuda and _is_autocast("cuda"):
        dtype = autocast_dtype(x, None)
    if takes_op(x):  # the op saves its result: it is asked for before rounding
        wide = sum_dtype(x.dtype, dtype)
        lse = traced.ops[LOGSUMEXP.name](x, dims, keepdim, wide, scale, zero_empty, kernel)
        return lse.to(dtype or result_dtype(x.dtype))
    if is_recorded(x):
        result: Any = _recorded_logsumexp(x, Over(dims, keepdim, dtype, scale, zero_empty), kernel)
        return result if isinstance(result, Tensor) else result[0]
    return rowops.logsumexp(x, dims, keepdim, dtype, scale, kernel)


# ---- out=


def _along_out(
    op: str,
    x: Tensor,
    dim: int,
    dtype: torch.dtype,
    scale: float,
    zero_empty: bool,
    kernel: str,
    out: Tensor,
) -> Tensor:
    if _is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise RuntimeError(
            f"{op}(): out= does not support automatic differentiation, but one of the arguments "
            "requires grad: leave out= away, or call under torch.no_grad()"
        )
    if functorch_active() or is_forward_mode():
        raise RuntimeError(f"{op}(): out= does not work under torch.func or forward-mode AD")
    if out.dtype != dtype:
        raise RuntimeError(f"{op}(): out must have dtype {dtype}, got {out.dtype}")
    if out.device != x.device:
        raise RuntimeError(f"{op}(): out must be on {x.device} like x, got {out.device}")
    if takes_op(x) or takes_op(out):
        if out.shape != x.shape:
            raise RuntimeError(
                f"{op}(): out must have shape {tuple(x.shape)} where torch.compile, a mode or a "
                f"subclass is at work, got {tuple(out.shape)}"
            )
        return out.copy_(traced.ops[op](x, dim, dtype, scale, zero_empty, kernel))
    if out.is_inference() and not torch.is_inference_mode_enabled():  # kernels would not ask
        raise RuntimeError(
            f"{op}(): out is an inference tensor, which is written in inference mode alone: pass "
            "out.clone()"
        )
    _resize(op, out, x)
    if _needs_copy(op, x, out):
        out.copy_(rowops.forward(op, x, dim, dtype, scale, zero_empty, kernel))
    else:
        rowops.forward(op, x, dim, dtype, scale, zero_empty, kernel, out)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # a kernel's writes are not torch's
    return out


def _resize(op: str, out: Tensor, x: Tensor) -> None:
    """As torch does: out takes x's shape, with a warning if it held something."""
    if out.shape == x.shape:
        return
    if out.numel():
        warnings.warn(
            f"{op}(): out of shape {tuple(out.shape)} was resized to {tuple(x.shape)}, the shape "
            "of x; pass one of that shape, or an empty one (out.resize_(0))",
            UserWarning,
            stacklevel=6,
        )
    out.resize_(x.shape)


def _needs_copy(op: str, x: Tensor, out: Tensor) -> bool:
    """Whether out is filled by a copy: it may share elements with x without being x.

    As torch's own check: two dense tensors that share memory are refused unless they are the same,
    in place; of a tensor with gaps nothing is known. RuntimeError too if out overlaps itself.
    """
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise RuntimeError(
            f"{op}(): several elements of out lie in one memory location (strides "
            f"{out.stride()}): pass out.clone()"
        )
    if out.is_neg():
        return True  # its memory does not hold its values: only torch's copy_ knows
    if x.numel() == 0 or x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
        return False
    (x_start, x_stop), (out_start, out_stop) = _span(x), _span(out)
    if x_stop <= out_start or out_stop <= x_start:
        return False
    if x_start == out_start and x.stride() == out.stride() and x.dtype == out.dtype:
        return False
    if all(
        (t.numel() * t.element_size() == stop - start)
        for t, start, stop in ((x, x_start, x_stop), (out, out_start, out_stop))
    ):
        raise RuntimeError(
            f"{op}(): out and x share part of their memory: pass x itself to work in place, or a "
            "tensor apart from x"
        )
    return True


def _span(t: Tensor) -> tuple[int, int]:
    """The first byte of a tensor with elements, and the one behind its last."""
    steps = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (steps + 1) * t.element_size()
