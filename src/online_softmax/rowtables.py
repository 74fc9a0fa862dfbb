"""The tuned numbers of rowplan.py: how a row is cut, by operation, element size and length.

Measured on an H200: benchmarks/results/h200/tuning-*.jsonl has the rankings. An entry (most,
vectors, cluster) serves rows of up to `most` 16-byte vectors: `vectors` a lane, a row of just
`most` in `cluster` blocks; `rowplan.fit` finds block and cluster for the others. RAGGED rows have
columns that do not fill their last vector: no two of them lie alike, each share has ends of its
own to mend, so larger shares pay.
"""

from __future__ import annotations

Cut = tuple[int, int, int]
Cuts = tuple[Cut, ...]
Shared = tuple[tuple[int, int], ...]  # (most, vectors a lane): rows that share a warp, or have one

# 16-bit types keep the words and raise them twice, float32 keeps the terms: so they differ.
_FORWARD_16: Cuts = (
    (256, 4, 1), (1024, 6, 1), (2048, 8, 2), (4096, 8, 4), (8192, 8, 8), (16384, 8, 16),
    (20480, 10, 16), (27648, 9, 16), (32768, 8, 16), (65536, 8, 16),
)  # fmt: skip
_FORWARD_32: Cuts = (
    (512, 2, 1), (2048, 4, 2), (4096, 4, 4), (8192, 4, 8), (16384, 12, 16), (32768, 16, 16),
    (65536, 16, 16),
)  # fmt: skip
_BACKWARD: Cuts = (
    (256, 2, 1), (512, 2, 1), (1024, 6, 2), (2048, 6, 4), (4096, 4, 8), (8192, 4, 16),
    (16384, 4, 16), (32768, 4, 16), (65536, 8, 16),
)  # fmt: skip
_LSE_16: Cuts = ((1024, 8, 1), (2048, 8, 1), (4096, 8, 2))
_LSE_32: Cuts = ((1024, 4, 1), (2048, 8, 2), (4096, 8, 4), (8192, 8, 4), (16384, 16, 8))
# What log_softmax keeps are x themselves, which live longer: fewer, fuller blocks.
_LOG_32: Cuts = (*_FORWARD_32[:2], (4096, 6, 4), (8192, 6, 8), (16384, 16, 8), *_FORWARD_32[5:])
CUTS: dict[tuple[str, int], Cuts] = {
    ("log_softmax", 4): _LOG_32,
    ("forward", 2): _FORWARD_16, ("forward", 4): _FORWARD_32, ("backward", 2): _BACKWARD,
    ("backward", 4): _BACKWARD, ("logsumexp", 2): _LSE_16, ("logsumexp", 4): _LSE_32,
    # What a loss does beside makes blocks end at other times: no cluster's blocks wait for others
    # where parts of a row will do.
    ("cross_entropy", 2): _LSE_16[:2],
    ("cross_entropy_in_forward", 2): (
        *_FORWARD_16[:1], (512, 6, 1), (4096, 8, 1), (16384, 8, 8), (65536, 8, 16),
    ),
    ("cross_entropy_in_forward", 4): (
        *_FORWARD_32[:1], (1024, 4, 1), (4096, 16, 1), (8192, 16, 2), (16384, 16, 4),
        (32768, 16, 8), (65536, 16, 16),
    ),
}  # fmt: skip
RAGGED: dict[tuple[str, int], Cuts] = {
    ("forward", 2): (
        (256, 8, 1), (1024, 8, 1), *_FORWARD_16[2:5], (16384, 8, 8), *_FORWARD_16[6:],
    ),
    ("forward", 4): ((512, 10, 1), (2048, 6, 1), (8192, 6, 8), (16384, 16, 8), *_FORWARD_32[5:]),
    ("backward", 2): ((256, 8, 1), (512, 8, 1)),
    ("backward", 4): ((256, 4, 1), (512, 3, 1)),
    ("logsumexp", 2): _LSE_16,
    ("logsumexp", 4): ((512, 10, 1), (2048, 8, 1), *_LSE_32[2:]),
    ("cross_entropy", 2): _LSE_16[:2],
    ("cross_entropy", 4): ((512, 10, 1), (2048, 8, 1)),
    ("cross_entropy_in_forward", 2): (
        (256, 8, 1), (4096, 8, 1), (8192, 8, 8), (16384, 16, 8), (65536, 8, 16),
    ),
}  # fmt: skip
# Ragged rows past their table land: a lane has 8 vectors of both tensors, a block about 8 warps.
RAGGED_LANDED: Cuts = ((2048, 8, 1), (4096, 8, 2), (8192, 8, 4), (32768, 8, 8), (65536, 8, 16))
# For `batch_invariant(False)`: cuts of few rows, not ragged, that give other bits than the planned;
# (more than, most, vectors, cluster, most rows). Measured at 1 to 16 rows in both 16-bit types: in
# bench-rows.jsonl no cell takes longer than by the planned cut. Past 20,480 vectors 8 and 16 rows
# would: of 201,088 and 262,144 columns they take 4 to 23 % longer so, 1 to 4 rows up to 7 % less.
SPREAD = 2048  # vectors: a block that has so many spreads over a cluster where rows are few
FEW: dict[tuple[str, int], tuple[tuple[int, int, int, int, int], ...]] = {
    ("forward", 2): (
        (2048, 4096, 4, 8, 16), (4096, 20480, 4, 16, 16), (20480, 32768, 4, 16, 4),
    ),
}  # fmt: skip
# Without clusters: blocks of up to 512 threads, from facts.
ALONE: dict[str, Cuts] = {
    "forward": ((128, 2, 1), (1024, 4, 1), (4096, 8, 1), (8192, 16, 1)),
    "backward": ((512, 2, 1), (2048, 4, 1), (4096, 8, 1)),
    "logsumexp": ((128, 2, 1), (1024, 4, 1), (4096, 8, 1), (8192, 16, 1)),
}
SHARED: dict[tuple[str, int], Shared] = {
    ("forward", 2): ((64, 3),), ("forward", 4): ((64, 2), (96, 3)), ("backward", 2): ((64, 2),),
    ("backward", 4): ((64, 2),), ("logsumexp", 2): ((128, 4), (256, 8)),
    ("logsumexp", 4): ((128, 6), (256, 8)),
}  # fmt: skip

