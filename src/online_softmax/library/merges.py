"""Merging as torch sees it: states, or pairs (out, lse), of several parts in one.

- eager on plain CUDA tensors that have kernels: these, and an `autograd.Function` for a gradient;
- torch.compile, on CUDA tensors: the registered op, which runs the same kernels;
- all else (the CPU, float64, subclasses and modes, functorch's transforms, forward mode): the
  reference, in torch operations, which are differentiable in every way.

The second derivative is torch's, of the gradient's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import register_vmap

from online_softmax import mergekernels
from online_softmax.library.eager import base_apply, renamed
from online_softmax.library.loss_eager import are_plain
from online_softmax.library.operations import in_front
from online_softmax.library.private import (
    SingleLevelFunction,
    after_autograd,
    below_autograd,
    functorch_active,
    is_forward_mode,
)
from online_softmax.library.second import pulled_back
from online_softmax.library.traced import NAMESPACE, library
from online_softmax.reference import parts as reference
from online_softmax.reference.online import State
from online_softmax.reference.outputs import OutputState
from online_softmax.reference.parts import Merged, Parts
from online_softmax.rowops import is_batch, with_values

Upstream = Sequence[Tensor | None]

library.define("merge(Tensor[] m, Tensor[] d, Tensor[] o, str base) -> (Tensor, Tensor, Tensor)")
library.define(
    "merge_backward(Tensor? dm, Tensor? dd, Tensor? do, Tensor[] m, Tensor[] d, Tensor[] o, "
    "str base) -> (Tensor, Tensor, Tensor)"
)
op = torch.ops.online_softmax.merge.default
op_backward = torch.ops.online_softmax.merge_backward.default


def _run(*lists: Any) -> tuple[Tensor, ...]:
    parts = Parts(*lists).each(with_values)
    if mergekernels.takes(parts):
        return mergekernels.forward(parts)
    return tuple(t.contiguous() for t in reference.forward(parts))


def _run_backward(dm: Any, dd: Any, do: Any, *lists: Any) -> tuple[Tensor, ...]:
    parts = Parts(*lists).each(with_values)
    dm, dd, do = (None if g is None else with_values(g) for g in (dm, dd, do))
    if mergekernels.takes(parts):
        return mergekernels.backward(dm, dd, do, parts)
    return tuple(t.contiguous() for t in reference.backward(dm, dd, do, parts))


def _fake(ms: Any, ds: Any, os: Any, base: str) -> tuple[Tensor, ...]:
    return _like(ms, ds, os, base, ())


def _fake_backward(dm: Any, dd: Any, do: Any, ms: Any, ds: Any, os: Any, base: str) -> Any:
    return _like(ms, ds, os, base, (len(ms),))


def _like(ms: Any, ds: Any, os: Any, base: str, first: tuple[int, ...]) -> tuple[Tensor, ...]:
    none = ms[0].new_empty(0)
    return tuple(
        each[0].new_empty((*first, *each[0].shape)) if each else none for each in (ms, ds, os)
    )


library.impl("merge", _run, "CompositeExplicitAutograd")
library.impl("merge_backward", _run_backward, "CompositeExplicitAutograd")
library.impl("merge", _fake, "Meta")
library.impl("merge_backward", _fake_backward, "Meta")


# ---- flat: an autograd.Function sees tensors that are arguments of their own


def _flat(parts: Parts) -> tuple[Tensor, ...]:
    return *parts.ms, *parts.ds, *parts.os


def _parts(count: int, base: str, tensors: Sequence[Tensor]) -> Parts:
    """Of flat ones again; count: of parts."""
    lists = [tensors[at : at + count] for at in range(0, len(tensors), count)]
    ds = [] if base else lists.pop(1)
    return Parts(lists[0], ds, lists[1] if len(lists) > 1 else [], base)


def _split(found: Merged) -> list[Tensor]:
    """What is stacked of all parts, as `_flat` has the parts."""
    return [each for t in found if t.numel() or t.dim() > 1 for each in t.unbind()]


# ---- autograd


class OpBackward(SingleLevelFunction):  # (keys, count, base, dm, dd, do, *flat) -> Merged, stacked
    @staticmethod
    def forward(keys: Any, count: int, base: str, *tensors: Any) -> Any:
        parts = _parts(count, base, tensors[3:])
        with below_autograd():
            return op_backward.redispatch(keys & after_autograd, *tensors[:3], *parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.count, ctx.base, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved: Sequence[Tensor | None] = ctx.saved_tensors
        at = [i for i, t in enumerate(saved) if t is not None]

        def formula(*floats: Tensor) -> Sequence[Tensor]:
            whole: list[Any] = [None] * len(saved)
            for i, t in zip(at, floats, strict=True):
                whole[i] = t
            dm, dd, do, *flat = whole
            return reference.backward(dm, dd, do, _parts(ctx.count, ctx.base, flat))

        result: list[Tensor | None] = [None] * len(saved)
        floats = [t for t in saved if t is not None]
        for i, gradient in zip(at, pulled_back(formula, floats, g), strict=True):
            result[i] = gradient
        return None, None, None, *result


class OpForward(SingleLevelFunction):  # (keys, count, base, *flat) -> Merged
    @staticmethod
    def forward(keys: Any, count: int, base: str, *tensors: Tensor) -> Any:
        with below_autograd():
            return op.redispatch(keys & after_autograd, *_parts(count, base, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.count, ctx.base, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, None, *_go_back(ctx, op_backward, above)


def _go_back(ctx: Any, back: Callable[..., Any], above: Upstream) -> Sequence[Tensor | None]:
    tensors = ctx.saved_tensors
    if all(g is None for g in above):
        return [None] * len(tensors)
    parts = _parts(ctx.count, ctx.base, tensors)
    dm, dd, do = (g if each else None for g, each in zip(above, parts[:3], strict=True))
    return _split(Merged(*back(dm, dd, do, *parts)))


def _forward_of_op(keys: Any, ms: Any, ds: Any, os: Any, base: str) -> Any:
    return OpForward.apply(keys, len(ms), base, *ms, *ds, *os)  # type: ignore[attr-defined]


def _backward_of_op(
    keys: Any, dm: Any, dd: Any, do: Any, ms: Any, ds: Any, os: Any, base: str
) -> Any:
    return OpBackward.apply(keys, len(ms), base, dm, dd, do, *ms, *ds, *os)  # type: ignore[attr-defined]


library.impl("merge", _forward_of_op, "Autograd", with_keyset=True)
library.impl("merge_backward", _backward_of_op, "Autograd", with_keyset=True)


def _by_formula(dm: Any, dd: Any, do: Any, *lists: Any) -> Merged:
    return reference.backward(dm, dd, do, Parts(*lists))


class Recorded(Function):  # (count, base, *flat) -> Merged; eager, by the kernels
    @staticmethod
    def forward(ctx: Any, count: int, base: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.count, ctx.base = count, base
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(mergekernels.forward(_parts(count, base, tensors).each(with_values)))

    @staticmethod
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        is_seen = torch.is_grad_enabled() or functorch_active() or is_forward_mode()
        back: Any = op_backward if is_seen or not are_plain(*above) else _run_backward
        if is_batch(*above):  # which no op with lists of tensors knows
            back = _by_formula
        return None, None, *_go_back(ctx, back, above)


_recorded = base_apply(renamed(Recorded, "OnlineSoftmax_merge"))


# ---- batches


def _moved(info: Any, tensors: Any, in_dims: Any) -> list[Any]:
    return [
        t if t is None else in_front(t, d, info.batch_size)
        for t, d in zip(tensors, in_dims, strict=True)
    ]


def _vmap(info: Any, in_dims: Any, ms: Any, ds: Any, os: Any, base: str) -> Any:
    lists = [_moved(info, *each) for each in zip((ms, ds, os), in_dims[:3], strict=True)]
    return op(*lists, base), tuple(0 if each else None for each in lists)


def _vmap_backward(info: Any, in_dims: Any, *arguments: Any) -> Any:
    *given, base = arguments
    above = _moved(info, given[:3], in_dims[:3])
    lists = [_moved(info, *each) for each in zip(given[3:], in_dims[3:6], strict=True)]
    return op_backward(*above, *lists, base), tuple(1 if each else None for each in lists)


register_vmap(f"{NAMESPACE}::merge", _vmap, lib=library)
register_vmap(f"{NAMESPACE}::merge_backward", _vmap_backward, lib=library)


# ---- the way in


def merge(parts: Parts) -> Merged:
    """The whole, of parts that are of one shape, dtype and device, of any kind of tensor."""
    flat, first = _flat(parts), parts.ms[0]
    if torch.compiler.is_compiling():
        is_ours = first.is_cuda and first.dtype == torch.float32 and len(parts.ms) > 1
        return Merged(*op(*parts)) if is_ours else reference.forward(parts)
    if functorch_active() or is_forward_mode() or not are_plain(*flat):
        return reference.forward(parts)
    if not mergekernels.takes(parts):
        return _in_groups(parts)
    if torch.is_grad_enabled() and any(t.requires_grad for t in flat):
        return Merged(*_recorded(len(parts.ms), parts.base, *flat))
    return mergekernels.forward(parts.each(with_values))


def _in_groups(parts: Parts) -> Merged:
    """The reference; of states that are more than a launch takes, groups first."""
    most, count = mergekernels.MOST_PARTS, len(parts.ms)
    if parts.base or count <= most or not mergekernels.takes(parts.some(slice(most))):
        return reference.forward(parts)
    groups = [merge(parts.some(slice(at, at + most))) for at in range(0, count, most)]
    ms, ds, os = zip(*groups, strict=True)
    return merge(Parts(ms, ds, os if parts.os else [], ""))


def merge_states(states: Sequence[State | OutputState]) -> State | OutputState:
    """Of one kind, shape, dtype and device."""
    ms, ds, *os = (list(each) for each in zip(*states, strict=True))
    found = merge(Parts(ms, ds, os[0] if os else [], ""))
    return OutputState(*found) if os else State(found.m, found.d)


def merge_pairs(pairs: Sequence[tuple[Tensor, Tensor]], base: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of one shape, dtypes and device."""
    outs, lses = (list(each) for each in zip(*pairs, strict=True))
    found = merge(Parts(lses, [], outs, base))
    return found.o, found.m
