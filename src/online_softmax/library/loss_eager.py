"""Cross-entropy in eager mode where a gradient or a functorch transform is at work.

As eager.py has it for the operations that take one tensor, and for the same reasons; and one
`autograd.Function` more, which makes the gradient in the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from online_softmax import celoss, ceops
from online_softmax.cereduce import Reduction
from online_softmax.keptcalls import Known
from online_softmax.library import loss_traced
from online_softmax.library.eager import base_apply, renamed
from online_softmax.library.loss_calculus import LossOptions
from online_softmax.library.loss_traced import over_batch
from online_softmax.library.private import functorch_active, is_forward_mode, keeps_graph
from online_softmax.library.traced import is_plain

Rows = tuple[Tensor, Tensor, Tensor]  # the loss of each row, lse, what rounding took from lse


def are_plain(*tensors: Tensor | None) -> bool:
    """No subclass among these, and no mode, that must see the op."""
    return is_plain(*(t for t in tensors if t is not None))


# ---- below autograd and all transforms


def _forward(
    x: Tensor, target: Tensor, weight: Tensor | None, o: LossOptions, check: bool, kernel: str
) -> Rows:
    if are_plain(x, target, weight):
        return ceops.forward(x, target, weight, o.dim, o.of_row, check, kernel)
    return loss_traced.op(x, target, weight, *o, check, kernel)


def _backward(
    dloss: Tensor | None,
    dlse: Tensor | None,
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    lse_rest: Tensor,
    weight: Tensor | None,
    o: LossOptions,
) -> Tensor:
    if are_plain(x, dloss, dlse, target, lse, lse_rest, weight):
        return ceops.backward(dloss, dlse, x, target, lse, lse_rest, weight, o.dim, o.of_row)
    return loss_traced.op_backward(dloss, dlse, x, target, lse, lse_rest, weight, *o)


# ---- with autograd


class Backward(Function):  # (dloss, dlse, x, target, lse, lse_rest, weight, options) -> dx
    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *loss_traced.gradients(ctx, g), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:  # type: ignore[override]
        return loss_traced.tangent_of_backward(ctx, *tangents[:3])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:  # type: ignore[override]
        *tensors, o = args
        return over_batch(_enter_backward, tensors, in_dims[:-1], info.batch_size, o)


_apply_backward = base_apply(renamed(Backward, "OnlineSoftmax_cross_entropy_backward"))


def _enter_backward(*args: Any) -> Tensor:
    if functorch_active():
        return Backward.apply(*args)
    if torch.is_grad_enabled() or is_forward_mode():
        return _apply_backward(*args)
    return _backward(*args)  # an ordinary backward pass: nothing is recorded


def _go_back(
    ctx: Any, dloss: Tensor | None, dlse: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    if dloss is None and dlse is None:
        return (None,) * 6
    dx = _enter_backward(dloss, dlse, *ctx.saved_tensors, ctx.options)
    return dx, None, None, None, None, None


class Forward(Function):  # (x, target, weight, options, check, kernel) -> (loss, lse, lse_rest)
    @staticmethod
    def forward(*args: Any) -> Rows:
        return _forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Rows) -> None:
        x, target, weight, ctx.options, _, _ = inputs
        loss_traced.keep(ctx, x, target, weight, output)

    backward = staticmethod(_go_back)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # type: ignore[override]
        return loss_traced.tangent_of_forward(ctx, *tangents[:3])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:  # type: ignore[override]
        *tensors, o, check, kernel = args
        call = lambda *t: Forward.apply(*t, check, kernel)  # noqa: E731
        return over_batch(call, tensors, in_dims[:3], info.batch_size, o)


_apply_forward = base_apply(renamed(Forward, "OnlineSoftmax_cross_entropy"))


def transformed(*args: Any) -> Rows:
    """Rows of (x, target, weight, options, check, kernel), under functorch or in forward mode."""
    return (Forward.apply if functorch_active() else _apply_forward)(*args)


# ---- the loss in one, for reverse mode alone


class Recorded(Function):
    """(x, target, weight, options, reduction, check, kernel, known) -> (loss, lse).

    known: a call like one before, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None,
        o: LossOptions,
        r: Reduction,
        check: bool,
        kernel: str,
        known: Known | None,
    ) -> tuple[Tensor, Tensor]:
        made = None if known is None else celoss.again(known, target, r.name == "mean")
        if made is None:
            made = celoss.reduced(x, target, weight, o.dim, o.of_row, r, check, kernel)
        loss, lse, rest, total = made
        ctx.options = o
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, target, lse, rest, weight, total)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if dloss is None and dlse is None:
            return (None,) * 8
        *saved, total = ctx.saved_tensors
        _, target, lse, *_ = saved
        if dloss is not None:
            dloss = dloss.to(lse.dtype) if total is None else torch.div(dloss, total)
            dloss = dloss if dloss.shape == target.shape else dloss.expand(target.shape)
        return _enter_backward(dloss, dlse, *saved, ctx.options), *(None,) * 7


