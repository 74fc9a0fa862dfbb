"""The row operations on plain tensors against float64: every case and view, both directions.

On the CPU the cases of size class "cpu"; on a GPU all that fit. Inputs and outputs lie among NaN.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from online_softmax import catalogue, rowops
from online_softmax.catalogue import DTYPES
from online_softmax.lab import cases, judge
from online_softmax.reference.ops import FP8, beside, sum_dtype
from rows_kit import DEVICES, INF

TORCHS = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
OPS = pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp"])
ALONG = pytest.mark.parametrize("op", ["softmax", "log_softmax"])
FLOATS = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LARGEST = 2**27  # elements that float64 and its copies leave room for on a GPU; else some rows


def run(op: str, x: Tensor, dim: int = -1, scale: float = 1.0, kernel: str = "") -> Tensor:
    if op == "logsumexp":
        return rowops.logsumexp(x, (dim,), False, None, scale, kernel)
    return rowops.forward(op, x, dim, None, scale, False, kernel)


def oracle(op: str, x: Tensor, dim: int = -1, scale: float = 1.0) -> Tensor:
    """float64 of what x holds times scale, the product rounded as ours is."""
    wide = x.double() if x.dtype in (torch.float64, *FP8) else x.float().double()
    z = wide if scale == 1 else (x.to(sum_dtype(x.dtype)) * scale).double()
    return torch.logsumexp(z, dim) if op == "logsumexp" else TORCHS[op](z, dim)


def wrong(got: Tensor, want: Tensor, size: Tensor | float = 0.0) -> str:
    """What is wrong with a result, or "". `size`: of the terms whose difference it is.

    Half a unit of got's dtype; float32's share, 2e-6 relative and 1e-6 of `size` and absolute.
    """
    double = got.dtype == torch.float64
    share = 1e-12 if double else 1e-6
    half_unit = 0.5 * torch.finfo(got.dtype).eps if got.dtype.itemsize == 2 else 0.0
    tiny = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps  # near 0
    rounded = want.to(got.dtype).double()
    want = torch.where(rounded.isinf(), rounded, want)
    allowed = (half_unit + 2 * share) * want.abs() + share * (1e-2 + size) + tiny
    error = (got.double() - want).abs()
    right = (error <= allowed) | (got.double() == want) | (got.isnan() & want.isnan())
    if bool(right.all()):
        return ""
    at = tuple(int(i) for i in (~right).nonzero()[0])
    count = f"{int((~right).sum())} of {right.numel()} wrong"
    return f"{at}: {float(got[at]):.9g}, should be {float(want[at]):.9g}; {count}"


def _cases(dtype: torch.dtype, device: str) -> list[cases.Case]:
    wanted = torch.float32 if dtype == torch.float64 else dtype
    return [
        case
        for case in cases.CASES
        if wanted in case.dtypes and (device == "cuda" or case.size == "cpu")
        if case.elements <= LARGEST or case.checked
    ]


@DEVICES
@FLOATS
@OPS
def test_every_case(op: str, dtype: torch.dtype, device: str) -> None:
    failed = []
    for case in _cases(dtype, device):
        x = judge.lay_out(case, dtype, device)
        before = judge.checked_rows(case, x).clone()
        y = run(op, x)
        assert y.dtype == dtype
        assert y.is_contiguous()
        x, y = judge.checked_rows(case, x), judge.checked_rows(case, y)
        want = oracle(op, x)
        size = 1.0 if op == "softmax" else want.abs().nan_to_num(posinf=0.0) + 1.0
        if message := wrong(y, want, size):
            failed.append(f"{case.name} ({case.source}) {message}")
        assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0)), f"{case.name}: x was written"
    assert not failed, f"{len(failed)} cases:\n" + "\n".join(failed[:20])


@DEVICES
@FLOATS
@OPS
def test_every_view(op: str, dtype: torch.dtype, device: str) -> None:
    for view in cases.VIEWS:
        x = judge.lay_out_view(view, dtype, device)
        for dim in view.dims:
            for scale in (1.0, 0.25):
                y = run(op, x, dim, scale)
                assert y.is_contiguous()
                assert wrong(y, oracle(op, x, dim, scale), 10.0) == "", f"{view.name} dim {dim}"


@DEVICES
@OPS
def test_the_reference_and_aten_agree(op: str, device: str) -> None:
    for dtype in (*DTYPES, *FP8):
        for shape, dim in (((), 0), ((7,), -1), ((5, 33), 0), ((2, 3, 65), 1), ((3, 0), 1)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device).to(dtype)
            for name in ("torch", "reference"):
                got = run(op, x, dim, 0.5, name)
                assert wrong(got, oracle(op, x, dim, 0.5), 10.0) == "", f"{name} {dtype} {shape}"


# ---- several dims


@DEVICES
@FLOATS
def test_logsumexp_over_several_dims(dtype: torch.dtype, device: str) -> None:
    base = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.double)
    x = base.to(dtype).to(device)
    x[0] = -INF
    for view in (x, x.transpose(1, 3), x[:, ::2]):
        for dims in ((0, 1), (3, 1), (-1, 0, 2), (1, 2, 3), (0, 1, 2, 3)):
            for keepdim in (False, True):
                for kernel in ("", "reference"):
                    y = rowops.logsumexp(view, dims, keepdim, None, 1.0, kernel)
                    want = torch.logsumexp(view.double(), dims, keepdim)
                    assert y.shape == want.shape
                    assert wrong(y, want, 10.0) == ""


# ---- gradients


def _upstream(shape: torch.Size, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Contiguous, one value for all, one for each row, transposed and cut out of NaN."""
    generator = torch.Generator().manual_seed(3)
    dy = torch.randn(shape, generator=generator, dtype=torch.double).to(dtype).to(device)
    sliced = torch.full((*shape[:-1], shape[-1] + 3), math.nan, dtype=dtype, device=device)
    sliced[..., 1:-2] = dy
    return [
        dy,
        dy[:1, :1].expand(shape),
        dy[:, :1].expand(shape),
        dy.t().contiguous().t(),
        sliced[..., 1:-2],
    ]


