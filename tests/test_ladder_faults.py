"""The faults that textbook versions of the rungs have: each shown on the textbook's form, and
absent from ours. The textbook's kernels stand in tests/textbook; Triton's two faults are in
test_triton.py."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from online_softmax import jit, softmax
from online_softmax.catalogue import KERNELS, problem_of
from online_softmax.cuda import host
from online_softmax.cuda.launch import LADDER, Launch
from online_softmax.lab import judge
from online_softmax.plan import Numbers, Problem

TEXTBOOK = Path(__file__).parent / "textbook"
RUNGS = [rung.name for rung in LADDER]

if host.compiler() is None and not os.environ.get("CI"):
    pytest.skip("host execution needs g++ or clang++", allow_module_level=True)


def textbook(name: str, x: torch.Tensor, block: int) -> Launch:
    y = torch.full(x.shape, torch.nan)
    args = (x, y, x.shape[0], x.shape[1], x.stride(0))
    return Launch(str(TEXTBOOK / f"{name}.cu"), f"{name}<float>", args, x.shape[0], block)


def ours(name: str, x: torch.Tensor, block: int | None = None) -> torch.Tensor:
    y = torch.full(x.shape, torch.nan, dtype=x.dtype)
    record = KERNELS[name]
    problem = replace(problem_of(x), device="cuda")
    record.run(x, y, record.numbers(problem, block))
    return y


def test_merging_two_empty_lanes() -> None:
    """Eight warp states in thirty-two lanes: exp(-inf - -inf) is NaN, and spoils every row."""
    x = torch.randn(3, 1000)
    launch = textbook("unguarded_merge", x, block=256)
    host.launch(launch)
    assert launch.args[1].isnan().all()
    for name in RUNGS:
        verdict = judge.check(ours(name, x, 256), x)
        assert verdict.ok, f"{name}: {verdict.why}"


def test_a_vector_cast_on_a_misaligned_row() -> None:
    """Row 1 of 33 floats starts 4 bytes off: the GPU stops with 'misaligned address'."""
    x = torch.randn(2, 33)
    report = host.sanitize(textbook("misaligned_vector", x, block=32))
    assert not report.ok
    assert "align" in report.text
    for name in RUNGS:
        for start in range(5):  # every 16-byte phase
            sliced = torch.randn(3, 64)[:, start : start + 33]
            verdict = judge.check(ours(name, sliced), sliced)
            assert verdict.ok, f"{name} at phase {start}: {verdict.why}"


def test_registers_indexed_at_run_time() -> None:
    """The array lands in local memory. Spills say 0; the stack frame tells."""
    try:
        found = jit.resources(
            str(TEXTBOOK / "indexed_registers.cu"), "indexed_registers<float>", "sm_90a"
        )
    except jit.Unavailable as why:
        pytest.skip(str(why))
    assert found.stack_bytes >= 32 * 4
    assert found.spill_store_bytes == found.spill_load_bytes == 0
    assert found.has_local_memory
    v3 = jit.resources("ladder/v3_register_cache.cu", "v3_register_cache<float, 8>", "sm_90a")
    assert not v3.has_local_memory


def test_a_row_longer_than_the_registers() -> None:
    """The textbook writes past its array without a word; ours refuses with the reason."""
    x = torch.randn(1, 32 * 33 + 5)
    report = host.sanitize(textbook("indexed_registers", x, block=32))
    assert not report.ok
    assert "indexed_registers.cu" in report.text
    (why,) = KERNELS["v3_register_cache"].reasons(Problem(1, 32769))
    assert "32768" in why
    assert "32769" in why


def test_the_refusal_reaches_the_caller() -> None:
    with pytest.raises(ValueError, match=r"v3_register_cache.*runs on CUDA tensors"):
        softmax(torch.randn(2, 3), kernel="v3_register_cache")
    with pytest.raises(ValueError, match="no kernel is named 'v9'"):
        softmax(torch.randn(2, 3), kernel="v9")


NARROW = """
import torch
from test_ladder_faults import host, ours, textbook, judge, RUNGS
base = torch.empty(2**31 + 4096)  # 8 GiB of address space; only two rows are touched
x = base.as_strided((2, 1000), (2**31 + 8, 1))
x.copy_(torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)))
for name in RUNGS:
    verdict = judge.check(ours(name, x), x)
    assert verdict.ok, name + verdict.why
