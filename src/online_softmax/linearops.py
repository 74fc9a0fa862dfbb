"""linear_cross_entropy on plain tensors: products by torch, cross-entropy of shards between them.

Logits, input @ linear_weight.T + linear_bias, are made block by block in float32 (float64) and
never held whole. Every sum is one in float32 (float64), rounded once to the type of its result; the
gradient by a block's logits is rounded to the type of the products. No autograd, no subclass.

input is (tokens, features), linear_weight (classes, features), linear_bias (classes,) or None, all
of any float type that torch multiplies; `dtype` is the one in which they are multiplied. target is
(tokens,) int64; weight (classes,) float32 (float64) or None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from online_softmax import linearparts as parts
from online_softmax import linearplan, shardkernels
from online_softmax.ceops import Options
from online_softmax.reference import shards
from online_softmax.reference.ops import sum_dtype
from online_softmax.reference.shards import Shard

KERNELS = ("reference",)  # what `kernel=` may name
Needs = tuple[bool, bool, bool]  # whether a gradient by input, linear_weight, linear_bias is wanted


def forward(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    o: Options,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each row, its lse and what rounding took from that, by blocks of the vocabulary.

    kernel: "reference" keeps our kernels out; "": they run where they can.
    """
    tokens, classes = len(x), len(linear_weight)
    cols = _cols(tokens, classes, dtype)
    logits = parts.room(tokens, min(cols, classes), sum_dtype(dtype), x)
    runs, options = _implementation(logits, o, kernel), o._asdict()
    x = parts.as_matrix(x, dtype)
    partials = []
    for first, last in parts.pieces(classes, cols):
        w = parts.as_matrix(linear_weight[first:last], dtype)
        z = parts.logits_of(x, w, _part(linear_bias, first, last), logits[:, : last - first])
        partials.append(runs.fold(z, target, weight, Shard(first, classes), **options))
    if not partials:
        partials = [shards.fold(logits[:, :0], target, weight, Shard(0, 0), **options)]
    rest = torch.empty(tokens, dtype=logits.dtype, device=x.device)
    ends = (torch.cat(partials, 1), target, weight, classes)
    loss, lse = runs.finish(*ends, **options, lse_rest=rest)
    return loss, lse, rest


def backward(
    dloss: Tensor,
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    lse_rest: Tensor,
    dtype: torch.dtype,
    o: Options,
    needs: Needs,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by input, linear_weight and linear_bias, by blocks of the vocabulary.

    Args:
        dloss: (tokens,) the gradient by each row's loss, any stride.
        lse, lse_rest: from `forward`; the rest as there.
        needs: which of the three are wanted; the others come back without an element.

    Returns:
        Of the shapes and dtypes of what they are gradients by, contiguous.
    """
    tokens, classes, wide = len(x), len(linear_weight), sum_dtype(dtype)
    dx, dw, db = _empty_gradients(x, linear_weight, linear_bias, needs)
    cols = _cols(tokens, classes, dtype)
    logits = parts.room(tokens, min(cols, classes), wide, x)
    gradient = parts.room_beside(logits, dtype)
    runs, options = _implementation(logits, o, kernel), o._asdict()
    sums = dx if dx.dtype == wide else torch.empty(dx.shape, dtype=wide, device=x.device)
    sums.zero_()
    unit = _unit(dloss) if dtype == torch.float16 else None
    if unit is not None:
        dloss = dloss / unit
    products = parts.as_matrix(x, dtype)
    for first, last in parts.pieces(classes, cols):
        w, here = parts.as_matrix(linear_weight[first:last], dtype), slice(0, last - first)
        z = parts.logits_of(products, w, _part(linear_bias, first, last), logits[:, here])
        of_rows = (dloss, z, target, lse, weight, Shard(first, classes))
        dz = runs.backward(*of_rows, **options, lse_rest=lse_rest, out=gradient[:, here])
        if needs[0]:
            parts.add_product(dz, w, sums)
        if needs[1]:
            _store(dz.t(), products, dw[first:last], unit)
        if needs[2]:
            parts.copy_times(dz.sum(0, dtype=wide), unit, db[first:last])
    if needs[0] and (sums is not dx or unit is not None):
        parts.copy_times(sums, unit, dx)
    return dx, dw, db


def _store(a: Tensor, b: Tensor, out: Tensor, unit: Tensor | None) -> None:
    """out = a @ b, times unit if there is one."""
    if unit is None:
        parts.put_product(a, b, out)
    else:
        product = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        parts.copy_times(parts.put_product(a, b, product), unit, out)


def _cols(tokens: int, classes: int, dtype: torch.dtype) -> int:
    """Of a block of the vocabulary."""
    return linearplan.block_cols(tokens, classes, *parts.widths(dtype))


def _implementation(logits: Tensor, o: Options, kernel: str) -> Any:
    """What folds shards: `shardkernels` or `reference.shards`."""
    if not kernel and logits.numel() and shardkernels.takes(logits, o.softcap, o.scale):
        return shardkernels
    return shards


def _empty_gradients(
    x: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, needs: Needs
) -> tuple[Tensor, Tensor, Tensor]:
    given = (x, linear_weight, x if linear_bias is None else linear_bias)
    dx, dw, db = (
        torch.empty(t.shape if need else (0,), dtype=t.dtype, device=x.device)
        for t, need in zip(given, needs, strict=True)
    )
    return dx, dw, db


def _part(bias: Tensor | None, first: int, last: int) -> Tensor | None:
    return None if bias is None else bias[first:last]


def _unit(dloss: Tensor) -> Tensor:
    """The largest of dloss, for float16: multiplied last, so that its range holds the gradient by
    the logits, however small or large dloss is."""
    if not len(dloss):
        return torch.ones((), dtype=dloss.dtype, device=dloss.device)
    most = dloss.abs().amax()
    return torch.where(most.isfinite() & (most > 0), most, 1.0)
