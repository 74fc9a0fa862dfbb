"""What runs on so many rows: the only answers that ask for the number of rows.

Pure Python, standard library only. No bit of a row follows from `mechanism`; from `few` it does,
which is taken where batch invariance was given up (invariance.py) and nowhere else.
"""

from __future__ import annotations

from dataclasses import replace

from online_softmax.plan import VECTOR_BYTES, WARP, Problem, ceil_div
from online_softmax.rowplan import (
    ITEM_BYTES,
    Row,
    block_of,
    has_clusters,
    kind_of,
    numbers,
    reasons,
    vectors_a_row,
)
from online_softmax.rowtables import FEW, SPREAD, STREAMED_ITEMS


def chosen(op: str, problem: Problem, invariant: bool = True) -> Row:
    """What runs on a problem: the planned cut by the mechanism for so many rows; or, where bits may
    depend on the number of rows, a cut for few.

    >>> chosen("softmax", Problem(1, 32000, "bfloat16")).vectors
    8
    >>> chosen("softmax", Problem(1, 32000, "bfloat16"), invariant=False).vectors
    4
    """
    if not invariant and (cut := few(op, problem)):
        return cut
    row = numbers(op, problem.cols, problem.dtype, problem.arch)
    return mechanism(row, op, problem)


def few(op: str, problem: Problem) -> Row | None:
    """The cut for few rows that is faster than the planned one and gives other bits, if any."""
    p, item = problem, ITEM_BYTES[problem.dtype]
    is_whole = p.cols * item % VECTOR_BYTES == 0
    if not (is_whole and has_clusters(p.arch)):
        return None
    row = vectors_a_row(p.cols, item)
    for least, most, vectors, cluster, most_rows in FEW.get((kind_of(op), item), ()):
        if least < row <= most and p.rows <= most_rows:
            block = block_of(row, vectors, cluster)
            why = (
                f"few rows, batch invariance off: {cluster} blocks a row, {block} threads of "
                f"{vectors} vectors; not the bits that more rows would have"
            )
            return Row("registers", vectors, 0, block, cluster, why=why)
    return None


def mechanism(row: Row, op: str, problem: Problem) -> Row:
    """What runs a planned cut. It asks for the number of rows, and no bit of a row follows from the
    answer: `streamed` and `split` give a row of the same parts the same bits; so do `landed` and
    `registers` with the same vectors, few warps in many blocks and many in few."""
    sms = problem.multiprocessors
    if row.kernel == "landed" and problem.rows * row.cluster <= sms:
        row = replace(row, kernel="registers", why="no second row that could land meanwhile")
    warps = row.block * row.cluster // WARP
    has_blocks = row.kernel == "registers" and not row.lanes and has_clusters(problem.arch)
    if has_blocks and (row.cluster > 1 or row.vectors * row.block >= SPREAD):
        for blocks in (16, 8, 4):
            if row.cluster < blocks <= warps and problem.rows * blocks <= sms:
                why = f"few rows: the warps of each over {blocks} blocks"
                return replace(row, block=ceil_div(warps, blocks) * WARP, cluster=blocks, why=why)
    if row.kernel != "streamed":
        return row
    items = problem.rows * row.parts
    refusals = reasons("streamed", op, problem)
    enough = STREAMED_ITEMS * sms
    if items >= enough and not refusals:
        return row
    why = f"two kernels, a block for each of {items} parts of rows: streamed wants {enough} or more"
    return replace(row, kernel="split", why=refusals[0] if refusals else why)