SHAPES = [(1, 1), (2, 5), (3, 33), (5, 1030), (2, 9001)]  # S17 and up


@DEVICES
@FLOATS
@ALONG
def test_backward(op: str, dtype: torch.dtype, device: str) -> None:  # S08, S11, S76
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.double)
        y = run(op, x.to(dtype).to(device))
        padded = torch.full((shape[0], shape[1] + 5), math.nan, dtype=dtype, device=device)
        padded[:, :-5] = y
        for dy in _upstream(y.shape, dtype, device):
            for saved in (y, padded[:, :-5], y.t().contiguous().t()):
                dx = rowops.backward(op, dy, saved, -1, dtype, 0.5, False)
                g, p = dy.double(), y.double() if op == "softmax" else y.double().exp()
                total = (g * p if op == "softmax" else g).sum(-1, keepdim=True)
                want = 0.5 * (p * (g - total) if op == "softmax" else g - p * total)
                size = g.abs() + p * (g.abs() * (p if op == "softmax" else 1)).sum(-1, keepdim=True)
                assert wrong(dx, want, size) == "", f"{op} {shape} {dy.stride()}"
                assert dx.is_contiguous()
        down = rowops.backward(op, dy.t(), y.t(), 0, dtype, 0.5, False)
        assert wrong(down.t(), want, size) == ""


