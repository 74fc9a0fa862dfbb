"""What ships for each row operation: kernel, launch numbers and the reason. plan.py's sister file.

Pure Python, standard library only. The cut of a row follows from its operation, columns, type and
the architecture, never from the number of rows: a row has the same bits in any batch, unless that
is given up; rowchoice.py has what asks for that number. The numbers stand in rowtables.py; for
architectures that were not measured they follow from facts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from online_softmax import ring
from online_softmax.arches import ARCHES
from online_softmax.plan import MAX_GRID, VECTOR_BYTES, WARP, Problem, ceil_div, next_power_of_two
from online_softmax.rowtables import (
    ALONE,
    CUTS,
    FOLD_MOST,
    GROUP_BLOCK,
    LANDED_MOST,
    LANDED_VECTORS,
    LONG,
    MAX_BLOCK_OF_10,
    MAX_ROW_BLOCK,
    RAGGED,
    RAGGED_LANDED,
    SHARED,
    SHARES,
    SPLIT_CUT,
    SPLIT_CUTS,
    SPLIT_RAGGED,
    STREAMED_CUT,
    STREAMED_LEAST,
    STREAMED_LEAST_RAGGED,
    STREAMED_MOST,
    Cut,
    Cuts,
)

FORWARD = ("softmax", "log_softmax")
BACKWARD = ("softmax_backward", "log_softmax_backward")
OPERATIONS = (*FORWARD, *BACKWARD, "logsumexp")
# Cut as those, but for tables of their own; no records of the catalogue run them.
LOSSES = {"cross_entropy": "logsumexp", "cross_entropy_in_forward": "forward"}
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
    "landed": "pays where a multiprocessor has one row at a time, and more to come",
    "streamed": "for long rows, and many of them: a cluster or split is sooner otherwise",
    "split": "reads every element twice",
}
READS = {"registers": 1, "landed": 1, "streamed": 1, "split": 2}
NEEDS = {"landed": "clusters of 16 blocks", "streamed": "bulk copies"}


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


def vectors_a_row(cols: int, item_bytes: int) -> int:
    """16-byte vectors that hold a row, at least one."""
    return max(ceil_div(cols * item_bytes, VECTOR_BYTES), 1)


def block_of(row: int, vectors: int, cluster: int) -> int:
    """The fewest whole warps that hold a row."""
    return ceil_div(row, vectors * cluster * WARP) * WARP


def fit(
    row: int, most: int, vectors: int, cluster: int, keeps: int = 32, odd: bool = True
) -> tuple[int, int, int]:
    """Vectors a lane, threads a block and blocks a row for `row` vectors, by the cut of `most`.

    The fewest warps, those counted too that find no room on a multiprocessor that keeps `keeps` of
    them; then about as many a block as `most` would have. odd: clusters of 3, 5, 6 or 7 blocks too.
    """
    warps, usual = ceil_div(row, vectors * WARP), block_of(most, vectors, cluster) // WARP
    choices = []
    for a_block in range(1, min(2 * usual, MAX_ROW_BLOCK // WARP) + 1):
        blocks = ceil_div(warps, a_block)
        if blocks > 8:  # clusters of 9 to 15 find little room, as measured
            blocks = 16 if blocks <= 16 else 0
        if blocks and not odd:
            blocks = next_power_of_two(blocks)
        if 0 < blocks <= cluster:
            blocks = cluster if row > LONG else blocks
            taken = a_block * blocks * keeps / (keeps // a_block * a_block)
            choices.append((taken, a_block * blocks, abs(a_block - usual), a_block, blocks))
    _, in_all, _, a_block, blocks = min(choices)
    needed, block = ceil_div(row, in_all * WARP), a_block * WARP
    return needed + (needed == 10 and block > MAX_BLOCK_OF_10), block, blocks


def warps_kept(op: str, item: int, vectors: int) -> int:
    """Warps that a multiprocessor keeps: of 64 registers a thread, or of 128."""
    small = 4 if op in BACKWARD else 8 if item == 2 or kind_of(op) == "logsumexp" else 6
    return 32 if vectors <= small else 16


def has_clusters(arch: str) -> bool:
    """Whether blocks of an architecture form clusters of up to 16."""
    return arch in CLUSTER_ARCHES


@functools.lru_cache(maxsize=4096)
def numbers(op: str, cols: int, dtype: str, arch: str) -> Row:
    """The kernel and launch numbers of an operation on rows of `cols` elements.

    >>> numbers("softmax", 4096, "bfloat16", "sm_90a").block
    96
    >>> numbers("softmax", 4_194_304, "float32", "sm_90a").kernel
    'streamed'
    """
    item, kind = ITEM_BYTES[dtype], kind_of(op)
    row = vectors_a_row(cols, item)
    for most, vectors in SHARED[kind, item]:
        if row <= most:
            lanes = min(next_power_of_two(ceil_div(row, vectors)), WARP)
            vectors = ceil_div(row, lanes)
            who = f"{WARP // lanes} rows a warp" if lanes < WARP else "a warp a row"
            why = f"{who}, {vectors} vector{'s' if vectors > 1 else ''} a lane"
            return Row("registers", vectors, lanes, GROUP_BLOCK, why=why)
    ragged = cols * item % VECTOR_BYTES != 0
    least = STREAMED_LEAST_RAGGED if ragged else STREAMED_LEAST.get(kind, row)
    if has_clusters(arch) and least < row <= STREAMED_MOST.get(kind, 0):
        return streamed(row, op)
    for cut in _cuts(op, item, arch, ragged):
        if row <= cut[0]:
            return _in_registers(op, item, row, cut)
    for cut in RAGGED_LANDED if ragged and kind == "backward" and has_clusters(arch) else ():
        if row <= cut[0]:
            return _landed(row, cut)
    why = f"no other kernel is planned for {cols} columns: parts of a row, two kernels"
    parts = SPLIT_CUTS.get(kind, SPLIT_CUT)
    return split(row, why, SPLIT_RAGGED.get((kind, item), parts) if ragged else parts)


def kind_of(op: str) -> str:
    """The tables that an operation has, but for those of its own: forward, backward, logsumexp."""
    return "forward" if op in FORWARD else "backward" if op in BACKWARD else LOSSES.get(op, op)


def _in_registers(op: str, item: int, row: int, cut: Cut) -> Row:
    vectors, block, cluster = fit(row, *cut, warps_kept(op, item, cut[1]))
    blocks = f"a cluster of {cluster} blocks" if cluster > 1 else "a block"
    why = f"{blocks} a row, {block} threads of {vectors} vectors: one read, one write"
    return Row("registers", vectors, 0, block, cluster, why=why)


def _landed(row: int, cut: Cut) -> Row:
    vectors, block, cluster = fit(row, *cut, 16, odd=False)  # as measured
    blocks = f"{cluster} blocks" if cluster > 1 else "a block"
    why = (
        f"{blocks} a row, {block} threads of {vectors} vectors; the next row lands in shared "
        "memory meanwhile: one read, one write"
    )
    return Row("landed", vectors, 0, block, cluster, why=why)


def split(row: int, why: str, cut: tuple[int, int] = SPLIT_CUT) -> Row:
    """Two kernels over parts of a row: any number of columns; cut: vectors a lane, warps a part."""
    vectors, about = cut
    warps = ceil_div(row, vectors * WARP)
    near = range(about - about // 4, about + about // 4 + 1)
    a_part = min(near, key=lambda n: (-warps % n, -n))
    return Row("split", vectors, 0, a_part * WARP, parts=ceil_div(warps, a_part), why=why)


def shares(op: str, cols: int, item_bytes: int, cut: tuple[int, int] | None = None) -> Row:
    """A gradient that needs no other part of its row: some lanes a row, or a warp a part of it.

    cut: threads, vectors a lane at most; None: those of the operation.

    >>> shares("cross_entropy_backward", 128_256, 2).parts
    126
    """
    (block, most), row = cut or SHARES[op], vectors_a_row(cols, item_bytes)
    lanes = next_power_of_two(ceil_div(row, most))
    if lanes <= WARP:
        return Row("registers", ceil_div(row, lanes), lanes, block)
    return Row("registers", most, 0, block, parts=ceil_div(row, most * WARP))


def streamed(row: int, op: str, cut: tuple[int, int] | None = None) -> Row:
    """Blocks that stay and take parts of rows in turn; cut: threads, vectors a thread."""
    block, vectors = cut or STREAMED_CUT[kind_of(op)]
    parts = ceil_div(row, block * vectors)
    why = f"{parts} parts a row wait in shared memory for its state: one read, one write"
    return Row("streamed", vectors, 0, block, parts=parts, why=why)


def most_streamed(row: Row, op: str, arch: str, multiprocessors: int = 0) -> int:
    """Vectors of the longest row that streamed holds by the cut of `row`; logsumexp lands none."""
    if op == "logsumexp" or not has_clusters(arch):
        return 0
    facts, tensors = ARCHES[arch], 2 if op in BACKWARD else 1
    sms = multiprocessors or facts.sm_count
    return ring.most_vectors(row.block, row.vectors, tensors, facts, sms)


def _cuts(op: str, item: int, arch: str, ragged: bool) -> Cuts:
    if not has_clusters(arch):
        return ALONE[kind_of(op)]
    cuts = RAGGED if ragged else CUTS
    return cuts[op, item] if (op, item) in cuts else cuts[kind_of(op), item]


def _by_name(op: str, item: int, arch: str) -> Cuts:
    """The cuts of `registers` where it is asked for: those too that `split` beats."""
    cuts = _cuts(op, item, arch, False)
    is_fold = kind_of(op) == "logsumexp" and has_clusters(arch)
    return (*cuts, FOLD_MOST) if is_fold and cuts[-1] < FOLD_MOST else cuts


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
        item = ITEM_BYTES[dtype]
        widest = next(each for each in _by_name(op, item, arch) if row <= each[0])
        return replace(_in_registers(op, item, row, widest), why="asked for")
    vectors = LANDED_VECTORS[kind_of(op)]
    cluster = next(c for c in (1, 2, 4, 8, 16) if block_of(row, vectors, c) <= MAX_ROW_BLOCK)
    return Row("landed", vectors, 0, block_of(row, vectors, cluster), cluster, why="asked for")


def most_cols(kernel: str, op: str, dtype: str, arch: str, multiprocessors: int = 0) -> int:
    """The columns that a kernel other than split can hold (multiprocessors 0: as the card has)."""
    vectors = _by_name(op, ITEM_BYTES[dtype], arch)[-1][0]
    if kernel == "streamed":
        vectors = most_streamed(streamed(1, op), op, arch, multiprocessors)
    if kernel == "landed":
        vectors = LANDED_MOST[kind_of(op)]
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


def leaves_l2(total_bytes: int, l2_bytes: int) -> bool:
    """Whether what is read and written once should leave the caches first: if it cannot stay."""
    return total_bytes > l2_bytes // 2
