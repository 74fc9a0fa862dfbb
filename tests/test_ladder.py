"""The ladder: counts as predicted, wrong kernels found out, rows cut to what a CPU can."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ladder_kit import CHEAP, CUDA_RUNGS, READS, by_name, climb, on_cpu, printed
from online_softmax import jit, plan
from online_softmax.catalogue import KERNELS, Kernel
from online_softmax.cuda import host
from online_softmax.lab import budget, inputs, ladder, rung
from online_softmax.lab.results import Figures, Run
from online_softmax.triton import Build

pytestmark = pytest.mark.usefixtures("compiler")

# ---- right, and counted


@on_cpu
def test_every_line_agrees_with_float64(whole: Run):
    assert [result.name for result in whole.results] == list(ladder.NAMES)
    assert {r.name: r.ok for r in whole.results} == dict.fromkeys(ladder.NAMES, True)
    assert whole.is_right
    assert not whole.is_timed


@on_cpu
@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [
        (3, 1000, torch.float32),
        (5, 33, torch.bfloat16),
        (2, 9001, torch.float16),
        (1, 1, torch.float32),
        (70, 8, torch.float16),
        (2, 40000, torch.float32),
    ],
    ids=str,
)
def test_counts_are_what_was_predicted(rows: int, cols: int, dtype: torch.dtype):
    run = climb(inputs.random(rows, cols, dtype), CUDA_RUNGS)
    for result in run.results:
        if cols > plan.V3_MAX_COLS and result.name == "v3_register_cache":
            assert result.ok is None
            continue
        assert result.ok, result.why
        assert result.is_counted
        assert (result.reads, result.writes) == (READS[result.name], 1.0), result.name
        assert result.exps == result.exps_predicted, result.name


@on_cpu
def test_triton_is_predicted_and_says_so(whole: Run):
    pytest.importorskip("triton")
    found = by_name(whole)
    for name, reads in (("triton_two_pass", 3.0), ("triton_online", 2.0)):
        result = found[name]
        assert not result.is_counted
        assert (result.reads, result.writes, result.exps) == (reads, 1.0, None)
        tile = KERNELS[name].numbers(plan.Problem(3, 1000)).tile
        assert result.exps_predicted is not None
        assert 2 * tile / 1000 <= result.exps_predicted <= 4 * tile / 1000


@on_cpu
def test_production_is_the_planners_choice(whole: Run):
    found = by_name(whole)
    production = found["production"]
    assert production.kernel == "registers"
    assert production.chosen_because.startswith("a block a row, 64 threads of 4 vectors")
    assert production.reads == found["v3_register_cache"].reads == 1.0
    alone = climb(inputs.random(1, 70000, torch.float32), ["production"]).results
    assert [(r.name, r.kernel, r.ok) for r in alone] == [("production", "split", True)]


@on_cpu
def test_the_last_line_says_which_architecture_and_why(whole: Run):
    page = " ".join(printed(whole, 160).split())
    assert (
        "production is what softmax would run on a GPU; without one it is chosen for sm_80, the "
        "first of sm_80 and sm_90a (--arch names others): registers: a block a row, 64 threads"
    ) in page
    header = dataclasses.replace(whole.header, arches=("sm_90a",))
    page = " ".join(printed(Run(header, whole.results), 160).split())
    assert "chosen for sm_90a, which was asked for (--arch" in page
    header = dataclasses.replace(header, device="NVIDIA H200")
    assert "production here is registers: " in printed(Run(header, whole.results), 160)


# ---- registers


@on_cpu
def test_registers_without_a_gpu(whole: Run):
    if jit.missing():
        pytest.skip(str(jit.missing()))
    for name in ladder.RUNGS:
        figures = by_name(whole)[name].figures
        assert [f.arch for f in figures] == ["sm_80", "sm_90a"], name
        assert not any(f.missing for f in figures), figures
        assert all(f.registers > 0 and 0 < f.occupancy <= 1 for f in figures), figures
        assert all(f.spill_bytes == 0 and f.stack_bytes == 0 for f in figures), figures
    assert by_name(whole)["torch"].figures == ()


@on_cpu
def test_triton_is_compiled_while_kernels_run(monkeypatch: pytest.MonkeyPatch):
    """And where Triton cannot compile, its sentence stands in the place of figures."""
    pytest.importorskip("triton")
    ran, run_all = threading.Event(), ladder._run_all

    def compile_all(wanted: list[Build]) -> list[str]:
        assert {build.is_whole for build in wanted} == {False}
        assert ran.wait(60), "the kernels waited for the compiler"
        return [f"no {build.kernel} for {build.arch}" for build in wanted]

    monkeypatch.setattr(rung, "compile_all", compile_all)
    monkeypatch.setattr(ladder, "_run_all", lambda *given: (run_all(*given), ran.set()))
    run = climb(inputs.random(2, 40, torch.float32), ["triton_online"], arches=["sm_80"])
    assert run.results[0].figures == (Figures("sm_80", missing="no online for sm_80"),)
    assert "No registers: no online for sm_80." in printed(run, 80)


def test_registers_of_an_architecture_without_facts():
    setting = rung.Setting(plan.Problem(2, 64), 2, torch.float32, torch.device("cpu"))
    figures = rung.figures(rung.blank(KERNELS["safe"]), setting, "sm_103", {})
    assert figures is not None
    assert "no facts about sm_103" in figures.missing


@on_cpu
def test_special_values_are_told_and_right():
    x = torch.randn(6, 40)
    x[1], x[2, 3], x[3, 4], x[4, 5] = -math.inf, math.inf, math.nan, -math.inf
    run = climb(inputs.from_tensor(x, "mine"), CHEAP)
    assert run.is_right
    assert any("-inf" in note and "NaN" in note for note in run.header.notes)


# ---- wrong kernels


def wrong(x: Tensor, y: Tensor, numbers: plan.Numbers) -> None:
    y.copy_(x.softmax(-1) * 1.001)


def incomplete(x: Tensor, y: Tensor, numbers: plan.Numbers) -> None:
    y[:, :-1] = x.softmax(-1)[:, :-1]


def spilling(x: Tensor, y: Tensor, numbers: plan.Numbers) -> None:
    y.copy_(x.softmax(-1))
    y.as_strided((1,), (1,), y.storage_offset() + y.numel()).zero_()


def hanging(x: Tensor, y: Tensor, numbers: plan.Numbers) -> None:
    raise host.Fault("v1: block 0 waits for ever")


@on_cpu
@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (wrong, "should be"),
        (incomplete, "is nan"),
        (spilling, "1 elements outside"),
        (hanging, "for ever"),
    ],
)
def test_wrong_kernel_is_found_out(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., None], why: str
):
    name = "v1_warp_shuffle"
    monkeypatch.setitem(KERNELS, name, dataclasses.replace(KERNELS[name], run=kernel))
    run = climb(inputs.random(4, 50, torch.float32), ["safe", name, "torch"])
    assert {r.name: r.ok for r in run.results} == {"safe": True, name: False, "torch": True}
    assert not run.is_right
    assert why in by_name(run)[name].why
    page = printed(run, 80)
    assert "WRONG" in page
    assert "1 of 3 lines disagree" in page


# ---- what cannot run


@on_cpu
def test_refusal_is_a_row_with_its_reason():
    run = climb(inputs.random(2, 40000, torch.float32), ["v3_register_cache", "v2_vectorized"])
    refused = by_name(run)["v3_register_cache"]
    assert refused.ok is None
    assert "holds at most 32768 columns" in refused.reasons[0]
    page = " ".join(printed(run, 80).split())
    assert "not run" in page
    assert "v3_register_cache did not run:" in page
    assert "The line that ran agrees with float64." in page


@on_cpu
def test_block_too_small_for_a_row_in_registers():
    run = climb(inputs.random(2, 4096, torch.float32), ["v3_register_cache", "safe"], block=32)
    found = by_name(run)
    assert "holds at most 1024 columns (32 threads" in found["v3_register_cache"].reasons[0]
    assert found["safe"].ok
    assert found["safe"].block == 32


@on_cpu
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "compiler", lambda: None)
    run = climb(inputs.random(2, 64, torch.float32), ["safe", "torch"])
    found = by_name(run)
    assert "install g++ or clang++" in found["safe"].reasons[0]
    assert found["torch"].ok


@on_cpu
def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> jit.Resources:
        raise jit.Unavailable("no NVRTC here: install it")

    monkeypatch.setattr(jit, "resources", refuse)
    run = climb(inputs.random(2, 64, torch.float32), ["safe"], arches=["sm_80"])
    assert run.results[0].figures == (Figures("sm_80", missing="no NVRTC here: install it"),)
    assert "No registers: no NVRTC here: install it." in printed(run, 80)


# ---- rows


@on_cpu
def test_rows_are_cut_to_the_seconds_and_it_says_so():
    run = climb(inputs.random(10**6, 128, torch.float32), ["safe", "v4_grid_stride"], seconds=0.3)
    rows = run.header.rows
    assert 1 <= rows < 10**6
    assert rows & (rows - 1) == 0
    assert run.header.rows_asked == 10**6
    assert f"{rows:,} of 1,000,000 rows" in run.header.notes[0]
    assert "not for speed" in run.header.notes[0]
    assert run.is_right


@on_cpu
def test_the_interpreter_has_a_share_of_the_seconds(monkeypatch: pytest.MonkeyPatch):
    """Cheap rows of the other kernels leave it no more; without others it has all rows that fit."""
    seconds: dict[str, float] = {}

    def row_seconds(_: object, records: list[Kernel], __: object, given: float, n: int) -> float:
        seconds["+".join(record.name for record in records)] = given
        return 1.0 if records and records[0].backend == "triton" else 0.001

    monkeypatch.setattr(budget, "_row_seconds", row_seconds)
    monkeypatch.setattr(rung, "run", lambda result, *_: result)
    matrix, names = inputs.random(4096, 8, torch.float32), ("safe", "triton_online")
    setting = rung.Setting(plan.Problem(4096, 8), 4096, torch.float32, torch.device("cpu"))
    records = [KERNELS[name] for name in names]
    cut = budget.affordable(setting, records, matrix, 40.0, lambda _: None)
    assert seconds == {"safe": 30.0, "triton_online": 10.0}
    assert (cut.rows, cut.interpreted_rows) == (4096, 8)
    cut = budget.affordable(setting, records[1:], matrix, 40.0, lambda _: None)
    assert seconds["triton_online"] == 40.0
    assert (cut.rows, cut.interpreted_rows) == (4096, 32)


def test_fixed_grid_is_cut_as_its_rows_are():
    problem = plan.Problem(4096, 4096)
    setting = rung.Setting(problem, 64, torch.float32, torch.device("cpu"))
    blocks = setting.numbers(KERNELS["v4_grid_stride"]).blocks
    assert 1 < blocks < 64  # so that blocks loop, as they do on a GPU
    assert setting.numbers(KERNELS["safe"]).blocks == 0


def test_spread_takes_the_ends():
    x = torch.arange(10).unsqueeze(1)
    assert rung.spread(x, 4).flatten().tolist() == [0, 3, 6, 9]
    assert rung.spread(x, 1).flatten().tolist() == [0]
    assert rung.spread(x, 10) is x
    assert rung.checked_rows(torch.empty(5, 2**30, device="meta")) == 2
