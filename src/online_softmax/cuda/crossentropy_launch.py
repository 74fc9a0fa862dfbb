"""How the kernels of cross-entropy are launched: symbols, template arguments, grids.

Logits are (rows, cols) with unit column stride; so is their gradient, which may be the logits
themselves. Losses, lse and their gradients are float32, targets int64. The columns of `backward`
and `fold_shard` are classes first, first + 1, ... of `classes`; elsewhere they are all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from online_softmax import rowplan
from online_softmax.cuda.launch import C_TYPE, Launch
from online_softmax.cuda.row_launch import (
    WIDTHS,
    exchange_bytes,
    grid_of,
    grid_of_shares,
    lies,
    text_of,
)
from online_softmax.plan import VECTOR_BYTES, WARP, ceil_div
from online_softmax.rowplan import Row
from online_softmax.rowtables import SPLIT_CUTS

FILE, SPLIT_FILE = "crossentropy.cu", "crossentropy_split.cu"
BACKWARD_FILE, SHARD_FILE = "crossentropy_backward.cu", "crossentropy_shard.cu"
HARD, SMOOTH, WEIGHTED = range(3)  # crossentropy.cuh
FOLD_OP, GRADIENT_OP = "cross_entropy", "cross_entropy_in_forward"  # as rowplan.py knows them
BACKWARD_OP = "cross_entropy_backward"  # as rowplan.shares does
FIELDS, FIELDS_SMOOTH = 3, 5  # of a partial; crossentropy_shard.cu
FINISH_BLOCK = 256  # threads: a warp a row


@dataclass(frozen=True)
class Options:
    """What the loss depends on beside logits and targets."""

    weight: Tensor | None = None  # (classes) float32
    weight_sum: Tensor | None = None  # its sum, float32, where there is smoothing
    ignore_index: int = -100
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0

    @property
    def kinds(self) -> str:
        """The kernels' last template arguments."""
        smoothing = HARD if self.smoothing == 0 else SMOOTH if self.weight is None else WEIGHTED
        return f"{text_of(self.softcap is not None)}, {smoothing}"

    def logit(self) -> tuple[float, float]:
        """scale and softcap."""
        return float(self.scale), float(self.softcap or 0.0)

    @property
    def fields(self) -> int:
        """Numbers of a partial."""
        return FIELDS_SMOOTH if self.smoothing else FIELDS

    def mix(self, classes: int) -> tuple[float, float, float]:
        """hard, soft and z_loss of crossentropy.cuh."""
        return 1.0 - self.smoothing, self.smoothing / max(classes, 1), float(self.z_loss)

    def weights(self, none: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and their sum; `none`, which nobody reads, where there are none."""
        weight = none if self.weight is None else self.weight
        return weight, none if self.weight_sum is None else self.weight_sum


def in_registers(
    x: Tensor,
    target: Tensor,
    dloss: Tensor | None,
    loss: Tensor,
    lse: Tensor,
    lse_rest: Tensor | None,
    dx: Tensor | None,
    options: Options,
    row: Row,
    streams: bool,
) -> list[Launch]:
    """The loss of each row and its lse, and with dx the gradient, by the cut of a `registers` row.

    dloss: (rows) of any stride, 0 included; needed with dx. dx: x, or apart of any type if x is
    float32.
    """
    rows, cols = x.shape
    written, given = x if dx is None else dx, loss if dloss is None else dloss
    flags = f"{_lie(x, written)}, {text_of(streams)}, {text_of(dx is not None)}"
    types = f"{C_TYPE[x.dtype]}, {C_TYPE[written.dtype]}"
    kinds = f"{types}, {row.vectors}, {row.lanes}, {flags}, {options.kinds}"
    args = (
        x, target, *options.weights(loss), given, loss, lse, loss if lse_rest is None else lse_rest,
        written, rows, cols, x.stride(0), written.stride(0), given.stride(0), options.ignore_index,
        int(options.weight is not None), int(lse_rest is not None), *options.logit(),
        *options.mix(cols),
    )  # fmt: skip
    symbol, grid = f"cross_entropy_in_registers<{kinds}>", grid_of(row, rows)
    return [Launch(FILE, symbol, args, grid, row.block, row.cluster, exchange_bytes(row))]


def split(
    x: Tensor,
    target: Tensor,
    loss: Tensor,
    lse: Tensor,
    lse_rest: Tensor | None,
    options: Options,
    row: Row,
    room: Callable[..., Tensor] = torch.empty,
) -> list[Launch]:
    """The loss of each row and its lse, by the cut of a `split` row. room: gives workspaces."""
    rows, cols = x.shape
    grid = rows * row.parts
    states = room((grid, 2), dtype=torch.float32, device=x.device)
    sums = room((grid,), dtype=torch.float32, device=x.device) if options.smoothing else loss
    weight, weight_sum = options.weights(loss)
    x_type, sizes = C_TYPE[x.dtype], (rows, cols, x.stride(0), options.ignore_index, row.parts)
    fold = f"cross_entropy_fold<{x_type}, {row.vectors}, {lies(x)}, {options.kinds}>"
    args = (x, target, weight, states, sums, *sizes, *options.logit())
    first = Launch(SPLIT_FILE, fold, args, grid, row.block)
    merge = f"cross_entropy_merge<{x_type}, {options.kinds}>"
    rest = loss if lse_rest is None else lse_rest
    has = int(options.weight is not None), int(lse_rest is not None)
    tensors = (x, target, weight, weight_sum, states, sums, loss, lse, rest)
    merge_args = (*tensors, *sizes, *has, *options.logit(), *options.mix(cols))
    blocks = ceil_div(rows * WARP, row.block)
    return [first, Launch(SPLIT_FILE, merge, merge_args, blocks, row.block, dependent=True)]


def backward(
    dloss: Tensor | None,
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    lse_rest: Tensor | None,
    dx: Tensor,
    options: Options,
    streams: bool,
    dlse: Tensor | None = None,
    first: int = 0,
    classes: int | None = None,
    row: Row | None = None,
) -> list[Launch]:
    """The gradient by the logits into dx, which may be x, or apart of any type if x is float32.

    dloss, dlse: (rows) of any stride. row: in place of the planned `rowplan.shares`.
    """
    rows, cols = x.shape
    classes = cols if classes is None else classes
    row = row or rowplan.shares(BACKWARD_OP, cols, x.itemsize)
    flags = f"{_lie(x, dx)}, {text_of(streams)}"
    types = f"{C_TYPE[x.dtype]}, {C_TYPE[dx.dtype]}"
    kinds = f"{types}, {row.vectors}, {row.lanes}, {flags}, {options.kinds}"
    of_loss, of_lse = (lse if t is None else t for t in (dloss, dlse))
    given = (options.weight, dloss, dlse, lse_rest)
    args = (
        x, target, *options.weights(lse), of_loss, of_lse, lse,
        lse if lse_rest is None else lse_rest, dx, rows, cols, x.stride(0), dx.stride(0),
        of_loss.stride(0), of_lse.stride(0), first, classes, options.ignore_index, row.parts,
        *(int(t is not None) for t in given), *options.logit(), *options.mix(classes),
    )  # fmt: skip
    symbol, grid = f"cross_entropy_backward<{kinds}>", grid_of_shares(row, rows)
    return [Launch(BACKWARD_FILE, symbol, args, grid, row.block)]


def _lie(x: Tensor, dx: Tensor) -> str:
    """As `lies`; of two types whole words of x are enough that become one aligned store of dx."""
    if x.dtype == dx.dtype:
        return lies(x, dx)
    word = VECTOR_BYTES // x.itemsize * dx.itemsize
    is_aligned = dx.data_ptr() % word == 0
    is_whole_in = is_aligned and (len(dx) < 2 or dx.stride(0) * dx.itemsize % word == 0)
    return "WHOLE_WORDS" if lies(x) == "WHOLE_WORDS" and is_whole_in else "APART"


def shard_parts(cols: int, item_bytes: int) -> int:
    """Parts that `fold_shard` has of a row."""
    return _shard_cut(cols, item_bytes).parts


def _shard_cut(cols: int, item_bytes: int) -> Row:
    return rowplan.split(
        rowplan.vectors_a_row(cols, item_bytes), "", SPLIT_CUTS[rowplan.kind_of(FOLD_OP)]
    )


def fold_shard(
    x: Tensor, target: Tensor, partials: Tensor, options: Options, first: int, classes: int
) -> list[Launch]:
    """The partials of a shard: (rows, shard_parts, options.fields), of any row stride."""
    rows, cols = x.shape
    row = _shard_cut(cols, x.itemsize)
    weight, _ = options.weights(partials)
    args = (
        x, target, weight, partials, rows, cols, x.stride(0), partials.stride(0), first, classes,
        options.ignore_index, row.parts, *options.logit(),
    )  # fmt: skip
    kinds = f"{C_TYPE[x.dtype]}, {row.vectors}, {lies(x)}, {options.kinds}"
    symbol = f"cross_entropy_fold_shard<{kinds}>"
    return [Launch(SHARD_FILE, symbol, args, rows * row.parts, row.block)]


def finish(
    target: Tensor,
    partials: Tensor,
    loss: Tensor,
    lse: Tensor,
    lse_rest: Tensor | None,
    options: Options,
    classes: int,
) -> list[Launch]:
    """The loss of each row and its lse from the partials of all shards, (rows, parts, fields)."""
    rows, parts, _ = partials.shape
    args = (
        target, *options.weights(loss), partials, loss, lse, loss if lse_rest is None else lse_rest,
        rows, partials.stride(0), classes, options.ignore_index, parts,
        int(options.weight is not None), int(lse_rest is not None), *options.mix(classes),
    )  # fmt: skip
    symbol = f"cross_entropy_finish<{options.kinds.partition(', ')[2]}>"
    return [Launch(SHARD_FILE, symbol, args, ceil_div(rows * WARP, FINISH_BLOCK), FINISH_BLOCK)]


def _variants() -> Iterator[Options]:
    """One of each kind."""
    weight = torch.empty(1, device="meta")
    for softcap in (None, 30.0):
        yield Options(softcap=softcap)
        yield Options(softcap=softcap, smoothing=0.1)
        yield Options(softcap=softcap, smoothing=0.1, weight=weight, weight_sum=weight)


def _shard_work(x: Tensor, target: Tensor, loss: Tensor, options: Options) -> list[Launch]:
    """What a shard of float32 adds; other types are folded as they are, too."""
    partials = torch.empty((len(x), 1, options.fields), device="meta")
    work = fold_shard(x, target, partials, options, 0, x.shape[1])
    if x.dtype != torch.float32:
        return work
    work += finish(target, partials, loss, loss, None, options, x.shape[1])
    for dx in _gradients(x)[1:]:
        work += backward(None, x, target, loss, None, dx, options, True)
    return work


def _gradients(x: Tensor) -> list[Tensor]:
    """Of every type that the gradient by x may have."""
    halves = (torch.float16, torch.bfloat16) if x.dtype == torch.float32 else ()
    return [x, *(x.to(dtype) for dtype in halves)]


def instances(
    arch: str,
    widths: Sequence[int] = WIDTHS,
    dtypes: Sequence[torch.dtype] = tuple(C_TYPE),
    variants: Sequence[Options] = tuple(_variants()),
) -> list[tuple[str, str]]:
    """Every (file, symbol) that is planned on an architecture for rows of these widths, whole or
    not: what a compile run compiles."""
    found: dict[tuple[str, str], None] = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for cols in widths:
            for gap in (0, 1):  # whole rows, and others
                x = torch.empty((2, cols + gap), dtype=dtype, device="meta")[:, gap:]
                loss, target = x[:, 0], x[:, 0]  # stand for others: only their strides are read
                folded = rowplan.numbers(FOLD_OP, cols, name, arch)
                kept = rowplan.numbers(GRADIENT_OP, cols, name, arch)
                for options in variants:
                    work = backward(loss, x, target, loss, None, x, options, True)
                    work += _shard_work(x, target, loss, options)
                    if folded.kernel == "registers":
                        tensors = (x, target, None, loss, loss, None, None)
                        work += in_registers(*tensors, options, folded, True)
                    else:
                        work += split(x, target, loss, loss, None, options, folded)
                    if kept.kernel == "registers":
                        for dx in _gradients(x):
                            tensors_too = (x, target, loss, loss, loss, None, dx)
                            work += in_registers(*tensors_too, options, kept, True)
                    for launch in work:
                        found[launch.file, launch.symbol] = None
    return list(found)
