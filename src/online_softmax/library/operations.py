"""The row operations as records: what the generic machinery of the three routes reads.

An operation takes one tensor x; its backward takes dy and what was saved: the last result, and
before it x if `saves_input`. Both are functions of plain tensors, from rowops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from online_softmax import rowops
from online_softmax.library import calculus
from online_softmax.library.calculus import Along, Over
from online_softmax.library.private import set_forward_mode
from online_softmax.reference.ops import result_dtype, sum_dtype

Options = Along | Over


@dataclass(frozen=True)
class Operation:
    """One differentiable operation on rows.

    `recorded` is `run` where a gradient is recorded: it may give a second tensor, the result before
    rounding, for backward to start from.
    """

    name: str
    options: type[Along] | type[Over]
    arguments: str  # the options in the op's schema
    saved: str  # what backward takes beside dy, in its schema
    run: Callable[[Tensor, Any, str], Tensor]
    recorded: Callable[[Tensor, Any, str], Tensor | tuple[Tensor, ...]]
    backward: Callable[..., Tensor]  # (dy, *saved, *options)
    shape: Callable[[Tensor, Any], list[Any]]  # of the result
    tangent: Callable[..., Tensor]
    gradients: Callable[..., tuple[Tensor, ...]]
    backward_tangent: Callable[..., Tensor]
    saves_input: bool = False

    @property
    def schema(self) -> str:
        return f"{self.name}(Tensor x, {self.arguments}, str kernel) -> Tensor"

    @property
    def backward_schema(self) -> str:
        return f"{self.name}_backward(Tensor dy, {self.saved}, {self.arguments}) -> Tensor"

    def keep(self, x: Tensor, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What backward needs."""
        return (x, outputs[-1]) if self.saves_input else (outputs[-1],)

    def dtypes(self, x: Tensor, options: Options) -> tuple[torch.dtype, torch.dtype]:
        """Of the result, and of the result that backward starts from."""
        dtype = options.dtype or result_dtype(x.dtype)
        return dtype, sum_dtype(x.dtype, dtype) if self.saves_input else dtype

    def fake(self, x: Tensor, *arguments: Any) -> Tensor:
        """An empty tensor of the result's shape, dtype and strides."""
        options = self.options(*arguments[:-1])
        dtype = options.dtype or result_dtype(x.dtype)
        return x.new_empty(self.shape(x, options), dtype=dtype)

    def fake_backward(self, dy: Tensor, *arguments: Any) -> Tensor:
        like = arguments[0]  # x, or y of its shape
        options = self.options(*arguments[-len(self.options._fields) :])
        dtype = options.dtype or result_dtype(like.dtype)
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _along(name: str) -> Operation:
    def run(x: Tensor, options: Along, kernel: str) -> Tensor:
        return rowops.forward(name, x, *options, kernel)

    def backward(dy: Tensor, y: Tensor, *options: Any) -> Tensor:
        return rowops.backward(name, dy, y, *options)

    return Operation(
        name=name,
        options=Along,
        arguments="int dim, ScalarType? dtype, float scale, bool zero_empty",
        saved="Tensor y",
        run=run,
        recorded=run,
        backward=backward,
        shape=lambda x, options: list(x.shape),
        tangent=getattr(calculus, f"{name}_tangent"),
        gradients=getattr(calculus, f"{name}_gradients"),
        backward_tangent=getattr(calculus, f"{name}_backward_tangent"),
    )


def _logsumexp(x: Tensor, o: Over, kernel: str) -> Tensor:
    return rowops.logsumexp(x, tuple(o.dims), o.keepdim, o.dtype, o.scale, kernel)


def _logsumexp_recorded(x: Tensor, o: Over, kernel: str) -> Tensor | tuple[Tensor, ...]:
    dtype, saved_dtype = LOGSUMEXP.dtypes(x, o)
    if dtype == saved_dtype:  # nothing is rounded away
        return _logsumexp(x, o, kernel)
    return rowops.logsumexp_saving(x, tuple(o.dims), o.keepdim, o.dtype, o.scale, kernel)


def _logsumexp_shape(x: Tensor, o: Over) -> list[Any]:
    reduced = {dim % max(x.dim(), 1) for dim in o.dims}
    if o.keepdim:
        return [1 if dim in reduced else size for dim, size in enumerate(x.shape)]
    return [size for dim, size in enumerate(x.shape) if dim not in reduced]


SOFTMAX = _along("softmax")
LOG_SOFTMAX = _along("log_softmax")
LOGSUMEXP = Operation(
    name="logsumexp",
    options=Over,
    arguments="int[] dims, bool keepdim, ScalarType? dtype, float scale, bool zero_empty",
    saved="Tensor x, Tensor lse",
    run=_logsumexp,
    recorded=_logsumexp_recorded,
    backward=rowops.logsumexp_backward,
    shape=_logsumexp_shape,
    tangent=calculus.logsumexp_tangent,
    gradients=calculus.logsumexp_gradients,
    backward_tangent=calculus.logsumexp_backward_tangent,
    saves_input=True,
)
OPERATIONS = (SOFTMAX, LOG_SOFTMAX, LOGSUMEXP)


# ---- forward mode


def tangent_by(rule: Callable[..., Any], saved: tuple[Tensor | None, ...], *rest: Any) -> Any:
    """What a jvp gives, by a rule of calculus: right too where a jvp of this jvp is taken.

    torch turns forward mode off in a jvp, so that one of it would be zero. What was saved of the
    inputs still carries the tangents of this level, which the rule has as arguments already.
    """
    with set_forward_mode(True):
        return rule(*(t if t is None else forward_ad.unpack_dual(t).primal for t in saved), *rest)


# ---- batches


def in_front(x: Tensor, batch_dim: int | None, size: int) -> Tensor:
    """x with its batch dimension first; repeated if it has none."""
    return x.expand(size, *x.shape) if batch_dim is None else x.movedim(batch_dim, 0)


def over_batch(function: Callable[..., Any], tensors: tuple[Tensor, ...], options: Options) -> Any:
    """function(*tensors, options) for each example of a batch, whose dimension comes first."""
    if all(t.dim() == 1 for t in tensors):  # each example of each is a scalar
        results = function(*(t.unsqueeze(-1) for t in tensors), options.of_scalars())
        if isinstance(results, tuple):
            return tuple(result.squeeze(-1) for result in results)
        return results.squeeze(-1)
    return function(*tensors, options.in_batch())
