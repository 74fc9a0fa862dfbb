"""The command line: what `ladder` prints where, its exit codes, help, and as a person runs it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from cli_kit import CHEAP, needs_compiler, on_cpu, process, refusal, run
from online_softmax.catalogue import KERNELS
from online_softmax.lab import cli, ladder, results

WAITING = r"(\d+:\d\d .+ \(step \d+ of \d+\)\n)*"  # said of a run that takes seconds


@needs_compiler
def test_ladder_as_json():
    found = json.loads(run("ladder", "--rows", 3, "--cols", 70, "--only", CHEAP, "--json"))
    assert [rung["name"] for rung in found["rungs"]] == [
        "safe", "v2_vectorized", "v3_register_cache", "torch", "production",
    ]  # fmt: skip
    assert all(rung["ok"] for rung in found["rungs"])
    header = found["header"]
    assert (header["rows"], header["cols"], header["dtype"]) == (3, 70, "float32")
    assert header["versions"]["torch"] == torch.__version__
    assert header["command"].startswith("online-softmax")


@needs_compiler
def test_ladder_on_the_real_scores():
    found = json.loads(run("ladder", "--sample", "--only", "safe,v,torch,prod", "--json"))
    assert all(rung["ok"] for rung in found["rungs"]), found["rungs"]
    header = found["header"]
    assert (header["rows_asked"], header["cols"], header["dtype"]) == (1920, 40, "float16")
    assert header["rows"] == 1920
    assert any("-inf" in note for note in header["notes"])


@needs_compiler
def test_ladder_saves_draws_and_shows_again(tmp_path: Path):
    pytest.importorskip("matplotlib")
    saved, drawn = tmp_path / "a" / "run.jsonl", tmp_path / "b" / "run.png"
    page = run(
        "ladder", "--rows", 2, "--cols", 64, "--only", CHEAP, "--save", saved, "--plot", drawn
    )
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert [r.name for r in results.read(saved)[0].results][-1] == "production"
    again = tmp_path / "again.png"
    assert run("ladder", "--from", saved, "--plot", again) == page
    assert again.read_bytes().startswith(b"\x89PNG")
    assert json.loads(run("ladder", "--from", saved, "--json"))["header"]["cols"] == 64


@needs_compiler
def test_wrong_kernel_ends_with_1(monkeypatch: pytest.MonkeyPatch):
    def wrong(x: Tensor, y: Tensor, _: object) -> None:
        y.fill_(1 / x.shape[1])

    record = dataclasses.replace(KERNELS["v2_vectorized"], run=wrong)
    monkeypatch.setitem(KERNELS, "v2_vectorized", record)
    page = run("ladder", "--rows", 2, "--cols", 64, "--only", "safe,v2", exit_code=1)
    assert re.search(r"v2_vectorized +WRONG", page)
    found = run("ladder", "--rows", 2, "--cols", 64, "--only", "v2", "--json", exit_code=1)
    assert json.loads(found)["rungs"][0]["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--dtype", "int8"], "no kernel takes dtype 'int8'"),
        (["--dtype", "float64"], "give float32, float16 or bfloat16"),
        (["--arch", "sm_80,sm_42"], "--arch sm_42: known are sm_75"),
        (["--only", "v9"], "--only v9: no name starts so; there are safe, v0_thread"),
        (["--rows", 1, "--cols", 10**11, "--only", "v2"], "GiB: ask for fewer rows or columns"),
        (["--rows", 10**8, "--cols", 10**5, "--only", "v3,v5", "--seconds", 1], "GiB"),
        (["--from", "x.jsonl", "--only", "v2"], "--from shows what was kept: --only"),
        (["--from", "x.jsonl", "--rows", 3], "--rows cannot change it"),
        (["--block", "33"], "--block 33: give one of 32, 64"),
        (["--against", "cudnn"], "--against cudnn: there are torch, compile"),
        (["--sample", "--input", "x.npy"], "not both"),
        (["--sample", "--cols", "3"], "--cols is for random input"),
        (["--from", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--save", "/dev/null/x"], "folder cannot be made"),
        (["--save", "/"], "--save / cannot be written: it is a folder"),
        (["--save", "/proc/x"], "--save /proc/x cannot be written: No such file"),
        (["--save", "x" * 300], "cannot be written: File name too long"),
        (["--save", "x.png", "--plot", "./x.png"], "--save and --plot both name x.png"),
        (["--from", "x.jsonl", "--seconds", 3], "--seconds cannot change it"),
        (["--from", "x.jsonl", "--against", "torch"], "--against cannot change it"),
        (["--from", "x.jsonl", "--arch", "sm_80"], "--arch cannot change it"),
        (["--rows", 2**62, "--cols", 8], "is past the 2,305,843,009,213,693,951 elements"),
    ],
)
def test_ladder_refuses_in_one_line(arguments: list[str], why: str):
    assert why in refusal("ladder", *arguments)


@needs_compiler
@on_cpu
def test_nothing_can_run(tmp_path: Path):
    saved = tmp_path / "run.jsonl"
    impossible = ("ladder", "--rows", 2, "--cols", 40000, "--only", "v3")
    for more in ([], ["--save", saved]):
        why = refusal(*impossible, *more)
        assert why.startswith("error: nothing ran: v3_register_cache holds at most 32768 columns")
    assert not saved.exists()
    (rung,) = json.loads(run(*impossible, "--json", exit_code=2))["rungs"]
    assert rung["ok"] is None
    assert rung["reasons"][0].startswith("v3_register_cache holds at most 32768 columns")


@needs_compiler
@on_cpu
def test_rivals_without_a_gpu():
    """They are not dropped in silence; torch, which is a line of its own, is no rival here."""
    least = ("ladder", "--rows", 2, "--cols", 64, "--only", "safe,torch")
    page = run(*least, "--against", "torch,compile")
    assert "Note: without torch.compile: rivals are timed on a GPU only." in page
    found = json.loads(run(*least, "--against", "compile", "--json"))
    assert [rung["name"] for rung in found["rungs"]] == ["safe", "torch"]
    assert found["header"]["notes"] == [
        "without torch.compile: rivals are timed on a GPU only",
    ]
    for more in ((), ("--against", "torch")):
        assert json.loads(run(*least, *more, "--json"))["header"]["notes"] == []


@needs_compiler
def test_stored_results_hold_no_local_folder(tmp_path: Path):
    given, saved, drawn = tmp_path / "x.npy", tmp_path / "run.jsonl", tmp_path / "run.png"
    np.save(given, np.ones((2, 64), np.float32))
    names = ("--input", str(given), "--save", str(saved), f"--plot={drawn}")
    done = process("ladder", *names, "--only", "safe")
    assert done.returncode == 0, done.stderr
    header = results.read(saved)[0].header
    assert header.command == (
        "online-softmax ladder --input x.npy --save run.jsonl --plot=run.png --only safe"
    )
    assert header.source == "x.npy"
    assert str(tmp_path) not in saved.read_text()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A file with a small run."""
    header = results.Header("", "", "cpu", "", 1, 1, 1, "float32", (), {})
    counted = results.Result("safe", "safe", "cuda", "", ok=True, reads=3.0, writes=1.0)
    results.save(results.Run(header, (counted,)), tmp_path / "run.jsonl")
    return tmp_path / "run.jsonl"


