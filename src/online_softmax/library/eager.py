"""The eager route where a gradient or a functorch transform is at work: `autograd.Function`s.

Transforms enter it for tensors of every kind, since an op's Autograd kernel knows nothing of their
levels; at the bottom, below all levels, the op runs where a subclass or a mode must see it.

One for each direction, so that the backward is differentiable too, and for the forward one more, in
the older form without `setup_context`, which costs 3 us less a call on the host but knows neither
transforms nor forward mode. All are entered by the base class's `apply` unless functorch is at
work: `Function.apply` binds the signature in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from online_softmax.library import traced
from online_softmax.library.operations import (
    OPERATIONS,
    Operation,
    in_front,
    over_batch,
    tangent_by,
)
from online_softmax.library.private import functorch_active, is_forward_mode
from online_softmax.reference.ops import result_dtype

Entry = Callable[..., Any]


def base_apply(function: type[Function]) -> Entry:
    return super(Function, function).apply  # type: ignore[misc]


def renamed(function: type[Function], name: str) -> type[Function]:
    """The name that a result's grad_fn shows."""
    for cls, suffix in ((function, ""), (function._backward_cls, "Backward")):  # type: ignore[attr-defined]
        cls.__name__ = cls.__qualname__ = f"{name}{suffix}"
    return function


# ---- below autograd and all transforms


def _forward(operation: Operation, x: Tensor, options: Any, kernel: str) -> Any:
    """The result; or it, and before rounding, as `Operation.recorded`."""
    if traced.is_plain(x):
        return operation.recorded(x, options, kernel)
    dtype, saved_dtype = operation.dtypes(x, options)
    saved = traced.ops[operation.name](x, *options._replace(dtype=saved_dtype), kernel)
    return saved if dtype == saved_dtype else (saved.to(dtype), saved)


def _backward(operation: Operation, *args: Any) -> Tensor:
    *tensors, options = args
    if traced.is_plain(*tensors):
        return operation.backward(*tensors, *options)
    return traced.ops[f"{operation.name}_backward"](*tensors, *options)


# ---- with autograd


def _backward_entry(operation: Operation) -> Entry:
    class Backward(Function):  # (dy, *saved, options) -> dx
        @staticmethod
        def forward(*args: Any) -> Tensor:
            return _backward(operation, *args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            *tensors, ctx.options = inputs
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            return *operation.gradients(*ctx.saved_tensors, g, ctx.options), None

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:  # type: ignore[override]
            rule, saved = operation.backward_tangent, ctx.saved_tensors
            return tangent_by(rule, saved, *tangents[:-1], ctx.options)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:  # type: ignore[override]
            *tensors, options = args
            batch = tuple(in_front(t, in_dims[i], info.batch_size) for i, t in enumerate(tensors))
            return over_batch(entry, batch, options), 0

    renamed(Backward, f"OnlineSoftmax_{operation.name}_backward")
    recorded_apply = base_apply(Backward)

    def entry(*args: Any) -> Tensor:
        if functorch_active():
            return Backward.apply(*args)
        if torch.is_grad_enabled() or is_forward_mode():
            return recorded_apply(*args)
        return _backward(operation, *args)  # an ordinary backward pass: nothing is recorded

    return entry


def _forward_entry(operation: Operation, backward: Entry) -> Entry:
    def remember(ctx: Any, x: Tensor, options: Any, output: Any) -> tuple[Tensor, ...]:
        outputs = (output,) if isinstance(output, Tensor) else output
        kept = operation.keep(x, outputs)
        ctx.save_for_backward(*kept)
        ctx.options, ctx.x_dtype = options, x.dtype
        if len(outputs) > 1:
            ctx.set_materialize_grads(False)
        return outputs

    def go_back(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [dy for dy in upstream if dy is not None]
        if not given:
            return None, None, None
        dy = given[0] if len(given) == 1 else given[0] + given[1]
        options = ctx.options._replace(dtype=result_dtype(ctx.x_dtype))
        return backward(dy, *ctx.saved_tensors, options), None, None

    class Forward(Function):  # (x, options, kernel) -> result, or (result, before rounding)
        @staticmethod
        def forward(x: Tensor, options: Any, kernel: str) -> Any:
            return _forward(operation, x, options, kernel)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = remember(ctx, inputs[0], inputs[1], output)
            ctx.save_for_forward(*operation.keep(inputs[0], outputs))
            ctx.dtypes = tuple(each.dtype for each in outputs)

        backward = staticmethod(go_back)

        @staticmethod
        def jvp(ctx: Any, x_tangent: Tensor, *_: None) -> Any:  # type: ignore[override]
            rule, saved = operation.tangent, ctx.saved_tensors
            tangent = tangent_by(rule, saved, x_tangent, ctx.options)
            tangents = tuple(tangent.to(dtype) for dtype in ctx.dtypes)
            return tangents if len(tangents) > 1 else tangents[0]

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor, options: Any, kernel: str) -> Any:  # type: ignore[override]
            batch = (x.movedim(in_dims[0], 0),)
            call = lambda x, options: Forward.apply(x, options, kernel)  # noqa: E731
            results = over_batch(call, batch, options)
            return results, 0 if isinstance(results, Tensor) else (0,) * len(results)

    class Recorded(Function):  # the same, for reverse mode alone
        @staticmethod
        def forward(ctx: Any, x: Tensor, options: Any, kernel: str) -> Any:
            output = operation.recorded(x, options, kernel)
            remember(ctx, x, options, output)
            return output

        backward = staticmethod(go_back)

    name = f"OnlineSoftmax_{operation.name}"
    forward_apply = base_apply(renamed(Forward, name))
    recorded_apply = base_apply(renamed(Recorded, name))

    def entry(*args: Any) -> Any:
        if functorch_active():
            return Forward.apply(*args)
        return (forward_apply if is_forward_mode() else recorded_apply)(*args)

    return entry


backward_entry = {each.name: _backward_entry(each) for each in OPERATIONS}
forward_entry = {each.name: _forward_entry(each, backward_entry[each.name]) for each in OPERATIONS}
