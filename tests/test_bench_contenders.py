"""The benchmark's contenders: which lines a cell has, how each is called, what is right."""

from __future__ import annotations

import sys
import types
from importlib import metadata

import pytest

from bench_kit import lines, returning, setting
from online_softmax import invariance, rowops
from online_softmax.lab import contenders, grid, opbench
from online_softmax.lab.contenders import Refusal
from online_softmax.lab.grid import Cell
from online_softmax.lab.inputs import BadInput

CELL = Cell("softmax", "float32", 5, 40)
BACKWARD = Cell("softmax_backward", "bfloat16", 5, 40)


@pytest.mark.parametrize("op", grid.OPS)
def test_torch_is_right(op: str):
    cell = Cell(op, "float32", 5, 40)
    found = contenders.contenders(cell, ("torch", "quack"))
    assert [line.name for line in found] == ["ceiling", "ours", "torch"]
    row = opbench.measure(cell, [lines(op)[0], found[2]], setting())
    assert row.entry("torch").ok, row.entry("torch").why


@pytest.mark.parametrize("op", grid.OPS)
@pytest.mark.parametrize("dtype", grid.DTYPES)
def test_ours_is_right(op: str, dtype: str):
    cell = Cell(op, dtype, 5, 40)
    found = contenders.contenders(cell, ("torch",))
    row = opbench.measure(cell, [lines(op)[0], found[1]], setting())
    assert row.entry("ours").ok, row.entry("ours").why


@pytest.mark.parametrize("op", grid.OPS)
def test_ours_fills_the_set_or_returns(op: str):
    """No matrix of its own is counted in the memory that a cell takes, and none is made."""
    cell = Cell(op, "float32", 5, 40)
    tensors = opbench.buffers(cell, setting()).sets[0]
    made = contenders._ours(op)(*tensors)
    ours = contenders.contenders(cell, ())[1]
    assert not ours.allocates
    assert made is tensors[-1] or op == "logsumexp"


def wide(op: str) -> Cell:
    """One in which every rival is timed."""
    return Cell(op, "float32", 1, grid.RIVAL_COLS[0])


def test_few_rows_have_a_line_of_ours_without_batch_invariance(monkeypatch: pytest.MonkeyPatch):
    """Where another cut runs, and nowhere else; the setting is on again after each call."""
    found = contenders.contenders(Cell("softmax", "bfloat16", 4, 32000), ())
    assert [line.name for line in found] == ["ceiling", "ours", "ours, not batch invariant"]
    assert [line.kind for line in found] == ["ceiling", "ours", "ours"]
    for cell in (Cell("softmax", "bfloat16", 64, 32000), Cell("softmax", "float32", 4, 32000)):
        assert [line.name for line in contenders.contenders(cell, ())] == ["ceiling", "ours"]
    seen: list[bool] = []
    original = rowops.forward

    def forward(*arguments):
        seen.append(invariance.setting.is_on)
        return original(*arguments)

    monkeypatch.setattr(rowops, "forward", forward)
    row = opbench.measure(CELL, [lines("softmax")[0], *found[1:]], setting())
    assert all(entry.ok for entry in row.entries[1:]), row
    assert set(seen) == {True, False}
    assert invariance.setting.is_on


def test_how_quack_and_liger_are_called(monkeypatch: pytest.MonkeyPatch):
    for name in ("quack", "liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    quack, liger = types.ModuleType("quack.softmax"), types.ModuleType("liger_kernel.ops.softmax")
    utils = types.ModuleType("liger_kernel.ops.utils")
    quack.softmax_fwd, quack.softmax_bwd = returned("softmax"), returned("softmax_backward")
    liger._softmax_forward = lambda x: (returned("softmax")(x), 64, 4, False)
    utils.calculate_settings = lambda cols: (64, 4)

    def backward(dy, y, block, warps, is_multi):
        assert (block, warps, is_multi) == (64, 4, False)
        return returned("softmax_backward")(dy, y)

    liger._softmax_backward = backward
    for module in (quack, liger, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for cell in (CELL, BACKWARD):
        found = contenders.contenders(wide(cell.op), ("torch", "quack", "liger"))
        row = opbench.measure(cell, [lines(cell.op)[0], *found[3:]], setting())
        assert [(e.name, e.ok) for e in row.entries[1:]] == [("quack", True), ("liger", True)], row


def returned(op: str):
    return lambda *inputs: returning(op)(*inputs, inputs[0])


def test_what_rivals_lack_is_a_sentence():
    for op in ("log_softmax", "logsumexp", "log_softmax_backward"):
        for name in ("quack", "liger"):
            with pytest.raises(Refusal, match=f"{name} has no {op}"):
                contenders.RIVALS[name](op)


def test_rivals_by_name():
    assert contenders.rivals("") == ("torch",)
    assert contenders.rivals("liger, torch") == ("torch", "liger")
    with pytest.raises(BadInput, match="--against cudnn"):
        contenders.rivals("torch,cudnn")


def test_versions_of_packages_by_several_names(monkeypatch: pytest.MonkeyPatch):
    """flash-attn's module may come from a package of another name."""
    there: dict[str, str] = {"flash-attn-4": "4.0.0", "flash-attn-of-a-vendor": "2.8"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    brings = {"flash_attn": ["flash-attn-of-a-vendor"] * 2}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: brings)
    monkeypatch.setattr(contenders, "find_spec", lambda module: module == "flash_attn" or None)
    known = ("flash-attn", "quack")
    assert contenders.versions(known) == {"flash-attn": "4.0.0", "quack": None}
    del there["flash-attn-4"]
    assert contenders.versions(known) == {"flash-attn": "flash-attn-of-a-vendor 2.8", "quack": None}
    brings.clear()
    assert contenders.versions(known) == dict.fromkeys(known)
    there["flash-attn"] = "2.9"
    assert contenders.versions(known)["flash-attn"] == "2.9"
