"""What `streamed` holds in shared memory: the stages of a block's ring, and how they are used.

Pure Python, standard library only. Nothing here changes a bit of a result.
"""

from __future__ import annotations

from online_softmax.arches import Arch
from online_softmax.plan import VECTOR_BYTES, WARP, ceil_div

THREADS = 512  # a multiprocessor, which leave 128 registers each; blocks share its shared memory
RESERVED_BYTES = 1024  # of shared memory, that the driver takes for each block
STATE_BYTES, BARRIER_BYTES, TOP_BYTES = 8, 8, 4
EDGE_WORDS = 2  # landing.cuh: a misaligned share's, beside its own
STATE_SETS = 2  # streamed.cu: two items take turns


def shared_bytes(block: int, vectors: int, tensors: int, whole: bool, stages: int) -> int:
    """Dynamic shared memory of a block of so many threads and stages: words, barriers and states.
    Misaligned rows (not whole) have EDGE_WORDS more a warp."""
    words = vectors * WARP + (0 if whole else EDGE_WORDS)
    stage = tensors * (words * VECTOR_BYTES + BARRIER_BYTES) + TOP_BYTES
    return block // WARP * (stages * stage + STATE_SETS * STATE_BYTES)


def stages(block: int, vectors: int, tensors: int, whole: bool, arch: Arch) -> int:
    """Parts that fit a block's share of a multiprocessor's memory."""
    given = arch.shared_bytes_sm * block // THREADS - RESERVED_BYTES
    fixed = shared_bytes(block, vectors, tensors, whole, 0)
    stage = shared_bytes(block, vectors, tensors, whole, 1) - fixed
    return (min(given, arch.shared_bytes_block) - fixed) // stage


def lag(parts: int, blocks: int, stages: int) -> int:
    """How many items a block posts before it writes the first: at least parts / blocks, so that
    all of a row is posted by then; half of the other stages are time for the states to come, the
    rest has loads under way. 0: a row of so many parts is too long for the ring."""
    least = ceil_div(parts, blocks)
    return least + (stages - least) // 2 if least < stages else 0


def most_vectors(block: int, vectors: int, tensors: int, arch: Arch, multiprocessors: int) -> int:
    """The longest row, with a stage of loads beside it."""
    blocks = multiprocessors * THREADS // block
    return blocks * max(stages(block, vectors, tensors, False, arch) - 1, 0) * block * vectors
