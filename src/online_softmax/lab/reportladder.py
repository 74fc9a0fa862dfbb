"""The ladder in a report: each run's bars, what a rung changed, the roofline, counters' bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from online_softmax.catalogue import KERNELS
from online_softmax.lab import laddertables, marks
from online_softmax.lab.marks import Mark
from online_softmax.lab.profilefile import Profile
from online_softmax.lab.reportsheet import Sheet, Value, compact, trimmed
from online_softmax.lab.results import Header, Result, Run

# Exponentials that a multiprocessor gives a clock, by architecture: the CUDA programming guide,
# table of the throughput of arithmetic instructions. Others: no such roof is drawn.
EXPS_A_CLOCK = dict.fromkeys(("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"), 16)
TIMED = (
    ("rung", "code"), ("idea", "text"), ("beside the rung before", "text"), ("reads", "number"),
    ("writes", "number"), ("exps", "number"), ("registers", "count"), ("threads", "count"),
    ("µs", "us"), ("p20", "us"), ("p80", "us"), ("GB/s", "count"), ("of a copy", "share"),
    ("times torch", "times"), ("note", "text"),
)  # fmt: skip
COUNTED = (*TIMED[:6], ("exps predicted", "number"), ("registers", "count"), ("note", "text"))


def ordered(runs: Sequence[Run]) -> list[Run]:
    """The main cell first, then by type and size; each cell once, as it was measured last."""
    kinds = {"float32": 0, "bfloat16": 1, "float16": 2}
    last = {(run.header.device, *laddertables.cell(run)): run for run in runs}
    return sorted(
        last.values(),
        key=lambda run: (
            laddertables.cell(run) != laddertables.MAIN,
            kinds.get(run.header.dtype, 9),
            -run.header.rows,
            run.header.cols,
        ),
    )


def size(header: Header) -> str:
    return f"{header.rows:,} x {header.cols:,} {header.dtype}"


def exps(result: Result) -> float | None:
    """An element, counted where that was done."""
    return result.exps if result.exps is not None else result.exps_predicted


# ---- what a rung changed


def changes(results: Sequence[Result]) -> dict[str, str]:
    """Of each rung beside the one before it of its language: what it costs now, and the time."""
    said: dict[str, str] = {}
    before: dict[str, Result] = {}
    for each in results:
        if each.name not in KERNELS or not KERNELS[each.name].rung:
            continue
        if old := before.get(each.backend):
            said[each.name] = _change(old, each)
        before[each.backend] = each
    return said


def _change(old: Result, new: Result) -> str:
    parts = []
    pairs = (("reads", old.reads, new.reads), ("exps", exps(old), exps(new)))
    for name, was, now in pairs:
        if was is not None and now is not None and trimmed(was) != trimmed(now):
            parts.append(f"{name} {trimmed(was)} to {trimmed(now)}")
    if old.median_us and new.median_us:
        ratio = old.median_us / new.median_us
        parts.append(f"{ratio:.2f} times as fast" if ratio >= 0.1 else f"{ratio:.3f} times as fast")
    return f"after {old.name}: {', '.join(parts) or 'no count changed'}"


# ---- a run


def _note(result: Result, found: Sequence[Mark]) -> str:
    wrong = [result.why] if result.ok is False else []
    chosen = [f"runs {result.kernel}"] if result.name == "production" else []
    return "; ".join([*chosen, *wrong, *result.reasons, *(each.text for each in found)])


def sheet(run: Run) -> Sheet:
    """Every rung, and the limit."""
    h, changed, rows = run.header, changes(run.results), list[tuple[Value, ...]]()
    for r in run.results:
        note = _note(r, marks.of_rung(r, h))
        registers = r.figures[0].registers or None if r.figures else None
        first: tuple[Value, ...] = (r.name, r.idea, changed.get(r.name), r.reads, r.writes, exps(r))
        if not run.is_timed:
            rows.append((*first, r.exps_predicted, registers, note))
            continue
        rows.append((*first, registers, r.block or None, r.median_us, r.p20_us, r.p80_us, r.gbs,
                     r.of_copy, r.of_torch, note))  # fmt: skip
    if run.is_timed and h.copy_us:
        nothing: tuple[None, ...] = (None, None)
        rows.append(("copy", "one read, one write and nothing else: the limit", None, 1, 1, 0,
                     *nothing, h.copy_us, *nothing, h.copy_gbs, 1.0, None, ""))  # fmt: skip
    columns = TIMED if run.is_timed else COUNTED
    how = f"{h.clock}. " if run.is_timed else "Counted while the kernels ran on a CPU; not timed. "
    note = f"{h.device}, {h.date[:10]}. {how}Reads, writes and exponentials an element."
    return Sheet(f"softmax of {size(h)}", columns, tuple(rows), note)


def plain(run: Run) -> dict[str, Any]:
    """What the page draws of a run, beside its sheet."""
    h, drawn = run.header, []
    for r in run.results:
        share = r.of_copy if run.is_timed else r.reads
        if share is None:
            continue
        found = marks.of_rung(r, h)
        drawn.append({
            "name": r.name, "kind": r.name if r.name == "production" else r.backend,
            "idea": r.idea, "share": compact(r.of_copy), "us": compact(r.median_us),
            "gbs": compact(r.gbs), "reads": r.reads, "writes": r.writes, "exps": compact(exps(r)),
            "predicted": compact(r.exps_predicted), "counted": r.is_counted,
            "marks": [each.text for each in found],
            "isResult": all(d.is_result for d in found),
        })  # fmt: skip
    return {"size": size(h), "device": h.device, "timed": run.is_timed, "notes": list(h.notes),
            "copy": compact(h.copy_gbs), "datasheet": h.datasheet_gbs,
            "rungs": drawn, "roof": roofline(run), "sheet": sheet(run).plain()}  # fmt: skip


# ---- roofline


def exp_peak(header: Header) -> float | None:
    """Exponentials a second that the card's units for them give, at the clock that was noted."""
    clock = re.match(r"(\d+) MHz", str(header.machine.get("clocks.sm", "")))
    count = header.machine.get("multiprocessors")
    each = EXPS_A_CLOCK.get(header.arches[0] if header.arches else "")
    return each * count * int(clock[1]) * 1e6 if clock and count and each else None


