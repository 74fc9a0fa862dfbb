"""What ships for each row operation: kernel, launch numbers and the reason. plan.py's sister file.

Pure Python, standard library only. The cut of a row follows from its operation, columns, type and
the architecture, never from the number of rows: a row has the same bits in any batch. Numbers were
measured on an H200 (benchmarks/results/h200); for other architectures they follow from facts.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

from online_softmax import ring
from online_softmax.arches import ARCHES
from online_softmax.plan import MAX_GRID, VECTOR_BYTES, WARP, Problem, ceil_div, next_power_of_two

FORWARD = ("softmax", "log_softmax")
BACKWARD = ("softmax_backward", "log_softmax_backward")
OPERATIONS = (*FORWARD, *BACKWARD, "logsumexp")
ELEMENTWISE = ("logsumexp_backward",)  # on x as it lies: no cut of rows, no record
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
CLUSTER_ARCHES = ("sm_90a", "sm_100a")  # clusters of up to 16 blocks, bulk copies

IDEAS = {
    "registers": "the row in registers of a few lanes, a block or a cluster: one read, one write",
    "landed": "a cluster a row; the next row lands in shared memory while one is in registers",
    "streamed": "parts of rows land in shared memory and wait there until the row's state is known",
    "split": "parts of a row, several blocks each, in two kernels: any number of columns",
}
WHY_NOT = {
    "registers": "a row takes all registers of its cluster: memory would wait for the exchange",
    "landed": "memory keeps busy without: several rows share a multiprocessor",
    "streamed": "for long rows, and many of them: a cluster or split is sooner otherwise",
    "split": "reads every element twice",
}
READS = {"registers": 1, "landed": 1, "streamed": 1, "split": 2}
NEEDS = {"landed": "clusters of 16 blocks", "streamed": "bulk copies"}
GROUP_BLOCK = 128  # threads a block where a row has a warp or less: small blocks end soonest
SPLIT_BLOCK, SPLIT_VECTORS = 256, 4  # a part of 16 KB: enough blocks from a few rows on
MAX_ROW_BLOCK = 512  # threads: 128 registers each
STREAMED_LEAST, STREAMED_MOST, STREAMED_MOST_BACKWARD = 65536, 1 << 20, 1 << 19  # vectors a row
STREAMED_CUT, STREAMED_BACKWARD_CUT = (256, 8), (256, 4)  # threads, vectors: 32 KB a stage
STREAMED_ITEMS = 4  # parts a multiprocessor in all: with fewer, split's two launches end sooner


@dataclass(frozen=True)
class Row:
    """Launch numbers of a row kernel, and the reason for them."""

    kernel: str
    vectors: int  # 16-byte vectors a lane holds, of each tensor
    lanes: int = 0  # of a warp that share a row; 0: a block or a cluster of blocks
    block: int = 0  # threads a block
    cluster: int = 1  # blocks a row
    parts: int = 1  # streamed, split: parts of a row, a block each
    why: str = ""


# Up to so many vectors a row: (vectors a lane, blocks a row). One cut serves a few rows and many:
# from 32,000 columns on more blocks than many rows alone would ask for. 16-bit forward keeps words
# and raises them twice, float32 keeps terms: hence two tables.
_Cuts = tuple[tuple[int, int, int], ...]
_FORWARD_16: _Cuts = (
    (256, 4, 1), (512, 4, 1), (1024, 6, 1), (2048, 6, 2), (4096, 8, 4), (8192, 8, 8),
    (16384, 8, 16), (32768, 8, 16), (65536, 16, 16),
)  # fmt: skip
_FORWARD_32: _Cuts = (
    (512, 2, 1), (1024, 4, 2), (2048, 6, 2), (4096, 6, 4), (8192, 6, 8), (16384, 16, 8),
    (32768, 16, 16), (65536, 16, 16), (131072, 16, 16),
)  # fmt: skip
_BACKWARD: _Cuts = (
    (256, 2, 1), (512, 4, 1), (1024, 6, 2), (2048, 6, 4), (4096, 4, 8), (8192, 4, 16),
    (16384, 4, 16), (32768, 8, 16), (65536, 8, 16),
)  # fmt: skip
_LSE_16: _Cuts = ((1024, 4, 1), (2048, 8, 1), (4096, 16, 2))
_LSE_32: _Cuts = ((2048, 4, 1), (4096, 6, 4), (8192, 8, 4), (16384, 16, 8))
# Without clusters: blocks of up to 512 threads.
_ALONE: _Cuts = ((128, 2, 1), (1024, 4, 1), (4096, 8, 1), (8192, 16, 1))
_ALONE_BACKWARD: _Cuts = ((512, 2, 1), (2048, 4, 1), (4096, 8, 1))
# Rows that share a warp, or have one each: up to so many vectors a row, vectors a lane.
_Shared = tuple[tuple[int, int], ...]
_SHARED: _Shared = ((64, 2),)
_SHARED_LSE_16: _Shared = ((128, 4), (256, 8))
_SHARED_LSE_32: _Shared = ((128, 6), (256, 8))
_LANDED_MOST = 131072  # vectors: 16 blocks of 512 threads with 16 vectors each


def vectors_a_row(cols: int, item_bytes: int) -> int:
    """16-byte vectors that hold a row, at least one."""
    return max(ceil_div(cols * item_bytes, VECTOR_BYTES), 1)


def _block(row: int, vectors: int, cluster: int) -> int:
    """The fewest whole warps that hold a row."""
    return ceil_div(row, vectors * cluster * WARP) * WARP


def _fit(row: int, most: int, vectors: int, cluster: int) -> tuple[int, int, int]:
    """Vectors a lane, threads a block and blocks a row for `row` vectors, where up to `most` have
    `vectors` and `cluster`: the fewest warps in all, none of them idle, then about as many a block.
    """
    warps, usual = ceil_div(row, vectors * WARP), _block(most, vectors, cluster) // WARP
    choices = []
    for a_block in range(1, min(2 * usual, MAX_ROW_BLOCK // WARP) + 1):
        blocks = ceil_div(warps, a_block)
        blocks = 16 if 8 < blocks < 16 else blocks  # 9 to 15 find little room, as measured
        if blocks <= cluster:
            choices.append((a_block * blocks, abs(a_block - usual), a_block, blocks))
    in_all, _, a_block, blocks = min(choices)
    return ceil_div(row, in_all * WARP), a_block * WARP, blocks


def has_clusters(arch: str) -> bool:
    """Whether blocks of an architecture form clusters of up to 16."""
    return arch in CLUSTER_ARCHES


@functools.lru_cache(maxsize=4096)
def numbers(op: str, cols: int, dtype: str, arch: str) -> Row:
    """The kernel and launch numbers of an operation on rows of `cols` elements.

    >>> numbers("softmax", 4096, "bfloat16", "sm_90a").block
    128
    >>> numbers("softmax", 4_194_304, "float32", "sm_90a").kernel
    'streamed'
    """
    item = ITEM_BYTES[dtype]
    row = vectors_a_row(cols, item)
    for most, vectors in _shared(op, item):
        if row <= most:
            lanes = min(next_power_of_two(ceil_div(row, vectors)), WARP)
            vectors = ceil_div(row, lanes)
            who = f"{WARP // lanes} rows a warp" if lanes < WARP else "a warp a row"
            why = f"{who}, {vectors} vectors a lane"
            return Row("registers", vectors, lanes, GROUP_BLOCK, why=why)
    longest = STREAMED_MOST_BACKWARD if op in BACKWARD else STREAMED_MOST
    if STREAMED_LEAST < row <= longest and op != "logsumexp" and has_clusters(arch):
        return streamed(row, op)
    for most, vectors, cluster in _cuts(op, item, arch):
        if row <= most:
            vectors, block, cluster = _fit(row, most, vectors, cluster)
            blocks = f"a cluster of {cluster} blocks" if cluster > 1 else "a block"
            why = f"{blocks} a row, {block} threads of {vectors} vectors: one read, one write"
            return Row("registers", vectors, 0, block, cluster, why=why)
    if op in FORWARD and has_clusters(arch) and row <= _LANDED_MOST:
        block = _block(row, 16, 16)
        why = (
            f"a cluster of 16 blocks a row, {block} threads of 16 vectors; the next row lands in "
            "shared memory meanwhile: one read, one write"
        )
        return Row("landed", 16, 0, block, 16, why=why)
    return split(row, f"{cols} columns are past what one read holds: parts of a row, two kernels")


def split(row: int, why: str) -> Row:
    """Two kernels over parts of a row: any number of columns."""
    parts = ceil_div(row, SPLIT_BLOCK * SPLIT_VECTORS)
    return Row("split", SPLIT_VECTORS, 0, SPLIT_BLOCK, parts=parts, why=why)


def streamed(row: int, op: str, cut: tuple[int, int] | None = None) -> Row:
    """Blocks that stay and take parts of rows in turn; cut: threads, vectors a thread."""
    block, vectors = cut or (STREAMED_BACKWARD_CUT if op in BACKWARD else STREAMED_CUT)
    parts = ceil_div(row, block * vectors)
    why = f"{parts} parts a row wait in shared memory for its state: one read, one write"
    return Row("streamed", vectors, 0, block, parts=parts, why=why)


def mechanism(row: Row, op: str, problem: Problem) -> Row:
    """What runs a planned cut: the only answer that asks for the number of rows. `streamed` and
    `split` give a row of the same parts the same bits, so which it is only decides the time."""
    if row.kernel != "streamed":
        return row
    items, sms = problem.rows * row.parts, problem.multiprocessors
    refusals = reasons("streamed", op, problem)
    if items >= STREAMED_ITEMS * sms and not refusals:
        return row
    why = f"{items} parts in all are few for {sms} multiprocessors: parts of rows, two kernels"
    return replace(row, kernel="split", why=refusals[0] if refusals else why)


def _most_streamed(row: Row, op: str, arch: str, multiprocessors: int = 0) -> int:
    """Vectors of the longest row that streamed holds by the cut of `row`; logsumexp lands none."""
    if op == "logsumexp" or not has_clusters(arch):
        return 0
    facts, tensors = ARCHES[arch], 2 if op in BACKWARD else 1
    sms = multiprocessors or facts.sm_count
    return ring.most_vectors(row.block, row.vectors, tensors, facts, sms)


def _shared(op: str, item: int) -> _Shared:
    if op == "logsumexp":
        return _SHARED_LSE_16 if item == 2 else _SHARED_LSE_32
    return _SHARED


def _cuts(op: str, item: int, arch: str) -> _Cuts:
    if not has_clusters(arch):
        return _ALONE_BACKWARD if op in BACKWARD else _ALONE
    if op in BACKWARD:
        return _BACKWARD
    if op == "logsumexp":
        return _LSE_16 if item == 2 else _LSE_32
    return _FORWARD_16 if item == 2 else _FORWARD_32


def forced(kernel: str, op: str, cols: int, dtype: str, arch: str) -> Row:
    """Numbers for a kernel by name, the planned ones if planned. `reasons` must have had none."""
    if (planned := numbers(op, cols, dtype, arch)).kernel == kernel:
        return planned
    row = vectors_a_row(cols, ITEM_BYTES[dtype])
    if kernel == "split":  # of streamed's parts, where that is planned
        cut = planned if planned.kernel == "streamed" else split(row, "")
        return replace(cut, kernel="split", why="parts of a row, two kernels")
    if kernel == "streamed":
        return streamed(row, op)
    if kernel == "registers":  # planned as something else: as many blocks as the widest rows have
        _, vectors, cluster = _cuts(op, ITEM_BYTES[dtype], arch)[-1]
        return Row("registers", vectors, 0, _block(row, vectors, cluster), cluster, why="asked for")
    vectors = 8 if op in BACKWARD else 16
    cluster = next(c for c in (1, 2, 4, 8, 16) if _block(row, vectors, c) <= MAX_ROW_BLOCK)
    return Row("landed", vectors, 0, _block(row, vectors, cluster), cluster, why="asked for")


def most_cols(kernel: str, op: str, dtype: str, arch: str, multiprocessors: int = 0) -> int:
    """The columns that a kernel other than split can hold (multiprocessors 0: as the card has)."""
    vectors = _cuts(op, ITEM_BYTES[dtype], arch)[-1][0]
    if kernel == "streamed":
        vectors = _most_streamed(streamed(1, op), op, arch, multiprocessors)
    if kernel == "landed":
        vectors = _LANDED_MOST // 2 if op in BACKWARD else _LANDED_MOST
    return vectors * (VECTOR_BYTES // ITEM_BYTES[dtype])


def reasons(kernel: str, op: str, problem: Problem) -> list[str]:
    """Why a row kernel cannot run an operation on a problem; empty: it can."""
    p = problem
    why: list[str] = []
    if p.dtype not in ITEM_BYTES:
        why.append(f"{kernel} takes {', '.join(ITEM_BYTES)}; this input is {p.dtype}")
    if p.device != "cuda":
        why.append(f"{kernel} runs on CUDA tensors; this one is on {p.device}")
    if kernel in NEEDS and not has_clusters(p.arch):
        wanted = " and ".join(CLUSTER_ARCHES)
        why.append(f"{kernel} needs {NEEDS[kernel]}: planned for {wanted}, this is {p.arch}")
    if kernel in NEEDS and op == "logsumexp":  # which reads once however it is done
        why.append(f"{kernel} writes rows; logsumexp goes to registers or split")
    if why:
        return why
    most = 0 if kernel == "split" else most_cols(kernel, op, p.dtype, p.arch, p.multiprocessors)
    if kernel != "split" and p.cols > most:
        return [f"{kernel} holds at most {most} columns here; this row has {p.cols}: split does"]
    row = forced(kernel, op, p.cols, p.dtype, p.arch)
    blocks = ceil_div(p.rows * row.lanes, row.block) if row.lanes else p.rows * row.cluster
    if kernel not in NEEDS and blocks * row.parts > MAX_GRID:
        return [f"{kernel} would need {blocks * row.parts} blocks, more than a grid's {MAX_GRID}"]
    return []


def sweep(op: str, cols: int, dtype: str, arch: str) -> list[Row]:
    """What a tuning run should try on rows of `cols` elements, the planned numbers first."""
    found = [numbers(op, cols, dtype, arch)]
    row, clusters = vectors_a_row(cols, ITEM_BYTES[dtype]), has_clusters(arch)
    blocks_a_row = (1, 2, 4, 8, 16) if clusters else (1,)
    most = 8 if op in BACKWARD else 16
    for vectors in (v for v in (1, 2, 4, 6, 8, 12, 16) if v <= most):
        for lanes in (1, 2, 4, 8, 16, 32):
            if row <= vectors * lanes < 2 * row + lanes and vectors <= most // 2:
                found.append(Row("registers", vectors, lanes, GROUP_BLOCK))
        for cluster in blocks_a_row:
            block = _block(row, vectors, cluster)
            if block <= MAX_ROW_BLOCK and (cluster == 1 or block * vectors >= WARP * most):
                found.append(Row("registers", *_shape_of(_fit(row, row, vectors, cluster))))
                if clusters and vectors >= most // 2 and op != "logsumexp" and row >= 1024:
                    found.append(Row("landed", vectors, 0, block, cluster))
    found.append(split(row, ""))
    for part, block in itertools.product((1024, 2048, 4096), (256, 512)):  # 16, 32, 64 KB
        each = streamed(row, op, (block, part // block))
        if 8192 <= row <= _most_streamed(each, op, arch) and each.vectors <= most // 2:
            found += [each, replace(each, kernel="split", why="")]
    kept: dict[Row, Row] = {}  # the first of those that differ in more than the reason
    for each in found:
        kept.setdefault(replace(each, why=""), each)
    return list(kept.values())


def _shape_of(fit: tuple[int, int, int]) -> tuple[int, int, int, int]:
    vectors, block, cluster = fit
    return vectors, 0, block, cluster


def leaves_l2(total_bytes: int, l2_bytes: int) -> bool:
    """Whether what is read and written once should leave the caches first: if it cannot stay."""
    return total_bytes > l2_bytes // 2


@dataclass(frozen=True)
class Outer:
    """Launch numbers along a dimension that is not the last."""

    width: int  # neighbouring elements a thread: 16 bytes of them, or one
    held: int  # elements of the dimension that a thread keeps; 0: two reads
    across: int  # threads along the outer and inner positions, which changes no bit
    along: int  # threads along the dimension


def outer(cols: int, item_bytes: int, whole: bool) -> Outer:
    """Numbers for `cols` elements along the dimension; whole: inner rows are whole 16-byte vectors,
    which changes nothing about the order of a sum. Short dimensions stay in registers in float32;
    16-bit types read twice, as measured."""
    width = VECTOR_BYTES // item_bytes if whole else 1
    if item_bytes == 4 and cols <= 256:
        along = next_power_of_two(ceil_div(cols, 8))
        return Outer(width, 8, max(16, GROUP_BLOCK // along), along)
    if item_bytes == 4 and cols <= 2048:
        return Outer(width, 16, 4, max(next_power_of_two(ceil_div(cols, 16)), 8))
    return _outer_read_twice(cols, width)


def outer_backward(cols: int, read_bytes: int, item_bytes: int, whole: bool) -> Outer:
    """The same for a backward: read_bytes are those of an element of dy and of y together,
    item_bytes those of the narrowest of dy, y and dx. From register counts, nothing measured: what
    is held, as it lay in memory, takes 64 registers."""
    widest = VECTOR_BYTES // item_bytes
    held = 8 if widest * read_bytes <= 32 else 4
    width = widest if whole else 1
    along = next_power_of_two(ceil_div(cols, held))
    if along <= 32:
        return Outer(width, held, max(16, GROUP_BLOCK // along), along)
    if along <= 128:
        return Outer(width, held, 4, along)
    return _outer_read_twice(cols, width)


def _outer_read_twice(cols: int, width: int) -> Outer:
    if cols <= 64:
        return Outer(width, 0, 32, 4)
    if cols <= 16384:
        return Outer(width, 0, 16, 16 if cols <= 2048 else 32)
    return Outer(width, 0, 4, 128)
