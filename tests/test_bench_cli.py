"""The command `bench`: what it prints, writes, refuses; its exit codes. No GPU: times are given."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench_kit import HEADER, lines, returning, setting, wrong
from cli_kit import bench as invoke
from online_softmax.lab import benchcli, benchclock, benchfile, contenders, hostcost
from online_softmax.lab.grid import Cell

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
CELLS = ("--cells", "3x40,2x64")


def run(*arguments: object, exit_code: int = 0) -> str:
    done = invoke(*arguments)
    said = f"{arguments}: {done.exit_code}\n{done.output}\n{done.exception!r}"
    assert done.exit_code == exit_code, said
    return done.stdout


def refusal(*arguments: object) -> str:
    done = invoke(*arguments)
    assert done.exit_code == 2, f"{arguments}: {done.output}{done.exception!r}"
    (line,) = done.output.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A GPU that is the CPU with a clock that says what it is told; ours may be replaced."""
    given: dict[str, object] = {"ours": None}

    def found(cell: Cell, rivals: tuple[str, ...]):
        return lines(cell.op, given["ours"], torch=returning(cell.op))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    us = {"ceiling": 90.0, "ours": 100.0, "torch": 200.0}
    monkeypatch.setattr(benchclock, "gpu_setting", lambda values: setting(us, values=values))
    monkeypatch.setattr(contenders, "contenders", found)
    headed = lambda rivals, values: replace(HEADER, values=values)  # noqa: E731
    monkeypatch.setattr(benchcli, "header_now", headed)
    return given


# ---- without a GPU


@without_gpu
def test_what_needs_a_gpu_says_so(tmp_path: Path):
    saved = tmp_path / "run.jsonl"
    for asked in (["--tune", "softmax"], ["--host", "8,1024"], ["softmax", "--prepare"]):
        option = next(word for word in asked if word.startswith("--"))
        assert f"bench {option} needs a CUDA GPU" in refusal(*asked, "--save", saved)
    assert not saved.exists()


ALL = ("--against", ",".join(contenders.RIVALS))  # what a GPU is compared with


def test_list_shows_cells_and_bytes():
    asked = ("softmax", "logsumexp", "--grid", "odd", "--dtype", "bf16", *ALL)
    listed = run(*asked, "--list").splitlines()
    assert len(listed) == 2 * 8 + 4
    assert listed[3] == (
        "softmax bfloat16 2670 x 50257: moves 511.9 MiB, takes 5.25 GiB, "
        "beside torch, compile, quack, liger, tutorial"
    )
    assert listed[4].endswith("beside torch")  # 100,277 columns: no other rival
    assert listed[16].startswith("16 cells; the largest takes ")
    assert "takes: what measuring it may need" in " ".join(listed[17:])


def test_list_as_json_is_sharded():
    asked = ("softmax", "--grid", "big", "--dtype", "bf16,fp32", "--list", "--json")
    parts = [json.loads(run(*asked, "--shard", f"{i}/3")) for i in range(3)]
    whole = json.loads(run(*asked))
    assert sorted(repr(cell) for part in parts for cell in part) == sorted(map(repr, whole))
    assert whole[0] == {
        "op": "softmax", "dtype": "bfloat16", "rows": 4194304, "cols": 32, "rivals": ["torch"],
        "moves": 2**29, "takes": whole[0]["takes"], "sizes": "",
    }  # fmt: skip
    assert whole[0]["takes"] > 2**30


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu_the_list_is_what_runs_here():
    """The same defaults as of a run: `bench softmax` times these, and no others."""
    found = json.loads(run("softmax", "--list", "--json"))
    assert found == json.loads(
        run("softmax", "--grid", "cpu", "--dtype", "fp32", "--list", "--json")
    )
    assert {each["dtype"] for each in found} == {"float32"}
    assert all(each["rivals"] == ["torch"] for each in found)


