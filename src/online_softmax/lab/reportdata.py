"""Everything that a report says, gathered from what was stored: figures to draw, tables, sentences.

The page draws it (htmlreport.py), so do the pictures (reportpng.py); the tables alone are Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from online_softmax.catalogue import KERNELS
from online_softmax.lab import (
    benchfile,
    benchpage,
    benchplot,
    benchtable,
    goals,
    marks,
    reportcells,
    reportfused,
    reportladder,
    reportmore,
)
from online_softmax.lab.benchfile import Part, Row
from online_softmax.lab.benchtable import Table
from online_softmax.lab.reportread import KINDS, Stored, of_kind
from online_softmax.lab.reportsheet import Sheet, of_table, shown
from online_softmax.lab.results import Run

TEXT_TABLES = {  # sections of benchpage that are shown as they are: by the part of the page
    "means": "verdicts", "below": "verdicts", "slower": "verdicts", "few": "few",
    "losses": "losses", "fusion": "host", "refusals": "refusals",
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What was stored, in the order of a report."""

    stored: Stored

    @cached_property
    def runs(self) -> list[Run]:
        """Of the ladder, the main cell first."""
        return reportladder.ordered(self.stored.runs)

    @cached_property
    def parts(self) -> list[Part]:
        """Of bench, those with a figure that is shown; what is not to be believed says so."""
        shown = [part for part in self.stored.parts if part.rows or of_kind([part], *KINDS)]
        return [marks.doubted(part, self.stored.runs) for part in shown]

    @cached_property
    def every(self) -> list[Row]:
        """Every cell once."""
        return benchtable.ordered(map(goals.today, benchfile.latest(self.parts)))

    @cached_property
    def rows(self) -> list[Row]:
        """The cells of matrices: attention and merges stand apart."""
        return [row for row in self.every if not row.cell.is_fused]

    @cached_property
    def texts(self) -> dict[str, list[Sheet]]:
        """Verdicts as tables of text, by the part of the page."""
        found: dict[str, list[Sheet]] = {}
        sections = benchpage.sections(self.parts, is_page=True)
        for name, part in TEXT_TABLES.items():
            tables = [each for each in sections.get(name, ()) if each.rows]
            sheets = [of_table(each, _title(name, each)) for each in tables]
            found.setdefault(part, []).extend(sheets)
        for op, group in benchtable.operations(self.every).items():
            table = benchpage.refusals_table(group)
            if group[0].cell.is_fused and table.rows:
                found["refusals"].append(of_table(table, f"Without a time: {op}"))
        return found

    @property
    def devices(self) -> list[str]:
        found = [reportmore.device(each.header) for each in self._headed]
        found = found or [each.header.device for each in self.stored.traffic]
        return list(dict.fromkeys(found))

    @property
    def dates(self) -> list[str]:
        """The days on which something was measured."""
        return sorted({each.header.date[:10] for each in self._headed})

    @property
    def _headed(self) -> list[Any]:
        """Everything with a header: a date, a device."""
        return [*self.parts, *self.stored.runs]

    # ---- tables

    @cached_property
    def sheets(self) -> dict[str, Sheet]:
        """The tables behind the plots, by the name of the plot; those without a line are left
        out."""
        parts, rows = self.parts, self.rows
        found = {
            "machine": reportmore.machine_sheet(self.parts, self.stored.runs),
            "accuracy": reportmore.accuracy_sheet(parts, rows),
            "memory": reportmore.memory_sheet(parts),
            "attention_memory": reportmore.attention_memory_sheet(parts),
            "host": reportmore.host_sheet(parts),
            "marks": reportcells.marked(self.every),
        }
        found |= reportfused.sheets(self.every, parts)
        return {name: sheet for name, sheet in found.items() if sheet.rows}

    def ladder_sheets(self) -> list[Sheet]:
        """Of each run: its rungs, its roofline; and bytes by the counters."""
        found: list[Sheet | None] = [reportladder.sheet(run) for run in self.runs]
        found += [reportladder.roof_sheet(run) for run in self.runs]
        found += [reportladder.traffic_sheet(each) for each in self.stored.traffic]
        return [each for each in found if each]

    def cell_sheets(self) -> list[Sheet]:
        """A table for each operation and type."""
        kinds = benchtable.groups(self.rows)
        return [reportcells.cells_sheet(self.rows, op, dtype) for op, dtype in kinds]

    # ---- for the page

    def plain(self) -> dict[str, Any]:
        """As JSON has it, for web/report.js."""
        return {
            "title": self.title,
            "devices": self.devices,
            "dates": self.dates,
            "tiles": tiles(self),
            "circumstances": self.circumstances,
            "names": benchplot.NAMES,
            "cells": len(self.every),
            "operations": len(benchtable.operations(self.every)),
            "ladder": [reportladder.plain(run) | {"roofSheet": _plain(reportladder.roof_sheet(run))}
                       for run in self.runs],
            "traffic": [reportladder.traffic_sheet(each).plain() for each in self.stored.traffic],
            "bench": reportcells.plain(self.rows),
            "sheets": {name: sheet.plain() for name, sheet in self.sheets.items()},
            "texts": {name: [s.plain() for s in found] for name, found in self.texts.items()},
            "fused": [name for name in reportfused.TITLES if name in self.sheets],
            "files": self.stored.files,
            "passed": self.stored.passed,
        }  # fmt: skip

    @property
    def title(self) -> str:
        return f"Softmax on {' and '.join(self.devices)}"

    @property
    def circumstances(self) -> list[str]:
        """Card, driver, versions, commit, date and clock of all that has figures here."""
        return benchpage.circumstances(self.parts)


