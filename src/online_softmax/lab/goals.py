"""What a benchmark's cells are held to, and what they are compared with: pure functions of rows.

Goals are shares of the ceiling in large cells, and geometric means beside each rival. A goal is
not a measurement: it says from which figure on a table names a cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from online_softmax import rowchoice
from online_softmax.lab.benchfile import Entry, Row
from online_softmax.lab.doubts import HOST
from online_softmax.lab.grid import ITEM_BYTES, Cell
from online_softmax.plan import DEFAULT_ARCH, VECTOR_BYTES, Problem

CLUSTER_BYTES = (
    16 * 227 * 2**10
)  # shared memory of the largest cluster: a row past it is read twice
# (columns up to which, share of the ceiling)
FORWARD = ((65536, 0.97), (131072, 0.96), (262144, 0.94))
FORWARD_ON_CHIP, FORWARD_PAST = 0.90, 0.62
BACKWARD = ((16384, 0.98), (65536, 0.965), (131072, 0.95), (262144, 0.92))
LOGSUMEXP = {4: 0.975, 2: 0.93}  # by bytes of an element
# Geometric means over the main cells, times as fast as a rival: by bytes of an element.
MEANS: dict[tuple[str, int], dict[str, float]] = {
    ("softmax", 2): {"torch": 2.1, "compile": 2.0, "quack": 1.03},
    ("softmax", 4): {"torch": 1.48, "compile": 1.38, "quack": 1.03},
    ("log_softmax", 2): {"torch": 1.83, "compile": 1.8},
    ("log_softmax", 4): {"torch": 1.44, "compile": 1.35},
    ("softmax_backward", 2): {"torch": 2.15, "compile": 1.27, "quack": 1.02},
    ("softmax_backward", 4): {"torch": 2.15, "compile": 1.27, "quack": 1.02},
    ("logsumexp", 2): {"torch": 7.0, "compile": 2.2},
    ("logsumexp", 4): {"torch": 7.0, "compile": 1.4},
}
# Of losses: the share of the ceiling, as above; the gradient made in the forward, times as fast as
# the rival's forward and backward; token_stats, in times of cross_entropy's forward.
LOSSES = {"cross_entropy": 0.95, "cross_entropy_both": 0.93}
IN_FORWARD_RIVAL, IN_FORWARD = "quack", 1.25
STATS_OF_FORWARD = 1.6
# Of linear_cross_entropy: bytes beyond inputs and gradients, and time over matrix products alone.
LINEAR = {"ours, low": (0.8e9, "four products"), "ours, fast": (3.2e9, "three products")}
LINEAR_OF_PRODUCTS = 1.15
NOISE = 1.02  # slower than this times the fastest rival, and by more than the spread: slower
FEW_ROWS, FEW_ROWS_COLS = 16, 32000  # at most, at least
EXACT = 2**-23  # an error may be torch's and this more, both of the size of their row
LONG_COLS = 131072  # rows of more columns are long
NOT_INVARIANT = "ours, not batch invariant"  # a line of ours: under batch_invariant(False)
RAGGED, LONG, REST = "Ragged columns", f"Rows of more than {LONG_COLS:,} columns", "The rest"
KINDS = (RAGGED, LONG, REST)  # of cells that fall short
FEW_ROWS_SLOWER = 1.10  # the most that one cell of few rows may take beside the fastest rival


def goal(cell: Cell) -> float | None:
    """The share of the ceiling that a cell should reach; None: it has no goal.

    >>> goal(Cell("softmax", "float32", 128, 1048576))
    0.62
    """
    if not cell.is_large:
        return None
    if cell.is_loss:
        return LOSSES.get(cell.op)
    item = ITEM_BYTES[cell.dtype]
    if cell.op == "logsumexp":
        return LOGSUMEXP[item]
    is_backward = cell.op.endswith("_backward")
    for most, share in BACKWARD if is_backward else FORWARD:
        if cell.cols <= most:
            return share
    if is_backward:
        return None
    return FORWARD_ON_CHIP if cell.cols * item <= CLUSTER_BYTES else FORWARD_PAST


def kind(cell: Cell) -> str:
    """What a cell is that falls short. Ragged: rows do not all begin on 16-byte boundaries.

    >>> kind(Cell("softmax", "bfloat16", 2670, 50257)), kind(Cell("softmax", "float32", 1024, 1000))
    ('Ragged columns', 'The rest')
    """
    if cell.cols * ITEM_BYTES[cell.dtype] % VECTOR_BYTES:
        return RAGGED
    return LONG if cell.cols > LONG_COLS else REST


def times(ours: Entry | None, other: Entry | None) -> float | None:
    """How many times as fast ours is as another, by the clock that both have; None where one of the
    times is not to be believed."""
    if ours is None or other is None or not ours.median_us or not other.median_us:
        return None
    if ours.doubt or other.doubt:
        return None
    if other.clock == "do_bench":
        return other.median_us / ours.do_bench_us if ours.do_bench_us else None
    return other.median_us / ours.median_us if ours.clock == other.clock else None


def of_ceiling(row: Row) -> float | None:
    """Ours as a share of the ceiling."""
    return times(row.entry("ours"), row.entry("ceiling"))


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are known; None where none is.

    >>> geometric_mean([1.0, 4.0, None])
    2.0
    """
    known = [value for value in values if value]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


