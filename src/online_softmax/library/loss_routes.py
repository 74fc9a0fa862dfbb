"""The way in to cross-entropy: the cheapest route that is right for a call, then the reduction.

Classes as target take an op of our own for the rows, by the three routes of routes.py.
Probabilities as target take log_softmax, and torch's operations for the rest, as torch itself does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from online_softmax import celoss, cereduce, keptcalls
from online_softmax.catalogue import HALVES
from online_softmax.cereduce import Reduction
from online_softmax.library import loss_eager, loss_traced, routes
from online_softmax.library.loss_calculus import LossOptions
from online_softmax.library.private import (
    dispatch_modes,
    function_mode_count,
    functorch_active,
    is_forward_mode,
)
from online_softmax.lossarguments import check_can_overwrite
from online_softmax.reference.cross_entropy import capped
from online_softmax.reference.ops import is_autocast, result_dtype, sum_dtype

_FLOAT32 = torch.float32
_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast = torch.is_autocast_enabled


def again(
    x: Any, target: Any, weight: Any, reduction: Any, options: tuple[Any, ...]
) -> tuple[Tensor, Tensor] | None:
    """(loss, lse) of a call like one before; None: the call goes the whole way.

    Asked before the arguments are checked: an equal call has passed the checks. Wherever another
    route than a plain eager one may be right, the answer is None.

    Args:
        x, target, weight, reduction: what the user gave; classes along the dim that is torch's.
        options: those of `LossOptions` after dim, numbers of the types there.
    """
    if (
        # First: Dynamo sees nothing of what follows. Other tracing has modes, or tensors of a type.
        _is_dynamo_compiling()
        or not keptcalls.kept
        or type(x) is not Tensor
        or type(target) is not Tensor
        or (weight is not None and (type(weight) is not Tensor or weight.requires_grad))
        or dispatch_modes()
        or function_mode_count()
        or functorch_active()
        or is_forward_mode()
        or (x.dtype is not _FLOAT32 and _is_autocast("cuda"))
    ):
        return None
    dim, r = 1 if x.dim() > 1 else 0, (reduction, x.dtype)
    known = celoss.find(x, target, weight, dim, options, r)
    if known is None:
        return None
    if x.requires_grad and _is_grad_enabled():
        args = LossOptions(dim, *options), Reduction(*r), False, ""
        recorded: tuple[Tensor, Tensor] = loss_eager.recorded(x, target, weight, *args, known)
        return recorded
    found = celoss.again(known, target, reduction == "mean")
    return None if found is None else (found.loss, found.lse)


def of_classes(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    o: LossOptions,
    check: bool,
    grad_in_forward: bool,
    overwrite: bool,
    return_lse: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """The loss, and lse of each row; arguments as for `ceops.forward`, of any kind of tensor.

    Args:
        target: int64, or uint8.
        weight: of any float type; it has no gradient.
        reduction: "mean", "sum" or "none".
        grad_in_forward: make the gradient in the forward where it is certain to be wanted alone:
            one is recorded, and no trace, mode, transform or dual level is at work.
        overwrite: write it over x then.
        return_lse: whether lse may have a gradient then; else it has it always.

    Raises:
        RuntimeError: weight requires a gradient; x cannot be written over.
    """
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(loss_traced.NOT_BY_WEIGHT)
    target = target if target.dtype == torch.int64 else target.to(torch.int64)
    weight = None if weight is None else weight.to(sum_dtype(x.dtype)).contiguous()
    r, args = Reduction(reduction, _dtype(x, x.dtype)), (x, target, weight)
    is_transformed = functorch_active()
    if _is_compiling() or (not is_transformed and not loss_eager.are_plain(*args)):
        loss, lse, _ = loss_traced.op(*args, *o, check, kernel)
    elif is_transformed or is_forward_mode():
        loss, lse, _ = loss_eager.transformed(*args, o, check, kernel)
    elif not (x.requires_grad and torch.is_grad_enabled()):
        found = celoss.reduced(*args, o.dim, o.of_row, r, check, kernel)
        return found.loss, found.lse
    elif grad_in_forward:
        if overwrite:
            check_can_overwrite("cross_entropy", x)
        options = (o, r, check, return_lse, overwrite, kernel)
        loss, lse, *_ = loss_eager.with_gradient(*args, *options)
        return loss, lse
    else:
        reduced: tuple[Tensor, Tensor] = loss_eager.recorded(*args, o, r, check, kernel, None)
        return reduced
    total = None
    if reduction == "mean":
        total = cereduce.totals(target, weight, x.shape[o.dim], o.ignore_index, loss.dtype)
    return cereduce.reduce(loss, total, r), lse


def of_probabilities(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    o: LossOptions,
    kernel: str,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same for a float target of x's shape; differentiable by target and weight as well.

    lse is there if it is asked for.
    """
    given = [x.dtype, target.dtype, *([] if weight is None else [weight.dtype])]
    wide = sum_dtype(*given)
    z = x if o.softcap is None else capped(x, o.softcap, o.scale)
    scale = o.scale if o.softcap is None else 1.0
    classes = x.shape[o.dim]
    q = target.to(wide)
    if o.label_smoothing:
        q = (1 - o.label_smoothing) * q + o.label_smoothing / max(classes, 1)
    if weight is not None:
        beside = [1] * x.dim()
        beside[o.dim] = classes
        q = q * weight.to(wide).reshape(beside)
    log_p = routes.along("log_softmax", z, o.dim, wide, scale, False, kernel)
    loss, lse = -(q * log_p).sum(o.dim), None
    if o.z_loss or return_lse:
        lse = routes.logsumexp(z.to(wide), (o.dim,), False, scale, False, kernel)
    if lse is not None and o.z_loss:
        loss = loss + o.z_loss * lse.square()
    if reduction != "none":
        rows = loss.numel()
        loss = loss.sum()
        loss = loss / rows if reduction == "mean" else loss
    dtype = result_dtype(x.dtype)
    for each in given[1:]:
        dtype = torch.promote_types(dtype, each)
    loss = loss.to(_dtype(x, dtype))
    return loss if lse is None or not return_lse else (loss, lse)


def _dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Of the loss: float32 for half types under autocast, on any device, as torch's list has it."""
    dtype = result_dtype(dtype)
    return torch.float32 if dtype in HALVES and is_autocast(x.device.type) else dtype