recorded = base_apply(renamed(Recorded, "OnlineSoftmax_cross_entropy"))


# ---- the gradient made in the forward


class WithGradient(Function):
    """Keeps dx for an upstream of 1, in place of x; x too if lse may have a gradient.

    Of (x, target, weight, options, reduction, check, keeps_x, overwrite, kernel). With `overwrite`
    dx stands in x's memory: x is an output too, changed in place, so that torch sees to who else
    has saved it, and this sees what is computed from it later.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None,
        o: LossOptions,
        r: Reduction,
        check: bool,
        keeps_x: bool,
        overwrite: bool,
        kernel: str,
    ) -> tuple[Tensor, ...]:
        args = (x, target, weight, o.dim, o.of_row, r, check, kernel, overwrite)
        loss, lse, dx, total = celoss.reduced_with_gradient(*args)
        ctx.options, ctx.overwrote, ctx.is_spent = o, overwrite, False
        ctx.set_materialize_grads(False)
        if overwrite:
            ctx.mark_dirty(x)
        saved = (x, lse, torch.zeros_like(lse), weight) if keeps_x and not overwrite else ()
        ctx.save_for_backward(dx, total, target, *saved)
        return (loss, lse, dx) if overwrite else (loss, lse)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dloss: Tensor | None, dlse: Tensor | None, later: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # `once_differentiable` lets a constant upstream pass
            raise RuntimeError(
                "cross_entropy(): with grad_in_forward=True the gradient cannot be recorded "
                "(create_graph=True): pass grad_in_forward=False"
            )
        made, total, target, *saved = ctx.saved_tensors
        dx, o = None, ctx.options
        if ctx.overwrote:
            _check_overwritten(ctx.is_spent, dlse, later)
            ctx.is_spent = True
        if dloss is not None:
            # The last backward gives `made` away, and needs no second tensor of its size.
            over_made = ctx.overwrote or not keeps_graph()
            dx = celoss.rescale(made, dloss, total, target, o.dim, o.ignore_index, over_made)
        if dlse is not None:
            x, lse, lse_rest, weight = saved
            of_lse = _backward(None, dlse, x, target, lse, lse_rest, weight, o)
            dx = of_lse if dx is None else dx + of_lse
        return dx, *(None,) * 8


def _check_overwritten(is_spent: bool, dlse: Tensor | None, later: Tensor | None) -> None:
    """Errors where a gradient is wanted that only the logits could give."""
    if later is not None:
        what = "what was computed from the logits afterwards has no gradient"
    elif dlse is not None:
        what = "lse has no gradient"
    elif is_spent:
        what = "the loss has one backward: its gradient has been given away"
    else:
        return
    raise RuntimeError(
        f"cross_entropy(): overwrite_logits=True wrote the gradient over the logits, so {what}: "
        "pass overwrite_logits=False"
    )


with_gradient = base_apply(renamed(WithGradient, "OnlineSoftmax_cross_entropy_with_gradient"))
