"""What cells will take on a CPU, and which are not begun: by calls of small ones of their kind.

The default grid's sizes are fixed, so that runs can be compared, and so small that what each takes
beside its rounds is about the same. Of cells that were asked for, one that would end past the run's
seconds is not begun. Time goes with a cell's work: its products, or its bytes where it has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from online_softmax.lab import (
    benchrun,
    buffersets,
    contenders,
    fusedcells,
    linear,
    linearcells,
    moresizes,
    opbench,
    opjudge,
    rotation,
)
from online_softmax.lab.benchask import Asked
from online_softmax.lab.benchclock import Setting
from online_softmax.lab.benchfile import Log
from online_softmax.lab.contender import Contender
from online_softmax.lab.cpuclock import FEWEST_ROUNDS
from online_softmax.lab.fusedsizes import LINEAR, MERGE, parsed, written
from online_softmax.lab.grid import Cell
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.moresizes import MORE_OPS
from online_softmax.lab.rotation import Overwrites, Rotation, bound

# Of the small cell, bytes and products: a call of about ten milliseconds. A shorter one says more
# of what a call costs at all, and of who else has the processor.
PILOT_BYTES, PILOT_FLOPS = 2**24, 2**28
# Of a linear layer's loss, whose contenders cut small ones into pieces that say nothing of large
# ones: two seconds of all contenders.
PILOT_LINEAR = 2**31
PILOT_CALLS = 3  # of which the least counts
LEAST_ROWS, LEAST_KEYS = 1, 64  # below which a cell is made no smaller
# Calls of a contender in a cell at the least: judged, warmed up, and the rounds.
CALLS = 2 + FEWEST_ROUNDS
BESIDE_S = 0.6  # of a small cell beside its rounds: buffers filled, results judged
COMPILE_S = 7.0  # a cell's for torch.compile, on two cores
RIVALS = ("torch",)  # who is called beside ours on the small cell

Price = Callable[[Cell], float]  # seconds that a cell takes at the least


def work(cell: Cell) -> int:
    """Products of a cell, or the bytes that it moves."""
    return cell.flops or cell.ideal_bytes


def smaller(cell: Cell) -> Cell | None:
    """A cell with half the work, or a quarter where only a length is left; None: it is the least.
    Of a linear layer's loss tokens and classes stay alike: a product of one row is of another kind.

    >>> smaller(Cell("softmax", "float32", 1024, 1024)).text
    'softmax float32 512 x 1024'
    """
    if not cell.is_fused or cell.op in (MERGE, LINEAR):
        if cell.rows > (max(cell.cols // 2, LEAST_ROWS) if cell.op == LINEAR else LEAST_ROWS):
            return replace(cell, rows=cell.rows // 2)
        return replace(cell, cols=cell.cols // 2) if cell.cols > LEAST_KEYS else None
    sizes, rows, cols = parsed(cell.sizes), cell.rows, cell.cols
    if cell.op in MORE_OPS:
        found = moresizes.smaller(cell.op, rows, cols, sizes)
        return found and Cell(cell.op, cell.dtype, *found)
    is_decode = cell.op == "attention_decode"
    if sizes["batch"] > 1:
        less = {"batch": sizes["batch"] // 2}
        rows = rows // sizes["batch"] * less["batch"]
    elif not is_decode and sizes["heads"] > 1 and sizes["heads"] == sizes["kv_heads"]:
        less = dict.fromkeys(("heads", "kv_heads"), sizes["heads"] // 2)
        rows = rows // sizes["heads"] * less["heads"]
    elif cols > LEAST_KEYS:
        less, cols = {}, cols // 2
        rows = rows if is_decode else rows // 2
    else:
        return None
    return replace(cell, rows=rows, cols=cols, sizes=written(**sizes | less))


def small(cell: Cell) -> Cell:
    """The pilot of a cell: of its kind, with little work; the cell where it has no more."""
    most = PILOT_FLOPS if cell.flops else PILOT_BYTES
    most = PILOT_LINEAR if cell.op == LINEAR else most
    while work(cell) > most:
        less = smaller(cell)
        if less is None:
            break
        cell = less
    return cell


# ---- what a cell takes


@dataclass(frozen=True)
class Rate:
    """Seconds of an operation and type: of one call of each contender and of filling a set, a unit
    of work; of judging all of them, a unit of the work that is judged."""

    calls: float
    judging: float = 0.0
    filling: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What is known of each operation and type, and how cells are run."""

    known: dict[tuple[str, str], Rate]
    l2_bytes: int
    is_compiling: bool = False
    repeat: int = 1  # times that a cell is measured

    def price(self, cell: Cell) -> float:
        """Seconds that the cell takes at the least, of an operation that was tried."""
        if cell.is_empty:
            return 0.0
        rate = self.known[cell.op, cell.dtype]
        spent = rate.calls * work(cell)
        if cell.op != LINEAR:  # whose rate is of everything
            sets, _ = rotation.set_count(cell.ideal_bytes, self.l2_bytes)
            spent = spent * CALLS + rate.judging * _judged(cell) + rate.filling * sets * work(cell)
        return self.repeat * (BESIDE_S + spent) + (COMPILE_S if self.is_compiling else 0.0)


