"""Which launch numbers are fastest: every variant of a cell judged, ranked and kept as evidence.

What may be tried comes from `variants`; what is found goes into rowtables.py by hand,
with this as the reason. Nothing tunes at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from online_softmax import catalogue, rowchoice, rowplan, rowsweep
from online_softmax.lab import benchfile, benchrun, opbench, opjudge
from online_softmax.lab.benchclock import Broken, Setting
from online_softmax.lab.benchrun import Outlet
from online_softmax.lab.contenders import CEILING
from online_softmax.lab.grid import Cell
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.refusal import one_line
from online_softmax.lab.rotation import Call, Rotation
from online_softmax.plan import Problem

FINALISTS = 3  # of the quick ranking, timed again in interleaved rounds
SHOWN = 5  # variants of a cell in a table


@dataclass(frozen=True)
class Variant:
    """One kernel with one set of launch numbers, as a call on a buffer set's tensors."""

    kernel: str
    numbers: dict[str, Any]  # kept with the result, enough to launch it again
    call: Call
    is_planned: bool = False  # what the planner chooses today

    @property
    def name(self) -> str:
        given = ", ".join(f"{key} {value}" for key, value in self.numbers.items())
        return f"{self.kernel}: {given}"


Variants = Callable[[str, Problem], list[Variant]]


def variants(op: str, problem: Problem) -> list[Variant]:
    """Every kernel that ships, with every cut of the row that may run a problem.

    Raises:
        BadInput: there are no kernels for the problem's type, or none can be launched here.
    """
    if problem.dtype not in rowplan.ITEM_BYTES:
        raise BadInput(f"--tune {op}: no kernels of ours take {problem.dtype}")
    if missing := catalogue.lacks("cuda"):
        raise BadInput(f"--tune {op}: {missing}")
    rows = rowsweep.sweep(op, problem.cols, problem.dtype, problem.arch)
    planned = rowchoice.chosen(op, problem)
    if planned not in (replace(row, why=planned.why) for row in rows):
        rows.insert(0, planned)  # few rows: the same shares over more blocks
    found = []
    for row in rows:
        is_planned = row == replace(planned, why=row.why)
        found.append(Variant(row.kernel, _given(row), partial(_run, op, row), is_planned))
    return found


def _given(row: rowplan.Row) -> dict[str, Any]:
    """The launch numbers that a result is kept with."""
    return {k: v for k, v in asdict(row).items() if v and k not in ("why", "kernel")}


def _run(op: str, row: rowplan.Row, *tensors: torch.Tensor) -> None:
    from online_softmax.cuda import launch, row_launch

    x = tensors[0]
    matrices = 1 if op == "logsumexp" else len(tensors)
    streams = catalogue.streams(x, matrices)  # as what ships decides
    if op in rowplan.BACKWARD:
        dy, y, dx = tensors
        work = row_launch.backward(op, dy, y, dx, 1.0, False, row, streams)
    else:
        y = tensors[1].view(-1, 1) if op == "logsumexp" else tensors[1]
        work = row_launch.forward(op, x, y, 1.0, False, row, streams)
    launch.run(work, x.device)


def tune(cell: Cell, setting: Setting, source: Variants = variants) -> dict[str, Any]:
    """Rank a cell's variants, as a line to keep: wrong ones have a reason, the best three and the
    planned one a time beside the ceiling."""
    line: dict[str, Any] = {**asdict(cell), "values": setting.values, "ranking": []}
    why = opbench.lacking(cell, 0, setting)
    if why:
        return line | {"why": why}
    sets = opbench.buffers(cell, setting)
    problem = catalogue.problem_of(sets.sets[0][0])
    tried = {each.name: each for each in source(cell.op, problem)}
    found = {name: _judged(each, cell, sets, setting) for name, each in tried.items()}
    right = {name: tried[name].call for name, entry in found.items() if not entry["why"]}
    quick = setting.quick(sets, right, list(right))
    for name, timing in quick.items():
        found[name] |= {"why": timing.refused} if timing.refused else {"quick_us": timing.median_us}
    order = sorted(found, key=lambda name: found[name].get("quick_us", float("inf")))
    last = [n for n in order[:FINALISTS] if "quick_us" in found[n]]
    last += [n for n in order if tried[n].is_planned and n in right and n not in last]
    calls = {"ceiling": CEILING[cell.op], **{name: right[name] for name in last}}
    for name, timing in setting.interleaved(sets, calls, last).items():
        if name == "ceiling":
            line["ceiling_us"] = timing.median_us
        elif not timing.refused:
            found[name] |= {"median_us": timing.median_us, "rounds_us": timing.rounds_us}
    return line | {"arch": problem.arch, "ranking": [found[name] for name in order]}


