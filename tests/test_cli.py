"""The command line: what it prints where, its exit codes, one clear line for whatever is wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from online_softmax import catalogue
from online_softmax.catalogue import KERNELS
from online_softmax.cuda import host
from online_softmax.lab import cli, info, inputs, ladder, results

CHEAP = "safe,v2,v3,torch,prod"  # Triton's interpreter takes milliseconds a row

needs_compiler = pytest.mark.skipif(
    not torch.cuda.is_available() and host.compiler() is None and not os.environ.get("CI"),
    reason="host execution needs g++ or clang++",
)
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the ladder takes the GPU here")


def run(*arguments: object, exit_code: int = 0) -> str:
    """Run in this process; return standard output."""
    done = CliRunner().invoke(cli.app, [str(each) for each in arguments])
    said = f"{arguments}: {done.exit_code}\n{done.output}\n{done.exception!r}"
    assert done.exit_code == exit_code, said
    return done.stdout


def refusal(*arguments: object) -> str:
    """Run what must be refused; return the one line that says why."""
    done = CliRunner().invoke(cli.app, [str(each) for each in arguments])
    assert done.exit_code == 2, f"{arguments}: {done.exit_code}\n{done.output}{done.exception!r}"
    lines = done.output.strip().splitlines()
    assert len(lines) == 1, done.output
    assert lines[0].startswith("error: ")
    return lines[0]


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run as a person does, piped."""
    path = os.pathsep.join(filter(None, [str(Path("src").resolve()), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "online_softmax.lab.cli", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# ---- ladder


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
        (["--only", "v9"], "no rung starts with 'v9'; there are safe, v0_thread"),
        (["--rows", 1, "--cols", 10**11, "--only", "v2"], "GiB: ask for fewer rows or columns"),
        (["--rows", 10**8, "--cols", 10**5, "--only", "v3,v5", "--seconds", 1], "GiB"),
        (["--from", "x.jsonl", "--only", "v2"], "--from shows a run that was kept: --only"),
        (["--from", "x.jsonl", "--rows", 3], "--rows cannot change it"),
        (["--block", "33"], "--block 33: give one of 32, 64"),
        (["--against", "cudnn"], "--against cudnn: there are torch, compile"),
        (["--sample", "--input", "x.npy"], "not both"),
        (["--sample", "--cols", "3"], "--cols is for random input"),
        (["--from", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--save", "/dev/null/x"], "folder cannot be made"),
        (["--plot", "/"], "cannot be written"),
    ],
)
def test_ladder_refuses_in_one_line(arguments: list[str], why: str):
    assert why in refusal("ladder", *arguments)


@needs_compiler
@on_cpu
def test_nothing_can_run(tmp_path: Path):
    saved = tmp_path / "run.jsonl"
    for more in ([], ["--json"], ["--save", saved]):
        why = refusal("ladder", "--rows", 2, "--cols", 40000, "--only", "v3", *more)
        assert why.startswith("error: nothing ran: v3_register_cache holds at most 32768 columns")
    assert not saved.exists()


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


@pytest.mark.parametrize("arguments", [["--rows", "0"], ["--rows", "x"], ["--nonsense"], ["more"]])
def test_ladder_usage(arguments: list[str]):
    run("ladder", *arguments, exit_code=2)


def test_picture_of_unknown_kind(tmp_path: Path):
    pytest.importorskip("matplotlib")
    header = results.Header("", "", "cpu", "", 1, 1, 1, "float32", (), {})
    counted = results.Result("safe", "safe", "cuda", "", ok=True, reads=3.0, writes=1.0)
    results.save(results.Run(header, (counted,)), tmp_path / "run.jsonl")
    assert "--plot" in refusal(
        "ladder", "--from", tmp_path / "run.jsonl", "--plot", tmp_path / "x.y"
    )


# ---- a person's own tensor

Write = Callable[[Path], Path]


def numpy_file(array: np.ndarray, name: str = "x.npy") -> Write:
    def write(folder: Path) -> Path:
        np.save(folder / name, array, allow_pickle=True)
        return folder / name

    return write


def torch_file(value: object, name: str = "x.pt") -> Write:
    def write(folder: Path) -> Path:
        torch.save(value, folder / name)
        return folder / name

    return write


def bytes_file(data: bytes, name: str) -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


def npz_file(pick: str = "", **arrays: np.ndarray) -> Write:
    def write(folder: Path) -> Path:
        np.savez(folder / "x.npz", **arrays)
        return folder / f"x.npz{pick}"

    return write


def safetensors_file(pick: str = "", **tensors: Tensor) -> Write:
    def write(folder: Path) -> Path:
        save_file = pytest.importorskip("safetensors.torch").save_file
        save_file(tensors, folder / "x.safetensors")
        return folder / f"x.safetensors{pick}"

    return write


ONES = np.ones((2, 3), np.float32)
FILES: list[tuple[Write, tuple[int, int, str]]] = [
    (numpy_file(np.arange(5.0, dtype=np.float32)), (1, 5, "float32")),
    (numpy_file(np.ones((2, 3), np.float16)), (2, 3, "float16")),
    (numpy_file(np.ones((2, 3, 4))), (6, 4, "float32")),
    (numpy_file(np.asfortranarray(np.ones((2, 3, 4, 5), np.float32))), (24, 5, "float32")),
    (numpy_file(np.ones((2, 3), ">f4")), (2, 3, "float32")),
    (npz_file(only=ONES), (2, 3, "float32")),
    (npz_file(":b", a=ONES, b=ONES.T), (3, 2, "float32")),
    (torch_file(torch.ones(7, dtype=torch.bfloat16)), (1, 7, "bfloat16")),
    (torch_file(torch.ones(2, 3).t(), "x.pth"), (3, 2, "float32")),
    (torch_file({"scores": torch.ones(1, 2, 2, 3, dtype=torch.float16)}), (4, 3, "float16")),
    (torch_file(torch.nn.Parameter(torch.ones(2, 3))), (2, 3, "float32")),
    (safetensors_file(only=torch.ones(2, 3, dtype=torch.bfloat16)), (2, 3, "bfloat16")),
    (safetensors_file(":b", a=torch.ones(1), b=torch.ones(4, 2)), (4, 2, "float32")),
]


@pytest.mark.parametrize(("write", "wanted"), FILES)
def test_files_are_read(tmp_path: Path, write: Write, wanted: tuple[int, int, str]):
    matrix = inputs.load(str(write(tmp_path)))
    assert (matrix.rows, matrix.cols, inputs.short_name(matrix.dtype)) == wanted
    x = matrix.take(matrix.rows)
    assert (x.shape, x.dtype, x.is_contiguous()) == (wanted[:2], matrix.dtype, True)


@needs_compiler
def test_ladder_on_a_file(tmp_path: Path):
    x = np.random.default_rng(0).normal(size=(3, 2, 20))
    path = numpy_file(x)(tmp_path)
    found = json.loads(run("ladder", "--input", path, "--only", CHEAP, "--json"))
    assert all(rung["ok"] for rung in found["rungs"])
    assert found["header"]["rows"] == 6
    assert found["header"]["notes"] == [
        "3 x 2 x 20, viewed as rows along the last dimension",
        "converted from float64 to float32: the kernels take no float64",
    ]
    x = inputs.load(str(path)).take(6)
    assert torch.equal(x, torch.from_numpy(np.load(path)).float().reshape(6, 20))
    more = ("--rows", 2, "--dtype", "bf16", "--only", "safe", "--json")
    header = json.loads(run("ladder", "--input", path, *more))["header"]
    assert (header["rows"], header["dtype"]) == (2, "bfloat16")


WRONG_FILES: list[tuple[Write, str]] = [
    (lambda folder: folder / "gone.npy", "there is no such file"),
    (lambda folder: folder / "x.csv", "must end in one of .npy"),
    (lambda folder: (folder / "d.npy").mkdir() or folder / "d.npy", "is a folder"),  # type: ignore[func-returns-value]
    (bytes_file(b"", "x.npy"), "is empty"),
    (bytes_file(b"hello", "x.npy"), "is no .npy file"),
    (bytes_file(b"hello", "x.npz"), "is no .npz file"),
    (bytes_file(b"hello", "x.pt"), "is no .pt file"),
    (bytes_file(b"hello", "x.safetensors"), "is not a .safetensors file"),
    (bytes_file(b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', ", "x.npy"), "is no .npy file"),
    (numpy_file(np.ones((2, 3), np.int64)), "holds int64"),
    (numpy_file(np.ones((2, 3), np.complex64)), "holds complex64"),
    (numpy_file(np.ones((2, 3), "V2")), "save bfloat16 as .pt"),
    (numpy_file(np.array([{}], object)), "is no .npy file"),
    (numpy_file(np.ones((), np.float32)), "has 0 dimensions (a single number)"),
    (numpy_file(np.ones((1, 1, 1, 1, 1), np.float32)), "has 5 dimensions"),
    (numpy_file(np.ones((0, 4), np.float32)), "no elements: its shape is 0 x 4"),
    (npz_file(a=ONES, b=ONES), "holds 2 tensors (a, b): say which"),
    (npz_file(":c", a=ONES, b=ONES), "none is 'c'"),
    (npz_file(), "holds no tensors"),
    (torch_file([1, 2]), "holds a list, not a tensor"),
    (torch_file({"a": 1}), "holds a int, not a tensor"),
    (torch_file(torch.ones(2, 3, dtype=torch.int32)), "holds int32"),
    (torch_file(torch.ones(2, 3).to_sparse()), "sparse"),
    (safetensors_file(a=torch.ones(1), b=torch.ones(1)), "holds 2 tensors"),
    (lambda folder: Path(f"{numpy_file(ONES)(folder)}:a"), "without a name: leave :a away"),
]


@pytest.mark.parametrize(("write", "why"), WRONG_FILES)
def test_wrong_file_is_one_line(tmp_path: Path, write: Write, why: str):
    assert why in refusal("ladder", "--input", write(tmp_path))


def test_pickled_code_is_not_run(tmp_path: Path):
    class Mischief:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "made"),))

    torch.save(Mischief(), tmp_path / "x.pt")
    assert "is no .pt file" in refusal("ladder", "--input", tmp_path / "x.pt")
    assert not (tmp_path / "made").exists()


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = safetensors_file(a=torch.ones(2))(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install safetensors" in refusal("ladder", "--input", path)


# ---- trace, explain, info


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["1", "5", "3", "9", "2"], [1, 5, 3, 9, 2]),
        (["-3"], [-3]),
        (["1", "-3", "-inf", "2"], [1, -3, "-inf", 2]),
        (["-1e-3", "+inf", "nan", "-.5"], [-0.0010000000474974513, "inf", "nan", -0.5]),
        (["-infinity", "-nan", "-0"], ["-inf", "nan", -0.0]),
        (["--", "-3", "2"], [-3, 2]),
        (["1,-5, 3"], [1, -5, 3]),
        (["[1 -5]"], [1, -5]),
    ],
)
def test_trace_takes_any_number(words: list[str], values: list[object]):
    for arguments in (["--json", *words], [*words, "--json"]):
        if "--" in words and arguments[-1] == "--json":
            continue  # behind "--" all is values
        found = json.loads(run("trace", *arguments))
        assert [value for step in found["steps"] for value in step["values"]] == values


