"""Cells of a CPU: what they will take, how they share a run's seconds, which are not begun; and the
list of operations, for which nothing is compiled or imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_kit import HEADER
from cli_kit import bench as invoke
from online_softmax.lab import (
    benchfile,
    benchlist,
    benchoptions,
    benchrun,
    contenders,
    cpuclock,
    cpufit,
    fusedsizes,
    grid,
    opbench,
)
from online_softmax.lab.benchask import Asked
from online_softmax.lab.cpufit import Rate, Rates
from online_softmax.lab.grid import Cell
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.refusal import Refusal

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
EVERY = {op: grid.grid_cells([op], ["float32"], "big")[0] for op in grid.EVERY_OP}


def rates(cells: list[Cell], second_of: float) -> Rates:
    """So much work takes a second at the least."""
    pairs = {(cell.op, cell.dtype): Rate(1 / second_of / cpufit.CALLS) for cell in cells}
    return Rates(pairs, 2**20)


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


def asked(cells: list[Cell], seconds: float, **more: Any) -> Asked:
    given = {"rivals": ("torch",), "values": "normal", "seconds": seconds, "as_json": False}
    given |= {"save": None, "resume": False, "is_cpu": True, "is_default": True}
    return Asked(cells, **(given | more))


def test_a_default_grid_has_fixed_sizes_and_shares_its_seconds(tmp_path: Path):
    """The same cells at every speed and with any number of seconds; what each is granted follows
    from what is left."""
    cells = [cell for op in grid.EVERY_OP for cell in grid.grid_cells([op], ["float32"], "cpu")]
    log, here = benchfile.Log(tmp_path / "run.jsonl"), cpuclock.setting()
    for seconds in (5.0, 25.0, 1000.0):
        fit = cpufit.chosen(asked(cells, seconds), here, log)
        assert fit.cells == cells
        assert {fit.price(cell) for cell in cells} == {cpufit.BESIDE_S}
    fit = cpufit.chosen(asked(cells[:2], 25.0), here, log)
    assert "fixed sizes; about 17 s of at most 25 s" in fit.said
    spare = 50.0 - len(cells) * cpufit.BESIDE_S
    fit = cpufit.chosen(asked(cells, 50.0), here, log)
    total = benchrun.together([cpufit.BESIDE_S] * len(cells), 50.0, fit.share)
    assert total == pytest.approx(50.0)
    assert fit.share(spare / len(cells)) == pytest.approx(spare / len(cells))
    twice = cpufit.chosen(asked(cells, 25.0, repeat=2), here, log)
    assert twice.share(4.0) == 4.0  # of the two together
    assert twice.share(1e9) == 2 * cpuclock.MOST_S
    assert twice.price(cells[0]) == 2 * cpufit.BESIDE_S


def test_the_first_cell_of_what_is_left_is_never_said_to_take_nothing():
    assert benchrun.together([2.0, 2.0], 0.5, None) == 2.0
    assert benchrun.together([2.0, 3.0], 100.0, lambda seconds: 8.0) == 21.0
    outlet = benchrun.Outlet(None, HEADER, seconds=10.0)
    pace, (one, other) = benchrun.Pace(), grid.named_cells(["softmax"], ["float32"], "8x64,4x64")
    assert outlet.begin(pace, 0.0, [one, other]) is None
    pace.add(one, 4.0)
    assert outlet.begin(pace, 1.0, [one, other]) == 8.0
    assert outlet.begin(pace, 9.9, [other]) == 4.0


def test_what_was_asked_for_stays_and_may_be_too_long():
    cells = grid.named_cells(["softmax"], ["float32"], "64x64,1024x1024,4096x65536")
    known = rates(cells, float(cells[1].ideal_bytes))  # the second takes a second, the third 256
    assert cpufit.too_long(cells, known, 1000.0) == ""
    text = cpufit.too_long(cells, known, 25.0)
    assert text.startswith("1 of 3 cells would take longer on this CPU than a run's 25 s, softmax")
    assert "4096 x 65536 about 257 s" in text
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
    assert {op for op, _ in found.known} == set(grid.EVERY_OP)
    for (op, _), rate in found.known.items():
        assert 0 < rate.calls < 1
        assert (rate.judging > 0) == (rate.filling > 0) == (op != fusedsizes.LINEAR)
    twice = Rates(found.known, found.l2_bytes, is_compiling=True, repeat=2)
    assert twice.price(cells[0]) == 2 * found.price(cells[0]) + cpufit.COMPILE_S


@pytest.mark.parametrize("op", grid.EVERY_OP)
def test_a_pilot_is_of_its_cell_s_kind(op: str):
    """Of little work, and not so little that a call's own cost is all that it shows."""
    pilot = cpufit.small(EVERY[op])
    most = cpufit.PILOT_FLOPS if pilot.flops else cpufit.PILOT_BYTES
    most = cpufit.PILOT_LINEAR if op == fusedsizes.LINEAR else most
    assert most / 8 < cpufit.work(pilot) <= most
    assert cpufit.small(pilot) == pilot
    if op == fusedsizes.LINEAR:
        assert 0.25 <= pilot.rows / pilot.cols <= 4


@without_gpu
def test_what_a_file_has_is_not_too_long(tmp_path: Path):
    """A cell that was measured is no reason to end the run, however long it would take."""
    saved, long = tmp_path / "run.jsonl", Cell("softmax", "float32", 2**20, 4096)
    row = benchfile.line("cell", opbench.blank(long, "normal"))
    saved.write_text(benchfile.header_line(HEADER) + row)
    words = ("softmax", "--cells", f"{long.rows}x{long.cols},8x64", "--seconds", "3")
    words += ("--save", saved, "--resume")
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert "[1/1] softmax float32 8 x 64" in done.stderr
    assert "longer" not in done.stderr


@without_gpu
def test_the_command_says_the_sizes_and_the_time_left():
    done = invoke("attention_decode", "merge", "--json", "--seconds", "3")
    assert done.exit_code == 0, done.output
    assert "the grid cpu has fixed sizes; about 3 s of at most 3 s (--seconds)" in done.stderr
    first = next(line for line in done.stderr.splitlines() if line.startswith("[1/2]"))
    assert first.endswith(", about 3 s left")
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
    assert "`bench --list` says which operations there are" in invoke().stderr


def test_the_list_fits_a_narrow_terminal_and_names_who_has_an_operation(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, invoke("--list").stdout.splitlines())) <= 80
    found = {each["op"]: each["contenders"] for each in benchlist.operations()["operations"]}
    for op in (*grid.OPS, *grid.LOSS_OPS):
        for cell in grid.cells([op], ["float32"], [(64, 50257)]):
            for line in contenders.contenders(cell, ("quack", "liger", "tutorial")):
                try:
                    line.make()
                except Refusal:
                    assert line.name not in found[op]
                except ImportError:  # not installed here
                    assert line.name in found[op]
                else:
                    assert line.kind == "ceiling" or line.name in found[op]
    assert "liger" in found["softmax"]
    assert "liger" not in found["log_softmax"]


def test_examples_that_need_a_gpu_stand_under_it():
    everywhere, on_a_gpu = benchoptions.HELP.split("On a GPU:")
    for option in ("--prepare", "--tune", "--host", "--grid big"):
        assert option in on_a_gpu
        assert option not in everywhere
    assert "--list" in everywhere
