"""Benchmarking where there is no GPU: that it says so, and its defaults; what a run without
results says; a file that a crash tore."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from bench_kit import HEADER, cells, lines, make, right, setting
from cli_kit import bench as invoke
from online_softmax.lab import (
    benchcli,
    benchfile,
    cli,
    contenders,
    cpuclock,
    grid,
    moresizes,
    opbench,
    repeats,
)
from online_softmax.lab.benchask import Words
from online_softmax.lab.grid import Cell

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
SMALL = ("--cells", "16x256", "--seconds", "3")


def test_a_cell_of_every_operation_on_the_cpu():
    """Small ones: every contender that runs is right, and has a time by the host's clock."""
    small = dict.fromkeys(("attention", "attention_backward"), "2x2x24x16")
    small |= {"attention_decode": "2x40", "merge": "3x12x16"}
    small |= dict.fromkeys(moresizes.OUTER_OPS, "3x10x6") | {moresizes.VARLEN: "2x2x24x16"}
    for op in grid.EVERY_OP[:-1]:
        for cell in grid.named_cells([op], ["float32"], small.get(op, "6x40")):
            found = contenders.contenders(cell, ("torch",))
            row = repeats.measure(cell, found, cpuclock.setting())
            assert [entry.why for entry in row.entries] == [""] * len(row.entries), row
            assert {entry.clock for entry in row.entries} == {"host"}
            assert all(entry.median_us > 0 for entry in row.entries)


@without_gpu
def test_the_command_times_the_cpu_and_says_so(tmp_path: Path):
    saved = tmp_path / "run.jsonl"
    done = invoke("softmax", "cross_entropy", *SMALL, "--save", saved)
    assert done.exit_code == 0, done.output
    assert "torch sees no CUDA GPU here: the CPU is timed" in done.stderr
    (part,) = benchfile.read([saved])
    assert part.header.device == "cpu"
    assert "host's clock" in part.header.clock
    assert part.header.machine["threads"] == torch.get_num_threads()
    assert {(row.op, row.dtype) for row in part.rows} == {
        ("softmax", "float32"), ("cross_entropy", "float32")
    }  # fmt: skip
    assert {entry.name for entry in part.rows[0].entries} == {"ceiling", "ours", "torch"}
    assert "CPU " in done.stdout
    for text in ("driver", "goal", "do_bench"):  # of a GPU
        assert text not in done.stdout
    assert all(len(e.rounds_us) >= 3 for row in part.rows for e in row.entries)


@without_gpu
def test_a_linear_layer_on_the_cpu_is_kept_and_resumed(tmp_path: Path):
    saved = tmp_path / "run.jsonl"
    words = ("linear_cross_entropy", "--cells", "24x16x50", "--seconds", "2")
    words += ("--save", saved, "--resume")
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    (part,) = benchfile.read([saved])
    (line,) = part.others
    assert (line["tokens"], line["features"], line["classes"], line["device"]) == (
        24,
        16,
        50,
        "cpu",
    )
    names = [entry["name"] for entry in line["entries"]]
    assert names[:3] == ["ours, low", "ours, fast", "torch"]
    assert "liger" not in names
    assert "(over" not in done.stdout  # goals are a GPU's
    before = saved.read_text()
    assert invoke(*words).exit_code == 0
    assert saved.read_text() == before


def test_defaults_follow_the_machine():
    nothing = Words(None, None, None, None, "normal", "0/1")
    small, large = nothing.filled(True, False), nothing.filled(False, False)
    assert (small.grid, small.dtype, small.against) == ("cpu", "fp32", "torch")
    assert (large.grid, large.dtype) == ("big", "bf16,fp16,fp32")
    assert large.against.split(",") == list(contenders.KNOWN)
    asked = Words("odd", None, "bf16", "quack", "normal", "0/1").filled(True, False)
    assert (asked.grid, asked.dtype, asked.against) == ("odd", "bf16", "quack")
    for op in grid.EVERY_OP:  # small: a CPU's cells are of a second
        for cell in small.cells([op], False):
            assert cell.ideal_bytes < 2**26
            assert cell.flops < 2**32


# ---- results that are none, and files that a crash tore


