"""The ladder's times: what ships, rivals beside it, and all of it on a GPU."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from torch import Tensor

from ladder_kit import READS, climb, on_cpu, printed
from online_softmax import plan
from online_softmax.catalogue import KERNELS
from online_softmax.cuda import host
from online_softmax.lab import (
    bench,
    info,
    inputs,
    ladder,
    laddertables,
    results,
    rotation,
    rung,
)
from online_softmax.lab.results import Result, Run

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture
def matrix_setting(monkeypatch: pytest.MonkeyPatch) -> rung.Setting:
    """64 x 4096 as on a GPU, for hand-made timings."""
    monkeypatch.setattr(info, "bandwidth", lambda _: (4800.0, "datasheet"))
    return rung.Setting(plan.Problem(64, 4096), 64, torch.float32, torch.device("cpu"))


# ---- what ships


@on_cpu
def test_production_keeps_the_planners_block(matrix_setting: rung.Setting):
    """On a GPU a sweep may find a better block for the rung; what ships does not sweep."""
    name, setting, x = "v3_register_cache", matrix_setting, torch.randn(64, 4096)
    planned = rung.run(rung.blank(KERNELS[name]), KERNELS[name], setting, x)
    other = planned.block // 2
    swept = bench.Timing(30.0, 29.0, 31.0, block=other, every={other: 30.0, planned.block: 40.0})
    timings = dict.fromkeys(("copy", "torch", name), swept)
    timings["production"] = bench.Timing(40.0, 39.0, 41.0, block=planned.block)
    shipped = ladder._production(planned, "because", setting, timings, x)
    assert (shipped.name, shipped.kernel, shipped.chosen_because) == ("production", name, "because")
    assert (shipped.block, shipped.median_us, shipped.p20_us) == (planned.block, 40.0, 39.0)
    assert shipped.of_copy == pytest.approx(0.75)
    assert shipped.gbs == pytest.approx(2 * 64 * 4096 * 4 / 40e3)
    assert shipped.every_us == {}
    assert (shipped.ok, shipped.is_counted) == (True, True)
    assert shipped.exps == shipped.exps_predicted
    # With --block all have the same block, and the rung's time is production's.
    del timings["production"]
    assert ladder._production(planned, "because", setting, timings, x).median_us == 30.0


@on_cpu
def test_production_has_no_time_where_it_failed(matrix_setting: rung.Setting):
    name, x = "v3_register_cache", torch.randn(64, 4096)
    planned = dataclasses.replace(rung.blank(KERNELS[name]), ok=True)
    timings = dict.fromkeys(("copy", "torch", name), bench.Timing(30.0, 29.0, 31.0))
    timings["production"] = bench.Timing(math.nan, math.nan, math.nan, refused="no memory")
    shipped = ladder._production(planned, "because", matrix_setting, timings, x)
    assert (shipped.median_us, shipped.reasons) == (None, ("no memory",))
    wrong = dataclasses.replace(planned, ok=False)
    assert ladder._production(wrong, "because", matrix_setting, timings, x).median_us is None


# ---- rivals


def filling(x: Tensor, y: Tensor) -> None:
    torch.softmax(x, -1, out=y)


def returning(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@on_cpu
@pytest.mark.parametrize("call", [filling, returning])
def test_rival_has_a_row(
    monkeypatch: pytest.MonkeyPatch, matrix_setting: rung.Setting, call: rotation.Call
):
    monkeypatch.setitem(bench.RIVALS, "compile", lambda: call)
    timings = {
        "copy": bench.Timing(30.0, 29.0, 31.0),
        "torch": bench.Timing(80.0, 79.0, 81.0),
        "compile": bench.Timing(40.0, 39.0, 41.0),
    }
    row = ladder._rival("compile", timings, matrix_setting, torch.randn(64, 4096))
    assert (row.name, row.backend, row.ok, row.rows) == ("torch.compile", "torch", True, 64)
    assert (row.median_us, row.of_copy, row.of_torch) == (40.0, 0.75, 2.0)
    assert row.reads is None
    header = results.Header("", "", "NVIDIA H200", "", 64, 64, 4096, "float32", (), {})
    assert re.search(r"torch.compile +40.0", printed(Run(header, (row,)), 80))


@on_cpu
def test_rival_that_fails_has_no_time(
    monkeypatch: pytest.MonkeyPatch, matrix_setting: rung.Setting
):
    timings = dict.fromkeys(("copy", "torch", "compile"), bench.Timing(40.0, 39.0, 41.0))
    monkeypatch.setitem(bench.RIVALS, "compile", lambda: lambda x, y: y.fill_(0.5))
    row = ladder._rival("compile", timings, matrix_setting, torch.randn(64, 4096))
    assert (row.ok, row.median_us) == (False, None)
    assert "should be" in row.why
    timings["compile"] = bench.Timing(math.nan, math.nan, math.nan, refused="no inductor")
    row = ladder._rival("compile", timings, matrix_setting, torch.randn(64, 4096))
    assert (row.ok, row.median_us, row.reasons) == (None, None, ("no inductor",))


@on_cpu
@pytest.mark.parametrize("block", [0, 256])
def test_rivals_are_timed_with_and_without_a_sweep(
    monkeypatch: pytest.MonkeyPatch, matrix_setting: rung.Setting, block: int
):
    """Beside one rung, which is not what the planner would choose; torch always comes along."""
    timing = bench.Timing(40.0, 39.0, 41.0)

    def at_once(_: object, calls: dict[str, rotation.Call]) -> dict[str, bench.Timing]:
        return dict.fromkeys(calls, timing)

    def swept(x: Tensor, kernels: list[str], **more: object) -> dict[str, bench.Timing]:
        assert more["production"] is None
        return dict.fromkeys(["copy", *more["rivals"], *kernels], timing)  # type: ignore[misc]

    monkeypatch.setattr(rotation, "Buffers", lambda x: None)
    monkeypatch.setattr(bench, "interleaved", at_once)
    monkeypatch.setattr(bench, "time_ladder", swept)
    monkeypatch.setitem(bench.RIVALS, "compile", lambda: returning)
    setting, x = dataclasses.replace(matrix_setting, block=block), torch.randn(64, 4096)
    found = {"safe": rung.run(rung.blank(KERNELS["safe"]), KERNELS["safe"], setting, x)}
    timings = ladder._time(found, [KERNELS["safe"]], setting, x, ["compile"], "", lambda _: None)
    assert {"copy", "torch", "compile", "safe"} == set(timings)
    assert {name: row.median_us for name, row in found.items()} == {
        "safe": 40.0, "torch.compile": 40.0,
    }  # fmt: skip


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ladder_is_timed_on_a_gpu():
    run = climb(inputs.random(1024, 4096, torch.float32, "cuda"))
    assert run.is_right
    assert run.header.is_cold_l2
    assert run.header.copy_gbs
    for result in run.results:
        assert not result.reasons, result
        assert result.median_us is not None, result
        assert result.of_copy is not None, result
        if result.backend == "cuda" and result.name != "production" and host.compiler():
            assert (result.reads, result.exps) == (READS[result.kernel], result.exps_predicted)
    one = climb(inputs.random(1024, 4096, torch.float32, "cuda"), ["safe", "production"], block=256)
    assert one.results[0].block == 256  # what ships keeps its own cut


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("block", [0, 256])
def test_rival_is_timed_on_a_gpu(block: int):
    """Without production, too."""
    x = inputs.random(1024, 4096, torch.float32, "cuda")
    run = climb(x, ["safe"], block=block, rivals=("compile",))
    assert [result.name for result in run.results] == ["safe", "torch.compile"]
    assert all(result.median_us or result.reasons for result in run.results), run.results


# ---- in the lessons


def test_a_column_of_times_has_dashes_and_the_reasons_are_below(whole: Run):
    why = "v3_register_cache holds at most 8 columns; this row has 9: v2 has no such limit"
    refused = Result("v3_register_cache", "v3_register_cache", "cuda", "", reasons=(why,))
    known = Result("safe", "safe", "cuda", "", median_us=63.7, block=256)
    run = Run(whole.header, (known, refused))
    name = laddertables._title(run)
    for text in (laddertables.lesson_table([run, run], "v3_register_cache"),
                 laddertables.cells_table([run, run])):  # fmt: skip
        rows = [line for line in text.splitlines() if line.startswith(f"| {name}")]
        assert len(rows) == 2
        assert all("— |" in row and "holds" not in row for row in rows)
        assert text.count("—: v3_register_cache holds at most 8 columns; this row has 9.") == 1
    assert "—:" not in laddertables.lesson_table([run], "safe")
    never = dataclasses.replace(refused, reasons=())
    page = laddertables.lesson_table([Run(whole.header, (never,))], never.name)
    assert "\n\n—: not timed.\n\n" in page