def test_trace_of_the_worked_example():
    found = json.loads(run("trace", 1, 5, 3, 9, 2, "--block", 3, "--json"))
    states = [(step["m"], round(step["d"], 6)) for step in found["steps"]]
    assert states == [(5.0, 1.153651), (9.0, 1.022042)]
    page = run("trace", 1, 5, 3, 9, 2, "--block", 3)
    assert "1.153651" in page
    assert "1.022042" in page


@pytest.mark.parametrize("words", [["1", "two"], ["--bogus", "1"], ["1", "-x"], [""]])
def test_trace_refuses_in_one_line(words: list[str]):
    refusal("trace", *words)


def test_trace_usage():
    run("trace", exit_code=2)
    run("trace", 1, "--block", 0, exit_code=2)


def test_explain():
    assert run("explain", 4096, 4096).startswith("v3_register_cache: 4096 columns fit")
    page = run("explain", 1, 1048576, "--dtype", "bf16", "--arch", "90")
    assert page.startswith("v5_split_row: ")
    assert "not v3_register_cache: " in page
    assert run("explain", 3, 4, "--dtype", "double").startswith("reference: ")
    assert "known are" in refusal("explain", 3, 4, "--arch", "sm_1")
    assert "int8" in refusal("explain", 3, 4, "--dtype", "int8")
    run("explain", 3, exit_code=2)
    run("explain", -3, 4, exit_code=2)


