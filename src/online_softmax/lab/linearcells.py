"""linear_cross_entropy as cells of `bench`: lab/linear.py measures, this says with whom and where.

Its lines are of a kind of their own ("linear"), since memory and three errors stand beside a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from online_softmax.lab import clocks, linear, opbench
from online_softmax.lab.benchclock import Setting, Turns
from online_softmax.lab.benchfile import Log
from online_softmax.lab.contender import Contender
from online_softmax.lab.fusedsizes import parsed
from online_softmax.lab.grid import Cell
from online_softmax.lab.linear import Work

LINES = {  # of a rival that was asked for
    "torch": ("torch", "torch, chunked"),
    "compile": ("compile",),
    "liger": ("liger",),
    "cut-cross-entropy": ("cut-cross-entropy",),
}


def work_of(cell: Cell) -> Work:
    """A cell's size, as lab/linear.py has it."""
    return Work(cell.rows, parsed(cell.sizes)["features"], cell.cols, cell.dtype)


def contenders(cell: Cell, rivals: tuple[str, ...]) -> list[Contender]:
    """The lines of a cell: ours and the rivals asked for. The products alone are in each."""
    names = [name for name in linear.CONTENDERS if name.startswith("ours")]
    names += [name for rival in rivals for name in LINES.get(rival, ())]
    return [
        Contender(name, "ours" if name.startswith("ours") else "rival", linear.CONTENDERS[name])
        for name in names
    ]


def measure(
    cell: Cell, lines: list[Contender], setting: Setting, repeat: int = 1
) -> dict[str, Any]:
    """Check and time a cell's contenders, as a line to keep; without room, or past a limit, what
    has no time says why.

    Raises:
        Broken: a contender left the device unusable.
    """
    work, names = work_of(cell), [line.name for line in lines]
    if why := opbench.lacking(cell, 0, setting):
        entries = [{"name": name, "why": why} for name in names]
        return {**_size(work, setting), "entries": entries}

    def failed(name: str, error: Exception) -> None:
        kind = next((line.kind for line in lines if line.name == name), "rival")
        opbench.alive(setting, name, cell, error, kind)

    before = setting.watch()
    rounds = linear.ROUNDS * repeat
    found = linear.measure(
        work, setting.device, rounds, names=names, failed=failed, timed=_repeated(setting, repeat)
    )
    found |= {"repeats": repeat, "clocks": clocks.between(before, setting.watch())}
    peak = setting.limits.tflops.get(cell.dtype)
    for entry in found["entries"]:
        _judge(entry, cell, peak)
    return found


def _repeated(setting: Setting, repeat: int) -> Turns | None:
    """A CPU's rounds, so many times."""
    turns = setting.turns
    if turns is None:
        return None

    def timed(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        every = [turns(calls) for _ in range(repeat)]
        return {name: [us for found in every for us in found[name]] for name in calls}

    return timed


def _size(work: Work, setting: Setting) -> dict[str, Any]:
    return {"kind": "linear", **asdict(work), "device": setting.device.type}


def _judge(entry: dict[str, Any], cell: Cell, peak: float | None) -> None:
    """A time that beats the tensor cores is none."""
    us = entry.get("median_us")
    if not us or not peak:
        return
    reached = cell.flops / us / 1e6
    if reached > peak:
        entry["why"] = (
            f"not to be believed: {reached:,.0f} TFLOP/s are {reached / peak:.0%} of the "
            f"datasheet's {peak:g}: products were left out, or nothing waited for it"
        )
        del entry["median_us"], entry["rounds_us"]


def is_kept(log: Log, cell: Cell) -> bool:
    """Whether a log has this cell."""
    return linear.is_kept(log, work_of(cell))


def wrong(line: dict[str, Any]) -> list[str]:
    """What of ours was wrong, a sentence each."""
    size = linear.Work(*(line[name] for name in asdict(Work())))
    return [
        f"{size.text}: {entry['name']}: {entry['why']}"
        for entry in line["entries"]
        if entry["name"].startswith("ours") and entry["why"].startswith("wrong")
    ]
