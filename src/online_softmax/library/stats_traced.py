"""The ops of token_stats that torch sees: schemas, fakes, vmap and a kernel at the Autograd key.

As loss_traced.py has it for cross-entropy. An op gives a fixed number of tensors: what was not
asked for has no element. Floats are float32 (float64), so autocast has nothing to change. A target
that is no class is no error in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import register_vmap

from online_softmax import statsops
from online_softmax.library import stats_calculus
from online_softmax.library.operations import in_front, tangent_by
from online_softmax.library.private import SingleLevelFunction, after_autograd, below_autograd
from online_softmax.library.traced import NAMESPACE, library
from online_softmax.reference.ops import result_dtype
from online_softmax.statskernels import Stats

NAME = "token_stats"
DIFFERENTIABLE = 3  # lse, entropy, log_prob: the first fields of Stats
_WHOLE = ("rank", "top_indices")  # int64

library.define(
    f"{NAME}(Tensor x, Tensor? target, SymInt top_k, float scale) -> "
    f"({', '.join(['Tensor'] * len(Stats._fields))})"
)
library.define(
    f"{NAME}_backward(Tensor? dlse, Tensor? dentropy, Tensor? dlog_prob, Tensor x, Tensor? target, "
    "Tensor entropy, Tensor state, float scale) -> Tensor"
)
op = torch.ops.online_softmax.token_stats.default
op_backward = torch.ops.online_softmax.token_stats_backward.default


def asked_for(stats: Any, target: Any, top_k: Any) -> list[Tensor | None]:
    """The fields of TokenStats, of what the op gives: None for what has no element on purpose."""
    lse, entropy, log_prob, rank, top_log_probs, top_indices, _ = stats
    of_target = (None, None) if target is None else (log_prob, rank)
    return [lse, entropy, *of_target, *((top_log_probs, top_indices) if top_k else (None, None))]


def _filled(stats: Stats) -> tuple[Tensor, ...]:
    """Tensors without elements in place of None."""
    return tuple(
        stats.lse.new_empty(0, dtype=torch.int64 if name in _WHOLE else None) if t is None else t
        for name, t in zip(Stats._fields, stats, strict=True)
    )


def _run(x: Tensor, target: Tensor | None, top_k: int, scale: float) -> tuple[Tensor, ...]:
    return _filled(statsops.forward(x, target, top_k, scale))


def _fake(x: Tensor, target: Tensor | None, top_k: int, scale: float) -> tuple[Tensor, ...]:
    return _filled(statsops.fake(x, target, top_k))


def _fake_backward(dlse: Any, dentropy: Any, dlog_prob: Any, x: Tensor, *_: Any) -> Tensor:
    dtype = result_dtype(x.dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


library.impl(NAME, _run, "CompositeExplicitAutograd")
library.impl(f"{NAME}_backward", statsops.backward, "CompositeExplicitAutograd")
library.impl(NAME, _fake, "Meta")
library.impl(f"{NAME}_backward", _fake_backward, "Meta")


# ---- autograd


class OpBackward(
    SingleLevelFunction
):  # (keys, dlse, dentropy, dlog_prob, x, target, entropy, state, scale) -> dx
    @staticmethod
    def forward(keys: Any, *arguments: Any) -> Tensor:
        with below_autograd():
            return op_backward.redispatch(keys & after_autograd, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors[:5])
        ctx.save_for_forward(*tensors[:5])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *upstream, x, target = ctx.saved_tensors
        found = stats_calculus.tangent(x, target, g, ctx.scale)
        pairs = zip(upstream, found, strict=True)
        by_upstream = [None if d is None or t is None else t.to(d.dtype) for d, t in pairs]
        by_x = stats_calculus.second(tuple(upstream), x, target, g, ctx.scale)
        # entropy and state have none: x has the whole derivative of them.
        return None, *by_upstream, by_x, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:  # type: ignore[override]
        rule, of = stats_calculus.backward_tangent, tangents[:DIFFERENTIABLE]
        return tangent_by(rule, ctx.saved_tensors, of, tangents[DIFFERENTIABLE], ctx.scale)


class OpForward(SingleLevelFunction):  # (keys, x, target, top_k, scale) -> the fields of Stats
    @staticmethod
    def forward(keys: Any, *arguments: Any) -> Any:
        with below_autograd():
            return op.redispatch(keys & after_autograd, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, x, target, _, ctx.scale = inputs
        stats = Stats(*output)
        ctx.mark_non_differentiable(*output[DIFFERENTIABLE if target is not None else 2 :])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, target, stats.entropy, stats.state)
        ctx.save_for_forward(x, target)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        given = upstream[:DIFFERENTIABLE]
        if all(g is None for g in given):
            return (None,) * 5
        return None, op_backward(*given, *ctx.saved_tensors, ctx.scale), None, None, None

    @staticmethod
    def jvp(ctx: Any, _: None, x_tangent: Tensor, *__: None) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors[:2]
        found = tangent_by(stats_calculus.tangent, saved, x_tangent, ctx.scale)
        return *found, *(None for _ in Stats._fields[DIFFERENTIABLE:])


for _name, _function in ((NAME, OpForward), (f"{NAME}_backward", OpBackward)):
    library.impl(_name, _function.apply, "Autograd", with_keyset=True)  # type: ignore[attr-defined, union-attr]


# ---- batches


def _vmap(
    info: Any, in_dims: Any, x: Tensor, target: Tensor | None, top_k: int, scale: float
) -> tuple[Any, Any]:
    pairs = zip((x, target), in_dims[:2], strict=True)
    moved = [None if t is None else in_front(t, d, info.batch_size) for t, d in pairs]
    results = op(*moved, top_k, scale)
    are_there = [t is not None for t in (*asked_for(results, target, top_k), results[-1])]
    return results, tuple(0 if there else None for there in are_there)


def _vmap_backward(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
    *tensors, scale = arguments
    pairs = zip(tensors, in_dims[:-1], strict=True)
    moved = [None if t is None else in_front(t, d, info.batch_size) for t, d in pairs]
    return op_backward(*moved, scale), 0


register_vmap(f"{NAMESPACE}::{NAME}", _vmap, lib=library)
register_vmap(f"{NAMESPACE}::{NAME}_backward", _vmap_backward, lib=library)
