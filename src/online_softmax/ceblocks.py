"""Cross-entropy in torch's own operations, by blocks of rows that stay in the CPU's cache.

What `reference.cross_entropy` defines, with a fused softmax for each block: a row's largest
probability is 1 / d, so its loss is (m - z_t) + log d as there. Logits are read from memory once, a
gradient is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from online_softmax.reference import cross_entropy as reference
from online_softmax.reference.cross_entropy import Options, Targets
from online_softmax.reference.ops import result_dtype, sum_dtype

# Of probabilities, for each thread and in all: of 1 to 16 MiB a thread, 4 took the least time; with
# fewer blocks threads wait for each other less often.
BLOCK_BYTES, MOST_BYTES = 1 << 22, 1 << 26
NARROW = 16  # columns that fill a vector: with fewer torch's softmax takes an element at a time


class _Folded(NamedTuple):
    """What is known of all rows, (rows) each."""

    m: Tensor
    log_d: Tensor
    z_of_target: Tensor
    below: Tensor | None  # with smoothing: the mean of w (m - z)

    @classmethod
    def of(cls, logits: Tensor, has_smoothing: bool) -> _Folded:
        shape, dtype = (4, logits.shape[0]), sum_dtype(logits.dtype)
        m, log_d, z_of_target, below = torch.empty(shape, dtype=dtype, device=logits.device)
        return cls(m, log_d, z_of_target, below if has_smoothing else None)

    @property
    def lse(self) -> Tensor:
        return torch.where(self.m.isfinite(), self.m + self.log_d, self.m)

    def part(self, rows: slice) -> _Folded:
        below = None if self.below is None else self.below[rows]
        return _Folded(self.m[rows], self.log_d[rows], self.z_of_target[rows], below)


class _Rows(NamedTuple):
    """What the rows of a call have beside logits."""

    targets: Targets
    one: Tensor  # (rows) what the target's class counts for, 0 where the row does not
    of_all: Tensor | float  # what all classes count for: the mean of their weights, or 1
    weight: Tensor | None  # (cols)

    @classmethod
    def of(cls, logits: Tensor, target: Tensor, weight: Tensor | None, o: Options) -> _Rows:
        dtype = sum_dtype(logits.dtype)
        weight = None if weight is None else weight.to(dtype)
        targets = Targets.of(target, logits.shape[1], o.ignore_index)
        one = targets.weights(weight, dtype) * (1 - o.label_smoothing)
        return cls(targets, one, 1.0 if weight is None else weight.mean(), weight)


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    lse_rest: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """As `reference.cross_entropy.forward`, of (rows, cols)."""
    o = Options(**options)
    if not logits.numel():
        return reference.forward(logits, target, weight, lse_rest=lse_rest, **options)
    rows, folded = _Rows.of(logits, target, weight, o), _Folded.of(logits, o.label_smoothing > 0)
    for block, p in _blocks(logits):
        _fold(_mapped(logits[block], o), p, rows, block, folded)
    return _losses(folded, rows, o, lse_rest)


def backward(
    dloss: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    lse_rest: Tensor | None = None,
    dlse: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """As `reference.cross_entropy.backward`, of (rows, cols); probabilities are made of the logits
    again, so that they are as exact as if lse had not been rounded."""
    if not logits.numel():
        options["lse_rest"] = lse_rest
        return reference.backward(dloss, logits, target, lse, weight, dlse=dlse, **options)
    o, dx = Options(**options), torch.empty_like(logits, dtype=result_dtype(logits.dtype))
    rows = _Rows.of(logits, target, weight, o)
    given = torch.zeros_like(lse) if dloss is None else dloss
    for block, p in _blocks(logits, dx):
        z = _mapped(logits[block], o)
        _softmax(z, p)
        of_lse = None if dlse is None else dlse[block]
        _gradient(z, p, rows, block, given[block], of_lse, lse[block], o, dx)
    return dx


def forward_with_gradient(
    logits: Tensor,
    target: Tensor,
    dloss: Tensor,
    weight: Tensor | None = None,
    *,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.cross_entropy.forward_with_gradient`, of (rows, cols)."""
    if not logits.numel():
        return reference.forward_with_gradient(logits, target, dloss, weight, out=out, **options)
    o, dx = Options(**options), out
    if dx is None:
        dx = torch.empty_like(logits, dtype=result_dtype(logits.dtype))
    rows, folded = _Rows.of(logits, target, weight, o), _Folded.of(logits, o.label_smoothing > 0)
    given = dloss.expand(target.shape)
    for block, p in _blocks(logits, None if dx.data_ptr() == logits.data_ptr() else dx):
        z = _mapped(logits[block], o)
        _fold(z, p, rows, block, folded)
        _gradient(z, p, rows, block, given[block], None, folded.part(block).lse, o, dx)
    return *_losses(folded, rows, o, None), dx