def test_explain_on_a_gpu_without_facts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("online_softmax.lab.arguments.arches", lambda _: ["sm_103"])
    assert refusal("explain", 3, 4).startswith("error: no facts about 'sm_103'; known are sm_75")


def test_info():
    found = json.loads(run("info", "--json"))
    assert found["versions"]["torch"] == torch.__version__
    assert len(found["gpus"]) == torch.cuda.device_count()
    page = run("info")
    assert torch.__version__ in page
    assert found["cache"]["folder"] in page
    for sentence in found["missing"].values():
        assert sentence in page


def test_info_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    catalogue.lacks.cache_clear()
    monkeypatch.setattr(host, "compiler", lambda: None)
    page = run("info")
    catalogue.lacks.cache_clear()
    assert "pip install 'online-softmax[triton]'" in page
    assert "install g++ or clang++" in page


def test_where_the_code_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    package = tmp_path / "src" / "online_softmax"
    (package / "cuda" / "ladder").mkdir(parents=True)
    kernel = package / "cuda" / "ladder" / "safe.cu"
    kernel.write_text("1")
    monkeypatch.setattr("online_softmax.__file__", str(package / "__init__.py"))
    first = info.sources()
    (package / "plan.py").write_text("no kernel")
    assert info.sources() == first
    kernel.write_text("2")
    assert info.sources() != first
    assert info.commit() is None
    if not shutil.which("git"):
        pytest.skip("needs git")

    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    git("tag", "v1")
    short = git("rev-parse", "--short", "HEAD")
    assert info.commit() == short
    kernel.write_text("3")
    assert info.commit() == f"{short}+changes"
    inside = tmp_path / "lib" / "python" / "online_softmax" / "__init__.py"  # another's checkout
    monkeypatch.setattr("online_softmax.__file__", str(inside))
    assert info.commit() is None


# ---- as a person runs it


@needs_compiler
def test_piped_and_narrow():
    done = process("ladder", "--rows", "2", "--cols", "64", "--only", CHEAP, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "All 5 lines that ran agree with float64." in done.stdout
    found = process("ladder", "--rows", "2", "--cols", "64", "--only", "safe", "--json")
    assert json.loads(found.stdout)["rungs"][0]["ok"]


@needs_compiler
def test_ascii_terminal():
    done = process(
        "ladder", "--rows", "2", "--cols", "64", "--only", "safe,torch", PYTHONIOENCODING="ascii"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


@pytest.mark.parametrize("command", ["", "ladder", "trace", "explain", "info"])
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