# Rows of more vectors than `least` stream, up to `most`; (threads, vectors a thread).
STREAMED_LEAST = {"forward": 65536, "backward": 32768}
STREAMED_LEAST_RAGGED = 65536
STREAMED_MOST = {"forward": 1 << 20, "backward": 1 << 19}
STREAMED_CUT = {"forward": (256, 8), "backward": (256, 4)}
STREAMED_ITEMS = 4  # parts a multiprocessor in all: with fewer, split's two launches end sooner
GROUP_BLOCK = 128  # threads a block where a row has a warp or less: small blocks end soonest
FOLD_MOST: Cut = (16384, 16, 8)  # the longest row that one read of registers folds
# Parts of rows, two kernels: (vectors a lane, warps a part). With some 16 KB a part a few rows give
# blocks enough; a fold alone does little with a byte, so that what each warp costs counts: 32 KB.
SPLIT_CUT = 4, 8
SPLIT_CUTS = {"logsumexp": (8, 8)}
SPLIT_RAGGED = {("logsumexp", 2): (8, 4)}
# Gradients from what each row has been summarised to, for which no lane waits for another: (threads
# a block, vectors a lane at most).
SHARES = {"cross_entropy_backward": (64, 4), "token_stats_backward": (256, 4)}
LONG = 16384  # vectors: longer rows take all the blocks that their cut allows
MAX_ROW_BLOCK = 512  # threads: 128 registers each
MAX_BLOCK_OF_10 = 448  # where a lane has 10 vectors: rows.cu
LANDED_MOST = {"forward": 131072, "backward": 65536}  # vectors: 16 blocks of 512 threads, full
LANDED_VECTORS = {"forward": 16, "backward": 8}