@pytest.mark.parametrize(
    ("name", "why"), [("noext", "the name has no ending"), ("x.y", "no picture ends in .y")]
)
def test_picture_of_unknown_kind(kept: Path, name: str, why: str):
    pytest.importorskip("matplotlib")
    said = refusal("ladder", "--from", kept, "--plot", kept.with_name(name))
    assert re.search(rf"--plot \S+: {why}: give one of .*\.pdf, .*\.png, .*\.svg", said)
    assert [path.name for path in kept.parent.iterdir()] == ["run.jsonl"]


def test_picture_without_matplotlib(kept: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refusal("ladder", "--rows", 2, "--cols", 8, "--plot", kept.with_name("x.png"))
    assert said.endswith("a picture needs matplotlib: pip install 'online-softmax[lab]'")


@pytest.mark.parametrize("failure", [OSError(28, "No room"), RuntimeError("No room")], ids=str)
def test_what_cannot_be_kept_in_the_end(
    kept: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
):
    """The results were shown by then; a disk that is full, a TeX that is missing, is one line."""

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(results, "save", fail)
    words = ["ladder", "--from", str(kept), "--save", str(kept.with_name("y"))]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2
    assert "The line that ran agrees" in done.stdout
    assert done.stderr == f"error: --save {kept.with_name('y')}: No room\n"


def test_what_is_kept_is_not_written_over(kept: Path):
    before = kept.read_text()
    said = refusal("ladder", "--from", kept, "--save", kept)
    assert said == f"error: --from and --save both name {kept}: give two files"
    assert kept.read_text() == before
    given = kept.with_name("x.npz")
    np.savez(given, only=np.ones((2, 64), np.float32))
    said = refusal("ladder", "--input", f"{given}:only", "--save", given, "--only", "torch")
    assert said == f"error: --input and --save both name {given}: give two files"
    assert np.load(given)["only"].shape == (2, 64)


# ---- as a person runs it


@needs_compiler
def test_piped_and_narrow():
    done = process("ladder", "--rows", "2", "--cols", "64", "--only", CHEAP, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(WAITING, done.stderr)
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "All 5 lines that ran agree with float64." in done.stdout
    found = process("ladder", "--rows", "2", "--cols", "64", "--only", "safe", "--json")
    assert json.loads(found.stdout)["rungs"][0]["ok"]


@needs_compiler
@on_cpu
def test_home_that_cannot_be_written():
    """Kernels run; what a cache is wanted for says so, and names the variable that helps."""
    pytest.importorskip("triton")
    homeless = {"HOME": "/dev/null", "TRITON_HOME": "/dev/null", "TRITON_CACHE_DIR": ""}
    done = process("ladder", "--rows", "2", "--cols", "64", "--only", "triton", **homeless)
    assert done.returncode == 0
    assert re.fullmatch(WAITING, done.stderr)
    page = " ".join(done.stdout.split())
    sentence = (
        "No registers: Triton compiles into /dev/null/.triton/cache, which cannot be written: "
        "set TRITON_CACHE_DIR to a folder that can."
    )
    assert page.count(sentence) == 1
    assert "Error" not in page


@needs_compiler
def test_ascii_terminal():
    done = process(
        "ladder", "--rows", "2", "--cols", "64", "--only", "safe,torch", PYTHONIOENCODING="ascii"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


@pytest.mark.parametrize("command", ["", "ladder", "profile", "check", "trace", "explain", "info"])
def test_help_reads_well(monkeypatch: pytest.MonkeyPatch, command: str):
    monkeypatch.setenv("COLUMNS", "80")
    page = run(*command.split(), "--help")
    assert max(map(len, page.splitlines())) <= 80
    assert "<" not in page  # a type that Python would say, not a person


def test_help_teaches_and_loads_nothing_heavy():
    done = process("ladder", "--help")
    assert done.returncode == 0
    assert "online-softmax ladder --input scores.npy" in done.stdout
    probe = (
        "import sys, online_softmax.lab.cli\n"
        "heavy = {'triton', 'matplotlib', 'pandas', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    path = str(Path(cli.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", probe], env=environment, check=True)


def test_error_goes_to_standard_error():
    done = process("ladder", "--input", "gone.npy")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: gone.npy: there is no such file\n"
    done = process("trace", "1", "-3", "-inf")
    assert done.returncode == 0, done.stderr
    assert "-inf" in done.stdout


def test_seconds_have_one_default():
    assert ladder.SECONDS == cli.options.SECONDS
