"""The row operations on plain tensors where dtypes differ: gradients of mixed types along any dim,
fp8; what has a kernel, and that no index is too short. On a GPU by the kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from online_softmax import catalogue, rowops, rowplan
from online_softmax.catalogue import HALVES
from online_softmax.reference import ops
from online_softmax.reference.ops import FP8
from rows_kit import DEVICES, gpu

ALONG = pytest.mark.parametrize("op", rowplan.FORWARD)
BACKWARD = {"softmax": ops.softmax_backward, "log_softmax": ops.log_softmax_backward}
SHAPES = ((3, 5, 8), (2, 33, 3), (2, 700, 16), (1, 2500, 7))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def close(got: Tensor, want: Tensor, size: Tensor | float = 1.0) -> None:
    half_unit = 0.5 * torch.finfo(got.dtype).eps if got.dtype.itemsize == 2 else 0.0
    error = (got.double() - want.double()).abs()
    allowed = (half_unit + 2e-6) * want.double().abs() + 1e-6 * size + 6e-8
    assert bool(((error <= allowed) | (got.isnan() & want.isnan()) | (got == want)).all())


@DEVICES
@ALONG
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_of_mixed_types(op: str, dtype: torch.dtype, device: str) -> None:
    """x in a half type, the result in float32: its gradient is float32, or half."""
    for shape in SHAPES:
        x = normal(*shape).to(dtype).to(device)
        for dim in (0, 1, 2):
            y = rowops.forward(op, x, dim, torch.float32, 1.0, False, "")
            close(y, getattr(torch, op)(x.double(), dim), 4.0)
            for dy in (normal(*shape).to(device), normal(*shape).to(device).to(dtype)):
                out = torch.full(shape, math.nan, dtype=dtype, device=device)
                got = rowops.backward(op, dy, y, dim, dtype, 0.5, False, out)
                assert got is out
                g, o = dy.double(), y.double()
                p = o if op == "softmax" else o.exp()
                total = (g * p if op == "softmax" else g).abs().sum(dim, keepdim=True)
                close(got, BACKWARD[op](g, o, dim, scale=0.5), g.abs() + p * total)
                assert torch.equal(rowops.backward(op, dy, y, dim, dtype, 0.5, False), got)


@DEVICES
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_fp8(fp8: torch.dtype, device: str) -> None:
    """Every value that fp8 has, into every type; NaN stays NaN."""
    x = torch.arange(256, dtype=torch.uint8).view(fp8).reshape(8, 32).to(device)
    wide = x.double() * 0.25
    for dim in (0, 1):
        for dtype in (None, *catalogue.FLOATS):
            for op in rowplan.FORWARD:
                y = rowops.forward(op, x, dim, dtype, 0.25, False, "")
                assert y.dtype == (dtype or torch.bfloat16)
                want = getattr(torch, op)(wide, dim)
                close(y, want, want.abs().nan_to_num(0.0) + 1.0)
        lse, saved = rowops.logsumexp_saving(x, (dim,), False, None, 0.25, "")
        assert lse.dtype == torch.bfloat16
        close(saved, torch.logsumexp(wide, dim), 10.0)
        dlse = torch.ones_like(lse)
        dx = rowops.logsumexp_backward(dlse, x, saved, (dim,), False, None, 0.25, False)
        assert dx.dtype == torch.bfloat16
        close(dx, 0.25 * (wide - saved.double().unsqueeze(dim)).exp())


def test_what_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On what stands for CUDA tensors, with what CUDA needs and without."""
    monkeypatch.setattr(catalogue, "lacks", lambda backend: None)
    has = rowops.has_kernel
    with FakeTensorMode():
        half, single, double, fp8 = (
            torch.empty(2, 3, dtype=dtype, device="cuda")
            for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2)
        )
        for op in rowplan.FORWARD:
            assert has(op, half)
            assert has(op, fp8)
            assert not has(op, double)
            assert has(f"{op}_backward", single, half)
            assert not has(f"{op}_backward", half, double)
            assert not has(f"{op}_backward", half, fp8)
        assert has("logsumexp", fp8)
        assert has("logsumexp_backward", half, half, single)
        assert has("logsumexp_backward", half, fp8, single)
        assert not has("logsumexp_backward", double, double, double)
        assert not has("cumsum", single)
        monkeypatch.setattr(catalogue, "lacks", lambda each: "no" if each == "cuda" else None)
        assert has("softmax", half)
        assert not has("softmax", fp8)
        assert not has("logsumexp_backward", half, half, single)


@gpu
def test_gradients_past_2_to_the_31() -> None:
    """More elements than an int counts, along each dim: by the last slices, which lie past it."""
    shape = (3, 2**23, 100)
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 1.0
    x[-1, :, -1] = 2.0
    lse = torch.logsumexp(x[-1].float(), -1).expand(3, -1)
    dx = rowops.logsumexp_backward(
        torch.ones_like(lse), x, lse.contiguous(), (2,), False, None, 1.0, False
    )
    want = torch.softmax(x[-1, -64:].double(), -1)
    close(dx[-1, -64:], want)
    del dx
    along = x.view(3, 2**22, 2, 100)
    y = rowops.forward("softmax", along, 2, None, 1.0, False, "")
    dx = rowops.backward("softmax", along, y, 2, None, 1.0, False)
    g, o = along[-1, -64:].double(), y[-1, -64:].double()
    close(y[-1, -64:], torch.softmax(g, 1))
    close(dx[-1, -64:], ops.softmax_backward(g, o, 1))
