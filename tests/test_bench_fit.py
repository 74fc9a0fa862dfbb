"""Cells that fit a CPU: what they will take, which are made smaller, which are not begun; and the
list of operations, for which nothing is compiled or imported."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench_kit import HEADER
from online_softmax.lab import (
    benchfile,
    benchlist,
    benchrun,
    cli,
    contenders,
    cpuclock,
    cpufit,
    fusedsizes,
    grid,
    opbench,
)
from online_softmax.lab.cpufit import Rates
from online_softmax.lab.grid import Cell
from online_softmax.lab.inputs import BadInput

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
EVERY = {op: grid.grid_cells([op], ["float32"], "big")[0] for op in grid.EVERY_OP}


def invoke(*words: object):
    return CliRunner().invoke(cli.app, ["bench", *map(str, words)])


def rates(cells: list[Cell], second_of: float, names: int = 3) -> Rates:
    """So much work takes a second."""
    pairs = {(cell.op, cell.dtype): 1 / second_of / cpufit.CALLS for cell in cells}
    return Rates(pairs, {cell.op: names for cell in cells})


@pytest.mark.parametrize("op", grid.EVERY_OP)
def test_a_smaller_cell_is_one_of_the_same_operation(op: str):
    """Down to the least, each has less work and sizes that say what its rows are."""
    cell, steps = EVERY[op], 0
    while less := cpufit.smaller(cell):
        assert cpufit.work(less) < cpufit.work(cell)
        assert (less.op, less.dtype) == (cell.op, cell.dtype)
        fusedsizes.check(op, less.sizes)
        if op in fusedsizes.ATTENTION_OPS:
            sizes = fusedsizes.parsed(less.sizes)
            per_head = less.rows // (sizes["batch"] * sizes["heads"])
            assert per_head * sizes["batch"] * sizes["heads"] == less.rows
            assert per_head == (1 if op == "attention_decode" else less.cols)
        cell, steps = less, steps + 1
    assert steps > 4
    assert cpufit.work(cell) < 2**25  # milliseconds of any machine


def test_a_default_grid_fits_its_seconds():
    cells = [cell for op in grid.EVERY_OP for cell in grid.grid_cells([op], ["float32"], "cpu")]
    fast, slow = rates(cells, 1e12), rates(cells, 1e7)
    assert cpufit.fitted(cells, fast, 25.0) == cells
    assert "all as in the grid cpu" in cpufit.said(cells, cells, fast, 25.0)
    fit = cpufit.fitted(cells, slow, 25.0)
    assert sum(map(slow.price, fit)) <= 25.0 < sum(map(slow.price, cells))
    assert {cell.op for cell in fit} == set(grid.EVERY_OP)
    assert f"of {len(cells)} were made smaller" in cpufit.said(cells, fit, slow, 25.0)


def test_what_was_asked_for_stays_and_may_be_too_long():
    cells = grid.named_cells(["softmax"], ["float32"], "64x64,1024x1024,4096x65536")
    known = rates(cells, float(cells[1].ideal_bytes))  # the second takes a second, the third 256
    assert cpufit.too_long(cells, known, 1000.0) == ""
    text = cpufit.too_long(cells, known, 25.0)
    assert text.startswith("1 of 3 cells would take longer on this CPU than a run's 25 s, softmax")
    assert "4096 x 65536 about 256 s" in text
    with pytest.raises(BadInput, match=r"1 of 1 cells .* give more --seconds, or smaller --cells"):
        cpufit.too_long(cells[2:], known, 25.0)


def test_a_cell_that_would_end_too_late_is_not_begun(tmp_path: Path):
    cells = grid.named_cells(["softmax"], ["float32"], "64x64,4096x65536,32x64")
    known, seen, left = rates(cells, float(cells[1].ideal_bytes) / 300), [], []
    outlet = benchrun.Outlet(
        benchfile.Log(tmp_path / "run.jsonl"), HEADER,
        lambda text, done, total, seconds: left.append(seconds), None, 200.0, known.price,
    )  # fmt: skip

    def one(cell: Cell) -> str:
        seen.append(cell)
        return benchfile.line("cell", {})

    assert benchrun.each(cells, one, lambda cell, broken: "", outlet) == 1
    assert seen == [cells[0], cells[2]]
    assert left[0] == pytest.approx(200.0, abs=5)  # what is left of the run, not the long one's
    assert [json.loads(x)["kind"] for x in (tmp_path / "run.jsonl").read_text().splitlines()] == [
        "header", "cell", "cell",
    ]  # fmt: skip


def test_rates_come_from_calls_of_every_operation():
    cells = [cell for op in grid.EVERY_OP for cell in grid.grid_cells([op], ["float32"], "cpu")]
    found = cpufit.rates(cells, cpuclock.setting())
    assert {op for op, _ in found.seconds} == set(grid.EVERY_OP)
    assert all(0 < rate < 1 and math.isfinite(rate) for rate in found.seconds.values())
    assert min(found.names.values()) >= 3  # the ceiling, ours, torch
    twice = Rates(found.seconds, found.names, is_compiling=True, repeat=2)
    assert twice.price(cells[0]) == 2 * found.price(cells[0]) + cpufit.COMPILE_S


@without_gpu
def test_what_a_file_has_is_not_too_long(tmp_path: Path):
    """A cell that was measured is no reason to end the run, however long it would take."""
    saved, long = tmp_path / "run.jsonl", Cell("softmax", "float32", 2**20, 4096)
    row = benchfile.line("cell", opbench.blank(long, "normal"))
    saved.write_text(benchfile.header_line(HEADER) + row)
    words = ("softmax", "--cells", f"{long.rows}x{long.cols},8x64", "--save", saved, "--resume")
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert "[1/1] softmax float32 8 x 64" in done.stderr
    assert "longer" not in done.stderr


@without_gpu
def test_the_command_says_the_sizes_and_the_time_left():
    done = invoke("attention_decode", "merge", "--json")
    assert done.exit_code == 0, done.output
    assert "sizes fit this machine: all as in the grid cpu; about " in done.stderr
    first = next(line for line in done.stderr.splitlines() if line.startswith("[1/2]"))
    assert first.endswith(" s left")
    done = invoke("attention", "--cells", "64x64x65536x128")
    assert done.exit_code == 2
    assert "error: 2 of 2 cells would take longer on this CPU" in done.stderr


def test_the_list_of_operations_makes_no_contender(monkeypatch: pytest.MonkeyPatch):
    def started(*_: object, **__: object) -> None:
        raise AssertionError("torch.compile was started")

    monkeypatch.setattr(torch, "compile", started)
    monkeypatch.setattr(torch.compiler, "reset", started)
    before = {name for name in sys.modules if name.startswith(("quack", "liger", "flash_attn"))}
    done = invoke("--list")
    assert done.exit_code == 0, done.output
    assert {n for n in sys.modules if n.startswith(("quack", "liger", "flash_attn"))} == before
    for op in grid.EVERY_OP:
        assert f"\n  {op} " in done.stdout
    here = [name for name, version in contenders.versions(contenders.KNOWN).items() if version]
    assert f"Installed: {here[0]} " in done.stdout
    found = json.loads(invoke("--list", "--json").stdout)
    assert found == json.loads(json.dumps(benchlist.operations()))
    softmax = found["operations"][0]
    assert (softmax["op"], softmax["grids"]["odd"]) == ("softmax", len(grid.ODD_COLS))
    assert {"ours", "torch", "compile", "tutorial"} <= set(softmax["contenders"])
    assert found["installed"]["torch"] == torch.__version__
    for words in (("--grid", "odd"), ("--accuracy",), ("--repeat", "2")):
        assert "bench takes operations" in invoke("--list", *words).stderr
