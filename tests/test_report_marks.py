"""What a report says of figures that are to be doubted: above a limit, impossible, throttled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from online_softmax.lab import goals, htmlreport, marks, reportmd
from online_softmax.lab.benchfile import Part
from report_kit import CELL, H200, bench_text, cell_row, climb, data, entry, report_of, row


def words(given: list[marks.Mark]) -> list[str]:
    return [each.word for each in given]


def test_a_cell_above_the_limit_is_marked_with_the_reason():
    inside = row(CELL, entry("ceiling", 100.0), entry("ours", 99.0, spread=2.0))
    (found,) = marks.of_row(inside)
    assert (found.word, found.is_result) == (marks.OVER, True)
    assert found.why == f"101.0 % of the limit, {marks.WITHIN}"
    outside = row(CELL, entry("ceiling", 100.0), entry("ours", 96.0, spread=2.0))
    assert marks.of_row(outside)[0].why == f"104.2 % of the limit, {marks.BEYOND}"
    assert marks.of_row(row(CELL, entry("ceiling", 99.0), entry("ours", 99.0))) == []


def test_more_than_memory_delivers_is_no_result():
    """A warm cache, or a launch that was timed and not its run: 1 GiB moved in 20 µs."""
    late = row(CELL, entry("ceiling", 260.0), entry("ours", 20.0), entry("torch", 500.0))
    part = marks.doubted(Part(H200, (late,)))
    (found,) = marks.of_row(part.rows[0])
    assert (found.word, found.is_result) == (marks.IMPOSSIBLE, False)
    assert found.why.startswith("ours: 53,687 GB/s are 1118% of the card's datasheet")
    assert [bool(each.doubt) for each in part.rows[0].entries] == [False, True, False]
    assert goals.of_ceiling(part.rows[0]) is None
    elsewhere = marks.doubted(Part(replace(H200, device="cpu"), (late,)))
    assert words(marks.of_row(elsewhere.rows[0])) == [marks.OVER]


def test_a_doubt_that_was_stored_stays():
    doubted = row(CELL, entry("ceiling", 260.0), entry("ours", 270.0, doubt="nobody waited"))
    part = marks.doubted(Part(H200, (doubted,)))
    assert [each.text for each in marks.of_row(part.rows[0])] == ["impossible: ours: nobody waited"]


def test_a_throttled_cell_is_marked(tmp_path: Path):
    held = {"reasons": ["power limit"], "before": {"sm_mhz": 1980}, "after": {"sm_mhz": 1200}}
    report = report_of(tmp_path, bench_text(cell_row(CELL, clocks=held)))
    said = "throttled: power limit; SM 1,980 MHz before, 1,200 after"
    assert data(htmlreport.page(report))["bench"]["cells"][0][8] == [said]
    assert "| throttled | power limit; SM 1,980" in reportmd.page(report)
    report = report_of(tmp_path, bench_text(cell_row(CELL, clocks={"reasons": []})))
    assert "marks" not in report.sheets


def test_rungs_are_marked_too():
    run = climb(of_copy=1.02)
    (found,) = marks.of_rung(run.results[0], run.header)
    assert found.why == f"102.0 % of a copy, {marks.BEYOND}"
    run = climb(of_copy=1.5, gbs=6000.0)
    (found,) = marks.of_rung(run.results[0], run.header)
    assert found.word == marks.IMPOSSIBLE
    assert marks.of_rung(climb().results[0], climb().header) == []


def test_marks_reach_every_format(tmp_path: Path):
    """The page does not draw what is impossible, and says it; the tables do too."""
    given = [
        cell_row(CELL, 1.5),
        cell_row(replace(CELL, cols=1024, rows=2**17), 1.04),
    ]
    report = report_of(tmp_path, bench_text(*given))
    found = data(htmlreport.page(report))
    first, second = found["bench"]["cells"][::-1]
    ours = found["bench"]["contenders"].index("ours")
    assert [first[7][ours][5:], second[7][ours][5:]] == [[0, 1], []]
    assert first[8][0].startswith("impossible: ours: 6,000 GB/s are 125% of")
    assert second[8] == [f"over the limit: 104.0 % of the limit, {marks.BEYOND}"]
    assert [line[5] for line in found["sheets"]["marks"]["rows"]] == [
        "over the limit", "impossible"]  # fmt: skip
    text = reportmd.page(report)
    assert "| impossible | ours: 6,000 GB/s" in text