def _judged(cell: Cell) -> float:
    """The part of a cell's work that is compared with float64."""
    if cell.is_fused:
        return work(cell) * fusedcells.checked_share(cell)
    return work(cell) * opbench.checked_rows(cell) / cell.rows


def rates(
    cells: Iterable[Cell], setting: Setting, rivals: Sequence[str] = (), repeat: int = 1
) -> Rates:
    """Try ours and torch's on a small cell of each operation and type."""
    known: dict[tuple[str, str], Rate] = {}
    for cell in cells:
        if (cell.op, cell.dtype) not in known and not cell.is_empty:
            pilot = _linear_rate if cell.op == LINEAR else _rate
            known[cell.op, cell.dtype] = pilot(small(cell), setting)
    return Rates(known, setting.l2_bytes, "compile" in rivals, repeat)


def _rate(cell: Cell, setting: Setting) -> Rate:
    """Of a small cell, by its contenders' calls. Who refuses or fails takes none."""
    few = replace(setting, l2_bytes=1)  # two sets: nothing of the time depends on a cold cache
    make = fusedcells.buffers if cell.is_fused else buffersets.buffers
    make(cell, few)  # takes the memory that the next fills
    sets, filled_s = _timed(lambda: make(cell, few))
    calls_s = judging_s = 0.0
    for line in contenders.contenders(cell, RIVALS):
        try:
            spent = _contender(line, cell, sets)
        except Exception:  # noqa: BLE001  its row will say why
            continue
        calls_s, judging_s = calls_s + spent[0], judging_s + spent[1]
    filling = filled_s / len(sets.sets) / work(cell)
    return Rate(calls_s / work(cell), judging_s / _judged(cell), filling)


def _contender(line: Contender, cell: Cell, sets: Rotation) -> tuple[float, float]:
    """Seconds of a call, and of judging what it gave."""
    call, tensors = line.make(), sets.sets[0]
    if isinstance(call, Overwrites):
        sets.keep()
    bound(call, tensors)()
    call_s = min(_timed(bound(call, tensors))[1] for _ in range(PILOT_CALLS))
    if line.kind == "ceiling":
        return call_s, 0.0
    x = sets.kept[0] if sets.kept else None
    sets.restore()
    _, both_s = _timed(lambda: opbench.judged(call, cell, tensors, opjudge.OUR_ULPS, x=x))
    sets.restore()
    return call_s, max(both_s - call_s, 0.0)


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gave, and its seconds."""
    begun = time.perf_counter()
    made = run()
    return made, time.perf_counter() - begun


def _linear_rate(cell: Cell, setting: Setting) -> Rate:
    """Of everything that a small cell takes, with the fewest rounds."""
    given, names = linearcells.work_of(cell), [x.name for x in linearcells.contenders(cell, RIVALS)]
    rounds = FEWEST_ROUNDS - 1  # and the call before them

    def run(size: linear.Work) -> Any:
        return linear.measure(size, setting.device, rounds, names=names)

    run(replace(given, tokens=8, features=8, classes=16))  # what is only made the first time
    return Rate(_timed(lambda: run(given))[1] / work(cell))


# ---- what follows from it


@dataclass(frozen=True)
class Fit:
    """The cells of a run, and how it gives them its seconds."""

    cells: Sequence[Cell]
    price: Price | None = None
    share: Callable[[float], float] | None = None  # benchrun.Outlet.share
    said: str = ""  # a line that says what follows; "": nothing to say


def chosen(asked: Asked, setting: Setting, log: Log) -> Fit:
    """The cells to measure of those asked for that a log does not have, and what each will take.

    Raises:
        BadInput: each would take longer than the whole run may.
    """
    todo = benchrun.missing(asked.cells, log, asked.values)
    grant = setting.grant
    given = (lambda s: grant(s / asked.repeat) * asked.repeat) if grant else None
    if asked.is_default:
        beside = asked.repeat * BESIDE_S + (COMPILE_S if "compile" in asked.rivals else 0.0)
        said = ""
        if todo:
            took = benchrun.together([beside] * len(todo), asked.seconds, given)
            said = f"the grid cpu has fixed sizes; about {took:.0f} s of at most "
            said += f"{asked.seconds:.0f} s (--seconds)"
        return Fit(todo, lambda cell: beside, given, said)
    known = rates(todo, setting, asked.rivals, asked.repeat)
    return Fit(todo, known.price, given, too_long(todo, known, asked.seconds))


def too_long(cells: Sequence[Cell], rates: Rates, seconds: float) -> str:
    """One line of the cells asked for that would take longer than a run may; "": there is none.

    Raises:
        BadInput: every cell would.
    """
    over = [cell for cell in cells if rates.price(cell) > seconds]
    if not over:
        return ""
    longest = max(over, key=rates.price)
    text = (
        f"{len(over)} of {len(cells)} cells would take longer on this CPU than a run's "
        f"{seconds:.0f} s, {longest.text} about {rates.price(longest):,.0f} s"
    )
    if len(over) == len(cells):
        raise BadInput(f"{text}: give more --seconds, or smaller --cells")
    return f"{text}: they are not begun; --seconds gives more"