def roofline(run: Run) -> dict[str, Any] | None:
    """Exponentials a byte that must move, and a second, of each rung; and the roofs. None: nothing
    was timed."""
    h = run.header
    elements = h.rows * h.cols
    points: list[dict[str, Any]] = []
    for r in run.results:
        count = exps(r)
        if r.median_us and count and elements and h.bytes_moved:
            points.append({"name": r.name, "kind": r.name if r.name == "production" else r.backend,
                           "x": compact(count * elements / h.bytes_moved),
                           "y": compact(count * elements / r.median_us * 1e6)})  # fmt: skip
    if not points or not h.copy_gbs:
        return None
    peak = exp_peak(h)
    if peak and peak < max(p["y"] for p in points):
        peak = None  # the clock was read on an idle card
    return {"points": points, "copy": compact(h.copy_gbs), "datasheet": h.datasheet_gbs,
            "exps": peak, "clock": h.machine.get("clocks.sm", "")}  # fmt: skip


def roof_sheet(run: Run) -> Sheet | None:
    """The same as a table."""
    found = roofline(run)
    if found is None:
        return None
    rows = [
        (p["name"], p["x"], p["y"] / 1e9, p["y"] / (found["copy"] * 1e9 * p["x"]))
        for p in found["points"]
    ]
    columns = (
        ("rung", "code"),
        ("exponentials a byte", "number"),
        ("billion exponentials a second", "count"),
        ("of the copy's roof", "share"),
    )
    peak = found["exps"]
    note = f"A copy: {found['copy']:,.0f} GB/s."
    if peak:
        note += (
            f" Units for exponentials: {EXPS_A_CLOCK[run.header.arches[0]]} a clock on each of "
            f"{run.header.machine['multiprocessors']} multiprocessors at {found['clock']}, "
            f"{peak / 1e9:,.0f} billion a second."
        )
    return Sheet(f"Roofline, softmax of {size(run.header)}", columns, tuple(rows), note)


# ---- bytes by the GPU's counters

LEVELS = (("l1_load", "loads from L1"), ("l2_read", "reads from L2"),
          ("dram_read", "reads from DRAM"), ("l2_write", "writes to L2"))  # fmt: skip


def traffic_sheet(run: Profile) -> Sheet:
    """Bytes an element that each kernel moves at each level."""
    columns = (("rung", "code"), *((name, "number") for _, name in LEVELS), ("µs", "us"))
    rows = [
        (line.name, *(line.counters.get(key) for key, _ in LEVELS), line.counters.get("time_us"))
        for line in run.lines
        if line.counters
    ]
    header = run.header
    of = "" if header.op == "softmax" else f"{header.op} "
    title = f"Bytes an element, {of}{header.rows:,} x {header.cols:,} {header.dtype}"
    note = (
        f"By the counters of {header.device}, {header.date[:10]}; caches emptied "
        "before each kernel, planned block sizes; µs are the profiler's."
    )
    return Sheet(title, columns, tuple(rows), note)
