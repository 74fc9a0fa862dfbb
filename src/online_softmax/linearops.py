"""linear_cross_entropy on plain tensors: products by torch, cross-entropy of shards between them.

Logits, input @ linear_weight.T + linear_bias, are made block by block in float32 (float64) and
never held whole. Every sum is one in float32 (float64), rounded once to the type of its result; the
gradient by a block's logits is rounded to the type of the products. No autograd, no subclass.

input is (tokens, features), linear_weight (classes, features), linear_bias (classes,) or None, all
of any float type that torch multiplies; `dtype` is the one in which they are multiplied. target is
(tokens,) int64; weight (classes,) float32 (float64) or None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from online_softmax import linearplan, shardkernels
from online_softmax.catalogue import HALVES
from online_softmax.ceops import Options
from online_softmax.reference import shards
from online_softmax.reference.cross_entropy import Targets
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
    logits = _room(tokens, min(cols, classes), sum_dtype(dtype), x)
    runs, options = _implementation(logits, o, kernel), o._asdict()
    x = _as_matrix(x, dtype)
    partials = []
    for first, last in _pieces(classes, cols):
        w = _as_matrix(linear_weight[first:last], dtype)
        z = _logits(x, w, _part(linear_bias, first, last), logits[:, : last - first])
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
    logits = _room(tokens, min(cols, classes), wide, x)
    gradient = _room_beside(logits, dtype)
    runs, options = _implementation(logits, o, kernel), o._asdict()
    sums = dx if dx.dtype == wide else torch.empty(dx.shape, dtype=wide, device=x.device)
    sums.zero_()
    unit = _unit(dloss) if dtype == torch.float16 else None
    if unit is not None:
        dloss = dloss / unit
    products = _as_matrix(x, dtype)
    for first, last in _pieces(classes, cols):
        w, here = _as_matrix(linear_weight[first:last], dtype), slice(0, last - first)
        z = _logits(products, w, _part(linear_bias, first, last), logits[:, here])
        of_rows = (dloss, z, target, lse, weight, Shard(first, classes))
        dz = runs.backward(*of_rows, **options, lse_rest=lse_rest, out=gradient[:, here])
        if needs[0]:
            add_product(dz, w, sums)
        if needs[1]:
            _store(dz.t(), products, dw[first:last], unit)
        if needs[2]:
            _copy_times(dz.sum(0, dtype=wide), unit, db[first:last])
    if needs[0] and (sums is not dx or unit is not None):
        _copy_times(sums, unit, dx)
    return dx, dw, db


def forward_with_gradient(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    o: Options,
    needs: Needs,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of all losses and its gradients, by chunks of the tokens: logits are made once.

    Returns:
        (loss, dx, dw, db): 0-dim, and the gradients of `backward` for a dloss of 1, but in float32
        (float64), for `rescale`.
    """
    tokens, classes, wide = len(x), len(linear_weight), sum_dtype(dtype)
    chunk = linearplan.chunk_tokens(tokens, classes, *_widths(dtype))
    logits = _room(min(chunk, tokens), classes, wide, x)
    gradient = _room_beside(logits, dtype)
    runs, options = _implementation(logits, o, kernel), o._asdict()
    dx, dw, db = (
        torch.zeros(t.shape, dtype=wide, device=x.device)
        for t in _empty_gradients(x, linear_weight, linear_bias, needs)
    )
    one = torch.ones((), dtype=wide, device=x.device)
    losses = torch.empty(tokens, dtype=wide, device=x.device)
    x, w = _as_matrix(x, dtype), _as_matrix(linear_weight, dtype)
    for first, last in _pieces(tokens, chunk):
        rows, here = slice(first, last), slice(0, last - first)
        z = _logits(x[rows], w, linear_bias, logits[here])
        whole = Shard(0, classes)
        partials = runs.fold(z, target[rows], weight, whole, **options)
        rest = torch.empty(last - first, dtype=wide, device=x.device)
        ends = (partials, target[rows], weight, classes)
        losses[rows], lse = runs.finish(*ends, **options, lse_rest=rest)
        of_rows = (one.expand(last - first), z, target[rows], lse, weight, whole)
        dz = runs.backward(*of_rows, **options, lse_rest=rest, out=gradient[here])
        if needs[0]:
            put_product(dz, w, dx[rows])
        if needs[1]:
            add_product(dz.t(), x[rows], dw)
        if needs[2]:
            db += dz.sum(0, dtype=wide)
    return losses.sum(), dx, dw, db


def rescale(
    made: Tensor, dloss: Tensor, target: Tensor, classes: int, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """A gradient of `forward_with_gradient` for a dloss (0-dim) that is not 1, in a dtype.

    0 where no row counts, whatever dloss is: of a mean over none it is infinite.
    """
    counts = Targets.of(target, classes, ignore_index).counts.any()
    result = torch.empty(made.shape, dtype=dtype, device=made.device)
    _copy_times(made, torch.where(counts, dloss, 0.0), result)
    return result


# ---- products, in float32 (float64)


def put_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a @ b, rounded once to out's dtype: a's, or float32."""
    if a.dtype == out.dtype and (a.dtype not in HALVES or _mixes(a)):
        return torch.mm(a, b, out=out)
    if _mixes(a):
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return out.copy_(torch.mm(a.float(), b.float()))


def add_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out += a @ b, out in float32 (float64): one sum over all calls."""
    if a.dtype == out.dtype:
        return out.addmm_(a, b)
    if _mixes(a):
        return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    return out.addmm_(a.float(), b.float())


def _mixes(a: Tensor) -> bool:
    """Whether torch multiplies 16-bit types into float32 here."""
    return a.is_cuda


def _logits(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return put_product(x, w.t(), out)
    return add_product(x, w.t(), out.copy_(bias.expand_as(out)))


def _store(a: Tensor, b: Tensor, out: Tensor, unit: Tensor | None) -> None:
    """out = a @ b, times unit if there is one."""
    if unit is None:
        put_product(a, b, out)
    else:
        product = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        _copy_times(put_product(a, b, product), unit, out)


def _copy_times(sums: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """out = sums, times factor (0-dim) if there is one; rounded once."""
    if factor is None:
        out.copy_(sums)
    else:
        torch.mul(sums, factor, out=out)


# ---- pieces


def _pieces(total: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, total)) for first in range(0, total, size))


def _cols(tokens: int, classes: int, dtype: torch.dtype) -> int:
    """Of a block of the vocabulary."""
    return linearplan.block_cols(tokens, classes, *_widths(dtype))


def _widths(dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a logit, and of its gradient beside it."""
    wide = sum_dtype(dtype)
    return wide.itemsize, 0 if dtype == wide else dtype.itemsize


def _room(rows: int, cols: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """For a block, its rows on boundaries that products and kernels like."""
    stride = linearplan.row_stride(cols)
    return torch.empty((rows, stride), dtype=dtype, device=like.device)[:, :cols]


def _room_beside(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """For their gradient: the logits' own if the types are the same."""
    rows, cols = logits.shape
    return logits if logits.dtype == dtype else _room(rows, cols, dtype, logits)


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


def _as_matrix(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t in a dtype, as torch multiplies it without a copy each time."""
    t = t.to(dtype)
    return t if 1 in t.stride() else t.contiguous()