def test_losses_have_a_grid_of_their_own():
    asked = ("cross_entropy", "softmax", "--grid", "odd", "--dtype", "bf16", *ALL, "--list")
    listed = run(*asked).splitlines()
    assert len(listed) == 4 + 8 + 4
    assert listed[0].startswith("cross_entropy bfloat16 5341 x 50257: moves 512 MiB, takes ")
    assert listed[0].endswith("beside torch, compile, quack, liger")
    cells = json.loads(run("token_stats", "--cells", "2x50", "--dtype", "fp32", "--list", "--json"))
    assert [(each["rows"], each["cols"]) for each in cells] == [(2, 50)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "bench takes operations"),
        (["softmax", "--tune", "softmax"], "bench takes operations"),
        (["softmax", "--resume"], "give --save FILE"),
        (["softmin"], "operation softmin: there are softmax, log_softmax"),
        (["--tune", "cross_entropy"], "operation cross_entropy: there are softmax, log_softmax"),
        (["token_stats", "--accuracy"], "operation token_stats: there are softmax, log_softmax"),
        (["softmax", "--grid", "huge"], "--grid huge: there are big, small, odd, all"),
        (["softmax", "--dtype", "fp64"], "give float32, float16 or bfloat16"),
        (["softmax", "--against", "cudnn"], "--against cudnn"),
        (["softmax", "--shard", "4/4"], "--shard 4/4"),
        (["softmax", "--cells", "4096"], "ROWSxCOLS"),
        (["softmax", "--values", "zeros"], "--values zeros: there are normal, ascending"),
        (["--host", "8"], "--host 8: give ROWS,COLS"),
        (["softmax", "--seconds", "nan"], "--seconds nan: give a number of seconds, at least 0"),
        (["softmax", "--seconds", "-1"], "--seconds -1: give a number of seconds, at least 0"),
        (["softmax", "--workers", "0"], "--workers 0: give a whole number, at least 1"),
        (["softmax", "--prepare", "--accuracy"], "--prepare and --accuracy, one of them, stand"),
        (["--tune", "softmax", "--prepare"], "--prepare and --accuracy, one of them, stand"),
        (["--from", "no/such.jsonl"], "such.jsonl cannot be read: No such file or directory"),
        (["--from", "x.jsonl", "--tune", "softmax"], "--from shows what was kept: --tune cannot"),
        (["--from", "x.jsonl", "--seconds", "1"], "--seconds cannot change it"),
        (["--from", "x.jsonl", "--values", "ascending"], "--values cannot change it"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], said: str):
    assert said in refusal(*arguments)


# ---- measuring


def test_cells_are_measured_kept_and_shown_again(tmp_path: Path, pretended: dict):
    saved = tmp_path / "deep" / "run.jsonl"
    shown = run("softmax", *CELLS, "--dtype", "fp32,bf16", "--save", saved)
    assert "softmax float32" in shown
    assert "0.900" in shown
    rows = benchfile.read([saved])[0].rows
    assert [(r.dtype, r.rows, r.cols) for r in rows] == [
        ("float32", 3, 40), ("float32", 2, 64), ("bfloat16", 3, 40), ("bfloat16", 2, 64),
    ]  # fmt: skip
    assert run("--from", saved) == shown
    lines = run("--from", saved, "--json").splitlines()
    assert lines == saved.read_text().splitlines()


def test_json_is_the_lines_and_nothing_else(tmp_path: Path, pretended: dict):
    saved = tmp_path / "run.jsonl"
    printed = run("softmax", *CELLS, "--dtype", "fp32", "--json", "--save", saved)
    assert printed == saved.read_text()
    assert [json.loads(line)["kind"] for line in printed.splitlines()] == ["header", "cell", "cell"]


def test_progress_goes_to_standard_error(pretended: dict):
    done = invoke("softmax", *CELLS, "--dtype", "fp32", "--json")
    assert done.stderr.splitlines()[0] == "[1/2] softmax float32 3 x 40"
    assert re.search(
        r"^\[2/2\] softmax float32 2 x 64, less than a second left$", done.stderr, re.MULTILINE
    )


def test_resuming(tmp_path: Path, pretended: dict):
    saved = tmp_path / "run.jsonl"
    run("softmax", "--cells", "3x40", "--dtype", "fp32", "--save", saved)
    assert "--resume goes on with it" in refusal("softmax", *CELLS, "--save", saved)
    whole = saved.read_text()
    saved.write_text(whole + '{"kind": "cell", "op"')
    again = ("softmax", *CELLS, "--dtype", "fp32", "--resume", "--save", saved)
    shown = run(*again)
    assert saved.read_text().startswith(whole)
    assert [len(part.rows) for part in benchfile.read([saved])] == [1, 1]
    assert "3 x 40" in shown
    assert "2 x 64" in shown
    before = saved.read_text()
    run(*again)
    assert saved.read_text() == before


def test_results_of_other_sources_are_told(
    tmp_path: Path, pretended: dict, monkeypatch: pytest.MonkeyPatch
):
    saved = tmp_path / "run.jsonl"
    run("softmax", "--cells", "3x40", "--dtype", "fp32", "--save", saved)
    other = replace(HEADER, versions={"sources": "def"})
    monkeypatch.setattr(benchcli, "header_now", lambda rivals, values: other)
    done = invoke("softmax", *CELLS, "--dtype", "fp32", "--resume", "--save", saved)
    assert "has results of other kernel sources; they stay" in done.stderr


