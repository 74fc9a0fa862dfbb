"""Which implementation runs a cross-entropy: kernels by name, reasons, types, what explain says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ce_kit
from ce_kit import needs_compiler
from losses_kit import example, written_out
from online_softmax import catalogue, cross_entropy, explain
from online_softmax.reference import cross_entropy as reference
from rows_kit import gpu

ran = ce_kit.ran  # a fixture
close = torch.testing.assert_close
needs_cuda_bindings = pytest.mark.skipif(
    catalogue.lacks("cuda") is not None, reason="explain says what is missing instead"
)


KERNELS = {
    ("registers", False): ["in_registers"],
    ("registers", True): ["in_registers"],
    ("split", False): ["fold", "merge"],
    ("split", True): ["fold", "merge", "backward"],
    ("torch", False): [],
    ("torch", True): [],
    ("reference", False): [],
    ("reference", True): [],
    ("", False): ["in_registers"],
    ("", True): ["in_registers"],
}


@needs_compiler
@pytest.mark.parametrize(("kernel", "in_forward"), KERNELS)
def test_a_kernel_by_name(kernel: str, in_forward: bool, ran: list[str]) -> None:
    x, target, _ = example(5, classes=40)
    leaf = x.float().requires_grad_()
    loss = cross_entropy(leaf, target, grad_in_forward=in_forward, kernel=kernel or None)
    around = [name for name in ran if name in ("reduce", "rescale")]
    assert [name for name in ran if name not in around] == KERNELS[kernel, in_forward]
    assert around == ([] if kernel == "reference" else ["reduce"] * (1 + in_forward))
    want = written_out(x.requires_grad_(), target)
    close(loss.double(), want, rtol=1e-5, atol=1e-6)
    (dx,), (want_dx,) = torch.autograd.grad(loss, leaf), torch.autograd.grad(want, x)
    close(dx.double(), want_dx, rtol=1e-5, atol=1e-6)


REFUSALS = {
    "a CPU tensor": (torch.zeros(2, 3), {}, "runs on CUDA tensors; this one is on cpu"),
    "no row": (torch.zeros(0, 3), {}, "runs on CUDA tensors; this one is on cpu"),
    "float64": (torch.zeros(2, 3).double(), {}, "takes float32, float16, bfloat16; this input is"),
    "scale": (
        torch.zeros(2, 3),
        {"scale": 0.0, "softcap": 2.0},
        r"from 2\^-126 to 2\^127; given is scale 0, softcap 2",
    ),
}


@pytest.mark.parametrize("kernel", ["registers", "split"])
@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("what", REFUSALS)
def test_a_kernel_that_cannot_run_says_why(what: str, in_forward: bool, kernel: str) -> None:
    x, options, why = REFUSALS[what]
    target = torch.zeros(len(x), dtype=torch.int64)
    options = {**options, "grad_in_forward": in_forward, "kernel": kernel}
    with pytest.raises(ValueError, match=rf"^cross_entropy\(\): kernel '{kernel}' .*: .*{why}"):
        cross_entropy(x.requires_grad_(), target, **options)


def test_a_row_too_long_for_registers(ran: list[str]) -> None:
    x, target = torch.zeros(2, 131_073, dtype=torch.bfloat16), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="holds at most 131072 columns here; this row has 131073"):
        cross_entropy(x, target, kernel="registers")
    assert ran == []


@needs_compiler
def test_no_row_and_odd_types_take_the_reference(ran: list[str]) -> None:
    nothing = cross_entropy(torch.zeros(0, 3), torch.zeros(0).long(), kernel="split")
    assert nothing.isnan()
    x, target, _ = example(3, classes=9)
    close(cross_entropy(x, target), written_out(x, target))
    assert ran == []


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_has_kernels(dtype: torch.dtype, ran: list[str]) -> None:
    x, target, _ = example(5, classes=40)
    small = x.to(dtype)
    loss = cross_entropy(small, target, reduction="none", z_loss=0.1)
    assert ran == ["in_registers"]
    want = cross_entropy(small.to(torch.bfloat16), target, reduction="none", z_loss=0.1)
    assert torch.equal(loss, want)
    assert loss.dtype == torch.bfloat16


@gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [None, "registers", "split"])
def test_kernels_on_a_gpu(kernel: str | None, dtype: torch.dtype) -> None:
    x, target, weight = example(33, classes=5000, device="cuda")
    x = x.to(dtype)
    options = {"weight": weight.float(), "label_smoothing": 0.1, "softcap": 20.0}
    loss = cross_entropy(x, target, reduction="none", kernel=kernel, **options)
    args = (x.float(), target, weight.float())
    del options["weight"]
    want, _ = reference.forward(*args, **options)
    eps = torch.finfo(loss.dtype).eps
    close(loss.float(), want, rtol=eps + 2e-6, atol=2e-6)


@needs_cuda_bindings
def test_explain() -> None:
    def said(*args: Any, **options: Any) -> list[str]:
        return explain(*args, op="cross_entropy", **options).splitlines()

    lines = said(4096, 32_000)
    assert lines[0].startswith("registers: a cluster of 4 blocks a row, ")
    assert lines[0].endswith("vectors: one read")
    assert lines[1].startswith("  with grad_in_forward: registers: ")
    assert lines[-1] == "  not split: two kernels; the row fits in registers"
    lines = said(4096, 300_000, "bfloat16")
    assert lines[0].startswith("split: no other kernel is planned for 300000 columns")
    assert lines[-1].startswith("  not registers: registers holds at most 131072 columns here")
    lines = said(4096, 100_000, "bfloat16")
    assert lines[0].startswith("split: ")
    assert lines[-1].startswith("  not registers: the blocks of its clusters would wait")
    lines = said(8, 1 << 20, "float16", "sm_80")
    assert lines[1].startswith("  with grad_in_forward: split, then the gradient: registers holds")
    assert lines[3].startswith("  nobody has measured sm_80")
    (line,) = said(4, 4, "float64")
    assert line.startswith("reference: ")
    assert "float64" in line
    with pytest.raises(ValueError, match=r"op must be one of softmax, .*, got 'topk'"):
        explain(4, 4, op="topk")


def test_explain_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "lacks", lambda backend: "no NVRTC here")
    said = explain(4096, 32_000, op="cross_entropy")
    assert said == "reference: the definition, in PyTorch operations: no NVRTC here"


@needs_cuda_bindings
@needs_compiler
@pytest.mark.parametrize("cols", [40, 51_201])
def test_explain_says_what_runs(cols: int, ran: list[str]) -> None:
    x = torch.zeros(2, cols, dtype=torch.bfloat16)
    cross_entropy(x, torch.tensor([0, 1]))
    said = explain(2, cols, "bfloat16", op="cross_entropy")
    assert said.startswith({"in_registers": "registers", "fold": "split"}[ran[0]])
