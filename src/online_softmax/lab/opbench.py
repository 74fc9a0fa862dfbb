"""Measuring cells: correct first, then every contender in turn on one clock, a row for whatever
refuses; each cell is written when it is done.

Clock and device are a `Setting` (benchclock.py): everything else runs without a GPU too.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from online_softmax.lab import clocks, fusedcells, lossjudge, morecells, opjudge
from online_softmax.lab.bench import Timing
from online_softmax.lab.benchclock import Broken, Setting
from online_softmax.lab.benchfile import Entry, Row
from online_softmax.lab.buffersets import buffers, set_count
from online_softmax.lab.contender import Contender
from online_softmax.lab.grid import WRITING, Cell
from online_softmax.lab.refusal import Refusal, one_line
from online_softmax.lab.rotation import Call, Overwrites, Rotation, bound

CHECKED_ELEMENTS = 2**24  # of each result
EMPTY = "n/a: a matrix without elements"

# ---- one cell


def checked_rows(cell: Cell) -> int:
    """How many rows of a result are compared with float64, evenly spread, both ends among them."""
    return min(cell.rows, max(CHECKED_ELEMENTS // cell.cols, 2))


def judged(
    call: Call,
    cell: Cell,
    tensors: tuple[Tensor, ...],
    ulps: float,
    lap: Callable[[str], None] = lambda name: None,
    x: Tensor | None = None,
) -> opjudge.Judged:
    """Run a call once, into NaN, and compare what it filled or returned with float64: some rows
    where there are many. Of the others it must have written every element. `lap` is told when the
    call is over, which compiles what it needs. `x` is the first tensor as it was, where the call
    overwrites it."""
    if cell.is_fused:
        if cell.op in morecells.FILLING:
            tensors[-1].fill_(torch.nan)
        made = call(*tensors)
        lap("first calls")
        return fusedcells.check(cell, tensors, made, ulps)
    tensors[-1].fill_(torch.nan)
    made = call(*tensors)
    lap("first calls")
    rows = checked_rows(cell)
    if cell.is_loss:
        logits = tensors[0] if x is None else x
        verdict = lossjudge.check(cell.op, logits, tensors[1], made, ulps, rows)
        if cell.op not in WRITING:
            return verdict
        result = made
    else:
        result = made if isinstance(made, Tensor) else tensors[-1]
        result = result.reshape(tensors[-1].shape)
        verdict = opjudge.check(cell.op, tensors[:-1], result, ulps, rows)
    if verdict.ok and rows < cell.rows and math.isnan(float(result.sum(dtype=torch.float32))):
        unwritten = int(result.isnan().sum())
        why = f"{unwritten} of {result.numel()} elements are NaN, or were not written"
        return replace(verdict, ok=False, why=why)
    return verdict


def _enter(
    line: Contender,
    cell: Cell,
    sets: Rotation,
    setting: Setting,
    lap: Callable[[str], None],
) -> tuple[Entry, Call | None]:
    """A contender's entry before it is timed, and its call if it may be."""
    entry = Entry(line.name, line.kind)
    is_ours = line.kind == "ours"
    try:
        call = line.make()
        if line.kind == "ceiling":
            return entry, call
        ulps = opjudge.OUR_ULPS if is_ours else opjudge.RIVAL_ULPS
        if isinstance(call, Overwrites):
            sets.keep()
        x = sets.kept[0] if sets.kept else None
        verdict = judged(call, cell, sets.sets[0], ulps, lap, x)
        setting.synchronize()
    except Refusal as refusal:
        return replace(entry, why=str(refusal)), None
    except Exception as error:
        if line.kind == "ceiling":
            raise
        alive(setting, line.name, cell, error, line.kind)
        return replace(entry, ok=False if is_ours else None, why=one_line(error)), None
    entry = replace(
        entry,
        ok=verdict.ok,
        max_error=verdict.max_error,
        share_max=verdict.share_max,
        share_mean=verdict.share_mean,
    )
    return (entry, call) if verdict.ok else (replace(entry, why=f"wrong: {verdict.why}"), None)


def alive(
    setting: Setting, name: str, cell: Cell, error: BaseException, kind: str = "rival"
) -> None:
    """Raise Broken where an error has left the device unusable."""
    try:
        setting.synchronize()
    except RuntimeError:
        entry = Entry(name, kind, ok=None if kind == "rival" else False, why=one_line(error))
        said_so = f"{name} on {cell.text} left the device unusable: {entry.why}"
        raise Broken(said_so, entry) from error


