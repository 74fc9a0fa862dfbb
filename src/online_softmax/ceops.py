"""Cross-entropy on plain tensors: which implementation runs a call. No autograd, no subclass.

Arguments are checked above, in losses.py; targets are classes, int64. An implementation works on
rows: logits (rows, cols) of unit column stride; target, loss, lse and their gradients (rows,).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from online_softmax import ceblocks, cekernels, notedcalls, rowkernels
from online_softmax.keptcalls import Given
from online_softmax.reference import cross_entropy as reference
from online_softmax.reference.cross_entropy import Options
from online_softmax.reference.ops import FP8, sum_dtype
from online_softmax.rowops import is_batch, with_values

KERNELS = (*cekernels.NAMES, "torch", "reference")  # what `kernel=` may name


class Implementation(NamedTuple):
    """What computes rows: the three functions of `reference.cross_entropy`."""

    forward: Callable[..., Any]
    backward: Callable[..., Tensor]
    forward_with_gradient: Callable[..., Any]


_REFERENCE, _TORCH = (
    Implementation(each.forward, each.backward, each.forward_with_gradient)
    for each in (reference, ceblocks)
)
_KERNELS = {
    name: Implementation(
        partial(cekernels.forward, kernel=name),
        cekernels.backward,
        partial(cekernels.forward_with_gradient, kernel=name),
    )
    for name in ("", *cekernels.NAMES)
}


def implementation(
    rows: Tensor, o: Options, kernel: str, with_gradient: bool = False
) -> Implementation:
    """What computes rows. The one place where a kernel is chosen.

    Args:
        rows: (rows, cols) of unit column stride (`as_rows`); any dtype and device, and there may be
            none.
        o: the options.
        kernel: the name of a kernel to force, or "".
        with_gradient: whether the gradient is made in the forward.

    Raises:
        ValueError: the named kernel cannot run this; with the reasons.
    """
    if kernel in cekernels.NAMES:
        why = cekernels.reasons(kernel, rows, o.softcap, o.scale, with_gradient)
        if why:
            raise ValueError(
                f"cross_entropy(): kernel {kernel!r} cannot run this: {'; '.join(why)}"
            )
    if kernel in _KERNELS and rows.numel() and cekernels.takes(rows, o.softcap, o.scale):
        return _KERNELS[kernel]
    is_cpu = rows.device.type == "cpu"  # whose caches are what the blocks are for
    return _TORCH if kernel == "torch" or (is_cpu and kernel != "reference") else _REFERENCE


def forward(
    x: Tensor, target: Tensor, weight: Tensor | None, dim: int, o: Options, check: bool, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each row, its log-sum-exp, and what rounding took from that.

    Args:
        x: any shape and strides, classes along `dim`; a float type or fp8.
        target: x's shape without `dim`, int64.
        weight: (classes,) float32 or float64, or None.
        dim: counts from either end.
        check: whether a target that is no class is an error on any device. On the CPU it always is.
        kernel: the name of a kernel to force, or "".

    Returns:
        (loss, lse, lse_rest): target's shape, float32 (float64 for float64 x), contiguous.

    Raises:
        IndexError: a target is neither a class nor `ignore_index`.
    """
    check_if_asked(target, x.shape[dim], o, check)

    def call() -> tuple[Tensor, ...]:
        rows = as_rows(x, dim)
        rest = notedcalls.empty((rows.shape[0],), sum_dtype(x.dtype), x.device)
        runs, args = implementation(rows, o, kernel), (rows, target.reshape(-1), weight)
        return *runs.forward(*args, **o._asdict(), lse_rest=rest), rest

    loss, lse, rest = repeated("cross_entropy_rows", (dim, o, kernel), (x, target, weight), call)
    return shaped(loss, target), shaped(lse, target), shaped(rest, target)


def backward(
    dloss: Tensor | None,
    dlse: Tensor | None,
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    lse_rest: Tensor,
    weight: Tensor | None,
    dim: int,
    o: Options,
) -> Tensor:
    """The gradient by x, contiguous, in x's shape and dtype (bfloat16 for fp8).

    Args:
        dloss, dlse: the gradients by what `forward` gave, in target's shape; None: there is none.
        lse, lse_rest: what `forward` gave; the other arguments as there.
    """

    def call() -> tuple[Tensor, ...]:
        rows = as_rows(x, dim)
        others = (rows, target.reshape(-1), lse.reshape(-1), weight)
        options = {**o._asdict(), "lse_rest": lse_rest.reshape(-1)}
        of_loss, of_lse = (None if d is None else with_values(d).reshape(-1) for d in (dloss, dlse))
        runs = _REFERENCE if in_batch else implementation(rows, o, "")
        return (runs.backward(of_loss, *others, **options, dlse=of_lse),)

    in_batch = is_batch(dloss, dlse)
    given = (x, target, lse, lse_rest, weight, dloss, dlse)
    (dx,) = call() if in_batch else repeated("cross_entropy_backward", (dim, o), given, call)
    return from_rows(dx, x, dim)


def repeated(
    what: str, options: Any, given: Given, call: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What `call` gives; on a device with kernels a call like one before starts them again."""
    if given[0] is not None and rowkernels.has_kernels(given[0]):
        return notedcalls.repeated(what, options, given, call)
    return call()


def shaped(of_rows: Tensor, target: Tensor) -> Tensor:
    """What rows have, in target's shape."""
    return of_rows if of_rows.shape == target.shape else of_rows.reshape(target.shape)


def fake(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors of the results' shapes and dtypes."""
    loss, lse, rest = (x.new_empty(target.shape, dtype=sum_dtype(x.dtype)) for _ in range(3))
    return loss, lse, rest


def check_if_asked(target: Tensor, classes: int, o: Options, check: bool) -> None:
    """`check_target`; where the host would wait for it only if it is asked for."""
    if check or target.device.type == "cpu":
        check_target("cross_entropy", target, classes, o.ignore_index)


def check_target(name: str, target: Tensor, classes: int, ignore_index: int | None) -> None:
    """IndexError if a target is neither a class nor `ignore_index`. It waits for the device."""
    is_wrong = (target < 0) | (target >= classes)
    allowed = f"[0, {classes})"
    if ignore_index is not None:
        is_wrong &= target != ignore_index
        allowed += f", or ignore_index ({ignore_index})"
    if not bool(is_wrong.any()):
        return
    place = is_wrong.nonzero()[0].tolist()
    given = int(target[tuple(place)])
    where = f" at index {tuple(place)}" if place else ""
    raise IndexError(f"{name}(): target must be in {allowed}, got {given}{where}")


def as_rows(x: Tensor, dim: int) -> Tensor:
    """x as (rows, cols) of unit column stride, a view where its strides allow one.

    fp8 becomes bfloat16, which holds all its values, where that has kernels.
    """
    last = with_values(x).movedim(dim, -1)
    if x.dtype in FP8 and rowkernels.has_kernels(x):
        last = last.to(torch.bfloat16)
    rows = last.reshape(math.prod(last.shape[:-1]), last.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def from_rows(dx: Tensor, x: Tensor, dim: int) -> Tensor:
    """(rows, cols) back in x's shape, contiguous."""
    if dim % x.dim() == x.dim() - 1:
        return dx if dx.shape == x.shape else dx.reshape(x.shape)
    return dx.reshape(x.movedim(dim, -1).shape).movedim(-1, dim).contiguous()