def _title(section: str, table: Table) -> str:
    """What a table is of, where its section's heading is not above it."""
    if section == "below":
        return f"Below their goal. {table.title}"
    if section == "slower" and table.fold:
        return f"Slower than the fastest rival: {table.fold}"
    return f"Without a time: {table.fold}" if section == "refusals" else table.title


def _plain(sheet: Sheet | None) -> dict[str, Any] | None:
    return sheet.plain() if sheet else None


# ---- the figures at the head of a page

Tile = dict[str, str]
AT_HEAD = ("softmax", "softmax_backward", "cross_entropy")


def tiles(report: Report) -> list[Tile]:
    """A handful of figures, each with what it is of; all from the tables below them."""
    found = [_ladder_tile(report.runs), *_mean_tiles(report.rows), _attention_tile(report)]
    found += [_memory_tile(report), _few_tile(report.rows), _behind_tile(report)]
    return [each for each in found if each]


def _ladder_tile(runs: Sequence[Run]) -> Tile | None:
    run = next((run for run in runs if run.is_timed), None)
    rungs = [r for r in run.results if r.of_copy and _is_rung(r.name)] if run else []
    if not run or not rungs:
        return None
    first, best = min(rungs, key=_share), max(rungs, key=_share)
    return {"value": shown("share", best.of_copy), "of": "of a copy's speed, the ladder's best",
            "note": f"{best.name}; {first.name} reaches {shown('share', first.of_copy)}. "
                    f"{reportladder.size(run.header)}"}  # fmt: skip


def _is_rung(name: str) -> bool:
    return name in KERNELS and bool(KERNELS[name].rung)


def _share(result: Any) -> float:
    return float(result.of_copy)


