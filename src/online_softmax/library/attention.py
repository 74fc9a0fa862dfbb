"""Attention as torch sees it: two ops, and what is eager of them. attention_routes is the way in.

As traced.py and eager.py have it for the row operations. The second derivative is that of the
reference. There is no forward mode: it is an error, never a wrong number. vmap runs an example at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from online_softmax import attentionops, keptcalls
from online_softmax.attentionops import TENSORS, Made, Tensors
from online_softmax.attentionplan import Options
from online_softmax.library import attention_second
from online_softmax.library.eager import base_apply, renamed
from online_softmax.library.loss_eager import are_plain
from online_softmax.library.private import (
    SingleLevelFunction,
    after_autograd,
    below_autograd,
    functorch_active,
)
from online_softmax.library.traced import library

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # out, lse, m, d

_COUNT, _OPTIONS = len(TENSORS), len(Options._fields)
_SCHEMA = ", ".join(["Tensor q, Tensor k, Tensor v", *(f"Tensor? {name}" for name in TENSORS[3:])])
_OPTIONS_SCHEMA = (
    "SymInt max_q, SymInt max_k, float? scale, SymInt left, SymInt right, bool top_left, "
    "float? softcap, bool nan_empty"
)
library.define(
    f"attention({_SCHEMA}, {_OPTIONS_SCHEMA}, bool with_state, str kernel) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, {_SCHEMA}, Tensor out, Tensor lse, "
    f"{_OPTIONS_SCHEMA}, bool[] wanted, str kernel) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
op = torch.ops.online_softmax.attention.default
op_backward = torch.ops.online_softmax.attention_backward.default


def _run(*arguments: Any) -> Results:
    *options, with_state, kernel = arguments[_COUNT:]
    made = attentionops.forward(arguments[:_COUNT], Options(*options), with_state, kernel)
    return _filled(made)


def _filled(made: Made) -> Results:
    return attentionops.filled(made, made[1])  # type: ignore[arg-type, return-value]


def _run_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    tensors, (out, lse, *options, wanted, kernel) = arguments[:_COUNT], arguments[_COUNT:]
    o = Options(*options)
    found = attentionops.backward(dout, dlse, tensors, out, lse, o, wanted, kernel)
    return attentionops.filled(found, dout)


def _fake(*arguments: Any) -> Results:
    *options, with_state, _ = arguments[_COUNT:]
    return attentionops.fake(arguments[:_COUNT], Options(*options), with_state)


def _fake_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    return attentionops.fake_backward(arguments[:_COUNT], arguments[-2])


library.impl("attention", _run, "CompositeExplicitAutograd")
library.impl("attention_backward", _run_backward, "CompositeExplicitAutograd")
library.impl("attention", _fake, "Meta")
library.impl("attention_backward", _fake_backward, "Meta")


# ---- autograd, for both routes


def _keep(
    ctx: Any, tensors: Tensors, output: Made, o: Options, with_state: bool, kernel: str
) -> None:
    """What backward needs of a forward."""
    out, lse, m, d = output
    if m is not None:
        # A state's maximum is where it was put: output, lse and merges do not depend on it.
        ctx.mark_non_differentiable(*((m,) if with_state else (m, d)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse, d)
    ctx.options, ctx.kernel = o, kernel


def _go_back(
    ctx: Any,
    entry: Callable[..., Made],
    needed: Sequence[bool],
    dout: Tensor | None,
    dlse: Tensor | None,
    dd: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """By each of the eight tensors; needed: which of them."""
    *tensors, out, lse, d = ctx.saved_tensors
    if dout is None and dlse is None and dd is None:
        return (None,) * _COUNT
    if dd is not None:  # d = exp(lse - m), and m is a constant
        dlse = dd * d if dlse is None else dlse + dd * d
    dout = torch.zeros_like(out) if dout is None else dout
    places = attention_second.FLOATS
    wanted = [tensors[at] is not None and bool(needed[at]) for at in places]
    found = entry(dout, dlse, *tensors, out, lse, ctx.options, wanted, ctx.kernel)
    result: list[Tensor | None] = [None] * _COUNT
    for at, gradient, is_wanted in zip(places, found, wanted, strict=True):
        result[at] = gradient if is_wanted else None
    return tuple(result)


def _keep_backward(ctx: Any, tensors: Sequence[Tensor | None], o: Options) -> None:
    """What the second derivative needs of a backward: of (dout, dlse, *tensors, out, lse)."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors[: 2 + _COUNT])
    ctx.options = o


