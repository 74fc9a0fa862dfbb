"""How each CUDA kernel is launched: symbol, template arguments, grid; and the LADDER table.

A kernel becomes a list of `Launch` records, which two executors run: jit on a GPU, host on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from online_softmax import plan
from online_softmax.plan import Numbers, Problem, ceil_div

V0_PART = 256  # v0_thread.cu's PART
C_TYPE = {torch.float32: "float", torch.float16: "half_t", torch.bfloat16: "bfloat16_t"}


@dataclass(frozen=True)
class Launch:
    """One kernel launch. Tensors are passed as pointers, int as int64_t, float as float."""

    file: str  # relative to this folder
    symbol: str  # C++ name expression of a template instance
    args: tuple[Any, ...]  # in the kernel's parameter order
    grid: int  # blocks, also when they form clusters
    block: int  # threads a block
    cluster: int = 1  # blocks a cluster
    shared_bytes: int = 0  # dynamic shared memory a block
    cooperative: bool = False  # all blocks live at once
    dependent: bool = False  # may start before the stream's previous kernel has ended


Build = Callable[[Tensor, Tensor, Numbers], list[Launch]]


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: a kernel file, its idea, and what it should cost, said beforehand."""

    name: str
    idea: str
    reads: int  # reads per element, between multiprocessor and L2
    exps: Callable[[Problem, Numbers], float]  # predicted exponentials in all
    symbols: Callable[[str, Numbers], tuple[str, ...]]  # kernel instances, by C type
    build: Build

    @property
    def file(self) -> str:
        return f"ladder/{self.name}.cu"


def _plain_symbols(name: str) -> Callable[[str, Numbers], tuple[str, ...]]:
    return lambda c_type, numbers: (f"{name}<{c_type}>",)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], x.stride(0)


def _simple(name: str, grid: Callable[[int, Numbers], int], vectors: bool = False) -> Build:
    """A rung of one kernel with the parameters (x, y, rows, cols, x_row_stride)."""

    def build(x: Tensor, y: Tensor, numbers: Numbers) -> list[Launch]:
        extra = f", {numbers.vectors}" if vectors else ""
        symbol = f"{name}<{C_TYPE[x.dtype]}{extra}>"
        args = (x, y, *_sizes(x))
        return [Launch(f"ladder/{name}.cu", symbol, args, grid(x.shape[0], numbers), numbers.block)]

    return build


def _split_row(x: Tensor, y: Tensor, numbers: Numbers) -> list[Launch]:
    rows, cols, stride = _sizes(x)
    grid = rows * numbers.parts
    # A workspace of this call's own: (m, d) of each part.
    states = torch.empty((grid, 2), dtype=torch.float32, device=x.device)
    fold, emit = RUNG["v5_split_row"].symbols(C_TYPE[x.dtype], numbers)
    cut = (cols, stride, numbers.parts, numbers.part_cols)
    file = "ladder/v5_split_row.cu"
    return [
        Launch(file, fold, (x, states, *cut), grid, numbers.block),
        Launch(file, emit, (x, y, states, *cut), grid, numbers.block, dependent=True),
    ]


def _one_row_a_block(rows: int, numbers: Numbers) -> int:
    return rows


# ---- predictions: exponentials in all. A block merges its threads' states with two exponentials a
# thread (fold.cuh); `absorb` costs one an element, padding included, and two a vector.


def _merge_exps(p: Problem, n: Numbers) -> int:
    return 2 * n.block * p.rows


def _absorb_exps(p: Problem, cols: int) -> int:
    return ceil_div(cols, p.vector) * (p.vector + 2)


def _v5_exps(p: Problem, n: Numbers) -> float:
    full, tail = divmod(p.cols, n.part_cols)
    fold = full * _absorb_exps(p, n.part_cols) + _absorb_exps(p, tail) + 2 * n.block * n.parts
    emit = p.cols_padded + n.parts * (2 * n.parts + 2 * n.block)
    return p.rows * (fold + emit)


def _v3_exps(p: Problem, n: Numbers) -> float:
    return 2 * p.rows * n.block * n.vectors * p.vector + _merge_exps(p, n)


LADDER: tuple[Rung, ...] = (
    Rung(
        "safe",
        "three passes: maximum, sum, write; one block a row",
        3,
        lambda p, n: 2 * p.rows * p.cols,
        _plain_symbols("safe"),
        _simple("safe", _one_row_a_block),
    ),
    Rung(
        "v0_thread",
        "the online recurrence, one thread a row",
        2,
        lambda p, n: p.rows * (3 * p.cols + 2 * ceil_div(p.cols, V0_PART)),
        _plain_symbols("v0_thread"),
        _simple("v0_thread", lambda rows, n: ceil_div(rows, n.block)),
    ),
    Rung(
        "v1_warp_shuffle",
        "one block a row, states merged by warp shuffles",
        2,
        lambda p, n: 3 * p.rows * p.cols + _merge_exps(p, n),
        _plain_symbols("v1_warp_shuffle"),
        _simple("v1_warp_shuffle", _one_row_a_block),
    ),
    Rung(
        "v2_vectorized",
        "16-byte loads and stores, a vector absorbed at once",
        2,
        lambda p, n: p.rows * (_absorb_exps(p, p.cols) + p.cols_padded) + _merge_exps(p, n),
        _plain_symbols("v2_vectorized"),
        _simple("v2_vectorized", _one_row_a_block),
    ),
    Rung(
        "v3_register_cache",
        "the row stays in registers: one read, one write",
        1,
        _v3_exps,
        lambda c_type, n: (f"v3_register_cache<{c_type}, {n.vectors}>",),
        _simple("v3_register_cache", _one_row_a_block, vectors=True),
    ),
    Rung(
        "v4_grid_stride",
        "a fixed grid loops over all rows",
        2,
        lambda p, n: p.rows * (_absorb_exps(p, p.cols) + p.cols_padded) + _merge_exps(p, n),
        _plain_symbols("v4_grid_stride"),
        _simple("v4_grid_stride", lambda rows, n: min(rows, n.blocks)),
    ),
    Rung(
        "v5_split_row",
        "several blocks a row, their states merged, then the write",
        2,
        _v5_exps,
        lambda c_type, n: (f"v5_fold_part<{c_type}>", f"v5_emit_part<{c_type}>"),
        _split_row,
    ),
)
RUNG = {rung.name: rung for rung in LADDER}


def instances(rung: Rung) -> list[tuple[str, str]]:
    """Every (file, symbol) that a rung may launch: what a compile run compiles."""
    found: list[tuple[str, str]] = []
    for dtype, c_type in C_TYPE.items():
        vector = plan.VECTOR_BYTES // dtype.itemsize
        counts = (1, 2, 4, 8)[: (plan.V3_ELEMENTS // vector).bit_length()]
        for vectors in counts:
            for symbol in rung.symbols(c_type, Numbers(256, "", vectors=vectors)):
                if (rung.file, symbol) not in found:
                    found.append((rung.file, symbol))
    return found


def run(launches: list[Launch], device: torch.device) -> Any:
    """Run launches in order: on a GPU through jit, returning None; on the CPU through host
    execution, returning the counts of reads, writes and exponentials."""
    launches = [launch for launch in launches if launch.grid]  # an empty matrix needs no block
    if device.type == "cuda":
        from online_softmax import jit

        for launch in launches:
            jit.launch(launch, device)
        return None
    from online_softmax.cuda import host

    total = host.Counts(0, 0, 0)
    for launch in launches:
        total = total + host.launch(launch)
    return total