def lacking(cell: Cell, allocating: int, setting: Setting) -> str:
    """What device memory lacks for a cell whose contenders' outputs are so many, a sentence; "":
    nothing."""
    count, _ = set_count(cell, setting.l2_bytes)
    held = setting.arena.held_bytes
    needed, there = cell.memory_bytes(count, allocating), setting.free_bytes() + held
    if needed > there:
        gc.collect()  # takes half a second, so not at every cell
        there = setting.free_bytes() + held
    if needed <= there:
        return ""
    return f"it would take {needed / 2**30:,.1f} GiB; {there / 2**30:,.1f} GiB are free"


def blank(cell: Cell, values: str) -> Row:
    """A cell's row before anything was measured."""
    size = (cell.op, cell.dtype, cell.rows, cell.cols)
    return Row(*size, values, cell.ideal_bytes, sizes=cell.sizes, flops=cell.flops)


def measure(cell: Cell, lines: Sequence[Contender], setting: Setting) -> Row:
    """Judge and time a cell's contenders."""
    spent: dict[str, float] = {}
    start = since = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal since
        now = time.perf_counter()
        spent[name], since = round(spent.get(name, 0.0) + now - since, 4), now

    row = blank(cell, setting.values)
    if cell.is_empty:
        return replace(row, why=EMPTY)
    why = lacking(cell, sum(line.allocates for line in lines), setting)
    if why:
        return replace(row, why=why)
    sets = fusedcells.buffers(cell, setting) if cell.is_fused else buffers(cell, setting)
    lap("buffers")
    entries: dict[str, Entry] = {}
    calls: dict[str, Call] = {}
    for line in lines:
        entries[line.name], call = _enter(line, cell, sets, setting, lap)
        sets.restore()
        lap("judging")
        if call:
            calls[line.name] = call
    # Only the ceiling must not fail: without it the cell says nothing.
    may_fail = [line.name for line in lines if line.kind != "ceiling"]
    before = setting.watch()
    try:
        timings = setting.interleaved(sets, calls, may_fail)
    except Exception as error:
        alive(setting, "the rounds", cell, error, "ours")
        raise
    seen = clocks.between(before, setting.watch())
    lap("rounds")
    for name, call in calls.items():
        entries[name] = _timed(entries[name], call, timings[name], sets, cell, setting)
        if isinstance(call, Overwrites):
            sets.restore_first()
    if setting.do_bench:
        lap("do_bench")
    return replace(
        row,
        entries=tuple(entries.values()),
        is_cold_l2=sets.is_cold,
        sets=len(sets.sets),
        checked_rows=fusedcells.checked_rows(cell) if cell.is_fused else checked_rows(cell),
        clocks=seen,
        seconds=round(time.perf_counter() - start, 3),
        spent=spent,
    )


def _timed(
    entry: Entry,
    call: Call,
    timing: Timing,
    sets: Rotation,
    cell: Cell,
    setting: Setting,
) -> Entry:
    """An entry with its times. do_bench's is for ours, which a table shows, and for what no graph
    holds."""
    tensors = sets.sets[0]
    before = sets.restore_first if isinstance(call, Overwrites) else None
    known = entry if timing.refused else _with_rounds(entry, timing, cell, setting)
    if setting.do_bench is None:
        return replace(entry, why=timing.refused) if timing.refused else known
    if entry.kind != "ours" and not timing.refused:
        return known
    try:
        do_bench_us = setting.do_bench(bound(call, tensors), before)
    except Exception as error:  # noqa: BLE001  a row; the run goes on while the device does
        alive(setting, entry.name, cell, error, entry.kind)
        return replace(entry, why=timing.refused) if timing.refused else known
    if not timing.refused:
        return replace(known, do_bench_us=do_bench_us)
    why = f"no graph holds it, timed by do_bench: {timing.refused}"
    found = replace(entry, why=why, clock="do_bench", median_us=do_bench_us)
    return _rated(replace(found, do_bench_us=do_bench_us), cell)


def _with_rounds(entry: Entry, timing: Timing, cell: Cell, setting: Setting) -> Entry:
    found = replace(
        entry,
        clock=setting.clock,
        median_us=timing.median_us,
        p20_us=timing.p20_us,
        p80_us=timing.p80_us,
        rounds_us=timing.rounds_us,
    )
    return _rated(found, cell)


def _rated(entry: Entry, cell: Cell) -> Entry:
    """With what its time amounts to; a time of 0 amounts to nothing (doubts.py says so)."""
    if not entry.median_us:
        return entry
    tflops = cell.flops / entry.median_us / 1e6 if cell.flops else None
    return replace(entry, gbs=cell.ideal_bytes / entry.median_us / 1e3, tflops=tflops)