def test_a_wrong_result_of_ours_ends_with_1(tmp_path: Path, pretended: dict):
    pretended["ours"] = wrong("softmax")
    saved = tmp_path / "run.jsonl"
    done = invoke("softmax", *CELLS, "--dtype", "fp32", "--save", saved)
    assert done.exit_code == 1
    assert "WRONG: softmax float32 3 x 40: ours: wrong: [2, 39] is" in done.stderr
    assert "WRONG" in done.stdout
    assert invoke("--from", saved).exit_code == 1


def test_a_dead_device_ends_with_1_and_keeps_what_was_measured(
    tmp_path: Path, pretended: dict, monkeypatch: pytest.MonkeyPatch
):
    calls = []

    def synchronize() -> None:
        calls.append(None)
        if len(calls) > 2:  # one for each contender of the first cell
            raise RuntimeError("an illegal memory access")

    here = setting(synchronize=synchronize)
    monkeypatch.setattr(benchclock, "gpu_setting", lambda values: here)
    saved = tmp_path / "run.jsonl"
    done = invoke("softmax", *CELLS, "--dtype", "fp32", "--save", saved)
    assert done.exit_code == 1
    assert "left the device unusable" in done.stderr
    rows = benchfile.read([saved])[0].rows
    assert [(row.cols, row.is_right) for row in rows] == [(40, True), (64, False)]


def test_seconds_end_a_run_that_can_go_on(tmp_path: Path, pretended: dict):
    saved = tmp_path / "run.jsonl"
    asked = ("softmax", *CELLS, "--dtype", "fp32", "--resume", "--save", saved)
    done = invoke(*asked, "--seconds", "0")
    assert done.exit_code == 0
    assert "2 cells are left: --resume, or more --seconds" in done.stderr
    lost = invoke("softmax", *CELLS, "--dtype", "fp32", "--seconds", "0")
    assert "2 cells are left: --save FILE, and then --resume" in lost.stderr
    run(*asked, "--seconds", "600")
    assert [row.cols for row in benchfile.read([saved])[0].rows] == [40, 64]


def test_where_the_time_went_is_told(pretended: dict):
    done = invoke("softmax", *CELLS, "--dtype", "fp32", "--json")
    said = next(line for line in done.stderr.splitlines() if line.startswith("note: 2 cells in "))
    assert re.search(
        r" s a cell: buffers .* s, judging .* s, first calls .* s, rounds .* s, do_bench ", said
    )


def test_several_files_become_one(tmp_path: Path, pretended: dict):
    paths = [tmp_path / f"{index}.jsonl" for index in range(2)]
    asked = ("softmax", *CELLS, "--dtype", "fp32")
    run(*asked, "--shard", "0/2", "--save", paths[0])
    run(*asked, "--save", paths[1])  # the first cell again
    whole = tmp_path / "deep" / "whole.jsonl"
    shown = run("--from", *paths, "--save", whole)
    (part,) = benchfile.read([whole])
    assert [row.cols for row in part.rows] == [40, 64]
    assert run("--from", whole) == shown == run("--from", *paths)
    assert "--resume goes on with it" in refusal("--from", *paths, "--save", whole)
    assert run("--from", *paths, "--json", "--save", tmp_path / "again.jsonl") == ""
    assert (tmp_path / "again.jsonl").read_text() == whole.read_text()


def test_several_files_are_shown_together(tmp_path: Path, pretended: dict):
    paths = [tmp_path / f"{index}.jsonl" for index in range(2)]
    for index, path in enumerate(paths):
        run("softmax", *CELLS, "--dtype", "fp32", "--shard", f"{index}/2", "--save", path)
    for shown in (run("--from", *paths), run("--from", paths[0], "--from", paths[1])):
        assert "3 x 40" in shown
        assert "2 x 64" in shown


def test_host_is_kept_and_shown(tmp_path: Path, pretended: dict, monkeypatch: pytest.MonkeyPatch):
    line = {
        "kind": "host", "op": "softmax", "dtype": "float32", "rows": 8, "cols": 1024,
        "calls": [{"name": "ours", "recorded": False, "median_us": 9.0},
                  {"name": "torch", "recorded": False, "median_us": 6.0},
                  {"name": "quack", "recorded": True, "why": "no such module"}],
        "pieces": [{"name": "empty_like", "median_us": 1.5}], "fresh": {"first_ms": 99.0},
    }  # fmt: skip
    monkeypatch.setattr(hostcost, "measure", lambda rows, cols, rivals, say: line)
    saved = tmp_path / "host.jsonl"
    shown = run("--host", "[8,1024]", "--save", saved)
    assert "Host cost of an eager call, softmax 8 x 1,024 float32" in shown
    assert "1.50" in shown
    assert "refuses" in shown
    assert run("--from", saved) == shown
