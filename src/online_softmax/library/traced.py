"""The ops that torch sees: schemas, fakes, autocast, vmap and a kernel at the Autograd key.

torch.compile traces these, and tensor subclasses and modes see them. Dynamo refuses an
`autograd.Function` that has a jvp; the ones here it never sees, as they stand below the op.
`register_autograd` is not used: the forward-mode tangents of such an op are silently zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_vmap

from online_softmax.catalogue import HALVES
from online_softmax.library.operations import (
    OPERATIONS,
    Operation,
    in_front,
    over_batch,
    tangent_by,
)
from online_softmax.library.private import (
    SingleLevelFunction,
    after_autograd,
    below_autograd,
    dispatch_key,
    dispatch_keys,
    dispatch_modes,
    function_mode_count,
    function_modes,
    without_keys,
)
from online_softmax.reference.ops import result_dtype

NAMESPACE = "online_softmax"
ops: dict[str, Any] = {}  # by name, backward ones too
library = Library(NAMESPACE, "DEF")
_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(x: Tensor, *more: Tensor) -> bool:
    """No subclass among these, and no mode, that must see the op."""
    if type(x) not in _PLAIN:
        return False
    for t in more:
        if type(t) not in _PLAIN:
            return False
    return not dispatch_modes() and not (function_mode_count() and function_modes())


def _define(operation: Operation) -> None:
    name, backward_name = operation.name, f"{operation.name}_backward"
    library.define(operation.schema)
    library.define(operation.backward_schema)
    ops[name] = getattr(torch.ops.online_softmax, name).default
    ops[backward_name] = getattr(torch.ops.online_softmax, backward_name).default

    def run(x: Tensor, *arguments: Any) -> Tensor:
        *options, kernel = arguments
        return operation.run(x, operation.options(*options), kernel)

    library.impl(name, run, "CompositeExplicitAutograd")
    library.impl(backward_name, operation.backward, "CompositeExplicitAutograd")
    # The fakes, as kernels of meta tensors, which fake ones are beneath: `register_fake` says the
    # same, and looks through the files of all modules that are loaded first, for 40 ms at import.
    library.impl(name, operation.fake, "Meta")
    library.impl(backward_name, operation.fake_backward, "Meta")


# ---- autograd


def _autograd(operation: Operation) -> None:
    op, op_backward = ops[operation.name], ops[f"{operation.name}_backward"]

    class OpBackward(SingleLevelFunction):  # (keys, dy, *saved, *options) -> dx
        @staticmethod
        def forward(keys: Any, *arguments: Any) -> Tensor:
            with below_autograd():
                return op_backward.redispatch(keys & after_autograd, *arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            count = len(inputs) - len(operation.options._fields)
            ctx.options = operation.options(*inputs[count:])
            ctx.save_for_backward(*inputs[1:count])
            ctx.save_for_forward(*inputs[1:count])

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            gradients = operation.gradients(*ctx.saved_tensors, g, ctx.options)
            return None, *gradients, *(None for _ in ctx.options)

        @staticmethod
        def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:  # type: ignore[override]
            saved = ctx.saved_tensors
            given = tangents[: len(saved)]
            return tangent_by(operation.backward_tangent, saved, *given, ctx.options)

    class OpForward(SingleLevelFunction):  # (keys, x, *options, kernel) -> result
        @staticmethod
        def forward(keys: Any, *arguments: Any) -> Tensor:
            with below_autograd():
                return op.redispatch(keys & after_autograd, *arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            _, x, *options, _ = inputs
            ctx.options, ctx.x_dtype = operation.options(*options), x.dtype
            kept = operation.keep(x, (output,))
            ctx.save_for_backward(*kept)
            ctx.save_for_forward(*kept)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            options = ctx.options._replace(dtype=result_dtype(ctx.x_dtype))
            dx = op_backward(dy, *ctx.saved_tensors, *options)
            return None, dx, *(None for _ in options), None

        @staticmethod
        def jvp(ctx: Any, _: None, x_tangent: Tensor, *__: None) -> Tensor:  # type: ignore[override]
            return tangent_by(operation.tangent, ctx.saved_tensors, x_tangent, ctx.options)

    for name, function in ((operation.name, OpForward), (f"{operation.name}_backward", OpBackward)):
        library.impl(name, function.apply, "Autograd", with_keyset=True)  # type: ignore[attr-defined, union-attr]


# ---- autocast


def autocast_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """float32 for half types, as torch's own list has it for CUDA, unless a dtype is asked for."""
    return torch.float32 if dtype is None and x.dtype in HALVES else dtype


def autocast_kernel(operation: Operation, device: str = "CUDA") -> Any:
    """The op under autocast: it reads the half input itself; no cast goes before."""
    op, own_key = ops[operation.name], getattr(dispatch_key, f"Autocast{device}")

    def kernel(_: Any, x: Tensor, *arguments: Any) -> Tensor:
        *given, name = arguments
        options = operation.options(*given)
        options = options._replace(dtype=autocast_dtype(x, options.dtype))
        with without_keys(dispatch_keys(own_key)):
            return op(x, *options, name)

    return kernel


# ---- vmap


def _vmap(operation: Operation) -> None:
    op, op_backward = ops[operation.name], ops[f"{operation.name}_backward"]

    def forward(info: Any, in_dims: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, int]:
        *options, kernel = arguments
        batch = (x.movedim(in_dims[0], 0),)
        call = lambda x, options: op(x, *options, kernel)  # noqa: E731
        return over_batch(call, batch, operation.options(*options)), 0

    def backward(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        count = len(arguments) - len(operation.options._fields)
        options = operation.options(*arguments[count:])
        batch = tuple(in_front(arguments[i], in_dims[i], info.batch_size) for i in range(count))
        return over_batch(lambda *t: op_backward(*t[:-1], *t[-1]), batch, options), 0

    register_vmap(f"{NAMESPACE}::{operation.name}", forward, lib=library)
    register_vmap(f"{NAMESPACE}::{operation.name}_backward", backward, lib=library)


for _operation in OPERATIONS:
    _define(_operation)
    _autograd(_operation)
    library.impl(_operation.name, autocast_kernel(_operation), "AutocastCUDA", with_keyset=True)
    _vmap(_operation)
