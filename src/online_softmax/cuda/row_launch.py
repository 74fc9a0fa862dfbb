"""How the row kernels that ship are launched: symbols, template arguments, grids.

Matrices are (rows, cols) with unit column stride; outputs are contiguous. float32, float16 and
bfloat16; a forward may write float32 from a 16-bit input.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from online_softmax import ring, rowchoice, rowplan
from online_softmax.arches import ARCHES, DEFAULT_ARCH, Arch
from online_softmax.cuda.launch import C_TYPE, Launch
from online_softmax.plan import VECTOR_BYTES, WARP, Problem, ceil_div
from online_softmax.rowplan import Row

FILE = {name: f"{name}.cu" for name in ("landed", "streamed", "split")} | {"registers": "rows.cu"}
EMIT = {"softmax": "EmitSoftmax", "log_softmax": "EmitLogSoftmax", "logsumexp": "EmitLse"}
GRADIENT = {"softmax_backward": "BackwardSoftmax", "log_softmax_backward": "BackwardLogSoftmax"}
EXCHANGE_SETS = 2  # exchange.cuh: two rows take turns

HOST_CLUSTERS, HOST_BLOCKS = 2, 3  # that stay, in host execution: some rows follow others
CLEAR_BLOCK = 256  # threads that clear a word each


def is_whole(*tensors: Tensor) -> bool:
    """Whether all rows of all tensors are whole 16-byte vectors on 16-byte boundaries."""
    return all(
        t.data_ptr() % VECTOR_BYTES == 0
        and (t.stride(0) * t.itemsize % VECTOR_BYTES == 0 or t.shape[0] < 2)
        and t.shape[1] * t.itemsize % VECTOR_BYTES == 0
        for t in tensors
    )


def lies(*tensors: Tensor) -> str:
    """How the rows of tensors lie: share.cuh's word for it."""
    if is_whole(*tensors):
        return "WHOLE_WORDS"
    first, *others = tensors
    alike = all(
        t.itemsize == first.itemsize
        and (t.data_ptr() - first.data_ptr()) % VECTOR_BYTES == 0
        and ((t.stride(0) - first.stride(0)) * t.itemsize % VECTOR_BYTES == 0 or t.shape[0] < 2)
        for t in others
    )
    return "ALIKE" if alike else "APART"


def text_of(flag: bool) -> str:
    return "true" if flag else "false"


def exchange_bytes(row: Row) -> int:
    return 0 if row.lanes else EXCHANGE_SETS * ring.STATE_BYTES * row.cluster * row.block // WARP


def grid_of(row: Row, rows: int) -> int:
    return ceil_div(rows * row.lanes, row.block) if row.lanes else rows * row.cluster


def grid_of_shares(row: Row, rows: int) -> int:
    return ceil_div(rows * row.parts * (row.lanes or WARP), row.block)


def _landed(
    symbol: str, tensors: tuple[Tensor, ...], tail: tuple[Any, ...], row: Row, whole: bool
) -> list[Launch]:
    """As many clusters as the device holds, at most one a row; all tensors but the last land."""
    from online_softmax import jit

    x = tensors[0]
    words = (len(tensors) - 1) * (row.vectors * WARP + (0 if whole else ring.EDGE_WORDS))
    shared = words * VECTOR_BYTES * row.block // WARP + exchange_bytes(row)
    args = (*tensors, *tail)
    work = Launch(FILE["landed"], symbol, args, 0, row.block, row.cluster, shared)
    held = jit.max_clusters(work, x.device) if x.is_cuda else HOST_CLUSTERS
    return [replace(work, grid=min(held, x.shape[0]) * work.cluster)]


