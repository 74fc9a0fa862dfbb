"""What both ways of linear_cross_entropy are made of: products with one rounding, rooms for blocks.

Products are torch's, their sums float32 (float64).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from online_softmax import linearplan
from online_softmax.catalogue import HALVES
from online_softmax.reference.ops import sum_dtype


def put_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a @ b, rounded once to out's dtype: a's, or float32."""
    if a.dtype == out.dtype and (a.dtype not in HALVES or _mixes(a)):
        return torch.mm(a, b, out=out)
    if _mixes(a):
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    if out.dtype == torch.float32:
        return torch.mm(a.float(), b.float(), out=out)
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


def logits_of(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return put_product(x, w.t(), out)
    return add_product(x, w.t(), out.copy_(bias.expand_as(out)))


def copy_times(sums: Tensor, factor: Tensor | None, out: Tensor) -> None:
    """out = sums, times factor (0-dim) if there is one; rounded once."""
    if factor is None:
        out.copy_(sums)
    else:
        torch.mul(sums, factor, out=out)


# ---- pieces


def pieces(total: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, total)) for first in range(0, total, size))


def widths(dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a logit, and of its gradient beside it."""
    wide = sum_dtype(dtype)
    return wide.itemsize, 0 if dtype == wide else dtype.itemsize


def room(rows: int, cols: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """For a block, its rows on boundaries that products and kernels like."""
    stride = linearplan.row_stride(cols)
    return torch.empty((rows, stride), dtype=dtype, device=like.device)[:, :cols]


def room_beside(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """For their gradient: the logits' own if the types are the same."""
    rows, cols = logits.shape
    return logits if logits.dtype == dtype else room(rows, cols, dtype, logits)


def as_matrix(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t in a dtype, as torch multiplies it without a copy each time."""
    t = t.to(dtype)
    return t if 1 in t.stride() else t.contiguous()
