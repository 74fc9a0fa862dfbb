"""Cells that fit a CPU: what each will take, from one call of a small one; the default grid's are
made smaller until a run ends in its seconds, and one that was asked for is not begun past them.

A cell's work is its products, or its bytes where it has none; time goes with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from online_softmax.lab import benchrun, buffersets, contenders, fusedcells, linear, linearcells
from online_softmax.lab.benchask import Asked
from online_softmax.lab.benchclock import Setting
from online_softmax.lab.benchfile import Log
from online_softmax.lab.fusedsizes import LINEAR, MERGE, parsed, written
from online_softmax.lab.grid import Cell
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.rotation import bound

PILOT_WORK = 2**21  # of the small cell: a call of a millisecond or so
LEAST_ROWS, LEAST_KEYS = 1, 64  # below which a cell is made no smaller
# Calls of a contender in a cell: judged, warmed up, estimated, three rounds, the figure beside
# them; and the judge, which takes float64, as two more.
CALLS = 9
ROUNDS_S = 0.2  # of a contender whose calls are short: the clock's three rounds are filled
COMPILE_S = 7.0  # a cell's for torch.compile, on two cores
RIVALS = ("torch",)  # who is called beside ours on the small cell

Price = Callable[[Cell], float]  # seconds that a cell will take


def work(cell: Cell) -> int:
    """Products of a cell, or the bytes that it moves."""
    return cell.flops or cell.ideal_bytes


def smaller(cell: Cell) -> Cell | None:
    """A cell with half the work, or a quarter where only a length is left; None: it is the least.

    >>> smaller(Cell("softmax", "float32", 1024, 1024)).text
    'softmax float32 512 x 1024'
    """
    if not cell.is_fused or cell.op in (MERGE, LINEAR):
        if cell.rows > LEAST_ROWS:
            return replace(cell, rows=cell.rows // 2)
        return replace(cell, cols=cell.cols // 2) if cell.cols > LEAST_KEYS else None
    sizes, rows, cols = parsed(cell.sizes), cell.rows, cell.cols
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


def _small(cell: Cell) -> Cell:
    """The pilot of a cell: of its kind, with little work."""
    while work(cell) > PILOT_WORK:
        less = smaller(cell)
        if less is None:
            break
        cell = less
    return cell


@dataclass(frozen=True)
class Rates:
    """What calls of one operation and type take together: seconds a unit of work."""

    seconds: dict[tuple[str, str], float]
    names: dict[str, int]  # contenders of an operation
    is_compiling: bool = False
    repeat: int = 1  # times that a cell is measured

    def calls(self, cell: Cell) -> float:
        """Seconds that a cell's calls will take, of an operation that was tried."""
        calls = self.seconds[cell.op, cell.dtype] * work(cell) * CALLS
        return self.repeat * max(calls, ROUNDS_S * self.names[cell.op])

    def price(self, cell: Cell) -> float:
        """Seconds that the cell will take."""
        return self.calls(cell) + (COMPILE_S if self.is_compiling else 0.0)


def rates(
    cells: Iterable[Cell], setting: Setting, rivals: Sequence[str] = (), repeat: int = 1
) -> Rates:
    """Call ours and torch's once on a small cell of each operation and type."""
    seconds: dict[tuple[str, str], float] = {}
    names: dict[str, int] = {}
    for cell in cells:
        if (cell.op, cell.dtype) not in seconds:
            small = _small(cell)
            spent = _linear_seconds(small, setting) if cell.op == LINEAR else _once(small, setting)
            seconds[cell.op, cell.dtype] = sum(spent) / work(small)
            names[cell.op] = len(spent)
    return Rates(seconds, names, "compile" in rivals, repeat)


def _once(cell: Cell, setting: Setting) -> list[float]:
    """Seconds of one call of each, the first left out. Who refuses or fails takes none."""
    few = replace(setting, l2_bytes=1)  # two sets: nothing of the time depends on a cold cache
    make = fusedcells.buffers if cell.is_fused else buffersets.buffers
    tensors, found = make(cell, few).sets[0], []
    for line in contenders.contenders(cell, RIVALS):
        try:
            call = line.make()
            bound(call, tensors)()
            run = bound(call, tensors)
            begun = time.perf_counter()
            run()
            found.append(time.perf_counter() - begun)
        except Exception:  # noqa: BLE001  its row will say why
            continue
    return found


def _linear_seconds(cell: Cell, setting: Setting) -> list[float]:
    names = [line.name for line in linearcells.contenders(cell, RIVALS)]
    made = linear.measure(linearcells.work_of(cell), setting.device, 1, names=names)
    found = [entry.get("median_us") for entry in made["entries"]]
    return [us / 1e6 for us in found if us]


# ---- what follows from it


def chosen(asked: Asked, setting: Setting, log: Log) -> tuple[list[Cell], Price, str]:
    """The cells to measure of those asked for that a log does not have, what each will take, and a
    line that says so; "" where there is nothing to say.

    Raises:
        BadInput: each would take longer than the whole run may.
    """
    todo = benchrun.missing(asked.cells, log, asked.values)
    known = rates(todo, setting, asked.rivals, asked.repeat)
    if not (asked.is_default and todo):
        return todo, known.price, too_long(todo, known, asked.seconds)
    cells = fitted(todo, known, asked.seconds)
    return cells, known.price, said(todo, cells, known, asked.seconds)


def fitted(cells: Sequence[Cell], rates: Rates, seconds: float) -> list[Cell]:
    """Cells whose calls take no more than their share of the seconds, each cell once."""
    share, found = seconds / max(len(cells), 1), []
    for cell in cells:
        while rates.calls(cell) > share and (less := smaller(cell)):
            cell = less
        found.append(cell)
    return list(dict.fromkeys(found))


def said(asked: Sequence[Cell], cells: Sequence[Cell], rates: Rates, seconds: float) -> str:
    """One line of a default grid: how long the run will take, and what was made smaller for it."""
    less = len(set(asked) - set(cells))
    sizes = f"{less} of {len(asked)} were made smaller" if less else "all as in the grid cpu"
    took = sum(map(rates.price, cells))
    return (
        f"sizes fit this machine: {sizes}; about {took:.0f} s, begun within {seconds:.0f} s "
        "(--seconds)"
    )


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
