"""Which cells a benchmark has: operations, types and shapes; where rivals are timed; bytes.

A cell is one operation on one rows x cols matrix of one type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from online_softmax.lab import fusedsizes
from online_softmax.lab.fusedsizes import FUSED_OPS
from online_softmax.lab.inputs import BadInput

OPS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward", "logsumexp")
# Of logits and a target: the loss; the loss and its gradient; both with the gradient made in the
# forward; what a token's distribution gives.
LOSS_OPS = ("cross_entropy", "cross_entropy_both", "cross_entropy_in_forward", "token_stats")
EVERY_OP = (*OPS, *LOSS_OPS, *FUSED_OPS)
DTYPES = ("bfloat16", "float16", "float32")
GRIDS = ("big", "small", "odd", "all", "cpu")
WHOLE = 2**27  # elements of a large cell: 256 MiB in 16-bit types, far past any L2

# The shapes whose geometric means are the headline: powers of two and everyday odd counts.
MAIN_COLS = (
    128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576,
    1000, 5000, 32001, 50257, 128257,
)  # fmt: skip
BIG_COLS = (
    32, 64, 96, 128, 192, 256, 384, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096, 5000, 6144, 8192,
    12288, 16384, 32000, 32001, 32768, 50257, 50304, 65536, 100277, 128256, 128257, 131072, 151936,
    201088, 262144, 524288, 1048576, 4194304,
)  # fmt: skip
ODD_COLS = (1000, 5000, 32001, 50257, 100277, 128257, 151936, 201088)  # vocabularies
SMALL_ROWS = (1, 2, 4, 8, 16, 64, 256)
SMALL_FROM = 1024  # columns
RIVAL_COLS = (32001, 50257, 128257, 201088)  # rivals are timed there at any number of rows
# Elsewhere where figures of the rivals were there before ours: to be comparable with them.
RIVAL_TYPES = ("bfloat16", "float32")
RIVAL_LARGE_OPS = ("softmax", "log_softmax", "softmax_backward", "logsumexp")
RIVAL_SMALL_OPS = ("softmax", "logsumexp")
RIVAL_SMALL_ROWS = (1, 4, 16, 64, 256)
RIVAL_SMALL_COLS = (1024, 32000, 65536, 128256, 262144, 1048576)

CPU_SHAPES = ((1024, 1024), (64, 32000))  # a CPU's default: small, and fixed
CPU_LOSS_SHAPES = ((64, 32000),)
LOSS_WHOLE = 2**28  # elements of a large cell of logits: 512 MiB in 16-bit types
LOSS_COLS = (
    4096, 8192, 16384, 32000, 32768, 50257, 65536, 128256, 128257, 131072, 151936, 201088, 262144,
)  # fmt: skip
TOKENS = (4096, 128256)  # the shape that token_stats is held to
FEW_TOKENS = (1, 16, 256)  # as serving has them, which needs no gradient
FEW_TOKENS_COLS = (32000, 50257, 128256, 262144)
FEW_TOKENS_OPS = ("cross_entropy", "token_stats")
TOP_K = 20  # that token_stats is asked for
WRITING = ("cross_entropy_both", "cross_entropy_in_forward")  # a matrix, of the losses

# Tensors of rows x cols that an operation must move: the floor of its traffic.
MATRICES = {
    "softmax": 2,
    "log_softmax": 2,
    "softmax_backward": 3,
    "log_softmax_backward": 3,
    "logsumexp": 1,
    "cross_entropy": 1,
    "cross_entropy_both": 3,
    "cross_entropy_in_forward": 2,
    "token_stats": 1,
}
# And bytes a row: the target; of token_stats also three numbers, a rank, and the largest.
ROW_BYTES = {"token_stats": 8 + 3 * 4 + 8 + TOP_K * (4 + 8)} | dict.fromkeys(LOSS_OPS[:3], 8)
# Bytes an element that a contender of a loss may have for itself while it runs: float32 copies,
# log-probabilities, their gradient; of token_stats a sorted copy and its int64 places too.
WORKING_BYTES = {"token_stats": 48} | dict.fromkeys(LOSS_OPS[:3], 16)
JUDGE_BYTES = 2**30  # eight float64 matrices of a chunk of 2^24 elements
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Cell:
    """One operation on one rows x cols matrix of one type."""

    op: str
    dtype: str
    rows: int
    cols: int
    sizes: str = ""  # of an operation on more than a matrix: what rows and columns do not say

    @property
    def is_loss(self) -> bool:
        """Of logits and a target."""
        return self.op in LOSS_OPS

    @property
    def is_fused(self) -> bool:
        """Of more than a matrix: attention, a merge, a linear layer's loss."""
        return self.op in FUSED_OPS

    @property
    def is_empty(self) -> bool:
        """Without elements: there is nothing to time."""
        return not (self.rows and self.cols)

    @property
    def is_large(self) -> bool:
        """As many rows as make up WHOLE elements, of a loss LOSS_WHOLE."""
        if self.is_fused:
            return False
        whole = LOSS_WHOLE if self.is_loss else WHOLE
        return bool(self.cols) and self.rows == max(whole // self.cols, 1)

    @property
    def is_main(self) -> bool:
        """Among the large cells whose geometric means are the headline."""
        return self.is_large and self.cols in (LOSS_COLS if self.is_loss else MAIN_COLS)

    @property
    def has_rivals(self) -> bool:
        """Whether every rival is timed here; elsewhere torch alone, beside the ceiling."""
        if self.is_loss or self.is_fused or self.cols in RIVAL_COLS:
            return True
        is_small = self.rows in RIVAL_SMALL_ROWS and self.cols in RIVAL_SMALL_COLS
        here = (self.is_main and self.op in RIVAL_LARGE_OPS) or (
            is_small and self.op in RIVAL_SMALL_OPS
        )
        return here and self.dtype in RIVAL_TYPES

    @property
    def ideal_bytes(self) -> int:
        """The least that the operation moves: what goes in and what comes out, once."""
        item = ITEM_BYTES[self.dtype]
        if self.is_fused:
            return fusedsizes.ideal_bytes(self.op, self.rows, self.cols, self.sizes, item)
        row = item if self.op == "logsumexp" else ROW_BYTES.get(self.op, 0)
        return (MATRICES[self.op] * self.cols * item + row) * self.rows

    @property
    def flops(self) -> int:
        """Of the products that the operation is made of; 0: it is held to memory."""
        if not self.is_fused:
            return 0
        return fusedsizes.flops(self.op, self.rows, self.cols, self.sizes)

    def memory_bytes(self, sets: int, allocating: int) -> int:
        """Device memory that a cell takes: its sets; the outputs of contenders that allocate their
        own, kept as long as a set is; what a backward's y is made of, or a sort; of a loss what its
        contenders work with, and copies of the logits; and the judge's float64 rows."""
        if self.is_fused:
            item = ITEM_BYTES[self.dtype]
            return fusedsizes.memory_bytes(self.op, self.rows, self.cols, self.sizes, item, sets)
        elements = self.rows * self.cols
        matrix = elements * ITEM_BYTES[self.dtype]
        has_matrix = self.op in WRITING or (self.op != "logsumexp" and not self.is_loss)
        outputs = (sets * allocating + 1) * matrix if has_matrix else 0
        if self.is_loss:
            copies = sets * matrix if self.op in WRITING else 0
            outputs += elements * WORKING_BYTES[self.op] + copies
        judged = JUDGE_BYTES + 8 * 8 * self.cols
        return sets * self.ideal_bytes + outputs + 2 * matrix + judged

    @property
    def text(self) -> str:
        beside = f" ({self.sizes})" if self.sizes else ""
        return f"{self.op} {self.dtype} {self.rows} x {self.cols}{beside}"


def shapes(grid: str, op: str = "softmax") -> list[tuple[int, int]]:
    """Rows and columns of a grid for an operation, each shape once.

    >>> shapes("odd")[3], shapes("odd", "cross_entropy")[0]
    ((2670, 50257), (5341, 50257))
    """
    if grid == "cpu":
        return list(CPU_LOSS_SHAPES if op in LOSS_OPS else CPU_SHAPES)
    if op in LOSS_OPS:
        return _loss_shapes(grid, op)
    large = {"big": BIG_COLS, "odd": ODD_COLS, "all": (*BIG_COLS, *ODD_COLS), "small": ()}[grid]
    found = [(WHOLE // cols, cols) for cols in sorted(set(large))]
    if grid in ("small", "all"):
        few = [cols for cols in BIG_COLS if cols >= SMALL_FROM]
        found += [(rows, cols) for cols in few for rows in SMALL_ROWS]
    return list(dict.fromkeys(found))


def _loss_shapes(grid: str, op: str) -> list[tuple[int, int]]:
    wide = {"big": LOSS_COLS, "odd": [c for c in LOSS_COLS if c in ODD_COLS], "all": LOSS_COLS}
    found = [(LOSS_WHOLE // cols, cols) for cols in wide.get(grid, ())]
    if grid in ("big", "all"):
        found.append(TOKENS)
    if grid in ("small", "all") and op in FEW_TOKENS_OPS:
        found += [(rows, cols) for cols in FEW_TOKENS_COLS for rows in FEW_TOKENS]
    return found


def grid_cells(ops: Iterable[str], dtypes: Iterable[str], grid: str) -> list[Cell]:
    """Every cell of a grid, one operation after the other."""
    dtypes = list(dtypes)
    found: list[Cell] = []
    for op in ops:
        if op in FUSED_OPS:
            found += [Cell(op, d, *each) for d in dtypes for each in fusedsizes.grid(op, grid)]
        else:
            found += cells([op], dtypes, shapes(grid, op))
    return found


def named_cells(ops: Iterable[str], dtypes: Iterable[str], text: str) -> list[Cell]:
    """The cells of shapes that a person named, one operation after the other.

    Raises:
        BadInput: a shape is none, or not of that operation.
    """
    dtypes = list(dtypes)
    found: list[Cell] = []
    for op in ops:
        if op in FUSED_OPS:
            found += [Cell(op, d, *each) for d in dtypes for each in fusedsizes.by_hand(op, text)]
        else:
            found += cells([op], dtypes, parse_shapes(text))
    return found


def cells(
    ops: Iterable[str], dtypes: Iterable[str], matrices: Sequence[tuple[int, int]]
) -> list[Cell]:
    """Every cell, one operation after the other."""
    return [Cell(op, dtype, *shape) for op in ops for dtype in dtypes for shape in matrices]


def shard(cells: Sequence[Cell], text: str) -> list[Cell]:
    """Every n-th cell from the i-th, for "i/n": the n shards make up the whole, none shares a cell.

    Raises:
        BadInput: the text is something else.
    """
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise BadInput(f"--shard {text}: give i/n with i from 0 to n - 1, such as 0/4")
    return list(cells[int(index) :: int(count)])


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Shapes that a person named; one without elements is a row that says so.

    >>> parse_shapes("4096x50257, 1x1048576")
    [(4096, 50257), (1, 1048576)]
    """
    found = []
    for part in text.split(","):
        rows, cross, cols = part.strip().lower().partition("x")
        if not (cross and rows.isdecimal() and cols.isdecimal()):
            raise BadInput(f"--cells {part.strip()}: give ROWSxCOLS, such as 4096x50257")
        found.append((int(rows), int(cols)))
    return list(dict.fromkeys(found))


def named(given: Iterable[str], known: Sequence[str], what: str) -> list[str]:
    """Some of the known names, each once; BadInput for any other."""
    found = list(dict.fromkeys(given))
    unknown = [name for name in found if name not in known]
    if unknown:
        raise BadInput(f"{what} {unknown[0]}: there are {', '.join(known)}")
    return found