def _go_back_again(ctx: Any, given: Sequence[Tensor | None]) -> list[Tensor | None]:
    """By (dout, dlse, *tensors, out, lse)."""
    dout, dlse, *tensors = ctx.saved_tensors
    found = attention_second.gradients(dout, dlse, tensors, ctx.options, given)
    return [*found, None, None]


# ---- traced: below the op


def _op_entry(*arguments: Any) -> tuple[Tensor, ...]:
    *before, o, wanted, kernel = arguments
    return op_backward(*before, *o, wanted, kernel)


class OpBackward(SingleLevelFunction):  # (keys, dout, dlse, *tensors, out, lse, *options, ...)
    @staticmethod
    def forward(keys: Any, *arguments: Any) -> Any:
        with below_autograd():
            return op_backward.redispatch(keys & after_autograd, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, *tensors = inputs
        _keep_backward(ctx, tensors, Options(*tensors[4 + _COUNT :][:_OPTIONS]))

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *_go_back_again(ctx, given), *(None,) * (_OPTIONS + 2)


class OpForward(SingleLevelFunction):  # (keys, *tensors, *options, with_state, kernel)
    @staticmethod
    def forward(keys: Any, *arguments: Any) -> Any:
        with below_autograd():
            return op.redispatch(keys & after_autograd, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        _, *arguments = inputs
        *options, with_state, kernel = arguments[_COUNT:]
        _keep(ctx, arguments[:_COUNT], output, Options(*options), with_state, kernel)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, dm: Any, dd: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needed = ctx.needs_input_grad[1:]
        found = _go_back(ctx, _op_entry, needed, dout, dlse, dd)
        return None, *found, *(None,) * (_OPTIONS + 2)


for _name, _function in (("attention", OpForward), ("attention_backward", OpBackward)):
    library.impl(_name, _function.apply, "Autograd", with_keyset=True)  # type: ignore[attr-defined, union-attr]


# ---- eager


def _forward(*arguments: Any) -> Results:
    *tensors, o, with_state, kernel = arguments
    if are_plain(*tensors):
        return _filled(attentionops.forward(tensors, o, with_state, kernel))
    return op(*tensors, *o, with_state, kernel)


def _backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> Made:
    *tensors, out, lse, o, wanted, kernel = arguments
    if are_plain(dout, dlse, *tensors, out, lse):
        return attentionops.backward(dout, dlse, tensors, out, lse, o, wanted, kernel)
    return op_backward(dout, dlse, *tensors, out, lse, *o, wanted, kernel)


def _each_example(
    call: Callable[..., tuple[Tensor, ...]], info: Any, in_dims: Any, arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
    examples = [
        call(
            *(
                t.select(d, at) if isinstance(t, Tensor) and isinstance(d, int) else t
                for t, d in zip(arguments, in_dims, strict=True)
            )
        )
        for at in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(each) for each in zip(*examples, strict=True))
    return stacked, (0,) * len(stacked)


class Backward(Function):  # (dout, dlse, *tensors, out, lse, options, wanted, kernel)
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return attentionops.filled(_backward(*arguments), arguments[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _keep_backward(ctx, inputs, inputs[-3])

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_go_back_again(ctx, given), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:  # type: ignore[override]
        def call(*each: Any) -> Any:
            return attentionops.filled(_enter_backward(*each), each[0])

        return _each_example(call, info, in_dims, arguments)


_apply_backward = base_apply(renamed(Backward, "OnlineSoftmax_attention_backward"))


def _enter_backward(*arguments: Any) -> Made:
    if functorch_active():
        return Backward.apply(*arguments)
    if torch.is_grad_enabled():
        return _apply_backward(*arguments)
    return _backward(*arguments)


class Forward(Function):  # (*tensors, options, with_state, kernel, known) -> (out, lse, m, d)
    """known: a call like one before, or None; with it, m and d may be None."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        *rest, known = arguments
        made = None if known is None else keptcalls.start(known)
        return _forward(*rest) if made is None else made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
        *tensors, o, with_state, kernel, _ = inputs
        _keep(ctx, tensors, output, o, with_state, kernel)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, dm: Any, dd: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found = _go_back(ctx, _enter_backward, ctx.needs_input_grad, dout, dlse, dd)
        return *found, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:  # type: ignore[override]
        return _each_example(Forward.apply, info, in_dims, arguments)


apply_forward = base_apply(renamed(Forward, "OnlineSoftmax_attention"))
