"""The kernels of cross-entropy on plain CUDA tensors: no autograd, no reduction.

Logits are (rows, cols) in float32, float16 or bfloat16, of unit column stride and any row stride
and alignment; all else is float32, targets int64. With z = scale x, or softcap tanh(scale x /
softcap), t the target and w the weights of classes, or 1, a row's loss is

    (1 - s) w_t (lse - z_t) + s / cols sum(w (lse - z)) + z_loss lse^2,  s the label smoothing.

A row whose target is `ignore_index` has loss 0, any other target that is no class NaN; the loss of
both has the gradient 0. The bits of a row follow from its values, the columns, the type and the
architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from online_softmax import catalogue, rowkernels
from online_softmax.cuda.launch import Launch

if TYPE_CHECKING:
    from online_softmax.cuda.crossentropy_launch import Options


class Losses(NamedTuple):
    """What the forward gives."""

    loss: Tensor  # (rows) float32
    lse: Tensor  # (rows) float32: the natural log-sum-exp of the row's z


class LossesAndGradient(NamedTuple):
    """What the forward with gradient gives."""

    loss: Tensor  # (rows) float32
    lse: Tensor  # (rows) float32
    dlogits: Tensor  # (rows, cols), of the logits' type


def takes(logits: Tensor, softcap: float | None = None, scale: float = 1.0) -> bool:
    """Whether these kernels take logits of this device and type, and such numbers."""
    least, most = rowkernels.SCALES
    numbers = [scale] if softcap is None else [scale, softcap, scale / max(softcap, least)]
    return rowkernels.takes(logits, None, scale) and all(least <= n <= most for n in numbers)


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    lse_rest: Tensor | None = None,
) -> Losses:
    """The loss of each row and its lse: one read of the logits.

    Args:
        logits: (rows, cols); `takes` has said yes.
        target: (rows) int64.
        weight: (cols) float32.
        lse_rest: (rows) float32, to be filled with what rounding takes from lse, for `backward`:
            without it a gradient is as exact as lse is, about 2^-24 of |lse|.
    """
    rows = logits.shape[0]
    loss, lse = (torch.empty(rows, device=logits.device) for _ in range(2))
    options = _options(weight, ignore_index, label_smoothing, z_loss, softcap, scale)
    _run(_losses(logits, target.contiguous(), loss, lse, lse_rest, options), logits)
    return Losses(loss, lse)


def backward(
    dloss: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    lse_rest: Tensor | None = None,
    dlse: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient by the logits: one read, one write.

    Args:
        dloss: (rows) float32 of any stride: the gradient by each row's loss as `forward` gives it,
            so with the reduction's factor in it, and without the weight of the row's class. None:
            it has none.
        logits, target, weight and the options: as in the forward.
        lse, lse_rest: from the forward.
        dlse: (rows) float32 of any stride: the gradient by lse, which ignored rows have too. None:
            it has none.
        out: (rows, cols) of unit column stride, to be filled: `logits` itself, or apart from them,
            of their type, or of any of the three if they are float32. None: a tensor of its own.
    """
    dx = _result(logits) if out is None else out
    options = _options(weight, ignore_index, label_smoothing, z_loss, softcap, scale)
    tensors = (dloss, logits, target.contiguous(), lse, lse_rest, dx)
    _run(_gradient(*tensors, options, dlse=dlse), logits)
    return dx


def forward_with_gradient(
    logits: Tensor,
    target: Tensor,
    dloss: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> LossesAndGradient:
    """The loss of each row, its lse and the gradient by the logits: one read and one write in all,
    two reads where a row is too long for the registers.

    Args:
        dloss: (rows) float32 of any stride, or one element for all rows; as in `backward`.
        the rest: as in `forward` and `backward`.
    """
    from online_softmax.cuda import crossentropy_launch

    rows = logits.shape[0]
    loss, lse = (torch.empty(rows, device=logits.device) for _ in range(2))
    dx = _result(logits) if out is None else out
    options = _options(weight, ignore_index, label_smoothing, z_loss, softcap, scale)
    target, dloss = target.contiguous(), dloss.expand(rows)
    row = rowkernels.numbers(crossentropy_launch.GRADIENT_OP, logits)
    if row.kernel == "registers":
        tensors = (logits, target, dloss, loss, lse, None, dx)
        streams = catalogue.streams(logits, 2)
        work = crossentropy_launch.in_registers(*tensors, options, row, streams)
    else:
        rest = torch.empty_like(lse)
        work = _losses(logits, target, loss, lse, rest, options)
        work += _gradient(dloss, logits, target, lse, rest, dx, options)
    _run(work, logits)
    return LossesAndGradient(loss, lse, dx)


def _options(
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    softcap: float | None,
    scale: float,
) -> Options:
    from online_softmax.cuda import crossentropy_launch

    weight = None if weight is None else weight.contiguous()
    total = weight.sum() if weight is not None and smoothing else None
    return crossentropy_launch.Options(
        weight, total, ignore_index, float(smoothing), z_loss, softcap, scale
    )


def _result(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _losses(
    logits: Tensor,
    target: Tensor,
    loss: Tensor,
    lse: Tensor,
    lse_rest: Tensor | None,
    options: Options,
) -> list[Launch]:
    from online_softmax.cuda import crossentropy_launch

    row = rowkernels.numbers(crossentropy_launch.FOLD_OP, logits)
    if row.kernel == "split":
        return crossentropy_launch.split(logits, target, loss, lse, lse_rest, options, row)
    tensors = (logits, target, None, loss, lse, lse_rest, None)
    streams = catalogue.streams(logits, 1)
    return crossentropy_launch.in_registers(*tensors, options, row, streams)


def _gradient(
    dloss: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    lse_rest: Tensor | None,
    dx: Tensor,
    options: Options,
    dlse: Tensor | None = None,
) -> list[Launch]:
    from online_softmax.cuda import crossentropy_launch

    streams = catalogue.streams(logits, 2)
    tensors = (dloss, logits, target, lse.contiguous(), lse_rest, dx)
    return crossentropy_launch.backward(*tensors, options, streams, dlse)


def _run(work: list[Launch], logits: Tensor) -> None:
    from online_softmax.cuda import launch

    launch.run(work, logits.device)
