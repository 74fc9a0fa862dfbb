"""The ops of linear_cross_entropy that torch sees: schemas, fakes and a kernel at the Autograd key.

One route for eager and compiled calls: beside its products the cost of an op is nothing. The
backward ops are not differentiable, and there is no forward mode: each says so. `*_with_gradient`
keeps gradients for an upstream of 1, which `*_rescale` multiplies. Arguments are those of
`linearops` and `linearfast`, but target may have any shape, so that an error names the place in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from online_softmax import ceops, linearfast, linearops
from online_softmax.ceops import Options
from online_softmax.library.private import (
    SingleLevelFunction,
    after_autograd,
    below_autograd,
    keeps_graph,
)
from online_softmax.library.traced import library
from online_softmax.reference.ops import sum_dtype
from online_softmax.rowops import is_batch, with_values

NAME = "linear_cross_entropy"
INSTEAD = "cross_entropy(linear(input, linear_weight, linear_bias), target, ...) can"
NOT_TWICE = f"{NAME}(): has no second derivative (create_graph=True): {INSTEAD}"
NOT_FORWARD = f"{NAME}(): has no derivative in forward mode: {INSTEAD}"

_GIVEN = "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight"
_OPTIONS = (
    "ScalarType dtype, int ignore_index, float label_smoothing, float z_loss, float? softcap, "
    "float scale"
)
_GRADIENTS = "(Tensor, Tensor, Tensor)"
library.define(
    f"{NAME}({_GIVEN}, {_OPTIONS}, bool check_target, str kernel) -> (Tensor, Tensor, Tensor)"
)
library.define(
    f"{NAME}_backward(Tensor dloss, {_GIVEN}, Tensor lse, Tensor lse_rest, {_OPTIONS}, "
    f"bool[3] needs, str kernel) -> {_GRADIENTS}"
)
library.define(
    f"{NAME}_with_gradient({_GIVEN}, {_OPTIONS}, bool is_mean, bool check_target, bool[3] needs, "
    "str kernel) -> (Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    f"{NAME}_rescale(Tensor made, Tensor dloss, Tensor target, int classes, int ignore_index, "
    "ScalarType dtype) -> Tensor"
)
op = getattr(torch.ops.online_softmax, NAME).default
op_backward = getattr(torch.ops.online_softmax, f"{NAME}_backward").default
op_with_gradient = getattr(torch.ops.online_softmax, f"{NAME}_with_gradient").default
op_rescale = getattr(torch.ops.online_softmax, f"{NAME}_rescale").default


class LinearOptions(NamedTuple):
    """Options of the ops, in the order of their arguments."""

    dtype: torch.dtype  # of the products
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    scale: float

    @property
    def of_row(self) -> Options:
        return Options(*self[1:])


_COUNT = len(LinearOptions._fields)


# ---- what the ops compute


def _run(x: Tensor, w: Tensor, b: Any, target: Tensor, weight: Any, *rest: Any) -> Any:
    o, (check, kernel) = LinearOptions(*rest[:-2]), rest[-2:]
    _check_target(target, len(w), o, check)
    with _without_autocast(x):
        return linearops.forward(x, w, b, target.flatten(), weight, o.dtype, o.of_row, kernel)


def _run_backward(
    dloss: Tensor, x: Tensor, w: Tensor, b: Any, target: Tensor, weight: Any, *rest: Any
) -> Any:
    lse, lse_rest, *options, needs, kernel = rest
    o, given = LinearOptions(*options), (dloss, x, w, b, target.flatten(), weight)
    with _without_autocast(x):
        return linearops.backward(*given, lse, lse_rest, o.dtype, o.of_row, tuple(needs), kernel)


def _run_with_gradient(
    x: Tensor, w: Tensor, b: Any, target: Tensor, weight: Any, *rest: Any
) -> Any:
    *options, is_mean, check, needs, kernel = rest
    o, given = LinearOptions(*options), (x, w, b, target.flatten(), weight)
    _check_target(target, len(w), o, check)
    with _without_autocast(x):
        how = (o.dtype, o.of_row, is_mean, tuple(needs), kernel)
        return linearfast.forward_with_gradient(*given, *how)


def _without_autocast(x: Tensor) -> Any:
    """Types are as the op was asked: a product inside it must not have others."""
    return torch.autocast(x.device.type, enabled=False)


def _check_target(target: Tensor, classes: int, o: LinearOptions, check: bool) -> None:
    if check or target.device.type == "cpu":
        ceops.check_target(NAME, target, classes, o.ignore_index)


def _fake(x: Tensor, w: Tensor, b: Any, target: Any, weight: Any, dtype: Any, *_: Any) -> Any:
    return tuple(x.new_empty(x.shape[0], dtype=sum_dtype(dtype)) for _ in range(3))


def _fake_backward(dloss: Any, x: Tensor, w: Tensor, b: Tensor | None, *rest: Any) -> Any:
    return _fake_gradients(x, w, b, rest[-2])


def _fake_with_gradient(x: Tensor, w: Tensor, b: Any, target: Any, weight: Any, *rest: Any) -> Any:
    dtype = rest[0]
    return x.new_empty((), dtype=sum_dtype(dtype)), *_fake_gradients(x, w, b, rest[-2], dtype)


def _fake_gradients(
    x: Tensor, w: Tensor, b: Tensor | None, needs: Any, products: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """products: their type, where gradients are held for the backward."""
    given = (x, w, x if b is None else b)
    dtypes = [
        t.dtype if products is None else linearfast.held_dtype(t.dtype, products) for t in given
    ]
    return tuple(
        t.new_empty(t.shape if need else (0,), dtype=dtype)
        for t, need, dtype in zip(given, needs, dtypes, strict=True)
    )


def _fake_rescale(made: Tensor, *rest: Any) -> Tensor:
    return made.new_empty(made.shape, dtype=rest[-1])


for _suffix, _compute, _of_fakes in (
    ("", _run, _fake),
    ("_backward", _run_backward, _fake_backward),
    ("_with_gradient", _run_with_gradient, _fake_with_gradient),
    ("_rescale", linearfast.rescale, _fake_rescale),
):
    library.impl(f"{NAME}{_suffix}", _compute, "CompositeExplicitAutograd")
    library.impl(f"{NAME}{_suffix}", _of_fakes, "Meta")


# ---- autograd


class _Below(SingleLevelFunction):
    """What the four have in common: (keys, *arguments of the op)."""

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(NOT_FORWARD)


def _below(which: Any, keys: Any, arguments: Any) -> Any:
    with below_autograd():
        return which.redispatch(keys & after_autograd, *arguments)


class OpForward(_Below):
    @staticmethod
    def forward(keys: Any, *arguments: Any) -> Any:
        return _below(op, keys, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, *tensors = inputs[:6]
        ctx.options, ctx.kernel = inputs[6 : 6 + _COUNT], inputs[-1]
        _, lse, lse_rest = output
        ctx.mark_non_differentiable(lse, lse_rest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, lse, lse_rest)

    @staticmethod
    def backward(ctx: Any, dloss: Any, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs = ctx.needs_input_grad[1:4]
        found: tuple[Any, ...] = (None,) * 3
        if dloss is not None:
            found = op_backward(dloss, *ctx.saved_tensors, *ctx.options, needs, ctx.kernel)
        return None, *_wanted(found, needs), *(None,) * (4 + _COUNT)


class OpWithGradient(_Below):
    @staticmethod
    def forward(keys: Any, *arguments: Any) -> Any:
        return _below(op_with_gradient, keys, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, x, w, b, target = inputs[:5]
        _, *made = output
        ctx.dtypes = [x.dtype, w.dtype, x.dtype if b is None else b.dtype]
        ctx.classes, ctx.ignore_index, ctx.needs = len(w), inputs[7], inputs[-2]
        ctx.mark_non_differentiable(*made)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(target, *made)

    @staticmethod
    def backward(ctx: Any, dloss: Any, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():  # `dloss` may be a constant, and nothing would tell then
            raise RuntimeError(NOT_TWICE)
        target, *made = ctx.saved_tensors
        facts = (dloss, target, ctx.classes, ctx.ignore_index)
        found = [
            _rescaled(each, dtype, facts) if need and dloss is not None else None
            for each, dtype, need in zip(made, ctx.dtypes, ctx.needs, strict=True)
        ]
        return None, *found, *(None,) * (6 + _COUNT)


def _rescaled(made: Tensor, dtype: torch.dtype, facts: tuple[Any, ...]) -> Tensor:
    """Over `made` where it has the dtype and no other backward can ask for it."""
    is_plain = type(made) is Tensor and type(facts[0]) is Tensor and not is_batch(facts[0])
    if is_plain and made.dtype == dtype and not keeps_graph():
        return linearfast.rescale_in_place(made, with_values(facts[0]), *facts[1:])
    found: Tensor = op_rescale(made, *facts, dtype)
    return found


class OpBackward(_Below):
    @staticmethod
    def forward(keys: Any, *arguments: Any) -> Any:
        return _below(op_backward, keys, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(NOT_TWICE)


class OpRescale(OpBackward):
    @staticmethod
    def forward(keys: Any, *arguments: Any) -> Any:
        return _below(op_rescale, keys, arguments)


def _wanted(found: Any, needs: Any) -> list[Tensor | None]:
    return [t if need else None for t, need in zip(found, needs, strict=True)]


for _suffix, _function in (
    ("", OpForward),
    ("_backward", OpBackward),
    ("_with_gradient", OpWithGradient),
    ("_rescale", OpRescale),
):
    library.impl(f"{NAME}{_suffix}", _function.apply, "Autograd", with_keyset=True)  # type: ignore[attr-defined, union-attr]