def forward(
    op: str, x: Tensor, y: Tensor, scale: float, zero_empty: bool, row: Row, streams: bool
) -> list[Launch]:
    """softmax or log_softmax of x's rows into y; logsumexp of them into y, (rows, 1)."""
    rows, cols = x.shape
    x_type, y_type, emit = C_TYPE[x.dtype], C_TYPE[y.dtype], EMIT[op]
    of = (x,) if op == "logsumexp" else (x, y)
    whole = is_whole(*of)
    tail = (rows, cols, x.stride(0), float(scale), int(zero_empty))
    file = FILE[row.kernel]
    if row.kernel == "streamed":
        kinds = f"{x_type}, {y_type}, {row.vectors}, {lies(*of)}, {text_of(streams)}, {emit}"
        if found := _streamed(f"rows_streamed<{kinds}>", (x, y), tail, row, whole):
            return found
    if row.kernel in ("streamed", "split"):
        return _split(op, x, y, scale, zero_empty, row)
    if row.kernel == "landed":
        kinds = f"{x_type}, {y_type}, {row.vectors}, {lies(*of)}, {text_of(streams)}, {emit}"
        return _landed(f"rows_landed<{kinds}>", (x, y), tail, row, whole)
    shape = f"{row.vectors}, {row.lanes}"
    kinds = f"{x_type}, {y_type}, {shape}, {lies(*of)}, {text_of(streams)}, {emit}"
    symbol, grid = f"rows_in_registers<{kinds}>", grid_of(row, rows)
    shared = exchange_bytes(row)
    return [Launch(file, symbol, (x, y, *tail), grid, row.block, row.cluster, shared)]


def _states(x: Tensor, row: Row) -> Tensor:
    """A workspace of this call's own: (m, d) of each part of each row."""
    return torch.empty((x.shape[0] * row.parts, 2), dtype=torch.float32, device=x.device)


def _streamed(
    symbol: str, tensors: tuple[Tensor, ...], sizes: tuple[Any, ...], row: Row, whole: bool
) -> list[Launch]:
    """The states cleared, then blocks that stay. Nothing where the device holds too few blocks for
    a row, a share of it for example: `split` has the same parts and gives the same bits."""
    from online_softmax import jit

    x, ring_of = tensors[0], (row.block, row.vectors, len(tensors) - 1, whole)
    stages = ring.stages(*ring_of, _facts(x.device.index if x.is_cuda else None))
    shared = ring.shared_bytes(*ring_of, stages)
    work = Launch(FILE["streamed"], symbol, (), 0, row.block, shared_bytes=shared, cooperative=True)
    if x.is_cuda:
        held = jit.max_clusters(work, x.device)
    else:
        held = max(HOST_BLOCKS, ceil_div(row.parts, stages - 1))
    items = x.shape[0] * row.parts
    grid = min(held, items)
    lag = ring.lag(row.parts, max(grid, 1), stages)
    if lag == 0:
        return []
    states = _states(x, row)
    args = (*tensors, states, *sizes, row.parts, stages, lag)
    blocks = ceil_div(items, CLEAR_BLOCK)
    return [
        Launch(work.file, "clear_states", (states, items), blocks, CLEAR_BLOCK),
        replace(work, args=args, grid=grid),
    ]


@functools.cache
def _facts(index: int | None) -> Arch:
    """Those of a CUDA device, or of the default."""
    from online_softmax import jit

    default = ARCHES[DEFAULT_ARCH]
    return default if index is None else ARCHES.get(jit.device_arch(index), default)


def _split(op: str, x: Tensor, y: Tensor, scale: float, zero_empty: bool, row: Row) -> list[Launch]:
    rows, cols = x.shape
    states, grid, file = _states(x, row), rows * row.parts, FILE["split"]
    x_type, y_type = C_TYPE[x.dtype], C_TYPE[y.dtype]
    sizes = (rows, cols, x.stride(0), float(scale))
    fold = f"split_fold<{x_type}, {row.vectors}, {lies(x)}>"
    first = Launch(file, fold, (x, states, *sizes, row.parts), grid, row.block)
    args: tuple[Any, ...]
    if op == "logsumexp":
        args = (states, y, rows, row.parts)
        blocks = ceil_div(rows * WARP, row.block)
        return [
            first,
            Launch(file, f"split_lse<{y_type}>", args, blocks, row.block, dependent=True),
        ]
    kinds = f"{x_type}, {y_type}, {row.vectors}, {lies(x, y)}, {EMIT[op]}"
    args = (x, y, states, *sizes, int(zero_empty), row.parts)
    return [first, Launch(file, f"split_emit<{kinds}>", args, grid, row.block, dependent=True)]


