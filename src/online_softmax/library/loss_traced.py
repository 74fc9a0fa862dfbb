"""The ops of cross-entropy that torch sees: schemas, fakes, vmap and a kernel at the Autograd key.

As traced.py has it for the operations that take one tensor. The op gives loss, lse and what
rounding took from lse of each row, in float32 (float64), so autocast has nothing to change; the
rows are reduced by torch's own operations (loss_routes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import register_vmap

from online_softmax import ceops
from online_softmax.library import loss_calculus
from online_softmax.library.loss_calculus import LossOptions
from online_softmax.library.operations import in_front, tangent_by
from online_softmax.library.private import SingleLevelFunction, after_autograd, below_autograd
from online_softmax.library.traced import NAMESPACE, library
from online_softmax.reference.ops import result_dtype

NOT_BY_WEIGHT = (
    "cross_entropy(): not differentiable by weight where target is classes: pass weight.detach()"
)
_OPTIONS = (
    "int dim, int ignore_index, float label_smoothing, float z_loss, float? softcap, float scale"
)
_COUNT = len(LossOptions._fields)
_NO_OPTIONS = (None,) * _COUNT

library.define(
    f"cross_entropy(Tensor x, Tensor target, Tensor? weight, {_OPTIONS}, bool check_target, "
    "str kernel) -> (Tensor, Tensor, Tensor)"
)
library.define(
    "cross_entropy_backward(Tensor? dloss, Tensor? dlse, Tensor x, Tensor target, Tensor lse, "
    f"Tensor lse_rest, Tensor? weight, {_OPTIONS}) -> Tensor"
)
op = torch.ops.online_softmax.cross_entropy.default
op_backward = torch.ops.online_softmax.cross_entropy_backward.default


def _run(x: Tensor, target: Tensor, weight: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    *options, check_target, kernel = arguments
    o = LossOptions(*options)
    return ceops.forward(x, target, weight, o.dim, o.of_row, check_target, kernel)


def _run_backward(
    dloss: Tensor | None,
    dlse: Tensor | None,
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    lse_rest: Tensor,
    weight: Tensor | None,
    *options: Any,
) -> Tensor:
    o = LossOptions(*options)
    return ceops.backward(dloss, dlse, x, target, lse, lse_rest, weight, o.dim, o.of_row)


def _fake(x: Tensor, target: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return ceops.fake(x, target)


def _fake_backward(dloss: Any, dlse: Any, x: Tensor, *_: Any) -> Tensor:
    dtype = result_dtype(x.dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


library.impl("cross_entropy", _run, "CompositeExplicitAutograd")
library.impl("cross_entropy_backward", _run_backward, "CompositeExplicitAutograd")
library.impl("cross_entropy", _fake, "Meta")
library.impl("cross_entropy_backward", _fake_backward, "Meta")


# ---- autograd, for the eager route as well


def keep(
    ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, output: tuple[Tensor, ...]
) -> None:
    """What backward needs of a forward."""
    _, lse, lse_rest = output
    ctx.mark_non_differentiable(lse_rest)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, target, lse, lse_rest, weight)
    ctx.save_for_forward(x, target, lse, lse_rest, weight)


def gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Of the backward operation, by (dloss, dlse, x, target, lse, lse_rest, weight)."""
    dloss, dlse, x, target, _, _, weight = ctx.saved_tensors
    by_dloss, by_dlse = loss_calculus.tangent(x, target, weight, g, ctx.options)
    by_x = loss_calculus.second(dloss, dlse, x, target, weight, g, ctx.options)
    return (
        None if dloss is None else by_dloss.to(dloss.dtype),
        None if dlse is None else by_dlse.to(dlse.dtype),
        by_x,
        None,  # target
        None,  # lse, of which x has the whole derivative
        None,  # lse_rest
        None,  # weight
    )


def tangent_of_backward(ctx: Any, *tangents: Tensor | None) -> Tensor:
    """Of the backward operation; the tangents of dloss, dlse and x."""
    dloss, dlse, x, target, _, _, weight = ctx.saved_tensors
    saved = (dloss, dlse, x, target, weight)
    return tangent_by(loss_calculus.backward_tangent, saved, *tangents, ctx.options)