def _mean_tiles(rows: Sequence[Row]) -> list[Tile]:
    """Of the operations that have main cells beside rivals: mean share of the limit, and beside
    torch, in the first type measured."""
    main = [row for row in rows if row.cell.is_main and row.values == "normal"]
    found: dict[str, Tile] = {}
    for (op, dtype), group in benchtable.groups(main).items():
        mean = goals.geometric_mean(map(goals.of_ceiling, group))
        if op in found or mean is None:
            continue
        fast = [(name, _beside(group, name)) for name in benchtable.rivals(group)]
        said = [f"{times:.2f} times {benchplot.NAMES.get(n, n)}" for n, times in fast if times]
        limit = benchplot.CEILING.get(op, "an addition")
        note = f"{dtype}, mean of {len(group)} shapes; {', '.join(said)}"
        found[op] = {"value": shown("share", mean), "of": f"of {limit}'s speed, {op}", "note": note}
    return [found[op] for op in AT_HEAD if op in found]


def _beside(rows: Iterable[Row], name: str) -> float | None:
    return goals.geometric_mean(goals.times(r.entry("ours"), r.entry(name)) for r in rows)


def _attention_tile(report: Report) -> Tile | None:
    """The fastest forward of ours, beside the others there."""
    sheet = report.sheets.get("attention")
    names = [name for name, _ in sheet.columns] if sheet else []
    if not sheet or "ours TFLOP/s" not in names:
        return None
    lines = [dict(zip(names, row, strict=True)) for row in sheet.rows]
    best = max(lines, key=lambda line: line["ours TFLOP/s"] or 0.0)
    rates = {n.removesuffix(" TFLOP/s"): best[n] for n in names if n.endswith(" TFLOP/s")}
    ours = rates.pop("ours")
    others = [f"{name} {shown('count', rate)}" for name, rate in rates.items() if rate]
    if not isinstance(ours, (int, float)) or ours < 1:  # a CPU's
        return None
    note = f"{best['of']}, {best['cell']}; {'; '.join(others)}"
    return {"value": shown("count", ours), "of": "TFLOP/s, attention forward", "note": note}


def _memory_tile(report: Report) -> Tile | None:
    line = next(iter(of_kind(report.stored.parts, "linear")[-1:]), None)
    entries = line["entries"] if line else ()
    known = {e["name"]: e for e in entries if e.get("memory_bytes") and e.get("median_us")}
    if "ours, low" not in known or "torch" not in known:
        return None
    ours, torch = known["ours, low"], known["torch"]
    return {"value": f"{ours['memory_bytes'] / 1e9:.2f} GB",
            "of": "beyond inputs and gradients, linear_cross_entropy",
            "note": f"{ours['median_us'] / 1000:.1f} ms; torch {torch['memory_bytes'] / 1e9:.2f} "
                    f"GB in {torch['median_us'] / 1000:.1f} ms"}  # fmt: skip


def _few_tile(rows: Sequence[Row]) -> Tile | None:
    """Few long rows of softmax beside the fastest rival, in the first type measured."""
    found = next((x for x in map(goals.few, _of(rows, "softmax").values()) if x), [])
    mean = goals.geometric_mean(each.times for each in found)
    if mean is None:
        return None
    worst = min(found, key=lambda each: each.times)
    shapes = f"{worst.row.dtype}, mean of {len(found)} shapes of at most {goals.FEW_ROWS} rows"
    return {
        "value": f"{mean:.2f} times",
        "of": "the fastest rival's speed, softmax of few long rows",
        "note": f"{shapes}; the worst, {benchtable.size(worst.row)}: {worst.times:.2f}",
    }


def _of(rows: Sequence[Row], op: str) -> dict[tuple[str, str], list[Row]]:
    return benchtable.groups(row for row in rows if row.op == op)


def _behind_tile(report: Report) -> Tile | None:
    beside = [row for row in report.rows if goals.beside_fastest(row)]
    if not beside:
        return None
    note = "by more than 2 % and more than the rounds are apart"
    apart = [row for row in report.every if row.cell.is_fused and goals.beside_fastest(row)]
    if apart:
        note += f"; of attention, merges and others in {len(goals.slower(apart))} of {len(apart)}"
    late = len(goals.slower(report.rows))
    return {"value": f"{late:,} of {len(beside):,}",
            "of": "cells of rows and losses where a rival is faster", "note": note}  # fmt: skip