@DEVICES
@FLOATS
def test_logsumexp_backward(dtype: torch.dtype, device: str) -> None:  # S20: one value a row
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.double)
        x = x.to(dtype).to(device)
        lse, saved = rowops.logsumexp_saving(x, (-1,), False, None, 0.5, "")
        assert (lse.dtype, saved.dtype) == (dtype, sum_dtype(dtype))
        share = torch.softmax(0.5 * x.double(), -1)
        for dlse in (
            torch.arange(1.0, 1 + len(lse), device=device).to(dtype),
            torch.ones(1, dtype=dtype, device=device).expand(len(lse)),
            torch.arange(1.0, 1 + 2 * len(lse), device=device).to(dtype)[::2],
        ):
            want = 0.5 * share * dlse.double()[:, None]
            dx = rowops.logsumexp_backward(dlse, x, saved, (-1,), False, dtype, 0.5, False)
            assert wrong(dx, want, want.abs()) == ""
            kept = (dlse[:, None], x, saved[:, None], (1,), True, dtype, 0.5, False)
            assert torch.equal(rowops.logsumexp_backward(*kept), dx)
    x = torch.randn(3, 4, 5, device=device).to(dtype)
    for dims, keepdim in (((0, 2), False), ((0, 2), True), ((-1, 0, 1), False)):
        _, saved = rowops.logsumexp_saving(x, dims, keepdim, None, 1.0, "")
        dlse = torch.randn(saved.shape, device=device).to(dtype)
        dx = rowops.logsumexp_backward(dlse, x, saved, dims, keepdim, dtype, 1.0, False)
        rows = (saved, dlse) if keepdim else (beside(saved, x, dims), beside(dlse, x, dims))
        want = rows[1].double() * (x.double() - rows[0].double()).exp()
        assert wrong(dx, want, want.abs()) == ""


def test_a_gradient_has_the_dtype_asked_for() -> None:
    y = torch.softmax(torch.randn(3, 4), -1)
    for dtype in DTYPES:
        assert rowops.backward("softmax", y, y, -1, dtype, 1.0, False).dtype == dtype
        assert rowops.backward("log_softmax", y, y, -1, dtype, 1.0, False).dtype == dtype
        x, lse = torch.randn(3, 4), torch.randn(3)
        dx = rowops.logsumexp_backward(lse, x, lse, (1,), False, dtype, 1.0, False)
        assert dx.dtype == dtype


# ---- what is promised to those above and below


def test_saved_is_the_result_where_nothing_is_rounded() -> None:
    for dtype in (torch.float32, torch.float64):
        lse, saved = rowops.logsumexp_saving(torch.randn(3, 4).to(dtype), (1,), False, None, 1, "")
        assert lse is saved


@DEVICES
@ALONG
def test_out_is_filled(op: str, device: str) -> None:
    x = torch.randn(3, 5, device=device)
    want = run(op, x)
    for out in (torch.empty_like(x), torch.empty(5, 3, device=device).t()):
        got = rowops.forward(op, x, -1, None, 1.0, False, "", out)
        assert got is out
        assert torch.equal(out, want)
    assert rowops.forward(op, x, -1, None, 1.0, False, "", x) is x
    assert torch.equal(x, want)


def test_a_row_kernel_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """On what stands for CUDA tensors: what is wrong is named; to have no elements is not."""
    monkeypatch.setattr(catalogue, "lacks", lambda backend: None)
    with FakeTensorMode():
        x, nothing = torch.empty(2, 3, device="cuda"), torch.empty(0, 3, device="cuda")
        for dtype, scale, told in (
            (torch.float64, 1.0, "to be given as torch.float64, with scale 1$"),
            (None, 0.0, "torch.float32 on cuda:0, to be given as torch.float32, with scale 0$"),
        ):
            with pytest.raises(ValueError, match=told):
                rowops._takes_aten("log_softmax", x, dtype, scale, "split")
        assert rowops._takes_aten("log_softmax", nothing, None, 1.0, "split") is False
        monkeypatch.setattr(catalogue, "lacks", lambda backend: f"no {backend} here")
        for given in (x, nothing):
            with pytest.raises(ValueError, match=r"'split' cannot run this: no cuda here$"):
                rowops._takes_aten("log_softmax", given, None, 1.0, "split")


@DEVICES
def test_has_kernel(device: str) -> None:
    x = torch.randn(3, 4, device=device)
    for name in ("softmax", "log_softmax", "logsumexp", "softmax_backward"):
        assert isinstance(rowops.has_kernel(name, x, x), bool)
        assert not rowops.has_kernel(name, x.cpu(), x.cpu())
        assert not rowops.has_kernel(name, x.long(), x.long())


def test_a_named_kernel_is_never_replaced() -> None:
    x = torch.randn(3, 4)
    for op in ("softmax", "log_softmax", "logsumexp"):
        with pytest.raises(ValueError, match=rf"{op}\(\): kernel 'safe' cannot run this"):
            run(op, x, scale=0.5, kernel="safe")
