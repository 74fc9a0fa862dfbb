"""Which kernel, with which numbers, and why: a problem goes in, all three come out.

Of the ladder's rungs; rowplan.py is the same for what ships. Pure Python, standard library only.
Thresholds on rows or columns and tuned numbers stand in these two files, each with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from online_softmax.arches import ARCHES, DEFAULT_ARCH, Arch

MAX_GRID = 2**31 - 1  # blocks in a grid's x dimension
MAX_BLOCK = 1024  # threads in a block
WARP = 32
VECTOR_BYTES = 16
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Problem:
    """One call, as the planner sees it: an operation on a rows x cols matrix."""

    rows: int
    cols: int
    dtype: str = "float32"
    device: str = "cuda"  # "cuda" or anything else
    arch: str = DEFAULT_ARCH
    sm_count: int = 0  # of the device at hand; 0: that of the architecture's card

    @property
    def facts(self) -> Arch:
        """The architecture's facts; of one that is not in the table, the default's, unmeasured."""
        known = ARCHES.get(self.arch)
        return known or replace(ARCHES[DEFAULT_ARCH], name=self.arch, measured=False)

    @property
    def multiprocessors(self) -> int:
        return self.sm_count or self.facts.sm_count

    @property
    def vector(self) -> int:
        """Elements in one 16-byte vector."""
        return VECTOR_BYTES // ELEMENT_BYTES[self.dtype]

    @property
    def cols_padded(self) -> int:
        """Columns rounded up to whole vectors."""
        return ceil_div(self.cols, self.vector) * self.vector


@dataclass(frozen=True)
class Numbers:
    """Launch numbers of one kernel on one problem, and the reason for them."""

    block: int  # threads a block, one of BLOCKS (Triton: 32 x warps)
    why: str
    vectors: int = 0  # v3: 16-byte vectors a thread holds
    blocks: int = 0  # v4: blocks in the grid
    parts: int = 0  # v5: blocks a row
    part_cols: int = 0  # v5: columns a block
    tile: int = 0  # Triton: columns a step


def unmeasured(arch: str) -> str:
    """That nobody has measured an architecture yet, a sentence; "": somebody has.

    >>> unmeasured("sm_90a"), unmeasured("sm_80")
    ('', 'nobody has measured sm_80 yet: chosen from its datasheet facts')
    """
    facts = Problem(0, 0, arch=arch).facts
    if facts.measured:
        return ""
    whose = "its datasheet facts" if arch in ARCHES else f"the facts of {DEFAULT_ARCH}"
    return f"nobody has measured {arch} yet: chosen from {whose}"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def clamp_block(threads: int, low: int = WARP, high: int = MAX_BLOCK) -> int:
    return min(max(next_power_of_two(threads), low), high)


# ---- the ladder's rungs

V3_ELEMENTS = 32  # floats of the row a thread holds: 64 registers, what 1,024 threads may have
V3_MAX_COLS = MAX_BLOCK * V3_ELEMENTS
V5_PART_VECTORS = 4  # 16-byte vectors a thread folds: 256 blocks for a row of a million floats
TRITON_TILE = 4096  # columns a step; longer rows gain from more, up to 16,384 (not yet tuned)
BLOCKS = (32, 64, 128, 256, 512, 1024)  # what a sweep tries


def _one_block(p: Problem, block: int | None, columns_a_thread: int) -> Numbers:
    """One block a row. About 16 elements, or 4 vectors, a thread were best on the H200 (4,096
    columns); fewer leave warps that only merge, more leave too few loads under way."""
    threads = block or clamp_block(ceil_div(p.cols, columns_a_thread))
    return Numbers(threads, f"one block of {threads} threads a row")


def _v0(p: Problem, block: int | None) -> Numbers:
    threads = block or WARP
    return Numbers(threads, f"{threads} rows a block: small blocks reach more multiprocessors")


def _v3(p: Problem, block: int | None) -> Numbers:
    vectors_a_row = max(ceil_div(p.cols, p.vector), 1)
    most = V3_ELEMENTS // p.vector
    if block is None:  # two vectors a thread were best on the H200, a block of 1,024 the worst
        block = clamp_block(ceil_div(vectors_a_row, 2), high=MAX_BLOCK // 2)
        if block * most < vectors_a_row:
            block = MAX_BLOCK
    vectors = min(next_power_of_two(ceil_div(vectors_a_row, block)), most)
    return Numbers(
        block, f"{block} threads hold the row, {vectors} vectors of 16 bytes each", vectors=vectors
    )


def _v4(p: Problem, block: int | None) -> Numbers:
    threads = block or clamp_block(ceil_div(p.cols, 4 * p.vector))
    # By warps alone: where registers admit fewer blocks, the last ones wait their turn.
    resident = min(p.facts.max_blocks, p.facts.max_warps * WARP // threads)
    blocks = max(1, min(p.rows, MAX_GRID, p.multiprocessors * resident))
    return Numbers(threads, f"{blocks} blocks stay and loop over the rows", blocks=blocks)


def _v5(p: Problem, block: int | None) -> Numbers:
    threads = block or 256
    part_cols = threads * p.vector * V5_PART_VECTORS
    parts = max(ceil_div(p.cols, part_cols), 1)
    return Numbers(
        threads,
        f"{parts} blocks a row, {part_cols} columns each: cut by columns alone, so a row's bits "
        "do not depend on its batch",
        parts=parts,
        part_cols=part_cols,
    )


def _triton(p: Problem, block: int | None) -> Numbers:
    tile = min(max(next_power_of_two(p.cols), 128), TRITON_TILE)
    # A slice of four vectors a thread, the best on the H200 at 4,096 columns.
    threads = block or clamp_block(tile // (4 * p.vector))
    return Numbers(threads, f"tiles of {tile} columns, {threads // WARP} warps", tile=tile)


_NUMBERS = {
    "safe": lambda p, b: _one_block(p, b, 16),
    "v0_thread": _v0,
    "v1_warp_shuffle": lambda p, b: _one_block(p, b, 16),
    "v2_vectorized": lambda p, b: _one_block(p, b, 4 * p.vector),
    "v3_register_cache": _v3,
    "v4_grid_stride": _v4,
    "v5_split_row": _v5,
    "triton_two_pass": _triton,
    "triton_online": _triton,
}


RUNGS = tuple(_NUMBERS)


def numbers(kernel: str, problem: Problem, block: int | None = None) -> Numbers:
    """Launch numbers for a kernel on a problem; `block` overrides the threads a block.

    Raises ValueError for a block that is not in BLOCKS: warps must be whole, and a sweep's sizes
    are the ones that tests run.

    >>> numbers("v3_register_cache", Problem(4096, 4096)).vectors
    2
    """
    if block is not None and block not in BLOCKS:
        raise ValueError(f"{kernel}: block must be one of {BLOCKS}, got {block}")
    return _NUMBERS[kernel](problem, block)


def sweep(kernel: str, problem: Problem) -> list[Numbers]:
    """Every block size that a benchmark should try for a kernel, the planned one first."""
    tried = [numbers(kernel, problem)]
    for block in BLOCKS:
        if reasons(kernel, replace(problem, device="cuda"), block):
            continue
        candidate = numbers(kernel, problem, block)
        if candidate not in tried and candidate.block != tried[0].block:
            tried.append(candidate)
    return tried


def reasons(kernel: str, problem: Problem, block: int | None = None) -> list[str]:
    """Why a kernel cannot run a problem, with `block` threads if given; empty: it can."""
    p = problem
    why: list[str] = []
    if kernel in ("torch", "reference"):
        return why
    if p.dtype not in ELEMENT_BYTES:
        why.append(
            f"{kernel} takes {', '.join(ELEMENT_BYTES)}; this input is {p.dtype} "
            "(the reference takes float64)"
        )
    if p.device != "cuda":
        why.append(f"{kernel} runs on CUDA tensors; this one is on {p.device}")
    threads = block or MAX_BLOCK
    if kernel == "v3_register_cache" and p.cols > threads * V3_ELEMENTS:
        why.append(
            f"v3_register_cache holds at most {threads * V3_ELEMENTS} columns "
            f"({threads} threads x {V3_ELEMENTS} elements); this row has {p.cols}: "
            "v2_vectorized, v4_grid_stride and v5_split_row have no such limit"
        )
    blocks = p.rows
    if kernel == "v0_thread":
        blocks = ceil_div(p.rows, numbers(kernel, p, block).block)
    if kernel == "v5_split_row" and p.dtype in ELEMENT_BYTES:
        blocks = p.rows * numbers(kernel, p, block).parts
    if blocks > MAX_GRID and kernel != "v4_grid_stride":
        why.append(
            f"{kernel} would need {blocks} blocks, more than the {MAX_GRID} of a grid: "
            "v4_grid_stride loops over any number of rows"
        )
    return why


# ---- the choice

SPLIT_MIN_COLS = 8192  # below, one block has the row in about the time of one launch


def _rows(problem: Problem) -> str:
    return "1 row" if problem.rows == 1 else f"{problem.rows} rows"


def choose(problem: Problem) -> tuple[str, str]:
    """The kernel for a problem and the reason, a sentence.

    >>> choose(Problem(4096, 4096))[0]
    'v3_register_cache'
    >>> choose(Problem(1, 1_048_576))[0]
    'v5_split_row'
    """
    p = problem
    if p.device == "cpu":
        return "torch", "a CPU tensor: ATen's softmax in float32 (float64) has our semantics"
    if p.device != "cuda" or p.dtype not in ELEMENT_BYTES:
        return "reference", f"{p.dtype} on {p.device}: no kernel of ours, so the reference"
    if (
        p.cols >= SPLIT_MIN_COLS
        and p.rows * 2 <= p.multiprocessors
        and not reasons("v5_split_row", p)
    ):
        return (
            "v5_split_row",
            f"{_rows(p)} cannot fill {p.multiprocessors} multiprocessors, a block each: "
            "several blocks share a row",
        )
    if p.cols <= V3_MAX_COLS and p.rows <= MAX_GRID:
        return (
            "v3_register_cache",
            f"{p.cols} columns fit in one block's registers: one read, one write, the least",
        )
    if p.rows <= MAX_GRID:
        return (
            "v2_vectorized",
            f"{p.cols} columns are past the register limit of {V3_MAX_COLS}: two reads, the second "
            "mostly from L2",
        )
    return "v4_grid_stride", f"{p.rows} rows are more than a grid has blocks: a fixed grid loops"


def why_not(kernel: str, problem: Problem) -> str:
    """What speaks against a kernel that could run a problem, a sentence."""
    p = problem
    if kernel == "v3_register_cache" and p.rows < p.multiprocessors:
        return f"{_rows(p)}, a block each, would leave most of {p.multiprocessors} SMs idle"
    if kernel == "v5_split_row":
        if p.cols < SPLIT_MIN_COLS:
            return f"{p.cols} columns are too few to share among blocks"
        if p.rows * 2 <= p.multiprocessors:
            return "reads every element twice, by one cut for every type; what ships is tuned"
        return f"{_rows(p)}, a block each, already fill {p.multiprocessors} multiprocessors"
    return {
        "safe": "reads every element three times",
        "v0_thread": "one thread a row: few threads, each waiting for its own sector of memory",
        "v1_warp_shuffle": "moves one element an instruction, where v2_vectorized moves 16 bytes",
        "v2_vectorized": "reads every element twice, a block a row",
        "v3_register_cache": "one block a row whatever its width: registers cuts rows to fit",
        "v4_grid_stride": "reads every element twice; a fixed grid gains nothing over a plain one",
        "triton_two_pass": "reads every element three times",
        "triton_online": "reads every element twice, a program a row",
    }[kernel]