print("ours ok", flush=True)
launch = textbook("narrow_offset", x, 64)
try:
    host.launch(launch)
except RuntimeError as fault:
    print("textbook faults")
else:
    print("textbook right" if judge.check(launch.args[1], x).ok else "textbook wrong")
"""


def test_a_row_offset_past_32_bits() -> None:
    """row * stride in 32 bits wraps: another row's memory, or none at all."""
    path = os.pathsep.join([str(TEXTBOOK.parent), str(TEXTBOOK.parents[1] / "src")])
    done = subprocess.run(
        [sys.executable, "-c", NARROW],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "can't allocate memory" in done.stderr:
        pytest.skip("this machine gives no 8 GiB of address space")
    assert "ours ok" in done.stdout, done.stderr
    assert "textbook right" not in done.stdout
    assert done.returncode < 0 or "textbook" in done.stdout  # killed by the bad address, or wrong


@pytest.mark.parametrize("name", RUNGS)
def test_merging_in_every_thread_order(name: str) -> None:
    """A missing barrier shows in some order of the threads."""
    rung = next(r for r in LADDER if r.name == name)
    x = torch.randn(3, 700)
    problem = replace(problem_of(x), device="cuda")
    numbers = KERNELS[name].numbers(problem, 64)
    if numbers.blocks:
        numbers = replace(numbers, blocks=2)  # v4's loop goes round
    for order in range(4):
        y = torch.full_like(x, torch.nan)
        for launch in rung.build(x, y, numbers):
            host.launch(launch, order=order)
        verdict = judge.check(y, x)
        assert verdict.ok, f"order {order}: {verdict.why}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RUNGS)
def test_sanitizers(name: str, dtype: torch.dtype) -> None:
    """No read or write outside the arrays, no undefined behaviour: odd, aligned, sliced rows."""
    rung = next(r for r in LADDER if r.name == name)
    for cols, gap in ((1, 0), (33, 0), (64, 0), (259, 3)):
        x = torch.randn(3, cols + gap).to(dtype)[:, :cols]
        y = torch.full((3, cols), torch.nan, dtype=dtype)
        problem = replace(problem_of(x), device="cuda")
        report = host.sanitize(rung.build(x, y, KERNELS[name].numbers(problem, 64)))
        assert report.ok, report.text
        assert judge.check(y, x).ok


@pytest.mark.parametrize("name", RUNGS)
def test_no_races(name: str) -> None:
    """Two threads of a block never touch one element of shared memory without a barrier between."""
    rung = next(r for r in LADDER if r.name == name)
    x = torch.randn(2, 130)
    y = torch.full_like(x, torch.nan)
    problem = replace(problem_of(x), device="cuda")
    numbers = replace(KERNELS[name].numbers(problem, 64), blocks=1)
    report = host.sanitize(rung.build(x, y, numbers), sanitizer="thread")
    assert report.ok, report.text
    assert judge.check(y, x).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RUNGS)
def test_bits_do_not_depend_on_where_a_row_starts(name: str, dtype: torch.dtype) -> None:
    """Every 16-byte phase, alone and among seven rows, aligned or not: the same bits."""
    cols = 1027
    row = torch.randn(cols, generator=torch.Generator().manual_seed(3)).mul(3).to(dtype)
    want = ours(name, row.clone().unsqueeze(0))[0]
    for phase in range(8):
        base = torch.full((7, cols + 8), torch.nan, dtype=dtype)
        x = base[:, phase : phase + cols]
        x.copy_(row)
        for y in (ours(name, x), ours(name, x[3:4])):
            assert all(torch.equal(each, want) for each in y), f"phase {phase}"


def test_v4_loops_over_more_rows_than_blocks() -> None:
    x = torch.randn(100, 67)
    y = torch.full_like(x, torch.nan)
    KERNELS["v4_grid_stride"].run(x, y, Numbers(64, "", blocks=3))
    assert judge.check(y, x).ok
