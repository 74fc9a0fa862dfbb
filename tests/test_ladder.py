"""The ladder: counts as predicted, wrong kernels found out, rows cut to what a CPU can, records."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from online_softmax import jit, plan
from online_softmax.catalogue import KERNELS
from online_softmax.cuda import host
from online_softmax.lab import bench, info, inputs, ladder, plot, results, rung, table
from online_softmax.lab.inputs import Matrix
from online_softmax.lab.results import Figures, Result, Run
from online_softmax.triton import Build

CUDA_RUNGS = [name for name in ladder.RUNGS if KERNELS[name].backend == "cuda"]
READS = dict(zip(CUDA_RUNGS, (3, 2, 2, 2, 1, 2, 2), strict=True))
CHEAP = [*CUDA_RUNGS, "torch", "production"]  # Triton's interpreter takes milliseconds a row

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the ladder takes the GPU here")


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if not torch.cuda.is_available() and host.compiler() is None:
        lacks = "host execution needs g++ or clang++"
        pytest.fail(lacks) if os.environ.get("CI") else pytest.skip(lacks)


@pytest.fixture(scope="module")
def whole() -> Run:
    """Every line, small."""
    return climb(inputs.random(3, 1000, torch.float32))


def climb(matrix: Matrix, only: Sequence[str] = (), **more: object) -> Run:
    return ladder.climb(matrix, only=only, **{"seconds": 20.0, **more})  # type: ignore[arg-type]


def by_name(run: Run) -> dict[str, Result]:
    return {result.name: result for result in run.results}


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
    assert production.kernel == "v3_register_cache"
    assert "1000 columns fit" in production.chosen_because
    assert production.reads == found["v3_register_cache"].reads == 1.0
    alone = climb(inputs.random(1, 70000, torch.float32), ["production"]).results
    assert [(r.name, r.kernel, r.ok) for r in alone] == [("production", "v5_split_row", True)]


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


@pytest.fixture
def matrix_setting(monkeypatch: pytest.MonkeyPatch) -> rung.Setting:
    """64 x 4096 as on a GPU, for hand-made timings."""
    monkeypatch.setattr(info, "bandwidth", lambda _: (4800.0, "datasheet"))
    return rung.Setting(plan.Problem(64, 4096), 64, torch.float32, torch.device("cpu"))


def filling(x: Tensor, y: Tensor) -> None:
    torch.softmax(x, -1, out=y)


def returning(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@on_cpu
@pytest.mark.parametrize("call", [filling, returning])
def test_rival_has_a_row(
    monkeypatch: pytest.MonkeyPatch, matrix_setting: rung.Setting, call: bench.Call
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

    def at_once(_: object, calls: dict[str, bench.Call]) -> dict[str, bench.Timing]:
        return dict.fromkeys(calls, timing)

    def swept(x: Tensor, kernels: list[str], **more: object) -> dict[str, bench.Timing]:
        assert more["production"] is None
        return dict.fromkeys(["copy", *more["rivals"], *kernels], timing)  # type: ignore[misc]

    monkeypatch.setattr(bench, "Buffers", lambda x: None)
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
    assert "All 1 lines that ran agree" in page


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


# ---- records


def timed(run: Run) -> Run:
    """The same run as a GPU might have timed it."""
    us = {name: 40.0 + 7 * i for i, name in enumerate(ladder.NAMES)} | {"v0_thread": 1244.0}
    copy = 35.0
    return Run(
        dataclasses.replace(
            run.header, device="NVIDIA H200", copy_us=copy, copy_gbs=3834.8, datasheet_gbs=4800.0,
            datasheet="datasheet of the H200", is_cold_l2=True, clock=ladder.CLOCK,
        ),
        tuple(
            dataclasses.replace(
                r, median_us=us[r.name], p20_us=us[r.name] - 1, p80_us=us[r.name] + 1,
                gbs=134217.7 / us[r.name], of_copy=copy / us[r.name], of_datasheet=0.5,
                of_torch=us["torch"] / us[r.name], every_us={"256": us[r.name]},
            )
            for r in run.results
        ),
    )  # fmt: skip


@on_cpu
def test_results_are_read_as_they_were_saved(whole: Run, tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    for run in (whole, timed(whole)):
        results.save(run, path)
        assert results.read(path) == [run]
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["kind"] for line in lines] == ["header"] + ["rung"] * len(ladder.NAMES)
    path.write_text(whole.to_lines() + timed(whole).to_lines())
    assert results.read(path) == [whole, timed(whole)]
    path.write_text(json.dumps(whole.to_json(), indent=2))
    assert results.read(path) == [whole]


@on_cpu
def test_results_name_the_code_that_made_them(whole: Run, tmp_path: Path):
    versions = whole.header.versions
    assert re.fullmatch(r"[0-9a-f]{12}", versions["sources"] or "")
    assert "commit" in versions
    older = dataclasses.replace(whole.header, versions={"torch": "2.11.0"})
    path = tmp_path / "older.jsonl"
    results.save(Run(older, whole.results), path)
    assert results.read(path)[0].header.versions == {"torch": "2.11.0"}


def test_json_has_no_nan():
    result = Result("safe", "safe", "cuda", "", max_error=math.nan, every_us={"32": math.inf})
    header = results.Header("", "", "cpu", "", 1, 1, 1, "float32", (), {})
    text = Run(header, (result,)).to_lines()
    rung_line = json.loads(text.splitlines()[1])
    assert (rung_line["max_error"], rung_line["every_us"]) == (None, {"32": None})


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", '{"kind": "rung"}', '"kind"', '{"kind": "header"}', "hello"]
)
def test_other_files_are_not_results(tmp_path, text: str):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no results") as caught:
        results.read(path)
    assert "\n" not in str(caught.value)


def test_what_a_later_version_adds_is_passed_over(tmp_path):
    header = results.Header("", "", "cpu", "", 1, 1, 1, "float32", (), {})
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"kind": "header", "new": 1, **dataclasses.asdict(header)}))
    assert results.read(path) == [Run(header, ())]


# ---- pages and pictures


def printed(run: Run, width: int) -> str:
    text = io.StringIO()
    table.render(run, Console(file=text, width=width))
    return text.getvalue()


@on_cpu
@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("is_timed", [False, True], ids=["counted", "timed"])
def test_page_fits_and_says_all(whole: Run, width: int, is_timed: bool):
    page = printed(timed(whole) if is_timed else whole, width)
    assert max(map(len, page.splitlines())) <= width
    assert "\u2026" not in page, "a cell is cut off"
    for word in (*ladder.NAMES, "max error", "reads", "exps", "regs", "spills", "warps"):
        assert word in page, word
    assert ("of copy" in page) == is_timed
    assert "All 11 lines that ran agree with float64." in page
    assert "production " in page


@on_cpu
def test_page_fits_with_the_widest_cells(whole: Run):
    refused = dataclasses.replace(whole.results[0], ok=None, reasons=("no",), block=1024)
    for run in (whole, timed(whole)):
        page = printed(Run(run.header, (refused, *whole.results[1:])), 80)
        assert "\u2026" not in page, "a cell is cut off"
        assert re.search(r"not run .* 1024\n", page)


@on_cpu
@pytest.mark.parametrize("is_timed", [False, True], ids=["counted", "timed"])
def test_picture_is_drawn_and_no_text_overlaps(whole: Run, is_timed: bool, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    run = timed(whole) if is_timed else whole
    plot.draw(run, tmp_path / "new" / "ladder.png")
    data = (tmp_path / "new" / "ladder.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    figure = plot.picture(run)
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    boxes = [(t.get_text(), t.get_window_extent().shrunk(0.98, 0.9)) for t in texts]
    assert len({text for text, _ in boxes} & set(ladder.NAMES)) >= len(ladder.RUNGS)
    for i, (one, box) in enumerate(boxes):
        for other, second in boxes[i + 1 :]:
            assert not box.overlaps(second) or one == other, f"{one!r} covers {other!r}"


def test_nothing_to_draw():
    pytest.importorskip("matplotlib")
    header = results.Header("", "", "cpu", "", 1, 1, 1, "float32", (), {})
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.picture(Run(header, ()))


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
        if result.backend == "cuda" and host.compiler():
            assert (result.reads, result.exps) == (READS[result.kernel], result.exps_predicted)
    one = climb(inputs.random(1024, 4096, torch.float32, "cuda"), ["safe", "production"], block=256)
    assert [result.block for result in one.results] == [256, 256]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("block", [0, 256])
def test_rival_is_timed_on_a_gpu(block: int):
    """Without production, too."""
    x = inputs.random(1024, 4096, torch.float32, "cuda")
    run = climb(x, ["safe"], block=block, rivals=("compile",))
    assert [result.name for result in run.results] == ["safe", "torch.compile"]
    assert all(result.median_us or result.reasons for result in run.results), run.results