def test_a_file_without_a_cell_says_so(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_text(benchfile.header_line(HEADER))
    done = invoke("--from", path)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert "no cell was measured before the run ended" in done.stderr


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpuclock, "setting", lambda values: setting(values=values))
    monkeypatch.setattr(benchcli, "header_now", lambda rivals, values: HEADER)


@without_gpu
def test_a_run_in_which_nothing_was_timed_says_so(pretended: None, monkeypatch: pytest.MonkeyPatch):
    full = setting(free_bytes=0)
    monkeypatch.setattr(cpuclock, "setting", lambda values: full)
    done = invoke("softmax", *SMALL)
    assert done.exit_code == 1
    assert "error: nothing was timed in 1 cells: it would take 1.0 GiB" in done.stderr


@without_gpu
def test_a_torn_line_is_dropped_and_said(
    pretended: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(contenders, "contenders", lambda cell, rivals: make(cell))
    path = tmp_path / "run.jsonl"
    words = ("softmax", "--cells", "3x40,2x64", "--save", path)
    assert invoke(*words).exit_code == 0
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:-1]) + whole[-1][:50])
    done = invoke(*words, "--resume")
    assert done.exit_code == 0
    assert f"{path} ended within a line: its 50 bytes are dropped" in done.stderr
    rows = benchfile.latest(benchfile.read([path]))
    assert [row.cell.cols for row in rows] == [40, 64]
    assert "ended within a line" not in invoke(*words, "--resume").stderr


@without_gpu
def test_repeat_reaches_the_file(pretended: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(contenders, "contenders", lambda cell, rivals: make(cell))
    path = tmp_path / "run.jsonl"
    assert invoke("softmax", *SMALL, "--repeat", "3", "--save", path).exit_code == 0
    (row,) = benchfile.read([path])[0].rows
    assert (row.repeats, len(row.entry("ours").repeats_us)) == (3, 3)


def test_the_time_left_is_by_operation():
    from online_softmax.lab.benchrun import Pace

    pace = Pace()
    rows, heads = (
        Cell("softmax", "float32", 2, 64),
        grid.grid_cells(["attention"], ["float32"], "cpu"),
    )
    pace.add(rows, 1.0)
    assert pace.left([rows, heads[0]]) == 2.0
    pace.add(heads[0], 40.0)
    assert pace.left([rows, *heads]) == 81.0


def test_right_and_slow_is_still_right():
    """The clock has no say in what is right: a slow contender is judged like any other."""

    def slow(x: Tensor, y: Tensor) -> None:
        time.sleep(0.001)
        right("softmax")(x, y)

    row = repeats.measure(cells(1)[0], lines("softmax", slow), cpuclock.setting())
    assert row.entry("ours").ok
    assert row.entry("ours").median_us > 1000


@without_gpu
def test_a_matrix_without_elements_is_a_row(tmp_path: Path):
    """Among others and alone; what has nothing to say of it says so."""
    saved = tmp_path / "run.jsonl"
    words = ("--cells", "0x128,1x1,5x0", "--seconds", "1")
    done = invoke("softmax", *words, "--save", saved)
    assert done.exit_code == 0, done.output
    assert re.search(r"\n  0 x 128 +— +n/a ", done.stdout)
    assert "n/a: a matrix without elements" in done.stdout
    (part,) = benchfile.read([saved])
    whys = {(row.rows, row.cols): row.why for row in part.rows}
    assert whys == {(0, 128): opbench.EMPTY, (1, 1): "", (5, 0): opbench.EMPTY}
    assert invoke("--from", saved).exit_code == 0
    assert invoke("logsumexp_backward", "--cells", "0x128").exit_code == 0
    assert "moves 0 B" in invoke("softmax", "--cells", "0x128", "--list").stdout
    done = invoke("softmax", "--cells", "0x128", "--dtype", "fp32", "--accuracy")
    assert done.exit_code == 2
    assert "softmax float32 0 x 128 has no elements" in done.stderr
    report = CliRunner().invoke(cli.app, ["report", str(saved), "-o", str(tmp_path / "page.html")])
    assert report.exit_code == 0, report.output