def backward(
    op: str,
    dy: Tensor,
    y: Tensor,
    dx: Tensor,
    scale: float,
    zero_empty: bool,
    row: Row,
    streams: bool,
) -> list[Launch]:
    """The gradient by x of softmax or log_softmax, from that by y and y itself, into dx."""
    rows, cols = y.shape
    kind, x_type, of = GRADIENT[op], C_TYPE[y.dtype], (dy, y, dx)
    whole = is_whole(*of)
    args: tuple[Any, ...]
    sizes, file = (rows, cols, dy.stride(0)), FILE[row.kernel]
    tail = (*sizes, float(scale), int(zero_empty))
    if row.kernel == "streamed":
        kinds = f"{x_type}, {row.vectors}, {lies(*of)}, {text_of(streams)}, {kind}"
        symbol = f"rows_streamed_backward<{kinds}>"
        if found := _streamed(symbol, (dy, y, dx), tail, row, whole):
            return found
    if row.kernel in ("streamed", "split"):
        states, grid = _states(y, row), rows * row.parts
        kinds = f"<{x_type}, {row.vectors}, {lies(*of)}, {kind}>"
        args = (dy, y, states, *sizes, int(zero_empty), row.parts)
        first = Launch(file, f"split_fold_backward{kinds}", args, grid, row.block)
        last = (dy, y, dx, states, *tail, row.parts)
        symbol = f"split_emit_backward{kinds}"
        return [first, Launch(file, symbol, last, grid, row.block, dependent=True)]
    if row.kernel == "landed":
        kinds = f"{x_type}, {row.vectors}, {lies(*of)}, {text_of(streams)}, {kind}"
        return _landed(f"rows_landed_backward<{kinds}>", (dy, y, dx), tail, row, whole)
    kinds = f"{x_type}, {row.vectors}, {row.lanes}, {lies(*of)}, {text_of(streams)}, {kind}"
    symbol, shared = f"rows_in_registers_backward<{kinds}>", exchange_bytes(row)
    args = (dy, y, dx, *tail)
    return [Launch(file, symbol, args, grid_of(row, rows), row.block, row.cluster, shared)]


WIDTHS = tuple(sorted({1 << k for k in range(23)} | {3 << k for k in range(20)}))


def instances(
    arch: str,
    widths: Sequence[int] = WIDTHS,
    dtypes: Sequence[torch.dtype] = tuple(C_TYPE),
) -> list[tuple[str, str]]:
    """Every (file, symbol) that the planner launches on an architecture for rows of these widths,
    whole or not, ragged ones of a column less, tensors that lie apart, and what `landed` would:
    what a compile run compiles."""
    found: dict[tuple[str, str], None] = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        # Whole rows; the same off a 16-byte boundary; and ragged ones.
        for cols, (start, gap) in itertools.product(widths, ((0, 0), (1, 0), (0, 1))):
            cols -= gap
            x = torch.empty((2, cols + start), dtype=dtype, device="meta")[:, start:]
            for op in rowplan.OPERATIONS:
                row = rowplan.numbers(op, cols, name, arch)
                cuts = [row]
                if row.kernel == "streamed":  # few rows go to split; landed goes by name
                    cuts.append(replace(row, kernel="split"))
                    if cols <= rowplan.most_cols("landed", op, name, arch):
                        cuts.append(rowplan.forced("landed", op, cols, name, arch))
                if row.kernel == "landed":
                    cuts.append(replace(row, kernel="registers"))
                if few := rowchoice.few(op, Problem(2, cols, name, arch=arch)):
                    cuts.append(few)
                apart = [x] if start == 0 else [x, x.new_empty((2, cols))]
                for cut, other in itertools.product(cuts, apart):
                    for launch in _examples(op, x, other, cut):
                        found[launch.file, launch.symbol] = None
    return list(found)


def _examples(op: str, x: Tensor, y: Tensor, row: Row) -> list[Launch]:
    if op in rowplan.BACKWARD:
        return backward(op, x, y, y, 1.0, False, row, True)
    return forward(op, x, y[:, :1] if op == "logsumexp" else y, 1.0, False, row, True)
