"""Running many cells: each is written when it is done; a dead device, or the time, ends the run.

What is written is enough to go on from: a cell that killed the device is not tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from online_softmax.lab import benchfile, opbench
from online_softmax.lab.benchclock import Broken, Setting
from online_softmax.lab.benchfile import Row
from online_softmax.lab.contenders import Contender
from online_softmax.lab.grid import Cell

Make = Callable[[Cell], Sequence[Contender]]


class Pace:
    """How long the rest will take, from what was measured: cells with every rival take longer."""

    def __init__(self) -> None:
        self.spent: dict[bool, list[float]] = {True: [], False: []}

    def add(self, cell: Cell, seconds: float) -> None:
        self.spent[cell.has_rivals].append(seconds)

    def left(self, cells: Sequence[Cell]) -> float | None:
        """Seconds; None before anything was measured."""
        every = self.spent[True] + self.spent[False]
        if not every:
            return None
        mean = {kind: sum(s or every) / len(s or every) for kind, s in self.spent.items()}
        return sum(mean[cell.has_rivals] for cell in cells)


Progress = Callable[[str, int, int, float | None], None]  # what is next, done, in all, seconds left


@dataclass(frozen=True)
class Outlet:
    """Where lines go, and what a run tells meanwhile."""

    log: benchfile.Log
    header: benchfile.Header
    progress: Progress | None = None
    emit: Callable[[str], None] | None = None  # gets what the log gets
    seconds: float = float("inf")  # after so many no cell is begun

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
        How many cells were left when the seconds were over.

    Raises:
        Broken: the device is unusable.
    """
    pace, begun = Pace(), time.perf_counter()
    for done, cell in enumerate(todo):
        start = time.perf_counter()
        if start - begun > outlet.seconds:
            return len(todo) - done
        if outlet.progress:
            outlet.progress(cell.text, done, len(todo), pace.left(todo[done:]))
        head = "" if done else benchfile.header_line(outlet.header)
        try:
            text = one(cell)
        except Broken as broken:
            outlet.write(head + lost(cell, broken))
            raise
        pace.add(cell, time.perf_counter() - start)
        outlet.write(head + text)
    return 0


def run(
    cells: Sequence[Cell], make: Make, setting: Setting, outlet: Outlet
) -> tuple[list[Row], int]:
    """Measure the cells that the log does not have; the rows, and how many cells are left."""
    rows: list[Row] = []

    def one(cell: Cell) -> str:
        rows.append(opbench.measure(cell, make(cell), setting))
        return benchfile.line("cell", rows[-1])

    def lost(cell: Cell, broken: Broken) -> str:
        row = Row(cell.op, cell.dtype, cell.rows, cell.cols, setting.values, cell.ideal_bytes)
        return benchfile.line("cell", {**vars(row), "entries": [vars(broken.entry)]})

    todo = [cell for cell in cells if not outlet.log.has(cell, setting.values)]
    return rows, each(todo, one, lost, outlet)
