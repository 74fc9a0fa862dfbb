"""The losses of all rows in one, on plain tensors: what cross_entropy gives, and its gradient.

The rows' own functions are in ceops.py, and so is which implementation runs them. On a device with
kernels a call is a few launches in a row, nothing between them: see notedcalls.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from online_softmax import ceops, cereduce, keptcalls, notedcalls
from online_softmax.ceops import Options
from online_softmax.cereduce import Reduction
from online_softmax.keptcalls import Known
from online_softmax.reference.ops import sum_dtype
from online_softmax.rowops import is_batch, with_values

REDUCED = "cross_entropy"  # what `reduced` is called among the calls that are kept


class Reduced(NamedTuple):
    """A loss as it was asked for, and what its gradient needs."""

    loss: Tensor  # 0-dim, or of target's shape; in the dtype that was asked for
    lse: Tensor  # target's shape
    kept: Tensor  # what rounding took from lse; or the gradient by x, of its shape
    total: Tensor | None  # 0-dim, of lse's dtype: what the gradient is still to be divided by


def find(
    x: Tensor, target: Tensor, weight: Tensor | None, dim: int, o: Any, r: tuple[Any, Any]
) -> Known | None:
    """A call of `reduced` like one that is kept, without `check` and by the planned kernel.

    Args:
        dim: counts as it did there.
        o, r: equal to the options and the reduction there.
    """
    return keptcalls.find(REDUCED, (dim, o, r, ""), (x, target, weight))


def again(known: Known, target: Tensor, is_mean: bool) -> Reduced | None:
    """What `reduced` gives, by what `find` has found; None: it is to go the whole way."""
    made = keptcalls.start(known)
    return None if made is None else _of(made, target, is_mean)


def _of(made: tuple[Tensor, ...], target: Tensor, is_mean: bool) -> Reduced:
    loss, total, lse, rest = made
    lse, rest = ceops.shaped(lse, target), ceops.shaped(rest, target)
    return Reduced(loss, lse, rest, total if is_mean else None)


def reduced(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    dim: int,
    o: Options,
    r: Reduction,
    check: bool,
    kernel: str,
) -> Reduced:
    """`forward`, and the losses reduced."""
    if r.name == "none" or not cereduce.takes(x, kernel) or sum_dtype(x.dtype) != torch.float32:
        loss, lse, rest = ceops.forward(x, target, weight, dim, o, check, kernel)
        total = None
        if r.name == "mean":
            total = cereduce.totals(target, weight, x.shape[dim], o.ignore_index, lse.dtype)
        return Reduced(cereduce.reduce(loss, total, r), lse, rest, total)
    ceops.check_if_asked(target, x.shape[dim], o, check)

    def call() -> tuple[Tensor, ...]:
        rows, flat = ceops.as_rows(x, dim), target.reshape(-1)
        rest = notedcalls.empty(flat.shape, torch.float32, x.device)
        runs = ceops.implementation(rows, o, kernel)
        loss, lse = runs.forward(rows, flat, weight, **o._asdict(), lse_rest=rest)
        about = (flat, weight, x.shape[dim], o.ignore_index, r)
        return *cereduce.by_kernel(loss, *about), lse, rest

    found = ceops.repeated(REDUCED, (dim, o, r, kernel), (x, target, weight), call)
    return _of(found, target, r.name == "mean")


def reduced_with_gradient(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    dim: int,
    o: Options,
    r: Reduction,
    check: bool,
    kernel: str,
    overwrite: bool,
) -> Reduced:
    """`reduced`, and the gradient by x for an upstream of 1, still to be divided by `total`.

    overwrite: write the gradient over x, which is given back as `kept`; x is of its gradient's
    dtype, and no two of its elements share memory.
    """
    ceops.check_if_asked(target, x.shape[dim], o, check)
    # A float16 gradient may be nothing after the division, before a loss scale could save it.
    is_divided = r.name == "mean" and x.dtype != torch.float16
    by_kernel = cereduce.takes(x, kernel) and sum_dtype(x.dtype) == torch.float32

    def call() -> tuple[Tensor, ...]:
        rows, flat = ceops.as_rows(x, dim), target.reshape(-1)
        about = (flat, weight, x.shape[dim], o.ignore_index)
        total = None
        if by_kernel:
            of_gradient = r if is_divided else r._replace(name="sum")
            _, dloss = cereduce.by_kernel(None, *about, of_gradient, inverts=True)
        else:
            dloss = torch.ones((), dtype=sum_dtype(x.dtype), device=x.device)
            if r.name == "mean":
                total = cereduce.totals(*about, dloss.dtype)
                dloss = dloss / total if is_divided else dloss
        runs, out = ceops.implementation(rows, o, kernel, True), rows if overwrite else None
        args = (rows, flat, dloss, weight)
        loss, lse, dx = runs.forward_with_gradient(*args, **o._asdict(), out=out)
        if by_kernel and r.name != "none":
            loss, total = cereduce.by_kernel(loss, *about, r)
        elif not by_kernel:
            loss = cereduce.reduce(loss, total, r)
        if overwrite:
            if rows.data_ptr() != x.data_ptr():  # the rows are a copy
                moved = x.movedim(dim, -1)
                moved.copy_(dx.reshape(moved.shape))
            dx = x
        return loss, lse, dx, dx if total is None else total

    options, given = (dim, o, r, kernel, overwrite), (x, target, weight)
    loss, lse, dx, total = ceops.repeated("cross_entropy_with_gradient", options, given, call)
    if r.name == "none":
        loss = ceops.shaped(loss.to(r.dtype), target)
    is_left = r.name == "mean" and not is_divided
    dx = dx if overwrite else ceops.from_rows(dx, x, dim)
    return Reduced(loss, ceops.shaped(lse, target), dx, total if is_left else None)


def rescale(
    made: Tensor,
    dloss: Tensor,
    total: Tensor | None,
    target: Tensor,
    dim: int,
    ignore_index: int,
    in_place: bool,
) -> Tensor:
    """The gradient for dloss, from `made`, the one for `total`, or 1.

    Args:
        made: of x's shape, from `reduced_with_gradient`.
        dloss: 0-dim, or of target's shape.
        in_place: write it over `made`, which is given back; else `made` stays as it is.
    """

    def call() -> tuple[Tensor, ...]:
        upstream = with_values(dloss)
        rows, each = ceops.as_rows(made, dim), upstream.expand(target.shape)
        is_view = rows.data_ptr() == made.data_ptr() and (in_place or is_last)
        if not (is_view and cereduce.takes_rescale(made, upstream)):
            moved, about = made.movedim(dim, -1), (total, target, ignore_index, in_place)
            return (cereduce.rescale(moved, each, *about).movedim(-1, dim),)
        args = (rows, each.reshape(-1), total, target.reshape(-1), ignore_index, in_place)
        dx = cereduce.rescale_by_kernel(*args)
        return (made if in_place else dx,)

    if is_batch(dloss):
        each, moved = dloss.expand(target.shape), made.movedim(dim, -1)
        ratio = cereduce.ratios(moved, each, total, target, ignore_index)
        return (moved * ratio.unsqueeze(-1)).to(made.dtype).movedim(-1, dim)
    is_last = dim % made.dim() == made.dim() - 1
    options = dim, ignore_index, in_place
    (dx,) = ceops.repeated("cross_entropy_rescale", options, (made, dloss, total, target), call)
    return dx if dx.shape == made.shape else dx.reshape(made.shape)  # rows: a view of them
