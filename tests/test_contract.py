"""The contract: every record of the catalogue runs every case and agrees with float64.

On the CPU, CUDA kernels run through host execution and Triton kernels through the interpreter, on
the cases of size class "cpu" (budget: four minutes on two cores). Under `make test-gpu` the same
test runs the real kernels on every case. `pytest -rP` prints each record's ten slowest cases.
"""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import replace

import pytest
import torch

from online_softmax.catalogue import DTYPES, KERNELS, Kernel, problem_of
from online_softmax.lab import cases, judge
from online_softmax.plan import Problem

INTERPRETER_ROWS = 5  # a program of Triton's interpreter, a row, takes 40 ms
INTERPRETER_STEP = 15  # of the sweep over widths, every fifteenth


def _lacks(record: Kernel) -> str | None:
    """What running this record on the CPU needs and lacks, a sentence."""
    if record.backend == "cuda":
        from online_softmax.cuda import host

        if host.compiler() is None:
            return "host execution needs g++ or clang++"
    if record.backend == "triton" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def _run(record: Kernel, case: cases.Case, dtype: torch.dtype, device: str) -> None:
    x = judge.lay_out(case, dtype, device)
    # The problem as if on a GPU: host execution and interpreter run what a GPU would run.
    problem = replace(problem_of(x), device="cuda")
    refusals = record.reasons(problem)
    if refusals:
        assert all(record.name in refusal for refusal in refusals)  # sentences, not codes
        return
    y = judge.output(case.rows, case.cols, dtype, device)
    before = x.clone() if case.elements <= cases.CPU_ELEMENTS else None
    record.run(x, y, record.numbers(problem))
    assert judge.spilled(y) == 0, f"{case.name}: {judge.spilled(y)} elements around y were written"
    if before is not None:
        assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0)), f"{case.name}: x was written"
    interpreted = record.backend == "triton" and device == "cpu" and dtype == torch.bfloat16
    verdict = judge.check(
        judge.checked_rows(case, y), judge.checked_rows(case, x), ulps=1.0 if interpreted else 0.5
    )
    assert verdict.ok, f"{record.name} on {case.name} ({case.source}): {verdict.why}"


def _cases(record: Kernel, dtype: torch.dtype, device: str) -> list[cases.Case]:
    """Everything on a GPU; on the CPU what is small, and less of it for Triton's interpreter."""
    wanted = torch.float32 if dtype == torch.float64 else dtype  # float64: what float32 takes
    chosen = [case for case in cases.CASES if wanted in case.dtypes]
    if device == "cuda":  # the reference holds several copies at a time: not of the largest
        few = record.name == "reference"
        return [case for case in chosen if not (few and case.elements > 2**27)]
    chosen = [case for case in chosen if case.size == "cpu"]
    if record.backend == "triton":
        chosen = [case for case in chosen if case.rows <= INTERPRETER_ROWS]
        sweep = [case for case in chosen if case.rows == 2 and case.source.startswith("S02")]
        thinned = set(sweep) - set(sweep[::INTERPRETER_STEP])
        chosen = [case for case in chosen if case not in thinned]
    return chosen


def _contract(name: str, dtype: torch.dtype, device: str) -> None:
    record = KERNELS[name]
    if dtype not in record.dtypes:
        (why,) = record.reasons(Problem(2, 2, str(dtype).removeprefix("torch.")))
        assert name in why
        return
    failed, seconds = [], []
    for case in _cases(record, dtype, device):
        start = time.perf_counter()
        try:
            _run(record, case, dtype, device)
        except AssertionError as error:
            failed.append(str(error).splitlines()[0])
        seconds.append((time.perf_counter() - start, case.name))
        if case.elements > 2**27:
            torch.cuda.empty_cache()
    slowest = ", ".join(f"{case} {s:.2f} s" for s, case in sorted(seconds, reverse=True)[:10])
    print(f"{len(seconds)} cases; slowest: {slowest}")  # noqa: T201
    assert not failed, f"{len(failed)} of {len(seconds)} cases:\n" + "\n".join(failed[:20])


DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@DTYPE
@pytest.mark.parametrize("name", KERNELS)
def test_contract_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: its contract test runs the real kernels")
    lacks = _lacks(KERNELS[name])
    if lacks and os.environ.get("CI"):
        pytest.fail(lacks)
    if lacks:
        pytest.skip(lacks)
    _contract(name, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@DTYPE
@pytest.mark.parametrize("name", KERNELS)
def test_contract_on_the_gpu(name: str, dtype: torch.dtype) -> None:
    _contract(name, dtype, "cuda")