# ---- the parts


def _blocks(logits: Tensor, dx: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows, and where their probabilities go: into dx, if it is of the sums' type."""
    rows, cols = logits.shape
    dtype, each = sum_dtype(logits.dtype), rows
    if logits.device.type == "cpu":
        room_bytes = min(torch.get_num_threads() * BLOCK_BYTES, MOST_BYTES)
        each = max(room_bytes // (cols * dtype.itemsize), 1)
    if dx is not None and dx.dtype == dtype:
        for start in range(0, rows, each):
            yield slice(start, start + each), dx[start : start + each]
        return
    room = torch.empty((min(each, rows), cols), dtype=dtype, device=logits.device)
    for start in range(0, rows, each):
        yield slice(start, start + each), room[: rows - start]


def _mapped(x: Tensor, o: Options) -> Tensor:
    """z of a block: x itself where nothing is to be done."""
    return reference.capped(x, o.softcap, o.scale)


def _softmax(z: Tensor, p: Tensor) -> None:
    if z.shape[1] >= NARROW:
        torch.softmax(z, -1, out=p)
        return
    top = z.amax(-1, keepdim=True)
    torch.sub(z, top, out=p).exp_()
    p.div_(p.sum(-1, keepdim=True))


def _fold(z: Tensor, p: Tensor, rows: _Rows, block: slice, folded: _Folded) -> None:
    """The probabilities of a block into p, and what is known of its rows."""
    part, place = folded.part(block), rows.targets.place[block]
    _softmax(z, p)
    torch.amax(z, -1, out=part.m)
    torch.amax(p, -1, out=part.log_d).log_().neg_()
    torch.gather(z, 1, place.unsqueeze(1), out=part.z_of_target.unsqueeze(1))
    if part.below is not None:
        below = part.m.unsqueeze(1) - z
        below = below if rows.weight is None else below.mul_(rows.weight)
        torch.mean(below, -1, out=part.below)


def _losses(
    folded: _Folded, rows: _Rows, o: Options, lse_rest: Tensor | None
) -> tuple[Tensor, Tensor]:
    m, log_d, z_of_target, below = folded
    lse = folded.lse
    loss = (m - z_of_target) + log_d
    if rows.weight is not None or o.label_smoothing:
        loss = loss * rows.one
    if below is not None:
        loss = loss + o.label_smoothing * (below + rows.of_all * log_d)
    if o.z_loss:
        loss = loss + o.z_loss * lse.square()
    if lse_rest is not None:
        lse_rest.copy_(reference.lost_of_lse(m, log_d, lse))
    return rows.targets.losses(loss), lse


def _gradient(
    z: Tensor,
    p: Tensor,
    rows: _Rows,
    block: slice,
    given: Tensor,
    dlse: Tensor | None,
    lse: Tensor,
    o: Options,
    dx: Tensor,
) -> None:
    """a p - b of a block (`reference.Upstream`), times the slope, over p, and into dx."""
    counts, one = rows.targets.counts[block], rows.one[block]
    # What does not depend on the column is multiplied first: scale is the slope without a cap.
    given = torch.where(counts, given.to(p.dtype), 0.0) * o.scale
    a = given * (one + o.label_smoothing * rows.of_all)
    if o.z_loss:
        a = a + 2 * o.z_loss * given * lse
    if dlse is not None:
        a = a + dlse.to(p.dtype) * o.scale
    p.mul_(a.unsqueeze(1))
    if o.label_smoothing:
        each = (given * (o.label_smoothing / p.shape[1])).unsqueeze(1)
        p = p.sub_(each) if rows.weight is None else p.addcmul_(each, rows.weight, value=-1)
    place = rows.targets.place[block].unsqueeze(1)
    p.scatter_add_(1, place, (-given * one).unsqueeze(1))
    if o.softcap is not None:
        p.mul_(reference.slope(z, o.softcap, 1.0))
    if dlse is None and not bool(counts.all()):
        p.masked_fill_(~counts.unsqueeze(1), 0.0)
    part = dx[block]
    if part.data_ptr() != p.data_ptr():
        part.copy_(p)
