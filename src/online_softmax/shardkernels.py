"""The kernels of cross-entropy over shards of the classes, on plain CUDA tensors.

The functions of `reference/shards.py`, which says what a shard and a partial are and how a
vocabulary is split over devices by them. Logits as for `cekernels`; all else is float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from online_softmax import catalogue, cekernels
from online_softmax.reference.cross_entropy import Options
from online_softmax.reference.shards import Shard, merge

__all__ = ["Shard", "backward", "finish", "fold", "merge", "takes"]

takes = cekernels.takes


def fold(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    shard: Shard,
    **options: Any,
) -> Tensor:
    """The partials of a shard's rows, (rows, parts, fields): one read of its logits.

    Arguments as for the reference; `takes` has said yes to the logits, so there is an element.
    """
    from online_softmax.cuda import crossentropy_launch, launch

    rows, cols = logits.shape
    o = cekernels.launch_options(weight, Options(**options))
    parts = crossentropy_launch.shard_parts(cols, logits.itemsize)
    partials = torch.empty((rows, parts, o.fields), device=logits.device)
    tensors = (logits, target.contiguous(), partials)
    launch.run(crossentropy_launch.fold_shard(*tensors, o, *shard), logits.device)
    return partials


def finish(
    partials: Tensor,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    *,
    lse_rest: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The loss of each row and its lse from the partials of all shards; arguments as for the
    reference, lse_rest contiguous."""
    from online_softmax.cuda import crossentropy_launch, launch

    loss, lse = (torch.empty(len(partials), device=partials.device) for _ in range(2))
    o = cekernels.launch_options(weight, Options(**options))
    tensors = (target.contiguous(), partials.contiguous(), loss, lse, lse_rest)
    launch.run(crossentropy_launch.finish(*tensors, o, classes), partials.device)
    return loss, lse


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
    """The gradient by a shard's logits: one read, one write; arguments as for the reference.

    out: as for `cekernels.backward`, of a 16-bit type for float32 logits, for example.
    """
    from online_softmax.cuda import crossentropy_launch, launch

    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device) if out is None else out
    o = cekernels.launch_options(weight, Options(**options))
    streams = catalogue.streams(logits, 2)
    tensors = (dloss, logits, target.contiguous(), lse.contiguous(), lse_rest, dx)
    work = crossentropy_launch.backward(*tensors, o, streams, dlse, *shard)
    launch.run(work, logits.device)
    return dx
