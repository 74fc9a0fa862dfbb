"""Measuring cells without a GPU: correct first, refusals, a dead device, the contenders."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from bench_kit import HEADER, SPREAD, cells, lines, make, returning, right, setting, wrong
from online_softmax.lab import benchclock, benchfile, benchrun, contenders, grid, opbench
from online_softmax.lab.benchfile import Log
from online_softmax.lab.benchrun import Outlet
from online_softmax.lab.contenders import Contender, Refusal
from online_softmax.lab.grid import Cell

CELL = Cell("softmax", "float32", 5, 40)
BACKWARD = Cell("softmax_backward", "bfloat16", 5, 40)


def failing(message: str):
    def call(*tensors):
        raise RuntimeError(message)

    return call


# ---- one cell


@pytest.mark.parametrize("op", grid.OPS)
@pytest.mark.parametrize("dtype", grid.DTYPES)
def test_every_operation_is_judged_and_timed(op: str, dtype: str):
    cell = Cell(op, dtype, 5, 40)
    us = {"ceiling": 10.0, "ours": 12.5, "theirs": 20.0}
    row = opbench.measure(cell, lines(op, theirs=returning(op)), setting(us))
    assert [(e.name, e.kind, e.ok, e.median_us) for e in row.entries] == [
        ("ceiling", "ceiling", None, 10.0),
        ("ours", "ours", True, 12.5),
        ("theirs", "rival", True, 20.0),
    ]
    ours = row.entry("ours")
    assert ours.gbs == pytest.approx(cell.ideal_bytes / 12.5e3)
    assert ours.rounds_us == pytest.approx((12.5 * (1 - SPREAD), 12.5, 12.5 * (1 + SPREAD)))
    assert (ours.clock, ours.do_bench_us, ours.why) == ("graph", 77.0, "")
    assert row.is_right
    assert row.ideal_bytes == cell.ideal_bytes
    assert row.is_cold_l2 is True
    assert row.sets * cell.ideal_bytes >= 3 * 4096


def test_ours_wrong_has_no_time():
    row = opbench.measure(
        CELL, lines("softmax", wrong("softmax"), theirs=right("softmax")), setting()
    )
    ours = row.entry("ours")
    assert (ours.ok, ours.median_us, ours.do_bench_us) == (False, None, None)
    assert ours.why.startswith("wrong: [4, 39] is ")
    assert ours.max_error == pytest.approx(1, abs=1e-5)
    assert not row.is_right
    assert row.entry("theirs").median_us == 100.0


def test_ours_raising_is_wrong_and_the_rest_is_timed():
    row = opbench.measure(CELL, lines("softmax", failing("no such kernel")), setting())
    assert row.entry("ours").ok is False
    assert row.entry("ours").why == "RuntimeError: no such kernel"
    assert row.entry("ceiling").median_us == 100.0


def test_an_operation_without_a_kernel_is_a_refusal_and_not_an_error():
    with pytest.raises(Refusal, match="no kernel for the_next yet"):
        contenders._ours("the_next")
    ours = Contender("ours", "ours", lambda: contenders._ours("the_next"))
    row = opbench.measure(CELL, [lines("softmax")[0], ours], setting())
    assert row.entry("ours").why == "the package has no kernel for the_next yet"
    assert (row.entry("ours").ok, row.entry("ours").median_us) == (None, None)
    assert row.is_right


def test_rivals_that_refuse_are_wrong_or_cannot_be_captured():
    def missing():
        raise ModuleNotFoundError("No module named 'quack'")

    found = lines(
        "softmax", refuses=failing("cols must\nbe even"), wrong=wrong("softmax"),
        synchronises=returning("softmax"),
    )  # fmt: skip
    found.append(Contender("absent", "rival", missing))
    row = opbench.measure(CELL, found, setting({"ours": 50.0}, uncaptured=["synchronises"]))
    assert row.is_right
    refuses, bad, synchronises, absent = row.entries[2:]
    assert (refuses.why, refuses.ok) == ("RuntimeError: cols must be even", None)
    assert (bad.ok, bad.median_us) == (False, None)
    assert absent.why == "ModuleNotFoundError: No module named 'quack'"
    assert (synchronises.clock, synchronises.median_us) == ("do_bench", 77.0)
    assert synchronises.why == (
        "no graph holds it, timed by do_bench: RuntimeError: it synchronises"
    )
    assert row.entry("ours").median_us == 50.0


def test_a_result_left_from_the_contender_before_is_not_taken():
    """Outputs arrive full of NaN: who writes nothing is wrong, whoever ran before."""
    row = opbench.measure(CELL, lines("softmax", idle=lambda *tensors: None), setting())
    assert "is nan" in row.entry("idle").why


def test_all_are_compared_on_a_sample_and_must_have_written_the_rest(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(opbench, "CHECKED_ELEMENTS", 2 * CELL.cols)

    def second_row(change):
        def call(x, y):
            right("softmax")(x, y)
            change(y[1])

        return call

    def leave(row):
        row[7] = torch.nan

    ours, theirs = second_row(lambda row: row.add_(1)), second_row(leave)
    row = opbench.measure(CELL, lines("softmax", ours, theirs=theirs), setting())
    assert (row.checked_rows, row.entry("ours").ok, row.entry("theirs").ok) == (2, True, False)
    assert row.entry("theirs").why == "wrong: 1 of 200 elements are NaN, or were not written"


def test_do_bench_is_asked_of_ours_and_of_what_no_graph_holds():
    found = lines("softmax", captured=returning("softmax"), synchronises=returning("softmax"))
    row = opbench.measure(CELL, found, setting(uncaptured=["synchronises"]))
    assert [entry.do_bench_us for entry in row.entries] == [None, 77.0, None, 77.0]


def test_where_the_time_went():
    row = opbench.measure(CELL, lines("softmax"), setting())
    assert set(row.spent) == {"buffers", "first calls", "judging", "rounds", "do_bench"}
    assert 0 < sum(row.spent.values()) <= row.seconds + 0.002

    def slow(x, y):
        time.sleep(0.05)
        right("softmax")(x, y)

    row = opbench.measure(CELL, lines("softmax", slow, theirs=slow), setting())
    assert 0.1 <= row.spent["first calls"] < row.seconds - 0.1  # the rest is the rounds'


def dying(survived: int):
    """A device that is dead after so many synchronisations."""
    count = iter(range(survived))

    def synchronize() -> None:
        if next(count, None) is None:
            raise RuntimeError("an illegal memory access")

    return synchronize


@pytest.mark.parametrize(("survived", "name", "ok"), [(1, "ours", False), (2, "theirs", None)])
def test_a_dead_device_ends_the_run_and_its_cell_is_not_tried_again(
    tmp_path: Path, survived: int, name: str, ok: bool | None
):
    path, calls = tmp_path / "run.jsonl", {"ours": right("softmax"), "theirs": right("softmax")}
    calls[name] = failing("misaligned address")

    def make(cell: Cell) -> list[Contender]:
        return lines("softmax", calls["ours"], theirs=calls["theirs"])

    here = setting(synchronize=dying(survived - 1))
    with pytest.raises(benchclock.Broken, match=f"{name} on softmax float32 5 x 40 left the dev"):
        benchrun.run([CELL, *cells(1)], make, here, Outlet(Log(path), HEADER))
    (row,) = benchfile.read([path])[0].rows
    assert (row.cell, row.entry(name).ok, row.is_right) == (CELL, ok, ok is None)
    assert row.entry(name).why == "RuntimeError: misaligned address"
    calls[name] = right("softmax")
    benchrun.run([CELL, *cells(1)], make, setting(), Outlet(Log(path, resume=True), HEADER))
    assert [row.cell for row in benchfile.latest(benchfile.read([path]))] == [CELL, *cells(1)]


def test_a_device_that_dies_in_the_rounds_is_our_fault():
    def interleaved(*_):
        raise RuntimeError("an illegal memory access")

    here = setting(interleaved=interleaved, synchronize=dying(1))
    with pytest.raises(benchclock.Broken) as broken:
        opbench.measure(CELL, lines("softmax"), here)
    assert broken.value.entry.ok is False
    with pytest.raises(RuntimeError, match="illegal"):
        opbench.measure(CELL, lines("softmax"), setting(interleaved=interleaved))


def test_no_cell_is_begun_when_the_seconds_are_over(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    found = benchrun.run(cells(3), make, setting(), Outlet(Log(path), HEADER, seconds=1e-9))
    assert (found.rows, found.left) == ((), 3)
    assert not path.exists()


def test_errors_are_kept_as_shares_of_the_largest_probability():
    row = opbench.measure(CELL, lines("softmax"), setting())
    ours = row.entry("ours")
    assert ours.share_max > ours.max_error > 0  # the largest probability of a row is below 1
    assert 0 < ours.share_mean < ours.share_max < 2**-23


def test_a_cell_that_does_not_fit_is_a_row():
    row = opbench.measure(CELL, lines("softmax"), setting(free_bytes=2**20))
    assert row.entries == ()
    assert "GiB are free" in row.why


def test_ascending_values_rise_in_every_row():
    found = opbench.buffers(CELL, setting(values="ascending"))
    x = found.sets[0][0]
    assert bool((x.diff(dim=-1) >= 0).all())
    assert not bool((opbench.buffers(CELL, setting()).sets[0][0].diff(dim=-1) >= 0).all())
    row = opbench.measure(CELL, lines("softmax"), setting(values="ascending"))
    assert row.values == "ascending"


def test_a_backward_gets_a_forward_s_result():
    dy, y, dx = opbench.buffers(BACKWARD, setting()).sets[1]
    assert y.float().sum(-1).sub(1).abs().max() < 0.02
    assert (dy.dtype, dx.shape) == (torch.bfloat16, y.shape)
    logs = opbench.buffers(Cell("log_softmax_backward", "float32", 5, 40), setting()).sets[0][1]
    assert logs.exp().sum(-1).sub(1).abs().max() < 1e-5