def tangent_of_forward(
    ctx: Any, x_tangent: Tensor | None, _: None, weight_tangent: Tensor | None
) -> Any:
    """Of (loss, lse, lse_rest), from the tangents of x, target and weight."""
    if weight_tangent is not None:
        raise RuntimeError(NOT_BY_WEIGHT)
    x, target, _, _, weight = ctx.saved_tensors
    saved = (x, target, weight)
    return *tangent_by(loss_calculus.tangent, saved, x_tangent, ctx.options), None


class OpBackward(
    SingleLevelFunction
):  # (keys, dloss, dlse, x, target, lse, lse_rest, weight, *options)
    @staticmethod
    def forward(keys: Any, *arguments: Any) -> Tensor:
        with below_autograd():
            return op_backward.redispatch(keys & after_autograd, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.options = LossOptions(*inputs[-_COUNT:])
        ctx.save_for_backward(*inputs[1:-_COUNT])
        ctx.save_for_forward(*inputs[1:-_COUNT])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *gradients(ctx, g), *_NO_OPTIONS

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:  # type: ignore[override]
        return tangent_of_backward(ctx, *tangents[:3])


class OpForward(SingleLevelFunction):  # (keys, x, target, weight, *options, check_target, kernel)
    @staticmethod
    def forward(keys: Any, *arguments: Any) -> Any:
        with below_autograd():
            return op.redispatch(keys & after_autograd, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, x, target, weight, *options, _, _ = inputs
        ctx.options = LossOptions(*options)
        keep(ctx, x, target, weight, output)

    @staticmethod
    def backward(ctx: Any, dloss: Any, dlse: Any, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        nothing = (None, None, *_NO_OPTIONS, None, None)
        if dloss is None and dlse is None:
            return None, None, *nothing
        return None, op_backward(dloss, dlse, *ctx.saved_tensors, *ctx.options), *nothing

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> Any:  # type: ignore[override]
        return tangent_of_forward(ctx, *tangents[:3])


for _name, _function in (("cross_entropy", OpForward), ("cross_entropy_backward", OpBackward)):
    library.impl(_name, _function.apply, "Autograd", with_keyset=True)  # type: ignore[attr-defined, union-attr]


# ---- batches


def over_batch(
    call: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    in_dims: Sequence[int | None],
    size: int,
    o: LossOptions,
) -> tuple[Any, Any]:
    """call(*tensors, options) for each example of a batch, and where its dimension is.

    The last tensor is the weight, one for all examples or, seldom, one for each.
    """
    *before, weight = tensors
    if weight is not None and in_dims[-1] is not None:
        examples = [
            [t if t is None or d is None else t.select(d, i) for t, d in zip(tensors, in_dims)]  # noqa: B905
            for i in range(size)
        ]
        results = [call(*example, o) for example in examples]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(each) for each in zip(*results, strict=True)), (0, 0, 0)
    moved = [None if t is None else in_front(t, d, size) for t, d in zip(before, in_dims)]  # noqa: B905
    results = call(*moved, weight, o.in_batch())
    return results, 0 if isinstance(results, Tensor) else (0, 0, 0)


def _vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    *options, check_target, kernel = arguments[3:]
    call = lambda *t: op(*t[:-1], *t[-1], check_target, kernel)  # noqa: E731
    return over_batch(call, arguments[:3], in_dims[:3], info.batch_size, LossOptions(*options))


def _vmap_backward(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    call = lambda *t: op_backward(*t[:-1], *t[-1])  # noqa: E731
    o = LossOptions(*arguments[7:])
    return over_batch(call, arguments[:7], in_dims[:7], info.batch_size, o)


register_vmap(f"{NAMESPACE}::cross_entropy", _vmap, lib=library)
register_vmap(f"{NAMESPACE}::cross_entropy_backward", _vmap_backward, lib=library)
