"""A person's own tensor, from a file: what is read, and one clear line for whatever is wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cli_kit import CHEAP, needs_compiler, refusal, run
from online_softmax.lab import inputs

Write = Callable[[Path], Path]


def numpy_file(array: np.ndarray, name: str = "x.npy") -> Write:
    def write(folder: Path) -> Path:
        np.save(folder / name, array, allow_pickle=True)
        return folder / name

    return write


def old_torch_file(value: object) -> Write:
    """As torch wrote before 1.6: no zip, which cannot be mapped."""

    def write(folder: Path) -> Path:
        torch.save(value, folder / "x.pt", _use_new_zipfile_serialization=False)
        return folder / "x.pt"

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
    (old_torch_file(torch.ones(2, 3)), (2, 3, "float32")),
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


@pytest.mark.parametrize(
    ("x", "dtype", "what"),
    [
        ([1e300, -1e39, 1.0, np.inf], None, "2 of 4 values are finite in float64 and past the"),
        ([1e300, 0.0, np.nan], "fp16", "1 of 3 values are finite in float64 and past the largest"),
        ([3.4028235e38, -1e-300], None, ""),
    ],
)
def test_what_a_conversion_makes_infinite_is_told(
    tmp_path: Path, x: list[float], dtype: str | None, what: str
):
    path = numpy_file(np.array(x))(tmp_path)
    notes = inputs.load(str(path), inputs.dtype_of(dtype) if dtype else None).notes
    told = [note for note in notes if "finite" in note]
    assert len(told) == bool(what)
    assert what in "".join(told)
    if told and dtype is None:
        assert told[0].endswith("past the largest float32, 3.4e+38: they run as +inf or -inf")


def test_what_a_narrow_type_cannot_hold_is_told(tmp_path: Path):
    path = numpy_file(np.array([65519.0, 65520.0], np.float32))(tmp_path)
    (told,) = [n for n in inputs.load(str(path), torch.float16).notes if "finite" in n]
    assert told.startswith("1 of 2 values are finite in float32 and past the largest float16")


WRONG_FILES: list[tuple[Write, str]] = [
    (lambda folder: folder / "gone.npy", "there is no such file"),
    (lambda folder: folder / f"{'x' * 300}.npy", "cannot be read: File name too long"),
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
    (torch_file([1, 2]), "holds no tensor: it is of type list"),
    (torch_file({"a": 1}), "holds no tensor: it is of type int"),
    (torch_file(torch.ones(2, 3, dtype=torch.int32)), "holds int32"),
    (torch_file(torch.ones(2, 3).to_sparse()), "holds a sparse tensor: save a dense one"),
    (torch_file(torch.ones(2, 3, device="meta")), "holds a meta tensor: save a dense one"),
    (
        torch_file(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        "holds a nested tensor: save a dense one",
    ),
    (torch_file(torch.nn.Linear(2, 2)), "more than tensors, or is something else; save a tensor"),
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
