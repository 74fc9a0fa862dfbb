"""The command that times, or builds, attention's steps: its file, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from online_softmax.lab import attentionsteps, benchfile, benchpage, stepbuilds
from online_softmax.lab.stepkernel import NAMES, SHIPPED, Variant, variants
from online_softmax.lab.steptables import Row

ARCH = "sm_90a"


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "steps.jsonl"
    with pytest.raises(SystemExit, match=r"needs a CUDA GPU.*--build sm_90a"):
        attentionsteps.main(["--out", str(out)])
    with pytest.raises(SystemExit, match="give i/n"):
        attentionsteps.main(["--out", str(out), "--build", ARCH, "--shard", "4/4"])
    with pytest.raises(SystemExit, match="--build sm_1 is not among sm_75, "):
        attentionsteps.main(["--out", str(out), "--build", "sm_1"])
    with pytest.raises(SystemExit, match="--workers 0: give 1 or more"):
        attentionsteps.main(["--out", str(out), "--build", ARCH, "--workers", "0"])
    assert not out.exists()


def test_a_build_is_a_file_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(given: list[Variant], arch: str, *_: Any) -> dict[Variant, Any]:
        figures = dict.fromkeys(stepbuilds.INSTRUCTIONS, 3) | stepbuilds.code("", "", "")
        figures |= {"registers": 168, "spill_store_bytes": 0, "shared_bytes": 1024, "missing": ""}
        return {v: figures if v.step == SHIPPED else "no" for v in given}

    monkeypatch.setattr(stepbuilds, "asked", found)
    out = tmp_path / "builds.jsonl"
    assert attentionsteps.main(["--out", str(out), "--build", ARCH, "--shard", "0/4"]) == 0
    header, *lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert header["command"].endswith("attentionsteps --build sm_90a")
    assert len(lines) == len(variants(128, False))
    assert lines[0] | {"kind": "attention_step_build", "why": "no", "arch": ARCH} == lines[0]
    assert (lines[-1]["registers"], lines[-1]["warps"]) == (168, 8)
    line = "| shipped | 128 | all keys | 128 x 128, 8 warps, 3 stages | 168 |"
    assert line in capsys.readouterr().out
    (table,) = benchpage.sections(benchfile.read([out]))["steps"]
    assert table.title.endswith("what is built")
    assert table.rows[-1][:3] == ("shipped", "128", "all keys")
    assert table.rows[-1][3:5] == ("128 x 128, 8 warps, 3 stages", "168")


def test_a_run_that_times_nothing_leaves_the_file_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [Row(step, 128, False, why="no") for step in NAMES]
    out = tmp_path / "steps.jsonl"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(attentionsteps.jit, "device_arch", lambda: ARCH)
    monkeypatch.setattr(attentionsteps.scriptlog, "begin", begin)

    def run(rows: list[Row]) -> None:
        monkeypatch.setattr(attentionsteps, "timed_rows", lambda *_: iter([rows]))
        attentionsteps.main(["--out", str(out)])

    run([replace(cells[0], median_us=2.0, tflops=400.0, tiles="64 x 64"), *cells[1:]])
    kept = out.read_text()
    (table,) = benchpage.sections(benchfile.read([out]))["steps"]
    assert table.rows[0] == ("128", "all keys", NAMES[0], "64 x 64", "400", "—")
    assert table.rows[1][3] == "no"
    with pytest.raises(SystemExit, match="nothing was timed, and nothing is kept"):
        run(cells)
    assert out.read_text() == kept
    assert [each.name for each in tmp_path.iterdir()] == [out.name]


def begin(out: Path, command: str, clock: str) -> tuple[benchfile.Log, benchfile.Header]:
    return benchfile.Log(out), benchfile.Header("2026-01-01", command, "a GPU", {})
