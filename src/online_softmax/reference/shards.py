"""Cross-entropy of rows whose classes lie in several shards, from its definition.

A shard is a run of neighbouring classes: a block of the vocabulary, one after the other
(`linearops.py`), or what one device of several holds. Its rows fold to partials, of a few numbers,
which merge associatively, in any order of the shards, and give the loss and lse; the gradient by a
shard's logits then follows from lse alone. So this is the seam for a vocabulary that is split over
devices: each folds its own logits, `merge`s what it has to one partial a row, gathers those of all
devices (`torch.distributed.all_gather`, 12 bytes a row, 20 with smoothing), concatenates them along
dim 1 and calls `finish`; for the gradient nothing more need be sent. `shardkernels.py` has the same
functions on CUDA.

A partial is, along the last dimension: m and d of the shard's z, as in online.py; z of the target,
or 0 where it is in another shard; and, with label smoothing, the sum of w (r - z) and that of w
over the shard, where r is m, or 0 if m is not finite, and w are the weights of classes, or 1. The
differences to r keep their digits whatever offset all logits have.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from online_softmax import linearplan
from online_softmax.reference.cross_entropy import Options, Targets, capped, lost_of_lse, slope
from online_softmax.reference.online import State
from online_softmax.reference.ops import result_dtype

FIELDS, FIELDS_SMOOTH = 3, 5  # numbers of a partial


class Shard(NamedTuple):
    """Which classes the columns are: first, first + 1, ... of `classes` in all shards."""

    first: int
    classes: int


def fold(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    shard: Shard,
    **options: Any,
) -> Tensor:
    """The partials of a shard's rows: one read of its logits.

    Args:
        logits: (rows, cols) of the shard; any float type.
        target: (rows) int64, a class of any shard or `ignore_index`.
        weight: (classes) of all shards, or None.
        shard: where the columns are.
        options: those of `reference.cross_entropy.Options`. Of label_smoothing only whether there
            is any matters here, and z_loss has no part in a partial.

    Returns:
        (rows, parts, 3), with smoothing (rows, parts, 5), float32 or float64; here one part.
    """
    o = Options(**options)
    blocks = [_fold(logits[rows], target[rows], weight, shard, o) for rows in _blocks(logits)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _fold(
    logits: Tensor, target: Tensor, weight: Tensor | None, shard: Shard, o: Options
) -> Tensor:
    z = capped(logits, o.softcap, o.scale)
    state = State.of(z)
    place, is_here = _column(target, z.shape[-1], shard, o.ignore_index)
    fields = [*state, _at(z, place, is_here)]
    if o.label_smoothing:
        w = _weights_of(weight, z, shard)
        below = w * (_reference(state.m).unsqueeze(-1) - z)
        fields += [below.sum(-1), w.sum().expand_as(state.m)]
    return torch.stack(fields, -1).unsqueeze(1)


def merge(partials: Tensor) -> Tensor:
    """One partial a row, (rows, 1, fields), of any number, (rows, parts, fields), none included."""
    rows, _, fields = partials.shape
    columns = partials.unbind(1)
    nothing = State.empty(rows, partials.dtype, partials.device)
    state = nothing.merge(*(State(p[:, 0], p[:, 1]) for p in columns))
    merged = [*state, partials[..., 2].sum(-1)]
    if fields == FIELDS_SMOOTH:
        below, in_all = partials[..., 3], partials[..., 4]
        common, own = _reference(state.m), _reference(partials[..., 0])
        merged += [(below + in_all * (common.unsqueeze(-1) - own)).sum(-1), in_all.sum(-1)]
    return torch.stack(merged, -1).unsqueeze(1)


def finish(
    partials: Tensor,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    *,
    lse_rest: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The loss of each row and its lse, as `reference.cross_entropy.forward` gives them.

    Args:
        partials: (rows, parts, fields), of all shards, in any order.
        classes: of all shards.
        lse_rest: (rows), to be filled with what rounding took from lse, for `backward`.
        target, weight and the options: as for `fold`; softcap and scale have no part in it.
    """
    o = Options(**options)
    m, d, z, *smooth = merge(partials)[:, 0].unbind(-1)
    log_d = torch.where(m.isfinite(), torch.log(d), math.nan)
    lse = torch.where(m.isfinite(), m + log_d, m)
    rows = Targets.of(target, classes, o.ignore_index)
    loss = (1 - o.label_smoothing) * rows.weights(weight, m.dtype) * ((m - z) + log_d)
    if o.label_smoothing:
        below, in_all = smooth
        loss = loss + o.label_smoothing / max(classes, 1) * (below + in_all * log_d)
    if o.z_loss:
        loss = loss + o.z_loss * lse.square()
    if lse_rest is not None:
        lse_rest.copy_(lost_of_lse(m, log_d, lse))
    return rows.losses(loss), lse


