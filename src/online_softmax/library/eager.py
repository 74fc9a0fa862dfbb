"""The eager route where a gradient or a functorch transform is at work: `autograd.Function`s.

One for each direction, so that the backward is differentiable too. They are entered by the base
class's `apply` unless functorch is at work: `Function.apply` binds the signature in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from online_softmax.library.operations import OPERATIONS, Operation, in_front, over_batch
from online_softmax.library.private import functorch_active
from online_softmax.reference.ops import result_dtype


def _entry(function: type[Function]) -> Callable[..., Any]:
    base_apply = super(Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        return function.apply(*args) if functorch_active() else base_apply(*args)

    return apply


def _renamed(function: type[Function], name: str) -> type[Function]:
    """The name that a result's grad_fn shows."""
    for cls, suffix in ((function, ""), (function._backward_cls, "Backward")):  # type: ignore[attr-defined]
        cls.__name__ = cls.__qualname__ = f"{name}{suffix}"
    return function


def _backward_of(operation: Operation) -> type[Function]:
    class Backward(Function):  # (dy, *saved, options) -> dx
        @staticmethod
        def forward(*args: Any) -> Tensor:
            *tensors, options = args
            return operation.backward(*tensors, *options)

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
            return operation.backward_tangent(*ctx.saved_tensors, *tangents[:-1], ctx.options)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:  # type: ignore[override]
            *tensors, options = args
            batch = tuple(in_front(t, in_dims[i], info.batch_size) for i, t in enumerate(tensors))
            return over_batch(backward_entry[operation.name], batch, options), 0

    return _renamed(Backward, f"OnlineSoftmax_{operation.name}_backward")


def _forward_of(operation: Operation) -> type[Function]:
    backward = backward_entry[operation.name]

    class Forward(Function):  # (x, options, kernel) -> result, or (result, before rounding)
        @staticmethod
        def forward(x: Tensor, options: Any, kernel: str) -> Tensor | tuple[Tensor, ...]:
            return operation.recorded(x, options, kernel)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            x, ctx.options, _ = inputs
            outputs = (output,) if isinstance(output, Tensor) else output
            kept = operation.keep(x, outputs)
            ctx.save_for_backward(*kept)
            ctx.save_for_forward(*kept)
            ctx.x_dtype = x.dtype
            ctx.dtypes = tuple(each.dtype for each in outputs)
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
            given = [dy for dy in upstream if dy is not None]
            if not given:
                return None, None, None
            dy = given[0] if len(given) == 1 else given[0] + given[1]
            options = ctx.options._replace(dtype=result_dtype(ctx.x_dtype))
            return backward(dy, *ctx.saved_tensors, options), None, None

        @staticmethod
        def jvp(ctx: Any, x_tangent: Tensor, *_: None) -> Any:  # type: ignore[override]
            tangent = operation.tangent(*ctx.saved_tensors, x_tangent, ctx.options)
            tangents = tuple(tangent.to(dtype) for dtype in ctx.dtypes)
            return tangents if len(tangents) > 1 else tangents[0]

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor, options: Any, kernel: str) -> Any:  # type: ignore[override]
            entry = forward_entry[operation.name]
            batch = (x.movedim(in_dims[0], 0),)
            results = over_batch(lambda x, options: entry(x, options, kernel), batch, options)
            return results, 0 if isinstance(results, Tensor) else (0,) * len(results)

    return _renamed(Forward, f"OnlineSoftmax_{operation.name}")


backward_entry = {each.name: _entry(_backward_of(each)) for each in OPERATIONS}
forward_entry = {each.name: _entry(_forward_of(each)) for each in OPERATIONS}
