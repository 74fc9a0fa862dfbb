"""Stored results for the tests of the report: a few cells and a climb, as they are kept."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_kit import HEADER
from online_softmax.lab import benchfile, grid, reportread, results
from online_softmax.lab.benchfile import Entry, Row
from online_softmax.lab.grid import Cell
from online_softmax.lab.reportdata import Report
from online_softmax.lab.results import Result, Run

ROOT = Path(__file__).parent.parent
STORED = ROOT / "benchmarks" / "results" / "h200"
H200 = replace(HEADER, device="NVIDIA H200", machine={"multiprocessors": 132, "l2_bytes": 2**20})
CELL = Cell("softmax", "float32", grid.WHOLE // 4096, 4096)
SCRIPT = "</script><script>throw new Error('a reason ran as code')</script>"


def entry(
    name: str, us: float | None, cell: Cell = CELL, spread: float = 0.0, **more: Any
) -> Entry:
    kind = {"ceiling": "ceiling", "ours": "ours"}.get(name, "rival")
    if us is None:
        return Entry(name, kind, **more)
    given: dict[str, Any] = {"ok": True, "clock": "graph", "do_bench_us": us + 1}
    given["gbs"] = cell.ideal_bytes / us / 1e3
    given["rounds_us"] = (us, us + spread)
    return Entry(name, kind, median_us=us, **(given | more))


def row(cell: Cell, *entries: Entry, **more: Any) -> Row:
    given: dict[str, Any] = {"is_cold_l2": True} | more
    return Row(
        cell.op, cell.dtype, cell.rows, cell.cols, "normal", cell.ideal_bytes, entries, **given
    )


def cell_row(cell: Cell, share: float = 0.9, limit_gbs: float = 4000.0, **more: Any) -> Row:
    """A cell whose limit moves so many GB/s, of which ours reaches a share, torch half."""
    us = cell.ideal_bytes / limit_gbs / 1e3
    rivals = entry("torch", 2 * us, cell), entry("quack", None, cell, why=SCRIPT)
    return row(cell, entry("ceiling", us, cell), entry("ours", us / share, cell), *rivals, **more)


def fused_row(cell: Cell, share: float = 0.5) -> Row:
    """A cell of attention or a merge: its limit is 600 TFLOP/s, or 4,000 GB/s."""
    us = cell.flops / 600e6 or cell.ideal_bytes / 4e6

    def timed(name: str, us: float) -> Entry:
        return entry(name, us, cell, **({"tflops": cell.flops / us / 1e6} if cell.flops else {}))

    lines = timed("ceiling", us), timed("ours", us / share), timed("torch, flash", 2.5 * us)
    refused = entry("flash_attn", None, cell, why="not installed")
    return row(cell, *lines, refused, sizes=cell.sizes, flops=cell.flops)


def rows() -> list[Row]:
    """Two operations, two types, large cells and few rows."""
    found = []
    for op in ("softmax", "cross_entropy"):
        whole = grid.LOSS_WHOLE if op in grid.LOSS_OPS else grid.WHOLE
        for dtype in ("bfloat16", "float32"):
            found += [
                cell_row(Cell(op, dtype, whole // cols, cols)) for cols in (1024, 4096, 50257)
            ]
            found += [cell_row(Cell(op, dtype, few, 32000), 0.5) for few in (1, 16)]
    return found


def bench_text(*given: Row, header: benchfile.Header = H200, others: tuple[Any, ...] = ()) -> str:
    lines = [benchfile.header_line(header), *(benchfile.line("cell", each) for each in given)]
    return "".join([*lines, *(benchfile.line(each["kind"], each) for each in others)])


def climb(of_copy: float = 0.9, gbs: float = 3600.0, is_timed: bool = True) -> Run:
    """Two rungs and torch, timed or counted alone."""
    us = (100.0, 101.0, 102.0) if is_timed else ()
    times: dict[str, Any] = {}
    if is_timed:
        times = {
            "median_us": us[1],
            "rounds_us": us,
            "gbs": gbs,
            "of_copy": of_copy,
            "of_torch": 2.0,
        }
    counts: dict[str, Any] = {"ok": True, "is_counted": True, "writes": 1.0, "exps": 2.0}
    names = (("safe", 3.0, "three passes"), ("v0_thread", 2.0, "the recurrence"))
    found = [Result(n, n, "cuda", idea, reads=r, **counts, **times) for n, r, idea in names]
    found.append(Result("torch", "torch", "torch", "PyTorch's own softmax", ok=True, **times))
    header = results.Header(
        date="2026-01-01T00:00:00+00:00", command="online-softmax ladder", device="NVIDIA H200",
        source="random", rows=4096, rows_asked=4096, cols=4096, dtype="float32", arches=("sm_90a",),
        versions={}, is_cold_l2=True if is_timed else None, bytes_moved=2 * 4 * 4096 * 4096,
        copy_us=90.0 if is_timed else None, copy_gbs=4000.0 if is_timed else None,
        datasheet_gbs=4800.0 if is_timed else None,
    )  # fmt: skip
    return Run(header, tuple(found))


def data(text: str) -> dict:
    """The JSON within a page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found)


def report_of(tmp_path: Path, text: str) -> Report:
    path = tmp_path / "given.jsonl"
    path.write_text(text)
    return Report(reportread.read([path]))


def fill(folder: Path) -> Path:
    """A bench file, a climb, and files of something else in a new folder."""
    folder.mkdir()
    (folder / "bench.jsonl").write_text(bench_text(*rows()))
    results.save(climb(), folder / "ladder.jsonl")
    (folder / "other.json").write_text('{"a": 1}')
    (folder / "notes.log").write_text("not looked at")
    return folder


# ---- lines to change

FORMER = Path(__file__).parent / "data"  # files as commands wrote them that are no more
FIGURES = {
    "accuracy": STORED / "accuracy-rows.jsonl", "attention": FORMER / "former-attention.jsonl",
    "fusion": STORED / "bench-fusion.jsonl", "host": STORED / "bench-host.jsonl",
    "linear": STORED / "bench-linear.jsonl",
}  # fmt: skip


def stored(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A header and a line of a kind, as they were stored."""
    lines = map(json.loads, FIGURES[kind].read_text().splitlines())
    head = next(lines)
    return head, next(line for line in lines if line["kind"] == kind)


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def put(line: dict[str, Any], *place: Any) -> dict[str, Any]:
    """The line with another value, the last of `place`, where the others lead to."""
    *way, name, value = place
    at: Any = line
    for each in way:
        at = at[each]
    at[name] = value
    return line
