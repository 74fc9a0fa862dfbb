"""A softmax between a prologue and an epilogue, without a GPU: checked, timed, drawn."""

from __future__ import annotations

import pytest
import torch

from bench_kit import HEADER, setting
from online_softmax.lab import benchclock, benchfile, fusion, goals
from online_softmax.lab.fusion import Work
from rows_kit import gpu

US = {"eager": 40.0, "eager, ours": 30.0, "compile": 10.0, "compile, ours": 15.0}


def works(rows: int = 3, cols: int = 40) -> list[Work]:
    return fusion.works([(rows, cols)])


@pytest.fixture
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds: here a function stands for what is compiled of it."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("work", works(), ids=lambda work: work.text)
def test_every_case_is_checked_and_timed(work: Work):
    line = fusion.measure(work, setting(US))
    assert [each["why"] for each in line["entries"]] == [""] * 4
    assert {each["name"]: each["median_us"] for each in line["entries"]} == US
    assert line["ideal_bytes"] == work.ideal_bytes
    assert fusion.faster(line) == "without ours"
    text = benchfile.line("fusion", line)
    assert benchfile.parse(benchfile.header_line(HEADER) + text, "x")


@pytest.mark.usefixtures("_uncompiled")
def test_what_is_wrong_has_no_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("online_softmax.softmax", lambda x: torch.softmax(x, -1) * 1.1)
    line = fusion.measure(works()[1], setting(US))
    why = {each["name"]: each["why"] for each in line["entries"]}
    assert why["compile, ours"].startswith("wrong: ")
    assert why["compile"] == ""
    assert fusion.faster(line) == "—"


def test_the_mask_drops_what_it_should():
    work = next(each for each in works(200, 50) if "dropout" in each.case)
    sets, parts = fusion.buffers(work, setting())
    x, keep, _ = sets.sets[-1]
    assert 0.05 < float((keep == 0).float().mean()) < 0.15
    y = fusion.CASES[work.case](lambda x: torch.softmax(x, -1), x, keep, parts)
    assert bool((y[keep == 0] == 0).all())
    assert work.ideal_bytes == 200 * 50 * (2 * y.element_size() + 1)


def test_alike_is_within_the_noise():
    def line(alone: float, around: float) -> dict:
        return {"case": "c", "dtype": "float32", "rows": 2, "cols": 3, "entries": [
            {"name": "compile", "why": "", "median_us": alone},
            {"name": "compile, ours", "why": "", "median_us": around}]}  # fmt: skip

    assert fusion.faster(line(100.0, 101.0)) == "alike"
    assert fusion.faster(line(100.0 * goals.NOISE + 1, 100.0)) == "with ours"
    _, head, rows, _ = fusion.table([line(9.0, 1.0), line(100.0, 103.0)])
    assert head[-1] == "faster compiled"
    assert rows == (("c", "float32 2 x 3", "100.0", "103.0", "without ours"),)


@gpu
@pytest.mark.parametrize("work", works(64, 1000), ids=lambda work: work.text)
def test_compiled_for_real(work: Work):
    """One graph, ours as an operation within it."""
    line = fusion.measure(work, benchclock.gpu_setting())
    assert [each["why"] for each in line["entries"]] == [""] * 4
    assert all(each["median_us"] > 0 for each in line["entries"])
