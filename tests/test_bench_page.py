"""Goals, comparisons and tables: what a row is said to be, from figures that are given."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from bench_kit import HEADER
from online_softmax.lab import benchfile, benchpage, goals, grid, report, verdicts
from online_softmax.lab.benchfile import Entry, Part, Row
from online_softmax.lab.grid import Cell

MAIN = [Cell("softmax", "bfloat16", grid.WHOLE // cols, cols) for cols in grid.MAIN_COLS]


def entry(name: str, us: float | None, spread: float = 0.0, **more) -> Entry:
    kind = {"ceiling": "ceiling", "ours": "ours"}.get(name, "rival")
    if us is None:
        return Entry(name, kind, **more)
    given = {"ok": True, "clock": "graph", "do_bench_us": us + 1, "gbs": 1000.0} | more
    return Entry(name, kind, median_us=us, rounds_us=(us, us + spread), **given)


def row(cell: Cell, *entries: Entry) -> Row:
    return Row(cell.op, cell.dtype, cell.rows, cell.cols, "normal", cell.ideal_bytes, entries)


def page(rows: list[Row], others: tuple = (), width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    benchpage.render([Part(HEADER, tuple(rows), others)], console)
    return console.file.getvalue()


# ---- goals


@pytest.mark.parametrize(
    ("op", "dtype", "cols", "wanted"),
    [
        ("softmax", "bfloat16", 32, 0.97),
        ("log_softmax", "float32", 65536, 0.97),
        ("softmax", "float32", 100277, 0.96),
        ("softmax", "float16", 201088, 0.94),
        ("softmax", "bfloat16", 1048576, 0.90),
        ("softmax", "float32", 1048576, 0.62),
        ("softmax", "bfloat16", 4194304, 0.62),
        ("softmax_backward", "bfloat16", 16384, 0.98),
        ("log_softmax_backward", "float32", 32000, 0.965),
        ("softmax_backward", "float32", 131072, 0.95),
        ("softmax_backward", "float32", 262144, 0.92),
        ("softmax_backward", "float32", 524288, None),
        ("logsumexp", "float32", 4194304, 0.975),
        ("logsumexp", "float16", 32, 0.93),
    ],
)
def test_goals(op: str, dtype: str, cols: int, wanted: float | None):
    assert goals.goal(Cell(op, dtype, grid.WHOLE // cols, cols)) == wanted


def test_small_cells_have_no_goal():
    assert goals.goal(Cell("softmax", "float32", 16, 4096)) is None


def test_every_goal_of_a_mean_names_a_rival():
    for (op, _), wanted in goals.MEANS.items():
        assert op in grid.OPS
        assert set(wanted) <= {"torch", "compile", "quack"}


def test_below_goal():
    rows = [row(MAIN[0], entry("ceiling", 96.9), entry("ours", 100.0)),
            row(MAIN[1], entry("ceiling", 97.1), entry("ours", 100.0)),
            row(MAIN[2], entry("ceiling", 97.1), entry("ours", None, ok=False))]  # fmt: skip
    ((found, share, wanted),) = goals.below_goal(rows)
    assert (found.cols, share, wanted) == (128, pytest.approx(0.969), 0.97)


# ---- beside rivals


def test_do_bench_is_compared_with_do_bench():
    ours = entry("ours", 10.0, do_bench_us=30.0)
    theirs = entry("liger", 33.0, clock="do_bench", do_bench_us=33.0)
    assert goals.times(ours, theirs) == pytest.approx(1.1)
    assert goals.times(replace(ours, do_bench_us=None), theirs) is None
    uncaptured = replace(ours, clock="do_bench")
    assert goals.times(uncaptured, entry("torch", 20.0)) is None


def test_the_fastest_rival_is_the_one_that_ours_gains_least_on():
    cell = row(MAIN[0], entry("ceiling", 9.0), entry("ours", 10.0), entry("torch", 30.0),
               entry("quack", 11.0), entry("liger", None, why="refuses"))  # fmt: skip
    found = goals.beside_fastest(cell)
    assert (found.rival.name, found.times) == ("quack", pytest.approx(1.1))
    assert not found.is_slower
    assert goals.beside_fastest(row(MAIN[0], entry("ours", None), entry("torch", 3.0))) is None
    assert goals.beside_fastest(row(MAIN[0], entry("ours", 3.0), entry("ceiling", 1.0))) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "spread", "wanted"),
    [
        (100.0, 99.0, 0.0, False),  # within 2 %
        (100.0, 97.0, 0.0, True),
        (100.0, 97.0, 4.0, False),  # within the spread
        (100.0, 97.0, 2.0, True),
        (97.0, 100.0, 0.0, False),
    ],
)
def test_slower_is_beyond_the_noise(ours: float, theirs: float, spread: float, wanted: bool):
    for where in ("ours", "quack"):
        spreads = {where: spread}
        rows = [row(MAIN[0], entry("ours", ours, spreads.get("ours", 0.0)),
                    entry("quack", theirs, spreads.get("quack", 0.0)))]  # fmt: skip
        assert bool(goals.slower(rows)) is wanted


def test_geometric_mean():
    assert goals.geometric_mean([2.0, 8.0, None]) == pytest.approx(4.0)
    assert goals.geometric_mean([None]) is None


# ---- tables


def test_means_are_over_the_main_cells_alone():
    rows = [row(cell, entry("ceiling", 90.0), entry("ours", 100.0), entry("torch", 200.0))
            for cell in MAIN]  # fmt: skip
    rows.append(row(Cell("softmax", "bfloat16", grid.WHOLE // 256, 256), entry("ceiling", 1.0),
                    entry("ours", 100.0), entry("torch", 9000.0)))  # fmt: skip
    table = verdicts.means_table(rows)
    assert table.head == ("operation", "cells", "of ceiling", "x torch (goal)")
    assert table.rows == (("softmax bfloat16", "17", "0.900", "2.00 (2.1)"),)


def test_a_cell_s_line():
    cell = row(
        MAIN[1], entry("ceiling", 126.0), entry("ours", 130.0), entry("torch", 1300.0),
        entry("compile", 65.0, clock="do_bench", do_bench_us=65.5),
        entry("quack", None, why="RuntimeError: cols"),
        entry("liger", None, ok=False, why="wrong: x"),
    )  # fmt: skip
    (table,) = benchpage.cell_tables([cell])
    assert table.title == "softmax bfloat16"
    assert table.head[:5] == ("rows x cols", "ceiling µs", "µs", "GB/s", "of ceiling")
    assert table.rows == (
        ("262,144 x 512", "126.0", "130.0", "1,000", "0.969", "131.0", "10.00", "0.50*",
         "refuses", "wrong"),
    )  # fmt: skip


def test_wrong_ours_has_no_figures():
    cell = row(MAIN[1], entry("ceiling", 126.0), entry("ours", None, ok=False), entry("torch", 1.0))
    (table,) = benchpage.cell_tables([cell])
    assert table.rows[0][2:] == ("WRONG", "—", "—", "—", "—")


def test_ours_under_another_setting_is_a_column():
    more = replace(entry("ours, not batch invariant", 120.0), kind="ours")
    cell = row(MAIN[1], entry("ceiling", 126.0), entry("ours", 130.0), more, entry("torch", 260.0))
    (table,) = benchpage.cell_tables([cell])
    assert table.head[-2:] == ("ours, not batch invariant µs", "x torch")
    assert table.rows[0][-2:] == ("120.0", "2.00")
    assert not replace(cell, entries=(replace(more, ok=False),)).is_right


def test_few_rows():
    def small(cols: int, ours: float, rows: int = 1) -> Row:
        cell = Cell("softmax", "float32", rows, cols)
        return row(cell, entry("ours", ours), entry("torch", 100.0), entry("compile", 10.0))

    rows = [small(32000, 5.0), small(65536, 20.0), small(262144, 10.5), small(1024, 99.0),
            small(32768, 99.0), small(32000, 99.0, rows=64)]  # fmt: skip
    (line,) = verdicts.few_table(rows).rows
    assert line == ("softmax float32", "ours", "3", "0.98", "1", "1 x 65,536", "0.50")
    other = replace(entry("ours, not batch invariant", 5.0), kind="ours")
    more = [replace(row, entries=(*row.entries, other)) for row in rows]
    assert [line[1:4] for line in verdicts.few_table(more).rows] == [
        ("ours", "3", "0.98"), ("ours, not batch invariant", "3", "2.00")
    ]  # fmt: skip


def test_errors_stand_beside_torch_s():
    def cell(ours: float, theirs: float) -> Row:
        return row(MAIN[0], entry("ours", 9.0, share_max=ours, share_mean=1e-9),
                   entry("torch", 9.0, share_max=theirs, share_mean=2e-9))  # fmt: skip

    rows = [cell(1e-7, 1e-7), cell(2e-7, 1e-7), cell(3e-7, 1e-7)]
    assert [line[-1] for line in verdicts.accuracy_table(rows).rows] == ["yes", "yes", "NO"]
    assert verdicts.accuracy_table(rows).rows[0][:3] == (
        "softmax bfloat16 1,048,576 x 128", "1.00e-07", "1.00e-07"
    )  # fmt: skip
    without = row(MAIN[0], entry("ours", 9.0, share_max=1.0), entry("torch", None))
    assert verdicts.accuracy_table([without]).rows == ()


def test_refusals_of_one_reason_are_one_line():
    refusing = entry("quack", None, why="RuntimeError: a|b")
    rows = [row(cell, refusing) for cell in MAIN[:3]]
    rows.append(replace(row(MAIN[3]), why="it would take 900 GiB"))
    for cell, much in ((MAIN[4], "1.5e-06"), (MAIN[5], "12")):  # the same but for its figures
        rows.append(row(cell, entry("liger", None, why=f"\x1b[91mwrong\x1b[0m: {much} off")))
    assert benchpage.refusals_table(rows).rows == (
        ("softmax", "quack", "RuntimeError: a|b", "bfloat16 1,048,576 x 128", "3"),
        ("softmax", "the cell", "it would take 900 GiB", "bfloat16 65,536 x 2,048", "1"),
        ("softmax", "liger", "wrong: 1.5e-06 off", "bfloat16 32,768 x 4,096", "2"),
    )


def test_on_a_terminal_the_verdicts_come_last():
    cell = row(MAIN[0], entry("ceiling", 90.0), entry("ours", 100.0), entry("quack", 95.0))
    said = page([cell])
    assert said.startswith("a GPU, driver unknown")
    assert said.index("Geometric means") < said.index("Cells below") < said.index("Cells slower")
    assert re.search(r"softmax bfloat16 1,048,576 x 128 +0\.900 +0\.97", said)
    assert re.search(r"softmax bfloat16 1,048,576 x 128 +quack +100\.0 +95\.0 +0\.95", said)
    right = row(MAIN[0], entry("ceiling", 99.0), entry("ours", 100.0), entry("quack", 105.0))
    assert page([right]).count("  none") == 2


# ---- the document


def test_without_stored_results_the_page_says_so():
    text = report.PERFORMANCE.read_text(encoding="utf-8")
    empty = report.performance(text, [])
    bodies = re.findall(r"<!-- (\w+):begin -->\n(.*?)\n<!-- \1:end -->", empty, re.DOTALL)
    assert len(bodies) == len(report.SECTIONS) + 5
    only_with_results = [name for name, body in bodies if not body]
    assert only_with_results == ["losses", "linear", "attention", "more"]
    assert {body for _, body in bodies} == {report.NOTHING, ""}


def test_the_page_from_stored_results():
    cell = row(MAIN[0], entry("ceiling", 90.0), entry("ours", 100.0), entry("quack", 95.0))
    refusing = row(MAIN[1], entry("ceiling", 90.0), entry("ours", 91.0),
                   entry("quack", None, why="TypeError: a|b"))  # fmt: skip
    alone = row(Cell("softmax", "bfloat16", 2, 1024), entry("ceiling", 1.0), entry("ours", 1.1))
    text = report.PERFORMANCE.read_text(encoding="utf-8")
    found = report.performance(text, [Part(HEADER, (cell, refusing, alone))])
    assert (
        "| of ceiling (goal) | 128 |\n| --- | ---: |\n| softmax bfloat16 | 0.900 (0.97) |" in found
    )
    slower = "| softmax bfloat16 1,048,576 x 128 | quack | 100.0 | 95.0 | 0.95 | 0.00 |"
    assert re.search(rf"<summary>softmax, cell by cell</summary>[^<]*{re.escape(slower)}", found)
    assert "TypeError: a\\|b" in found
    assert "| 1,048,576 x 128 | 90.0 | 100.0 |" in found
    assert "2 x 1,024" not in found  # no rival there: the file alone has it
    assert f"<!-- small:begin -->\n{report.NO_TABLE}" in found
    good = row(MAIN[0], entry("ceiling", 99.0), entry("ours", 100.0), entry("quack", 105.0))
    said = report.performance(text, [Part(HEADER, (good,))])
    assert f"<!-- slower:begin -->\n{report.NO_CELL}\n<!-- slower:end -->" in said


def test_stored_runs_of_bench_are_found(tmp_path):
    assert report.stored_bench(tmp_path) == []
    path = tmp_path / "bench-softmax.jsonl"
    path.write_text(benchfile.header_line(HEADER))
    assert report.stored_bench(tmp_path) == [Part(HEADER, ())]


def test_the_page_of_errors_from_stored_results(tmp_path):
    ours = {"ok": True, "why": "", "max": 1e-7, "mean": 1e-9}
    line = {"kind": "accuracy", "op": "softmax", "dtype": "float32", "rows": 3, "cols": 128,
            "values": "normal", "device": "cuda", "ours": ours, "torch": ours}  # fmt: skip
    (tmp_path / "accuracy-row-operations.jsonl").write_text(
        benchfile.header_line(HEADER) + benchfile.line("accuracy", line)
    )
    text = report.ACCURACY.read_text(encoding="utf-8")
    found = report.errors(text, report.stored_bench(tmp_path, "accuracy"))
    row = "| softmax | float32 | normal | 128 | 1.00e-07 | 1.00e-07 | 1.00e-09 | 1.00e-09 | yes |"
    assert row in found
    assert f"<!-- errors:begin -->\n{report.NOTHING}" in report.errors(text, [])
