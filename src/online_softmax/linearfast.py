"""linear_cross_entropy with memory="fast": logits and gradients at once in the forward.

Tokens go in groups (`linearplan.fast_cut`). In a group logits are made chunk by chunk in float32
(float64), and replaced by their gradient while they are on chip; then each gradient takes one
product. Arguments as in linearops.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax import ceops, cereduce, linearplan
from online_softmax import linearparts as parts
from online_softmax.ceops import Options
from online_softmax.cereduce import Reduction
from online_softmax.reference.cross_entropy import Targets
from online_softmax.reference.ops import sum_dtype

Needs = tuple[bool, bool, bool]  # whether a gradient by input, linear_weight, linear_bias is wanted


def held_dtype(given: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Of a gradient by something of type `given`, between forward and backward: its own where a
    product gives that. Of float16 products sums are held: for a mean they may be too small for
    float16 before a loss scale arrives, for a sum too large."""
    wide = sum_dtype(dtype)
    return given if given in (dtype, wide) and dtype != torch.float16 else wide


def divides(reduction: str, dtype: torch.dtype) -> bool:
    """Whether `forward_with_gradient` takes the mean itself: the upstream gradient is 1 then."""
    return reduction == "mean" and dtype != torch.float16


def forward_with_gradient(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    o: Options,
    is_mean: bool,
    needs: Needs,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of all losses, or their mean, and its gradients: logits are made once.

    Returns:
        (loss, dx, dw, db): 0-dim in float32 (float64), and the gradients for an upstream of 1, of
        `held_dtype`, for `rescale`; without an element where not wanted.
    """
    classes = len(linear_weight)
    given = (x, linear_weight, x if linear_bias is None else linear_bias)
    held = [held_dtype(t.dtype, dtype) for t in given]
    cut = plan(x, classes, dtype, held[1] if needs[1] else sum_dtype(dtype))
    is_one = cut.group >= len(x)
    dx = torch.empty(x.shape if needs[0] else (0,), dtype=held[0], device=x.device)
    dw = _Sums(linear_weight.shape if needs[1] else (0,), held[1], is_one, x)
    db = _Sums((classes if needs[2] else 0,), held[2], is_one, x)
    x, w = parts.as_matrix(x, dtype), parts.as_matrix(linear_weight, dtype)
    rooms = _Rooms.of(cut, classes, dtype, x)
    losses = _Losses.of(rooms.logits, target, weight, classes, o, is_mean, kernel)
    for first, last in parts.pieces(len(x), cut.group):
        group = slice(first, last)
        dz = _gradient(group, cut.chunk, x, w, linear_bias, rooms, losses)
        if needs[0]:
            parts.put_product(dz, w, dx[group])
        if needs[1]:
            dw.put_product(dz.t(), x[group])
        if needs[2]:
            db.put(dz.sum(0, dtype=sum_dtype(dtype)))
        del dz
    del rooms  # before a sum is rounded
    return losses.reduced(), dx, dw.whole(), db.whole()


def _gradient(
    group: slice,
    chunk: int,
    x: Tensor,
    w: Tensor,
    linear_bias: Tensor | None,
    rooms: _Rooms,
    losses: _Losses,
) -> Tensor:
    """By the logits of a group of tokens; their losses into `losses`."""
    gradient = rooms.gradient[: group.stop - group.start]
    for start, end in parts.pieces(len(gradient), chunk):
        logits = rooms.logits[start:end] if rooms.is_shared else rooms.logits[: end - start]
        rows = slice(group.start + start, group.start + end)
        parts.logits_of(x[rows], w, linear_bias, logits)
        losses.put(rows, logits, gradient[start:end])
    return gradient


def plan(x: Tensor, classes: int, dtype: torch.dtype, held: torch.dtype) -> linearplan.Cut:
    """How the tokens are cut. held: the type in which the weight's gradient is; that of the
    sums if none is wanted."""
    sums = 0 if held == sum_dtype(dtype) else sum_dtype(dtype).itemsize
    tokens, features = x.shape
    return linearplan.fast_cut(tokens, features, classes, *parts.widths(dtype), sums)


def rescale(
    made: Tensor,
    dloss: Tensor,
    target: Tensor,
    classes: int,
    ignore_index: int,
    dtype: torch.dtype,
) -> Tensor:
    """A gradient of `forward_with_gradient` for a dloss (0-dim), in a dtype.

    0 where no row counts, whatever dloss is: of a mean over none it may be infinite.
    """
    counts = Targets.of(target, classes, ignore_index).counts.any()
    result = torch.empty(made.shape, dtype=dtype, device=made.device)
    parts.copy_times(made, torch.where(counts, dloss, 0.0), result)
    return result


def rescale_in_place(
    made: Tensor, dloss: Tensor, target: Tensor, classes: int, ignore_index: int
) -> Tensor:
    """`rescale` over made itself; where dloss is 1, on a GPU, it is neither read nor written."""
    counts = Targets.of(target, classes, ignore_index).counts.any()
    row, upstream = made.view(1, made.numel()), dloss.expand(1)
    place = counts.to(torch.int64).reshape(1) - 1  # a class of that row, or none
    if cereduce.takes_rescale(row, upstream):
        return cereduce.rescale_by_kernel(row, upstream, None, place, -1, True).view(made.shape)
    return cereduce.rescale(row, upstream, None, place, -1, True).view(made.shape)


class _Rooms(NamedTuple):
    """Memory of a chunk's logits and of the gradients by a group's, which may be the same."""

    logits: Tensor
    gradient: Tensor
    is_shared: bool

    @classmethod
    def of(cls, cut: linearplan.Cut, classes: int, dtype: torch.dtype, like: Tensor) -> _Rooms:
        tokens = len(like)
        gradient = parts.room(min(cut.group, tokens), classes, dtype, like)
        if dtype == sum_dtype(dtype):
            return cls(gradient, gradient, True)
        logits = parts.room(min(cut.chunk, tokens), classes, sum_dtype(dtype), like)
        return cls(logits, gradient, False)


class _Losses(NamedTuple):
    """The losses of all rows as they come, and what a mean divides by."""

    each: Tensor  # (tokens)
    dloss: Tensor  # 0-dim: the gradient by each row's loss
    total: Tensor | None  # 0-dim: the divisor of a mean
    target: Tensor
    weight: Tensor | None
    o: Options
    runs: ceops.Implementation

    @classmethod
    def of(
        cls,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        classes: int,
        o: Options,
        is_mean: bool,
        kernel: str,
    ) -> _Losses:
        each = torch.empty(len(target), dtype=logits.dtype, device=logits.device)
        dloss, total = torch.ones((), dtype=logits.dtype, device=logits.device), None
        if is_mean:
            total = cereduce.totals(target, weight, classes, o.ignore_index, logits.dtype)
            dloss = dloss / total
        runs = ceops.implementation(logits, o, kernel, True)
        return cls(each, dloss, total, target, weight, o, runs)

    def put(self, rows: slice, logits: Tensor, out: Tensor) -> None:
        """The losses of some rows, and the gradient by their logits into out."""
        args = (logits, self.target[rows], self.dloss, self.weight)
        found = self.runs.forward_with_gradient(*args, **self.o._asdict(), out=out)
        self.each[rows] = found[0]

    def reduced(self) -> Tensor:
        name = "sum" if self.total is None else "mean"
        return cereduce.reduce(self.each, self.total, Reduction(name, self.each.dtype))


class _Sums:
    """A gradient as a sum over groups: in float32 (float64), in its own type where there is one
    group."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, is_one: bool, like: Tensor
    ) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.sums = torch.empty(shape, dtype=dtype if is_one else wide, device=like.device)
        self.dtype, self.is_empty = dtype, True

    def put_product(self, a: Tensor, b: Tensor) -> None:
        """Add a @ b; the first is written, so that nothing need be zero before."""
        product = parts.put_product if self.is_empty else parts.add_product
        product(a, b, self.sums)
        self.is_empty = False

    def put(self, part: Tensor) -> None:
        """Add part."""
        self.sums.copy_(part) if self.is_empty else self.sums.add_(part)
        self.is_empty = False

    def whole(self) -> Tensor:
        """In the type in which it is held."""
        return (self.sums.zero_() if self.is_empty else self.sums).to(self.dtype)
