"""Running many cells: each is written when it is done; a dead device, or the time, ends the run.

What is written is enough to go on from: a cell that killed the device is not tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from online_softmax.lab import benchfile, linearcells, opbench, repeats
from online_softmax.lab.benchclock import Broken, Setting
from online_softmax.lab.benchfile import Row
from online_softmax.lab.contender import Contender
from online_softmax.lab.fusedsizes import LINEAR
from online_softmax.lab.grid import Cell

Make = Callable[[Cell], Sequence[Contender]]


class Pace:
    """How long the rest will take, from what was measured: a cell takes about as long as others of
    its operation, and longer with every rival."""

    def __init__(self) -> None:
        self.spent: dict[tuple[str, bool], list[float]] = {}

    def add(self, cell: Cell, seconds: float) -> None:
        self.spent.setdefault((cell.op, cell.has_rivals), []).append(seconds)

    def left(self, cells: Sequence[Cell]) -> float | None:
        """Seconds; None before anything was measured."""
        if not self.spent:
            return None
        return sum(self._one(cell) for cell in cells)

    def _one(self, cell: Cell) -> float:
        """Of its own operation, else of all that have as many rivals, else of all."""
        exact = self.spent.get((cell.op, cell.has_rivals))
        alike = [s for (_, rivals), many in self.spent.items() for s in many
                 if rivals == cell.has_rivals]  # fmt: skip
        found = exact or alike or [s for many in self.spent.values() for s in many]
        return sum(found) / len(found)


Progress = Callable[[str, int, int, float | None], None]  # what is next, done, in all, seconds left


def together(prices: Sequence[float], over: float, share: Callable[[float], float] | None) -> float:
    """Seconds that cells of these prices will take of a run that has so many left, and at least
    what the first takes; each is granted its part of what the prices leave."""
    granted = share((over - sum(prices)) / len(prices)) if share else 0.0
    return max(min(sum(prices) + granted * len(prices), over), prices[0] + granted)


@dataclass(frozen=True)
class Outlet:
    """Where lines go, and what a run tells meanwhile."""

    log: benchfile.Log
    header: benchfile.Header
    progress: Progress | None = None
    emit: Callable[[str], None] | None = None  # gets what the log gets
    seconds: float = float("inf")  # after so many no cell is begun
    price: Callable[[Cell], float] | None = None  # what a cell takes at the least, where known
    share: Callable[[float], float] | None = None  # grants seconds to a cell beyond its price

    def is_over(self, spent: float, cell: Cell) -> bool:
        """Whether a cell is not begun after so many seconds: they are over, or it would end past
        them."""
        return spent + (self.price(cell) if self.price else 0.0) > self.seconds

    def begin(self, pace: Pace, spent: float, cells: Sequence[Cell]) -> float | None:
        """Grant the first of the cells its part of what is left of the run, and say how many
        seconds all of them will take, the first to its end; None: nobody knows."""
        over = max(self.seconds - spent, 0.0)
        if self.price:
            return together([self.price(cell) for cell in cells], over, self.share)
        found = pace.left(cells)
        return None if found is None else max(min(found, over), pace.left(cells[:1]) or 0.0)

    def write(self, text: str) -> None:
        self.log.write(text)
        if self.emit:
            self.emit(text)


def each(
    todo: Sequence[Cell],
    one: Callable[[Cell], str],
    lost: Callable[[Cell, Broken], str],
    outlet: Outlet,
) -> int:
    """Measure each cell by `one`, which gives its line, and write it at once, the header before the
    first. `lost` gives the line of a cell that leaves the device unusable, which ends the run.

    Returns:
        How many cells were left: the seconds were over, or they would have ended past them.

    Raises:
        Broken: the device is unusable.
    """
    pace, begun, left, head = Pace(), time.perf_counter(), 0, benchfile.header_line(outlet.header)
    for place, cell in enumerate(todo):
        start = time.perf_counter()
        if outlet.is_over(start - begun, cell):
            left += 1
            continue
        seconds = outlet.begin(pace, start - begun, todo[place:])
        if outlet.progress:
            outlet.progress(cell.text, place, len(todo), seconds)
        try:
            text = one(cell)
        except Broken as broken:
            outlet.write(head + lost(cell, broken))
            raise
        pace.add(cell, time.perf_counter() - start)
        outlet.write(head + text)
        head = ""
    return left


@dataclass(frozen=True)
class Found:
    """What a run measured."""

    rows: tuple[Row, ...]
    others: tuple[dict[str, Any], ...]  # lines of other kinds: a linear layer's loss
    left: int  # cells, when the seconds were over


def missing(cells: Sequence[Cell], log: benchfile.Log, values: str) -> list[Cell]:
    """The cells that a log does not have."""

    def is_there(cell: Cell) -> bool:
        is_kept = cell.op == LINEAR and linearcells.is_kept(log, cell)
        return is_kept or log.has(cell, values)

    return [cell for cell in cells if not is_there(cell)]


def run(
    cells: Sequence[Cell], make: Make, setting: Setting, outlet: Outlet, repeat: int = 1
) -> Found:
    """Measure the cells that the log does not have, each so many times."""
    rows: list[Row] = []
    others: list[dict[str, Any]] = []

    def one(cell: Cell) -> str:
        if cell.op == LINEAR:
            others.append(linearcells.measure(cell, list(make(cell)), setting, repeat))
            return benchfile.line("linear", others[-1])
        rows.append(repeats.measure(cell, make(cell), setting, repeat))
        return benchfile.line("cell", rows[-1])

    def lost(cell: Cell, broken: Broken) -> str:
        row = opbench.blank(cell, setting.values)
        return benchfile.line("cell", {**vars(row), "entries": [vars(broken.entry)]})

    left = each(missing(cells, outlet.log, setting.values), one, lost, outlet)
    return Found(tuple(rows), tuple(others), left)
