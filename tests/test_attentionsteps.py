"""The steps of attention's kernel: each is right, builds, and has its row whatever happens."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rows_kit import gpu

pytest.importorskip("triton")

from online_softmax import triton as kernels
from online_softmax.arches import ARCHES
from online_softmax.lab import attentionsteps, stepbuilds
from online_softmax.lab.bench import Timing
from online_softmax.lab.fusedsizes import attention
from online_softmax.lab.grid import Cell
from online_softmax.lab.rotation import Rotation
from online_softmax.lab.stepkernel import NAMES, SHIPPED, STEPS, Variant, launch, variants
from online_softmax.lab.steptables import Row, built_table, timed_table

ARCH = "sm_90a"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARPS_OF_ROLES = 12  # one group that loads, two that calculate
SMALL = {"cpu": (32, 16, 4, 2, 64), "cuda": (128, 64, 4, 2, 256)}[DEVICE]  # the last: length


def small(step: str, head_dim: int, causal: bool) -> Variant:
    return Variant(step, head_dim, causal, *SMALL[:4])


def checked(variant: Variant, length: int = SMALL[4]) -> float:
    return stepbuilds.checked(variant, ARCH, DEVICE, length, heads=2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("step", NAMES)
def test_every_step_is_attention(step: str, causal: bool) -> None:
    checked(small(step, 64, causal))


@pytest.mark.parametrize("step", NAMES)
def test_the_wider_head_too(step: str) -> None:
    checked(small(step, 128, True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("step", ["natural exp", "folded exp2", "whole tiles"])
def test_without_descriptors_any_length_is_right(step: str, causal: bool) -> None:
    checked(small(step, 64, causal), 45)
    checked(small(step, 64, causal), 5)


def test_descriptors_say_which_length_they_take() -> None:
    with pytest.raises(ValueError, match="length is 45, where a multiple of "):
        checked(small("descriptors", 64, False), 45)
    q, k = torch.empty(1, 2, 64, 64), torch.empty(1, 2, 32, 64)
    with pytest.raises(ValueError, match="where one shape with 64 wanted"):
        launch(small("whole tiles", 64, False), q, k, k, ARCH)


def test_a_step_has_those_before_it() -> None:
    launches = {}
    for step in STEPS:
        q = torch.empty((1, 2, 256, 64), dtype=torch.bfloat16, device="meta")
        launches[step] = launch(small(step, 64, True), q, q, q, ARCH)[0].arguments
    on = [[launches[step][name] for step in STEPS] for name in ("FOLDS", "SPLITS", "TMA")]
    assert on == [[at >= first for at in range(len(STEPS))] for first in (1, 2, 3)]
    assert [launches[step]["SPECIALIZES"] for step in STEPS] == [False] * 4 + [True]


def test_a_wrong_output_is_seen() -> None:
    right = torch.randn(2, 64, 64)
    wrong = right.clone()
    wrong[:, 32:40] = wrong[:, 40:48]  # a tile of keys too many or too few
    assert stepbuilds.judged(right, right) == 0
    for bad in (wrong, 1.01 * right, right * torch.nan):
        with pytest.raises(ValueError, match="wrong: its error is"):
            stepbuilds.judged(bad, right)


# ---- built


@pytest.fixture(scope="module")
def built() -> dict[Variant, Any]:
    """A variant a step of the harder kind, and the warp groups of the other."""
    first = {v.step: v for v in reversed(variants(128, True))}
    chosen = [first[step] for step in NAMES]
    chosen.append(next(v for v in variants(64, False) if v.step == "warp groups"))
    return stepbuilds.asked(chosen, ARCH, False, 1)


def test_every_step_builds_and_fits(built: dict[Variant, Any]) -> None:
    for variant, found in built.items():
        assert not isinstance(found, str), (variant, found)
        assert not found["missing"], found
        assert found["shared_bytes"] <= ARCHES[ARCH].shared_bytes_block, variant
        assert found["wgmma"] > 0, variant
        assert found["exp2"] > 0, variant


def test_the_machine_code_has_what_a_step_asks_for(built: dict[Variant, Any]) -> None:
    for variant, found in built.items():
        by_tma = variant.step in ("descriptors", "warp groups")
        assert (found["tma_loads"] > 0, found["cp_async"] > 0) == (by_tma, not by_tma), variant
        if variant.step == "warp groups":
            assert (found["all_warps"], found["roles"]) == (WARPS_OF_ROLES, 3)
            assert found["setmaxnreg"] > 0
            assert {40, 232} <= set(found["registers_of_roles"])
            assert found["spill_store_bytes"] == 0
        else:
            assert (found["all_warps"], found["roles"]) == (variant.warps, 1)
            assert not found["registers_of_roles"]
            assert found["setmaxnreg"] == 0


def test_a_refused_build_and_a_built_one_are_rows(built: dict[Variant, Any]) -> None:
    (variant,) = (v for v in built if v.step == SHIPPED)
    (found,) = stepbuilds.asked([variant], "sm_999", False, 1).values()
    assert isinstance(found, str)
    assert "sm_999" in found
    head, _, *lines = built_table({**built, replace(variant, stages=1): found}).splitlines()
    assert len(lines) == len(built) + 1
    assert len({line.count("|") for line in (head, *lines)}) == 1
    assert any("| 40 120 232 256 |" in line for line in lines)
    assert found in lines[-1]


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = """
import json, sys, time
print(json.dumps("started"), flush=True)
for question in json.load(sys.stdin):
    if question["hangs"]:
        time.sleep(60)
    print(json.dumps(question), flush=True)