def backward(
    dloss: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None,
    shard: Shard,
    *,
    lse_rest: Tensor | None = None,
    dlse: Tensor | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The gradient by a shard's logits, (rows, cols), rounded once to out's dtype, or theirs.

    Args:
        dloss: (rows) gradient by the loss; None: it has none.
        lse, lse_rest: (rows) of all shards, from `finish`.
        dlse: (rows) gradient by lse; None: it has none. It reaches rows that do not count too.
        out: of logits' shape, to be filled.
        logits, target and the rest: as for `fold`.
    """
    o = Options(**options)
    out = torch.empty_like(logits, dtype=result_dtype(logits.dtype)) if out is None else out
    for rows in _blocks(logits):
        above, rest, by_lse = (t if t is None else t[rows] for t in (dloss, lse_rest, dlse))
        of_rows = logits[rows], target[rows], lse[rows], rest, by_lse
        out[rows] = _gradient(above, *of_rows, weight, shard, o)
    return out


def _gradient(
    dloss: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    lse_rest: Tensor | None,
    dlse: Tensor | None,
    weight: Tensor | None,
    shard: Shard,
    o: Options,
) -> Tensor:
    z = capped(logits, o.softcap, o.scale)
    rows = Targets.of(target, shard.classes, o.ignore_index)
    log_p = z - lse.unsqueeze(-1)
    if lse_rest is not None:
        log_p = log_p - lse_rest.unsqueeze(-1)
    p = torch.where(lse.unsqueeze(-1).isfinite(), log_p.exp(), math.nan)
    given = torch.zeros_like(lse) if dloss is None else dloss.to(lse.dtype)
    given = torch.where(rows.counts, given, 0.0)
    own = (1 - o.label_smoothing) * rows.weights(weight, z.dtype)
    soft = o.label_smoothing / max(shard.classes, 1)
    whole = own + 2 * o.z_loss * lse if o.z_loss else own
    if o.label_smoothing:
        whole = whole + soft * (shard.classes if weight is None else weight.to(z.dtype).sum())
    a = given * whole if dlse is None else given * whole + dlse.to(lse.dtype)
    dz = a.unsqueeze(-1) * p
    if o.label_smoothing:
        dz = dz - soft * given.unsqueeze(-1) * _weights_of(weight, z, shard)
    place, is_here = _column(target, z.shape[-1], shard, o.ignore_index)
    if z.shape[-1]:
        hit = torch.where(is_here, given * own, 0.0)
        dz = dz.scatter_add(-1, place.unsqueeze(-1), -hit.unsqueeze(-1))
    if dlse is None:
        dz = torch.where(rows.counts.unsqueeze(-1), dz, 0.0)
    return slope(z, o.softcap, o.scale) * dz


def _blocks(logits: Tensor) -> list[slice]:
    """Of rows, that stay in a CPU's cache; elsewhere all."""
    rows, cols = logits.shape
    step = (
        linearplan.cpu_rows(cols, torch.get_num_threads()) if logits.device.type == "cpu" else rows
    )
    return [slice(i, i + step) for i in range(0, max(rows, 1), max(step, 1))]


def _reference(m: Tensor) -> Tensor:
    return torch.where(m.isfinite(), m, 0.0)


def _column(target: Tensor, cols: int, shard: Shard, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The target's column, 0 where it is not in the shard, and whether it is."""
    column = target - shard.first
    is_here = (column >= 0) & (column < cols) & (target < shard.classes) & (target != ignore_index)
    return torch.where(is_here, column, 0), is_here


def _at(z: Tensor, place: Tensor, is_here: Tensor) -> Tensor:
    if not z.shape[-1]:
        return torch.zeros(z.shape[:-1], dtype=z.dtype, device=z.device)
    return torch.where(is_here, z.gather(-1, place.unsqueeze(-1)).squeeze(-1), 0.0)


def _weights_of(weight: Tensor | None, z: Tensor, shard: Shard) -> Tensor:
    """(cols), of the shard's classes."""
    if weight is None:
        return torch.ones(z.shape[-1], dtype=z.dtype, device=z.device)
    return weight[shard.first : shard.first + z.shape[-1]].to(z.dtype)
