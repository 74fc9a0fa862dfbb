"""What stands around the rows of a cross-entropy: their losses in one, a gradient for what arrives.

By a kernel of ours where one takes this, else in torch operations. Nothing waits for the device,
and sums have an order of their own: the same bits in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax import catalogue, notedcalls, rowkernels
from online_softmax.reference.cross_entropy import Targets


class Reduction(NamedTuple):
    """What is made of the losses of all rows."""

    name: str  # "mean", "sum" or "none"
    dtype: torch.dtype  # of the result


def takes(like: Tensor, kernel: str) -> bool:
    """Whether the kernels take losses in float32 beside logits like these, of at least one row."""
    return kernel != "reference" and like.numel() > 0 and rowkernels.has_kernels(like)


def totals(
    target: Tensor, weight: Tensor | None, classes: int, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """What a mean divides by, 0-dim: the weights of the rows that count, or their number."""
    rows = Targets.of(target, classes, ignore_index)
    weights = rows.counts if weight is None else rows.weights(weight, weight.dtype)
    return weights.sum().to(dtype)


def reduce(loss: Tensor, total: Tensor | None, r: Reduction) -> Tensor:
    """The losses of all rows as asked for; total: what a mean divides by."""
    if r.name != "none":
        loss = loss.sum()
    return (loss if total is None else loss / total).to(r.dtype)


def by_kernel(
    loss: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    ignore_index: int,
    r: Reduction,
    inverts: bool = False,
) -> tuple[Tensor, Tensor]:
    """(the losses' sum or mean, what the mean divides by), both 0-dim; `takes` was yes.

    Args:
        loss: (rows) float32; None: the divisor alone is wanted, and the other is not filled.
        target: (rows) int64.
        weight: (classes,) float32, or None.
        inverts: give the inverse of the divisor, which is 1 unless r is a mean.
    """
    from online_softmax.cuda import reduce_launch

    device, blocks = target.device, reduce_launch.blocks(len(target))
    result, divisor = (notedcalls.empty((), each, device) for each in (r.dtype, torch.float32))
    parts = notedcalls.empty((blocks, 2), torch.float64, device) if blocks > 1 else None
    about = target.contiguous(), None if weight is None else weight.contiguous()
    # What is read before the wait for the kernel of the rows has to be there by then: no copy that
    # starts after it.
    overlaps = loss is not None and about[0] is target and about[1] is weight
    tensors = (loss, *about, parts, result, divisor)
    options = classes, ignore_index, r.name == "mean", inverts, overlaps
    work = reduce_launch.reduce(*tensors, *options)
    notedcalls.run(work, device)
    return result, divisor


def rescale(
    made: Tensor,
    upstream: Tensor,
    total: Tensor | None,
    target: Tensor,
    ignore_index: int,
    in_place: bool,
) -> Tensor:
    """made times upstream / total: over itself, or in a tensor of its own.

    Args:
        made: (..., classes): a gradient for the upstream `total`, or 1.
        upstream: (...)
        total: 0-dim, or None for 1.
        target: (...) int64: rows that do not count stay 0, whatever arrives.
    """
    ratio = ratios(made, upstream, total, target, ignore_index)
    if not in_place:
        return torch.mul(made, ratio.unsqueeze(-1), out=torch.empty_like(made))
    if ratio.device.type == "cpu" and bool((ratio == 1.0).all()):
        return made
    return made.mul_(ratio.unsqueeze(-1))


def ratios(
    made: Tensor, upstream: Tensor, total: Tensor | None, target: Tensor, ignore_index: int
) -> Tensor:
    """What each row of made is to be multiplied by, (...): 1 where it does not count."""
    ratio = upstream.to(torch.promote_types(upstream.dtype, torch.float32))
    ratio = ratio if total is None else ratio / total
    counts = Targets.of(target, made.shape[-1], ignore_index).counts
    return torch.where(counts, ratio, 1.0)


def takes_rescale(made: Tensor, upstream: Tensor) -> bool:
    """Whether a kernel rescales a gradient of this type."""
    types = (made.dtype, torch.float32)
    is_known = made.dtype in catalogue.FLOATS and upstream.dtype in types
    return is_known and made.numel() > 0 and rowkernels.has_kernels(made)


def rescale_by_kernel(
    made: Tensor,
    upstream: Tensor,
    total: Tensor | None,
    target: Tensor,
    ignore_index: int,
    in_place: bool,
) -> Tensor:
    """`rescale` of (rows, classes) with unit column stride; `takes_rescale` was yes."""
    from online_softmax.cuda import reduce_launch

    out = made if in_place else notedcalls.empty(made.shape, made.dtype, made.device)
    tensors = (made, upstream, total, target.contiguous(), out)
    notedcalls.run(reduce_launch.rescale(*tensors, ignore_index), made.device)
    return out