def _judged(variant: Variant, cell: Cell, sets: Rotation, setting: Setting) -> dict[str, Any]:
    entry: dict[str, Any] = {"kernel": variant.kernel, "numbers": variant.numbers, "why": ""}
    entry |= {"is_planned": variant.is_planned}
    try:
        verdict = opbench.judged(variant.call, cell, sets.sets[0], opjudge.OUR_ULPS)
        setting.synchronize()
    except Exception as error:  # noqa: BLE001  numbers that do not launch: a row
        opbench.alive(setting, variant.name, cell, error, "ours")
        return entry | {"why": one_line(error)}
    return entry | {"why": "" if verdict.ok else f"wrong: {verdict.why}"}


def is_kept(log: benchfile.Log, cell: Cell, values: str) -> bool:
    """Whether the log has this cell's ranking."""
    wanted = {**asdict(cell), "values": values}
    return any(
        each["kind"] == "tuning" and all(each[key] == value for key, value in wanted.items())
        for part in log.kept
        for each in part.others
    )


def price(line: dict[str, Any]) -> float | None:
    """What rows pay for bits that do not depend on how many they are: the time of the fastest cut
    on so many rows, as a share of that of the cut that is planned today, batch invariance on.

    1: nothing; 0.8: another cut would take 0.8 of the time. None: there is no time of either.
    """
    timed = [each for each in line["ranking"] if each.get("median_us")]
    if not timed or "arch" not in line:
        return None
    problem = Problem(line["rows"], line["cols"], line["dtype"], arch=line["arch"])
    row = rowchoice.chosen(line["op"], problem)
    today = (row.kernel, _given(row))
    planned = [e["median_us"] for e in timed if (e["kernel"], e["numbers"]) == today]
    return min(each["median_us"] for each in timed) / planned[0] if planned else None


def prices(lines: Iterable[dict[str, Any]]) -> dict[tuple[Cell, str], float]:
    """By cell and kind of input, from kept rankings, the last of each cell."""
    found: dict[tuple[Cell, str], float] = {}
    for line in lines:
        value = price(line)
        if value is not None:
            cell = Cell(line["op"], line["dtype"], line["rows"], line["cols"])
            found[cell, line["values"]] = value
    return found


def table(line: dict[str, Any]) -> tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...], int]:
    """A kept ranking as title, heading, rows and how many columns are words."""
    ceiling = line.get("ceiling_us")
    rows = []
    for place, each in enumerate(line["ranking"]):
        if place >= SHOWN and not each["is_planned"]:
            continue
        us = each.get("median_us") or each.get("quick_us")
        numbers = ", ".join(f"{key} {value}" for key, value in each["numbers"].items())
        rows.append(
            (each["kernel"], numbers + (" (planned)" if each["is_planned"] else ""),
             f"{us:.2f}" if us else each["why"] or "—",
             f"{ceiling / us:.3f}" if us and ceiling else "—")
        )  # fmt: skip
    tried = len(line["ranking"])
    size = f"{line['rows']:,} x {line['cols']:,}"
    title = f"{line['op']} {line['dtype']} {size}: the best of {tried} variants"
    if line.get("why"):
        title = f"{line['op']} {line['dtype']} {size}: {line['why']}"
    return title, ("kernel", "numbers", "µs", "of ceiling"), tuple(rows), 2


def run(
    cells: Sequence[Cell], setting: Setting, outlet: Outlet, source: Variants = variants
) -> tuple[list[dict[str, Any]], int]:
    """Rank the variants of every cell that the log does not have; what was found, and how many
    cells are left."""
    done: list[dict[str, Any]] = []

    def one(cell: Cell) -> str:
        done.append({"kind": "tuning", **tune(cell, setting, source)})
        return benchfile.line("tuning", done[-1])

    def lost(cell: Cell, broken: Broken) -> str:
        line = {**asdict(cell), "values": setting.values, "ranking": [], "why": str(broken)}
        return benchfile.line("tuning", line)

    todo = [cell for cell in cells if not is_kept(outlet.log, cell, setting.values)]
    return done, benchrun.each(todo, one, lost, outlet)
