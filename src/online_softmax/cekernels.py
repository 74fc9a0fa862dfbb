"""The kernels of cross-entropy on plain CUDA tensors: no autograd, no reduction.

Logits are (rows, cols) in float32, float16 or bfloat16, of unit column stride and any row stride
and alignment; all else is float32, targets int64. With z = scale x, or softcap tanh(scale x /
softcap), t the target and w the weights of classes, or 1, a row's loss is

    (1 - s) w_t (lse - z_t) + s / cols sum(w (lse - z)) + z_loss lse^2,  s the label smoothing.

A row whose target is `ignore_index` has loss 0, any other target that is no class NaN; the loss of
both has the gradient 0. The bits of a row follow from its values, the columns, the type, the kernel
and the architecture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from online_softmax import catalogue, invariance, notedcalls, rowchoice, rowkernels, rowplan
from online_softmax.cuda.launch import Launch
from online_softmax.plan import Problem
from online_softmax.reference.cross_entropy import Options
from online_softmax.rowplan import Row

if TYPE_CHECKING:
    from online_softmax.cuda import crossentropy_launch

NAMES = ("registers", "split")  # kernels that a call may name


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
    return (
        logits.dtype in catalogue.FLOATS
        and rowkernels.takes(logits, None, scale)
        and _takes_numbers(softcap, scale)
    )


def _takes_numbers(softcap: float | None, scale: float) -> bool:
    least, most = rowkernels.SCALES
    numbers = [scale] if softcap is None else [scale, softcap, scale / max(softcap, least)]
    return all(least <= n <= most for n in numbers)


def reasons(
    kernel: str,
    logits: Tensor,
    softcap: float | None = None,
    scale: float = 1.0,
    with_gradient: bool = False,
) -> list[str]:
    """Why a kernel of `NAMES` cannot give the loss of these rows; empty: it can.

    Args:
        logits: (rows, cols); there may be none.
        with_gradient: whether the gradient shall be made in the same go.
    """
    if logits.is_cuda and (missing := catalogue.lacks("cuda")):
        return [missing]
    problem = catalogue.problem_of(logits)
    if rowkernels.has_kernels(logits):
        problem = replace(problem, device="cuda")  # also under host execution
    why = refusals(kernel, problem, with_gradient)
    if not _takes_numbers(softcap, scale):
        cap = "" if softcap is None else f", softcap {softcap:g}"
        wanted = "wants scale, softcap and scale / softcap from 2^-126 to 2^127"  # SCALES
        why.append(f"{kernel} {wanted}; given is scale {scale:g}{cap}")
    return why


def refusals(kernel: str, problem: Problem, with_gradient: bool = False) -> list[str]:
    """`reasons`, as far as they follow from the matrix."""
    return rowplan.reasons(kernel, _op(with_gradient and kernel != "split"), problem)


def planned(problem: Problem, with_gradient: bool = False) -> Row:
    """The kernel of the loss and its numbers; with the gradient in the same go, where its kernel is
    "registers". It asks for types that have kernels."""
    return rowchoice.chosen(_op(with_gradient), problem, invariance.setting.is_on)


def _op(with_gradient: bool) -> str:
    """The row operation whose cuts are taken."""
    from online_softmax.cuda import crossentropy_launch

    return crossentropy_launch.GRADIENT_OP if with_gradient else crossentropy_launch.FOLD_OP


def launch_options(weight: Tensor | None, o: Options) -> crossentropy_launch.Options:
    """A loss's options as its launches take them; weight: (classes) float32, or None."""
    from online_softmax.cuda import crossentropy_launch

    weight = None if weight is None else weight.contiguous()
    total = weight.sum() if weight is not None and o.label_smoothing else None
    return crossentropy_launch.Options(weight, total, *o)


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    lse_rest: Tensor | None = None,
    kernel: str = "",
    **options: Any,
) -> Losses:
    """The loss of each row and its lse: one read of the logits.

    Args:
        logits: (rows, cols); `takes` has said yes.
        target: (rows) int64.
        weight: (cols) float32.
        lse_rest: (rows) float32, to be filled with what rounding takes from lse, for `backward`:
            without it a gradient is as exact as lse is, about 2^-24 of |lse|.
        kernel: one of `NAMES`, whose `reasons` are none, or "": the planned one.
        options: those of `reference.cross_entropy.Options`.
    """
    loss, lse = (_of_rows(logits) for _ in range(2))
    o = launch_options(weight, Options(**options))
    _run(_losses(logits, target.contiguous(), loss, lse, lse_rest, o, kernel), logits)
    return Losses(loss, lse)


def backward(
    dloss: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    *,
    lse_rest: Tensor | None = None,
    dlse: Tensor | None = None,
    out: Tensor | None = None,
    **options: Any,
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
    o = launch_options(weight, Options(**options))
    tensors = (dloss, logits, target.contiguous(), lse, lse_rest, dx)
    _run(_gradient(*tensors, o, dlse=dlse), logits)
    return dx


def forward_with_gradient(
    logits: Tensor,
    target: Tensor,
    dloss: Tensor,
    weight: Tensor | None = None,
    *,
    out: Tensor | None = None,
    kernel: str = "",
    **options: Any,
) -> LossesAndGradient:
    """The loss of each row, its lse and the gradient by the logits: one read and one write in all,
    two reads where a row is too long for the registers.

    Args:
        dloss: (rows) float32 of any stride, or one element for all rows; as in `backward`.
        out and the rest: as in `forward` and `backward`.
    """
    from online_softmax.cuda import crossentropy_launch

    rows = logits.shape[0]
    loss, lse = (_of_rows(logits) for _ in range(2))
    dx = _result(logits) if out is None else out
    o = launch_options(weight, Options(**options))
    target, dloss = target.contiguous(), dloss.expand(rows)
    row = None if kernel == "split" else rowkernels.numbers(_op(True), logits, kernel)
    if row is not None and row.kernel == "registers":
        tensors = (logits, target, dloss, loss, lse, None, dx)
        streams = catalogue.streams(logits, 2)
        work = crossentropy_launch.in_registers(*tensors, o, row, streams)
    else:
        rest = _of_rows(logits)
        work = _losses(logits, target, loss, lse, rest, o, kernel)
        work += _gradient(dloss, logits, target, lse, rest, dx, o)
    _run(work, logits)
    return LossesAndGradient(loss, lse, dx)


def _of_rows(logits: Tensor) -> Tensor:
    return notedcalls.empty((logits.shape[0],), torch.float32, logits.device)


def _result(logits: Tensor) -> Tensor:
    return notedcalls.empty(logits.shape, logits.dtype, logits.device)


def _losses(
    logits: Tensor,
    target: Tensor,
    loss: Tensor,
    lse: Tensor,
    lse_rest: Tensor | None,
    options: crossentropy_launch.Options,
    kernel: str,
) -> list[Launch]:
    from online_softmax.cuda import crossentropy_launch

    row = rowkernels.numbers(_op(False), logits, kernel)
    if row.kernel == "split":
        found = (logits, target, loss, lse, lse_rest, options, row)
        return crossentropy_launch.split(*found, room=notedcalls.empty)
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
    options: crossentropy_launch.Options,
    dlse: Tensor | None = None,
) -> list[Launch]:
    from online_softmax.cuda import crossentropy_launch

    streams = catalogue.streams(logits, 2)
    tensors = (dloss, logits, target, lse.contiguous(), lse_rest, dx)
    return crossentropy_launch.backward(*tensors, options, streams, dlse)


def _run(work: list[Launch], logits: Tensor) -> None:
    notedcalls.run(work, logits.device)
