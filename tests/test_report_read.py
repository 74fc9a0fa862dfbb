"""Where the command `report` looks for results, and what it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_kit import refusal
from online_softmax.lab import htmlreport, reportread
from online_softmax.lab.report import stored_bench
from online_softmax.lab.reportdata import Report
from report_kit import STORED, bench_text, climb, fill, rows


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return fill(tmp_path / "results")


def test_reads_files_and_folders(stored: Path):
    found = reportread.read([stored])
    assert [len(found.runs), len(found.parts)] == [1, 1]
    assert found.files == ("bench.jsonl", "ladder.jsonl")
    (passed,) = found.passed
    assert passed.startswith("other.json was passed over: ")
    assert reportread.read([stored / "ladder.jsonl"]).runs == found.runs


def test_a_torn_last_line_is_passed_over(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_text(bench_text(*rows()[:3])[:-200])
    found = reportread.read([path])
    assert len(found.parts[0].rows) == 2
    assert found.passed == ("run.jsonl ends within a line, which is passed over",)
    assert found.passed[0] in htmlreport.page(Report(found))
    path.write_text(bench_text(*rows()[:3]))
    assert not reportread.read([path]).passed


def test_a_torn_last_line_is_said_where_a_page_is_drawn_again(tmp_path: Path):
    (tmp_path / "bench-a.jsonl").write_text(bench_text(*rows()[:3])[:-200])
    with pytest.warns(UserWarning, match=r"bench-a.jsonl ends within a line, which is passed over"):
        assert len(stored_bench(tmp_path)[0].rows) == 2


def test_reads_what_profile_keeps(tmp_path: Path):
    head = {"kind": "header", "what": "profile", "format": 1, "date": "2026-01-01T00:00:00+00:00",
            "command": "", "device": "NVIDIA H200", "rows": 4096, "cols": 65536, "op": "softmax",
            "dtype": "float32", "arches": ["sm_90a"]}  # fmt: skip
    counters = {"time_us": 50.5, "dram_read": 4.0, "l2_read": 8.0, "l2_write": 4.0, "l1_load": 12.0}
    lines = [{"kind": "profile", "name": name, "kernel": name, "idea": "", "counters": each}
             for name, each in (("safe", counters), ("v0_thread", {}))]  # fmt: skip
    path = tmp_path / "ncu.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (head, *lines)))
    report = Report(reportread.read([path]))
    (sheet,) = report.ladder_sheets()
    assert sheet.title == "Bytes an element, 4,096 x 65,536 float32"
    assert sheet.rows == (("safe", 12.0, 8.0, 4.0, 4.0, 50.5),)
    assert report.title == "Softmax on NVIDIA H200"
    path.write_text(json.dumps(head) + "\n")
    assert "nothing was measured in" in refusal("report", path)


def test_reads_ladder_json(tmp_path: Path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(climb().to_json(), indent=2))
    assert reportread.read([path]).runs == (climb(),)


def test_stored_results_are_found_from_a_folder_of_the_checkout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(STORED.parents[1])
    assert reportread.default() == STORED


def test_stored_results_are_those_of_the_package_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert reportread.default() == STORED
    monkeypatch.setattr(reportread, "__file__", str(tmp_path / "a/b/c/reportread.py"))
    assert "no stored results were found in " in refusal("report")
    kept = tmp_path / "a/b/c/stored/h200"
    kept.mkdir(parents=True)
    (kept / "run.jsonl").write_text(bench_text(*rows()))
    assert reportread.default() == kept
