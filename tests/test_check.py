"""check: what it runs, what it says of what is wrong, refused or lost, and the page it ends in."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import online_softmax
from cli_kit import needs_compiler, on_cpu, refusal, run
from online_softmax import catalogue, plan
from online_softmax.catalogue import KERNELS
from online_softmax.lab import (
    check,
    checkops,
    checkpage,
    contract,
)
from online_softmax.lab.check import Fault, Outcome, Report
from online_softmax.lab.contract import Ran

PROGRAM = "online-softmax check"


def outcomes(report: Report) -> dict[tuple[str, str], Outcome]:
    return {(outcome.name, outcome.dtype): outcome for outcome in report.outcomes}


@on_cpu
@needs_compiler
def test_a_kernel_and_operations_pass_and_the_page_says_so(tmp_path, monkeypatch):
    words = ["check", "--quick", "--only", "safe,torch,softmax,attention"]
    words += ["--save", str(tmp_path / "check.md")]
    monkeypatch.setattr(sys, "argv", ["online-softmax", *words])
    page = run(*words)
    assert (tmp_path / "check.md").read_text() == page
    head = "# online-softmax check --quick --only safe,torch,softmax,attention --save check.md\n"
    assert page.startswith(head)
    assert "results on the CPU agree with float64." in page
    assert "A quick look" in page
    assert f"- torch: {torch.__version__}" in page
    assert "- missing: torch sees no CUDA device" in page
    assert "WRONG" not in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert {row[0] for row in rows} == {"| `safe`", "| `torch`", "| `softmax`", "| `attention`"}
    for row in rows:
        asked, passed, wrong, refused = (int(each) for each in row[2:6])
        assert asked == passed > 3, row
        assert wrong == refused == 0, row


@on_cpu
def test_every_record_and_every_operation_has_its_cases():
    names = {name for name in check.NAMES if name in KERNELS}
    assert names == set(KERNELS)
    for name in checkops.OPERATIONS:
        assert hasattr(online_softmax, name)
        quick = checkops.cases_of(name, "cpu", is_quick=True)
        every = checkops.cases_of(name, "cpu", is_quick=False)
        gpu = checkops.cases_of(name, "cuda", is_quick=False)
        assert 0 < len(quick) <= len(every) <= len(gpu)
        has_both = name != "linear_cross_entropy"  # of which each case is both
        assert any(case.is_gradient for case in quick) == has_both
    for record in KERNELS.values():
        for dtype in record.dtypes:
            every = contract.cases_of(record, dtype, "cpu")
            some = contract.quick(record, every, "cpu")
            assert 4 < len(some) < len(every)
            assert set(some) <= set(every)
            assert len(contract.cases_of(record, dtype, "cuda")) > len(every)


def _wrong_softmax(x: Tensor, y: Tensor, numbers: Any) -> None:
    y.copy_(torch.softmax(x.float(), -1))
    if x.shape[1] == 33:
        y[:, 5] *= 1.01


def _raising(x: Tensor, y: Tensor, numbers: Any) -> None:
    raise RuntimeError("no\nsuch thing")


def _spilling(x: Tensor, y: Tensor, numbers: Any) -> None:
    y.copy_(torch.softmax(x.float(), -1))
    if y.numel():
        y.as_strided((y.numel() + 1,), (1,))[-1] = 1.0


def _overwriting(x: Tensor, y: Tensor, numbers: Any) -> None:
    y.copy_(torch.softmax(x.float(), -1))
    x.zero_()


@on_cpu
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (_wrong_softmax, "should be"),
        (_raising, "it raised RuntimeError: no such thing"),
        (_spilling, "1 elements around y were written"),
        (_overwriting, "x was written"),
    ],
)
def test_a_fault_is_named_with_its_case_and_ends_in_1(monkeypatch, fault, why: str):
    record = KERNELS["torch"]
    monkeypatch.setitem(catalogue.KERNELS, "torch", type(record)(**{**vars(record), "run": fault}))
    page = run("check", "--quick", "--only", "torch", exit_code=1)
    assert "**WRONG: " in page
    assert "disagree with float64: torch.**" in page
    assert why in page
    assert "random-" in page or "-5x33" in page
    found = json.loads(run("check", "--quick", "--only", "torch", "--json", exit_code=1))
    assert found["is_right"] is False
    assert any(outcome["faults"] for outcome in found["outcomes"])


@on_cpu
def test_refusals_are_told_with_their_sentence():
    record, dtype = KERNELS["v3_register_cache"], torch.float32
    wide = [case for case in contract.cases_of(record, dtype, "cpu") if case.cols > 32768]
    assert wide
    outcome = Outcome("v3_register_cache", "float32", "kernel", len(wide))
    for case in wide:
        check._one(outcome, case, lambda case: contract.run(record, case, dtype, "cpu"))
    assert (outcome.passed, outcome.faults) == (0, [])
    assert sum(outcome.refused.values()) == len(wide)
    page = checkpage.page(_report(outcome), PROGRAM)
    assert "What did not run, and why" in page
    assert f"- v3_register_cache, {len(wide)} cases, such as: " in page
    assert "holds at most 32768 columns" in page


@on_cpu
def test_what_cannot_run_here_says_why(monkeypatch):
    monkeypatch.setattr(contract, "lacks", lambda record: "there is no compiler")
    page = run("check", "--quick", "--only", "safe", exit_code=2)
    assert "Nothing ran on the CPU." in page
    assert "- safe float32, safe " in page
    assert "there is no compiler" in page


def test_a_lost_device_ends_the_run(monkeypatch):
    """What a kernel leaves behind is not blamed on those that come after it."""
    ran: list[str] = []

    def one(case: contract.Case) -> Ran:
        ran.append(case.name)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    case = contract.cases_of(KERNELS["torch"], torch.float32, "cpu")[0]
    first, second = (Outcome(name, "float32", "kernel", 2) for name in ("one", "two"))
    monkeypatch.setattr(check, "_is_lost", lambda: True)
    check._run(
        [check.Task(first, [case, case], one), check.Task(second, [case], one)], "cuda", None
    )
    assert len(ran) == 1
    assert len(first.faults) == 1
    assert second.why_not.startswith(f"one float32 on {case.name} failed, and the device was")
    assert not second.faults


def test_too_little_memory_is_no_fault():
    def one(case: contract.Case) -> Ran:
        raise torch.OutOfMemoryError("CUDA out of memory")

    outcome = Outcome("one", "float32", "kernel", 1)
    check._one(outcome, contract.cases_of(KERNELS["torch"], torch.float32, "cpu")[0], one)
    assert not outcome.faults
    assert "- one, 1 case: the device has too little memory left." in checkpage.page(
        _report(outcome), PROGRAM
    )


def test_progress_counts_every_case():
    seen: list[tuple[int, int]] = []
    cases = contract.cases_of(KERNELS["torch"], torch.float32, "cpu")[:3]
    outcome = Outcome("torch", "float32", "kernel", 3)
    task = check.Task(outcome, cases, lambda case: Ran(max_error=0.5))
    check._run([task], "gpu", lambda text, done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3)]
    assert (outcome.passed, outcome.max_error) == (3, 0.5)


# ---- the page


def _report(*outcomes: Outcome, **more: Any) -> Report:
    facts = {"versions": {"torch": "2.11.0"}, "cuda_of_torch": "13.0", "gpus": [],
             "cache": {"folder": "/home/me/secret", "entries": 1, "bytes": 2},
             "missing": {}}  # fmt: skip
    values = {"device": "NVIDIA A100", "arch": "sm_80", "is_quick": False, "facts": facts, **more}
    return Report(outcomes=outcomes, **values)


def test_many_faults_are_counted_and_no_folder_is_told():
    faults = [Fault(f"case{i}", "y[0, 1] is 2, should be 1", "S01") for i in range(13)]
    wrong = Outcome("v3_register_cache", "float16", "kernel", 20, 7, 1e-7, faults)
    fine = Outcome("softmax", "float32", "operation", 3, 3, 1e-7)
    page = checkpage.page(_report(wrong, fine), PROGRAM)
    assert "**WRONG: 13 of 23 results on NVIDIA A100 (sm_80) disagree" in page
    assert "- case0 (S01): y[0, 1] is 2, should be 1" in page
    assert "- and 3 more" in page
    assert "secret" not in page
    assert "| `v3_register_cache` | float16 | 20 | 7 | 13 | 0 | 1.0e-07 |" in page
    assert page.index("## What is wrong") < page.index("## Kernels") < page.index("## Operations")


def test_architectures_that_nobody_measured_say_so():
    assert plan.unmeasured("sm_90a") == ""
    assert (
        plan.unmeasured("sm_80") == "nobody has measured sm_80 yet: chosen from its datasheet facts"
    )
    assert (
        plan.unmeasured("sm_121")
        == "nobody has measured sm_121 yet: chosen from the facts of sm_90a"
    )
    for op in ("softmax", "cross_entropy"):
        for arch in plan.ARCHES:
            said = run("explain", 4096, 4096, "--arch", arch, "--op", op)
            assert (f"nobody has measured {arch} yet" in said) == (arch != "sm_90a")
    page = checkpage.page(_report(notes=(plan.unmeasured("sm_80"),)), PROGRAM)
    assert "Nobody has measured sm_80 yet" in page


def test_unknown_names_are_refused():
    assert "--only nope: no name starts so; there are safe" in refusal("check", "--only", "nope")
