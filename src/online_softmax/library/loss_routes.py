"""The way in to cross-entropy: the cheapest route that is right for a call, then the reduction.

Classes as target take an op of our own for the rows, by the three routes of routes.py.
Probabilities as target take log_softmax, and torch's operations for the rest, as torch itself does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from online_softmax import ceops
from online_softmax.catalogue import HALVES
from online_softmax.library import loss_eager, loss_traced, routes
from online_softmax.library.loss_calculus import LossOptions
from online_softmax.library.private import functorch_active, is_forward_mode
from online_softmax.reference.cross_entropy import Targets, capped
from online_softmax.reference.ops import result_dtype, sum_dtype

_is_compiling = torch.compiler.is_compiling


def of_classes(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    o: LossOptions,
    check: bool,
    grad_in_forward: bool,
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
        return_lse: whether lse may have a gradient then; else it has it always.

    Raises:
        RuntimeError: weight requires a gradient.
    """
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(loss_traced.NOT_BY_WEIGHT)
    wide = sum_dtype(x.dtype)
    target = target if target.dtype == torch.int64 else target.to(torch.int64)
    weight = None if weight is None else weight.to(wide).contiguous()
    total = _total(x, target, weight, o) if reduction == "mean" else None
    loss, lse = _rows(x, target, weight, total, o, check, grad_in_forward, return_lse, kernel)
    if total is not None:
        loss = loss.sum() / total
    elif reduction == "sum":
        loss = loss.sum()
    return loss.to(_dtype(x, x.dtype)), lse


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
    return torch.float32 if dtype in HALVES and _is_autocast(x) else dtype


def _is_autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def _total(x: Tensor, target: Tensor, weight: Tensor | None, o: LossOptions) -> Tensor:
    """What the mean divides by, counted on the device."""
    rows = Targets.of(target, x.shape[o.dim], o.ignore_index)
    return rows.counts.sum() if weight is None else rows.weights(weight, weight.dtype).sum()


def _rows(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    total: Tensor | None,
    o: LossOptions,
    check: bool,
    grad_in_forward: bool,
    return_lse: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    is_transformed = functorch_active()
    if _is_compiling() or (not is_transformed and not loss_eager.are_plain(x, target, weight)):
        return loss_traced.op(x, target, weight, *o, check, kernel)[:2]
    is_dual = is_forward_mode()
    if not (is_transformed or is_dual or (x.requires_grad and torch.is_grad_enabled())):
        return ceops.forward(x, target, weight, o.dim, o.of_row, check, kernel)[:2]
    if grad_in_forward and not (is_transformed or is_dual):
        expected = torch.ones((), dtype=sum_dtype(x.dtype), device=x.device)
        if total is not None and x.dtype != torch.float16:  # 1 / total may be nothing there
            expected = expected / total
        args = (x, target, weight, expected, o, check, return_lse, kernel)
        return loss_eager.with_gradient(*args)
    return loss_eager.recorded(x, target, weight, o, check, kernel)[:2]