# {module}
"""
    monkeypatch.setattr(kernels, "PROGRAM", program)
    questions = [{"hangs": False}, {"hangs": True}, {"hangs": False}]
    first, second, third = kernels.ask_all("none", questions, ["a", "b", "c"], 2.0)
    assert (first, third) == (questions[0], questions[2])
    assert second == "Triton died of b: still at work after 2 s"


# ---- timed, by a clock that is not one

FAST = {"natural exp": 400.0, "folded exp2": 320.0, "descriptors": 200.0, SHIPPED: 250.0}
SHAPE = attention(1, 2, SMALL[4], 64, True)
CELL = Cell("attention", "bfloat16", *SHAPE)


def fake_clock(sets: Rotation, calls: dict[str, Any], rounds: int) -> dict[str, Timing]:
    found = {}
    for name in calls:
        step, _, numbers = name.partition(": ")
        us = FAST[step] + (50.0 if numbers.endswith("1 stages") else 0.0)
        found[name] = Timing.of([[us], [us + 1], [us + 2]][:rounds])
        if step == "folded exp2" and rounds == 1 and numbers.endswith("1 stages"):
            found[name] = Timing.refusal(RuntimeError("no such launch"))
    return found


def asked(given: list[Variant], *_: Any) -> dict[Variant, Any]:
    found: dict[Variant, Any] = {}
    for step in FAST:
        found[small(step, 64, True)] = {"rms": 0.001}
        found[replace(small(step, 64, True), stages=1)] = {"rms": 0.002}
    found[small("whole tiles", 64, True)] = "it does not build"
    found[small("warp groups", 64, True)] = "Triton died of it"
    return found


def timed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[Row]:
    monkeypatch.setattr(stepbuilds, "asked", asked)
    said: list[str] = []
    (rows,) = attentionsteps.timed_rows(
        [CELL], torch.device(DEVICE), ARCH, seconds, 1, fake_clock, said.append
    )
    assert "compiled and checked by 1 processes" in said[0]
    return rows


def test_rows_have_the_best_tiles_and_what_a_step_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = timed(monkeypatch, 100.0)
    assert [row.step for row in rows] == list(NAMES)
    by_step = {row.step: row for row in rows}
    first, folded, whole, tma, roles, shipped = rows
    assert first.rounds_us == (400.0, 401.0, 402.0)
    assert first.tflops == pytest.approx(CELL.flops / 401e6)
    assert first.over is None
    assert folded.over == pytest.approx(401 / 321)
    assert tma.over == pytest.approx(321 / 201)  # of the last step that has a time
    assert shipped.over is None
    assert (whole.tflops, whole.why) == (None, "it does not build")
    assert roles.why == "Triton died of it"
    best = small("natural exp", 64, True).numbers
    assert {by_step[step].tiles for step in FAST} == {best}
    assert first.tried_us == {best: 400.0, best.replace("2 stages", "1 stages"): 450.0}
    assert list(folded.refused.values()) == ["RuntimeError: no such launch"]
    assert first.rms == 0.001
    for row in rows:
        assert Row(**{**json.loads(json.dumps(asdict(row))), "rounds_us": row.rounds_us}) == row
    lines = timed_table(rows).splitlines()
    assert lines[2] == f"| 64 | causal | natural exp | {best} | {first.tflops:.0f} | — |"
    assert lines[3].endswith(f"| {folded.tflops:.0f} | +24.9 % |")
    assert lines[4] == "| 64 | causal | whole tiles | it does not build | — | — |"


def test_after_the_seconds_no_cell_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = timed(monkeypatch, -1.0)
    assert [row.step for row in rows] == list(NAMES)
    assert {row.why for row in rows} == {"not timed: -1 seconds were over"}


def test_an_output_unlike_the_shipped_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attentionsteps._call

    def call(variant: Variant, arch: str) -> Any:
        off = 2.0 if variant.step == "descriptors" else 1.0
        return lambda *tensors: right(variant, arch)(*tensors) * off

    monkeypatch.setattr(attentionsteps, "_call", call)
    row = next(row for row in timed(monkeypatch, 100.0) if row.step == "descriptors")
    assert row.tflops is None
    assert row.why.startswith("ValueError: wrong: its error is ")


# ---- the command


def test_the_cells_are_the_lessons() -> None:
    whole = attentionsteps.cells()
    assert [attentionsteps.kind(cell) for cell in whole] == [
        (128, False), (128, True), (64, False), (64, True),
    ]  # fmt: skip
    assert {cell.flops for cell in whole} == {4 * 16384**2 * 2048, 2 * 16384**2 * 2048}
    assert attentionsteps.cells("1/4") == [whole[1]]


@gpu
def test_on_a_gpu_every_variant_is_right_or_says_why() -> None:
    given = [v for v in variants(128, True) if v.step in ("descriptors", "warp groups", SHIPPED)]
    for variant, found in stepbuilds.asked(given, ARCH, True, 4).items():
        assert not isinstance(found, str), (variant, found)
        assert found["rms"] <= stepbuilds.BOUND
