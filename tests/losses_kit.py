"""What the tests of cross-entropy share: the options, and the formula in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100


def written_out(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    return_lse: bool = False,
) -> Any:
    """cross_entropy along dim 1 (0 of one dimension) by torch's own."""
    z = logits * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    dim = min(1, z.dim() - 1)
    lse = torch.logsumexp(z, dim)
    is_classes = target.dtype == torch.int64
    more = {"ignore_index": ignore_index} if is_classes else {}
    options = {"weight": weight, "label_smoothing": label_smoothing, **more}
    counts = target != ignore_index if is_classes else torch.ones_like(lse, dtype=torch.bool)
    loss = functional.cross_entropy(z, target, reduction="none", **options)
    loss = loss + torch.where(counts, z_loss * lse.square(), 0.0)
    total = counts.sum()
    if is_classes and weight is not None:
        total = torch.where(counts, weight[torch.where(counts, target, 0)], 0.0).sum()
    if reduction != "none":
        loss = loss.sum() / (total if reduction == "mean" else 1)
    return (loss, lse) if return_lse else loss


def example(
    *shape: int, classes: int = 7, ignored: bool = True, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, target, weight) in float64, classes along dim 1, or dim 0 of one dimension."""
    generator = torch.Generator().manual_seed(sum(shape) + classes)
    full = (*shape[:1], classes, *shape[1:])
    x = 2 * torch.randn(full, generator=generator, dtype=torch.double)
    target = torch.randint(classes, shape, generator=generator)
    if ignored and target.dim():
        target.view(-1)[0] = IGNORED
    weight = torch.rand(classes, generator=generator, dtype=torch.double) + 0.1
    return x.to(device), target.to(device), weight.to(device)
