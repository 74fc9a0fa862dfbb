"""What a tuning run tries on a row: every cut that its registers and shared memory allow.

Pure Python, standard library only, as rowplan.py is, whose planned cut stands first.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from online_softmax.plan import WARP
from online_softmax.rowplan import (
    BACKWARD,
    ITEM_BYTES,
    Row,
    block_of,
    fit,
    has_clusters,
    most_streamed,
    numbers,
    split,
    streamed,
    vectors_a_row,
    warps_kept,
)
from online_softmax.rowtables import GROUP_BLOCK, LONG, MAX_ROW_BLOCK

LONG_FOLD = 2048  # vectors: from here on several parts of a row are folds worth trying


def sweep(op: str, cols: int, dtype: str, arch: str) -> list[Row]:
    """What a tuning run should try on rows of `cols` elements, the planned numbers first."""
    found = [numbers(op, cols, dtype, arch)]
    item, clusters = ITEM_BYTES[dtype], has_clusters(arch)
    row = vectors_a_row(cols, item)
    blocks_a_row = (1, 2, 4, 8, 16) if clusters else (1,)
    most = 8 if op in BACKWARD else 16
    for vectors in (v for v in (1, 2, 4, 6, 8, 12, 16) if v <= most):
        for lanes in (1, 2, 4, 8, 16, 32):
            if row <= vectors * lanes < 2 * row + lanes and vectors <= most // 2:
                found.append(Row("registers", vectors, lanes, GROUP_BLOCK))
        for cluster in blocks_a_row:
            block = block_of(row, vectors, cluster)
            if block <= MAX_ROW_BLOCK and (cluster == 1 or block * vectors >= WARP * most):
                cut = vectors, block, cluster
                if row <= LONG:  # past it `fit` finds none for some clusters
                    cut = fit(row, row, vectors, cluster, warps_kept(op, item, vectors))
                found.append(Row("registers", cut[0], 0, *cut[1:]))
                if clusters and vectors >= most // 2 and op != "logsumexp" and row >= 1024:
                    found.append(Row("landed", vectors, 0, block, cluster))
    found.append(split(row, ""))
    if op == "logsumexp" and row >= LONG_FOLD:
        found += [split(row, "", cut) for cut in itertools.product((4, 8, 16), (4, 8))]
    for part, block in itertools.product((1024, 2048, 4096), (256, 512)):  # 16, 32, 64 KB
        each = streamed(row, op, (block, part // block))
        if 8192 <= row <= most_streamed(each, op, arch) and each.vectors <= most // 2:
            found += [each, replace(each, kernel="split", why="")]
    kept: dict[Row, Row] = {}  # the first of those that differ in more than the reason
    for each in found:
        kept.setdefault(replace(each, why=""), each)
    return list(kept.values())
