"""Cross-entropy on plain tensors: which implementation runs a call. No autograd, no subclass.

Arguments are checked above, in losses.py; targets are classes, int64. An implementation works on
rows: logits (rows, cols) of unit column stride; target, loss, lse and their gradients (rows,).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from online_softmax import cekernels
from online_softmax.reference import cross_entropy as reference
from online_softmax.reference.ops import sum_dtype
from online_softmax.rowops import with_values

KERNELS = ("reference",)  # what `kernel=` may name


class Options(NamedTuple):
    """What the loss of a row depends on beside its logits, target and weights."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    scale: float


def implementation(rows: Tensor, o: Options, kernel: str) -> Any:
    """What computes rows, a module with the three functions of `reference.cross_entropy`.

    The one place where a kernel is chosen.

    Args:
        rows: (rows, cols) of unit column stride; any dtype and device, and there may be none.
        o: the options.
        kernel: the name of a kernel to force, or "".
    """
    if not kernel and rows.numel() and cekernels.takes(rows, o.softcap, o.scale):
        return cekernels
    return reference


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
    if check or target.device.type == "cpu":
        check_target("cross_entropy", target, x.shape[dim], o.ignore_index)
    rows = as_rows(x, dim)
    runs, options = implementation(rows, o, kernel), o._asdict()
    rest = torch.empty(rows.shape[0], dtype=sum_dtype(x.dtype), device=x.device)
    loss, lse = runs.forward(rows, target.reshape(-1), weight, **options, lse_rest=rest)
    return loss.reshape(target.shape), lse.reshape(target.shape), rest.reshape(target.shape)


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
    rows = as_rows(x, dim)
    others = (rows, target.reshape(-1), lse.reshape(-1), weight)
    options = {**o._asdict(), "lse_rest": lse_rest.reshape(-1)}
    of_loss, of_lse = (None if d is None else with_values(d).reshape(-1) for d in (dloss, dlse))
    dx = implementation(rows, o, "").backward(of_loss, *others, **options, dlse=of_lse)
    return from_rows(dx, x, dim)


def forward_with_gradient(
    dloss: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    dim: int,
    o: Options,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`forward`, and the gradient by x for one dloss, which all rows have in common.

    Args:
        dloss: 0-dim, of the dtype of the losses.
        x, target and the rest: as for `forward`; the targets were checked.
    """
    rows = as_rows(x, dim)
    runs, options = implementation(rows, o, kernel), o._asdict()
    loss, lse, dx = runs.forward_with_gradient(rows, target.reshape(-1), dloss, weight, **options)
    return loss.reshape(target.shape), lse.reshape(target.shape), from_rows(dx, x, dim)


def rescale(
    made: Tensor, dloss: Tensor, expected: Tensor, target: Tensor, dim: int, ignore_index: int
) -> Tensor:
    """The gradient for dloss, from `made`, the one for `expected`; `made` stays as it is.

    Args:
        made: of x's shape, from `forward_with_gradient`.
        dloss: of target's shape.
        expected: 0-dim.
    """
    counts = reference.Targets.of(target, made.shape[dim], ignore_index).counts
    ratio = torch.where(dloss == expected, 1.0, dloss / expected)
    # dloss is infinite where no row counts.
    ratio = torch.where(counts, ratio, 0.0).unsqueeze(dim)
    return torch.mul(made, ratio, out=torch.empty_like(made))


def fake(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors of the results' shapes and dtypes."""
    loss, lse, rest = (x.new_empty(target.shape, dtype=sum_dtype(x.dtype)) for _ in range(3))
    return loss, lse, rest


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
    """x as (rows, cols) of unit column stride, a view where its strides allow one."""
    last = with_values(x).movedim(dim, -1)
    rows = last.reshape(math.prod(last.shape[:-1]), last.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def from_rows(dx: Tensor, x: Tensor, dim: int) -> Tensor:
    """(rows, cols) back in x's shape, contiguous."""
    return dx.reshape(x.movedim(dim, -1).shape).movedim(-1, dim).contiguous()
