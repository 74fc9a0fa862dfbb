"""The contract: every record of the catalogue runs every case and agrees with float64.

On the CPU, CUDA kernels run through host execution and Triton kernels through the interpreter, on
the cases of size class "cpu" (budget: four minutes on two cores). Under `make test-gpu` the same
test runs the real kernels on every case. `pytest -rP` prints each record's ten slowest cases.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

from online_softmax.catalogue import DTYPES, KERNELS, Kernel
from online_softmax.lab import cases, contract
from online_softmax.plan import Problem


def _run(record: Kernel, case: cases.Case, dtype: torch.dtype, device: str) -> None:
    ran = contract.run(record, case, dtype, device)
    assert all(record.name in refusal for refusal in ran.refusals)  # sentences, not codes
    assert not ran.why, f"{record.name} on {case.name} ({case.source}): {ran.why}"


def _contract(name: str, dtype: torch.dtype, device: str) -> None:
    record = KERNELS[name]
    if dtype not in record.dtypes:
        (why,) = record.reasons(Problem(2, 2, str(dtype).removeprefix("torch.")))
        assert name in why
        return
    failed, seconds = [], []
    for case in contract.cases_of(record, dtype, device):
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
    lacks = contract.lacks(KERNELS[name])
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
