"""Cross-entropy in eager mode where a gradient or a functorch transform is at work.

As eager.py has it for the operations that take one tensor, and for the same reasons; and one
`autograd.Function` more, which makes the gradient in the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from online_softmax import ceops
from online_softmax.library import loss_traced
from online_softmax.library.eager import base_apply, renamed
from online_softmax.library.loss_calculus import LossOptions
from online_softmax.library.loss_traced import over_batch
from online_softmax.library.private import functorch_active, is_forward_mode
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


class Recorded(Function):  # the same, for reverse mode alone
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None,
        o: LossOptions,
        check: bool,
        kernel: str,
    ) -> Rows:
        output = ceops.forward(x, target, weight, o.dim, o.of_row, check, kernel)
        ctx.options = o
        loss_traced.keep(ctx, x, target, weight, output)
        return output

    backward = staticmethod(_go_back)


_apply_forward = base_apply(renamed(Forward, "OnlineSoftmax_cross_entropy"))
_apply_recorded = base_apply(renamed(Recorded, "OnlineSoftmax_cross_entropy"))


def recorded(*args: Any) -> Rows:
    """Rows of (x, target, weight, options, check, kernel), with what backward needs."""
    if functorch_active():
        return Forward.apply(*args)
    return (_apply_forward if is_forward_mode() else _apply_recorded)(*args)


# ---- the gradient made in the forward


class WithGradient(Function):  # (x, target, weight, expected, options, check, keeps_x, kernel)
    """Keeps dx for a dloss that is expected, in place of x; x too if lse may have a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None,
        expected: Tensor,  # 0-dim, of the losses' dtype: the dloss of all rows
        o: LossOptions,
        check: bool,
        keeps_x: bool,
        kernel: str,
    ) -> tuple[Tensor, Tensor]:
        if check or target.device.type == "cpu":
            ceops.check_target("cross_entropy", target, x.shape[o.dim], o.ignore_index)
        args = (expected, x, target, weight, o.dim, o.of_row, kernel)
        loss, lse, dx = ceops.forward_with_gradient(*args)
        ctx.options = o
        ctx.set_materialize_grads(False)
        saved = (x, lse, torch.zeros_like(lse), weight) if keeps_x else ()
        ctx.save_for_backward(dx, expected, target, *saved)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():  # `once_differentiable` lets a constant upstream pass
            raise RuntimeError(
                "cross_entropy(): with grad_in_forward=True the gradient cannot be recorded "
                "(create_graph=True): pass grad_in_forward=False"
            )
        made, expected, target, *saved = ctx.saved_tensors
        dx, o = None, ctx.options
        if dloss is not None:
            dx = ceops.rescale(made, dloss, expected, target, o.dim, o.ignore_index)
        if dlse is not None:
            x, lse, lse_rest, weight = saved
            of_lse = _backward(None, dlse, x, target, lse, lse_rest, weight, o)
            dx = of_lse if dx is None else dx + of_lse
        return dx, *(None,) * 7


with_gradient = base_apply(renamed(WithGradient, "OnlineSoftmax_cross_entropy_with_gradient"))