@dataclass(frozen=True)
class Beside:
    """Ours beside the fastest rival of a cell."""

    row: Row
    rival: Entry
    times: float  # as fast; below 1: slower
    name: str = "ours"  # which line of ours

    @property
    def is_slower(self) -> bool:
        """By more than the noise, and by more than either's rounds are apart."""
        ours = self.row.entry(self.name)
        if ours is None or ours.median_us is None or self.times * NOISE >= 1:
            return False
        spread = max(ours.spread_us, self.rival.spread_us)
        return ours.median_us * (1 - self.times) > spread


def beside_fastest(row: Row, name: str = "ours") -> Beside | None:
    """None where ours has no time, or no rival has."""
    ours, found = row.entry(name), []
    for entry in row.entries:
        ratio = times(ours, entry) if entry.kind == "rival" else None
        if ratio:
            found.append(Beside(row, entry, ratio, name))
    return min(found, key=lambda each: each.times, default=None)


def slower(rows: Sequence[Row]) -> list[Beside]:
    """The cells in which a rival is faster, beyond the noise."""
    found = [beside_fastest(row) for row in rows]
    return [each for each in found if each and each.is_slower]


def is_held(row: Row) -> bool:
    """Whether goals are of this row: they are of GPUs."""
    return not any(entry.clock == HOST for entry in row.entries)


def below_goal(rows: Sequence[Row]) -> list[tuple[Row, float, float]]:
    """The cells below their goal: share reached, share wanted."""
    found = []
    for row in rows:
        share, wanted = of_ceiling(row), goal(row.cell) if is_held(row) else None
        if share is not None and wanted is not None and share < wanted:
            found.append((row, share, wanted))
    return found


def has_other_cut(cell: Cell, arch: str = DEFAULT_ARCH) -> bool:
    """Whether ours runs another cut where batch invariance was given up."""
    problem = Problem(cell.rows, cell.cols, cell.dtype, arch=arch)
    return rowchoice.few(cell.op, problem) is not None


def today(row: Row) -> Row:
    """A stored row without the line of a cut that no longer runs: what gives batch invariance up
    takes other cuts in fewer cells than it did."""
    if row.entry(NOT_INVARIANT) is None or has_other_cut(row.cell):
        return row
    return replace(row, entries=tuple(e for e in row.entries if e.name != NOT_INVARIANT))


def few(rows: Iterable[Row], name: str = "ours") -> list[Beside]:
    """The cells of few long rows, each beside its fastest rival; where every rival was timed."""
    found = [
        beside_fastest(row, name)
        for row in rows
        if row.rows <= FEW_ROWS and row.cols >= FEW_ROWS_COLS and row.cell.has_rivals
    ]
    return [each for each in found if each]


def is_as_exact(row: Row) -> bool | None:
    """Whether ours is right and its largest error torch's at most, but for EXACT; None: one of them
    is unknown."""
    ours, torch = row.entry("ours"), row.entry("torch")
    if ours is None or torch is None or ours.share_max is None or torch.share_max is None:
        return None
    return ours.ok is not False and ours.share_max <= torch.share_max + EXACT
