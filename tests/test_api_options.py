"""dtype, scale, empty and dims: values against float64, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from online_softmax import log_softmax, logsumexp, softmax
from online_softmax.catalogue import DTYPES
from online_softmax.reference.ops import FP8
from rows_kit import DEVICES, INF, NAN, double

ALONG = pytest.mark.parametrize("function", [softmax, log_softmax])
ALL = pytest.mark.parametrize("function", [softmax, log_softmax, logsumexp])
TORCHS = {softmax: torch.softmax, log_softmax: torch.log_softmax, logsumexp: torch.logsumexp}
EMPTY_VALUE = {softmax: 0.0, log_softmax: -INF}
close = torch.testing.assert_close


def _near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within one rounding of got's dtype, and float32's share."""
    half = 0.5 * torch.finfo(got.dtype).eps if got.dtype.itemsize == 2 else 0.0
    rtol = 1e-12 if got.dtype == torch.float64 else 2e-6 + half
    tiny = torch.finfo(got.dtype).smallest_normal
    rounded = want.to(got.dtype).double()
    want = torch.where(rounded.isinf(), rounded, want)
    close(
        got.double(),
        want,
        rtol=rtol,
        atol=1e-14 if rtol < 1e-9 else 2e-7 + tiny * bool(half),
        equal_nan=True,
    )


@DEVICES
@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("x_dtype", [*DTYPES, *FP8], ids=str)
@ALONG
def test_dtype(function, x_dtype, dtype, device: str) -> None:  # S77, fp8
    x = (double(2, 3, 33, device=device) * 4).to(x_dtype)
    for dim in (1, -1):
        y = function(x, dim, dtype=dtype)
        assert y.dtype == (dtype or (torch.bfloat16 if x_dtype in FP8 else x_dtype))
        assert y.is_contiguous()
        both_wide = torch.float64 in (x_dtype, dtype)
        wide = x.float().double() if x_dtype in FP8 else x.double()
        want = TORCHS[function](wide, dim)
        if y.dtype == torch.float64 and not both_wide:
            close(y, want, rtol=1e-5, atol=1e-6)
        else:
            _near(y, want)


@pytest.mark.parametrize("x_dtype", FP8, ids=str)
def test_logsumexp_of_fp8(x_dtype) -> None:
    x = double(3, 65).to(x_dtype)
    y = logsumexp(x)
    assert y.dtype == torch.bfloat16
    _near(y, torch.logsumexp(x.float().double(), -1))


def test_the_input_is_not_rounded_first() -> None:
    """torch converts to dtype before: 70,000 is infinite in float16."""
    x = torch.tensor([70000.0, 69999.0])
    assert torch.softmax(x, 0, dtype=torch.float16).isnan().all()
    _near(softmax(x, 0, dtype=torch.float16), torch.softmax(x.double(), 0))
    _near(log_softmax(x, 0, dtype=torch.float16), torch.log_softmax(x.double(), 0))


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@ALONG
def test_gradient_with_dtype(function, dtype, dim) -> None:  # S77
    x = torch.randn(2, 2, 2, 2).to(dtype).requires_grad_()
    y = function(x, dim, dtype=torch.float32)
    assert y.dtype == torch.float32
    (dx,) = torch.autograd.grad(y[0, 1, 0, 1], x)
    assert dx.dtype == dtype
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(TORCHS[function](wide, dim)[0, 1, 0, 1], wide)
    close(dx.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("x_dtype", FP8, ids=str)
@ALL
def test_gradient_of_fp8_is_bfloat16(function, x_dtype) -> None:
    """The backward gives bfloat16; autograd itself rounds it to a leaf's grad_dtype."""
    x = double(3, 33).to(x_dtype)
    leaf = x.clone().requires_grad_()
    leaf.grad_dtype = torch.bfloat16
    function(leaf).flatten()[0].backward()
    wide = x.float().double().requires_grad_()
    TORCHS[function](wide, -1).flatten()[0].backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.bfloat16
    close(leaf.grad.double(), wide.grad, rtol=2**-6, atol=2**-7)
    plain = x.clone().requires_grad_()
    function(plain).sum().backward()
    assert plain.grad is not None
    assert plain.grad.dtype == x_dtype  # torch's rule for a leaf of which nothing else is asked


# ---- scale


@DEVICES
@pytest.mark.parametrize("scale", [0, 1, 0.5, 0.0883883476, 3, 1e-30, 1e30, np.float32(0.25)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ALL
def test_scale(function, dtype, scale, device: str) -> None:
    x = double(5, 67, device=device).to(dtype)
    x[1, ::2] = -INF
    wide = x.double() if dtype == torch.float64 else (x.float() * float(scale)).double()
    want = TORCHS[function](wide * float(scale) if dtype == torch.float64 else wide, -1)
    _near(function(x, scale=scale), want)


@ALL
def test_scale_of_zero(function) -> None:
    """A uniform distribution; an infinite element times 0 is NaN, as in torch."""
    x = torch.tensor([[5.0, -3.0], [-INF, 1.0], [INF, 1.0], [NAN, 1.0]])
    y = function(x, scale=0.0)
    uniform = torch.zeros(1, 2)
    close(y[:1], TORCHS[function](uniform, -1))
    assert y[1:].isnan().all()
    x = torch.randn(3, requires_grad=True)
    function(x, scale=0.0).sum().backward()
    assert (x.grad == 0).all()


@ALL
def test_scale_is_refused(function) -> None:
    x = torch.randn(2, 3)
    for scale in (-1.0, -1e-30, INF, NAN, -INF):
        with pytest.raises(ValueError, match="scale must be at least 0 and finite, got"):
            function(x, scale=scale)
    for scale in ("1", None, True, torch.tensor(2.0), 1j):
        with pytest.raises(TypeError, match="scale must be a float, got"):
            function(x, scale=scale)


# ---- empty


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5])
@ALONG
def test_empty(function, dtype, scale, device: str) -> None:  # S14
    x = torch.tensor([[1.0, 2, -INF], [-INF, -INF, -INF], [0, 1, NAN], [INF, 1, 0]], device=device)
    for view, dim in ((x.to(dtype), 1), (x.t().to(dtype), 0)):
        want = TORCHS[function](view.double() * scale, dim)
        _near(function(view, dim, scale=scale), want)
        want.select(1 - dim, 1).fill_(EMPTY_VALUE[function])
        _near(function(view, dim, scale=scale, empty="zero"), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("empty", ["nan", "zero"])
@ALL
def test_gradient_of_an_empty_slice(function, empty, dtype) -> None:  # S14
    """Zero with empty="zero", whatever arrives; NaN as in torch otherwise. Neighbours normal."""
    values = torch.tensor([[1.0, 2.0, -INF], [-INF, -INF, -INF], [0.0, 1.0, -1.0]])
    for arriving in (1.0, NAN, INF):
        x = values.to(dtype).requires_grad_()
        y = function(x, empty=empty)
        dy = torch.linspace(1, 2, y.numel()).view(y.shape).to(dtype)
        dy[1] = arriving
        (dx,) = torch.autograd.grad(y, x, dy)
        wide = values.double().requires_grad_()
        (want,) = torch.autograd.grad(TORCHS[function](wide, -1), wide, dy.double())
        assert bool((dx[1] == 0).all() if empty == "zero" else dx[1].isnan().all())
        close(dx[::2].double(), want[::2], rtol=0.02 if dtype.itemsize == 2 else 1e-5, atol=1e-2)
    second = torch.autograd.functional.hvp(
        lambda x: function(x, empty="zero")[[1]].nan_to_num(neginf=0).sum(),
        values.double(),
        torch.ones_like(values).double(),
    )[1]
    assert (second[1] == 0).all()


def test_empty_zero_in_forward_mode() -> None:
    x = torch.full((2, 3), -INF, dtype=torch.double)
    x[0] = 1.0
    for function in (softmax, log_softmax, logsumexp):
        call = lambda v: function(v, empty="zero")  # noqa: B023, E731
        _, tangent = torch.func.jvp(call, (x,), (double(2, 3),))
        assert (tangent[1] == 0).all()
        assert tangent[0].isfinite().all()


@ALL
def test_empty_is_refused(function) -> None:
    for empty in ("zeros", None, 0, True, ["nan"]):
        with pytest.raises(ValueError, match='empty must be "nan" or "zero", got'):
            function(torch.randn(3), empty=empty)


# ---- dtype and kernel refused


@ALONG
def test_dtype_is_refused(function) -> None:
    x = torch.randn(3)
    for dtype in ("float32", float, 1):
        with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype, got"):
            function(x, dtype=dtype)
    for dtype in (torch.int64, torch.complex64, *FP8):
        with pytest.raises(NotImplementedError, match="dtype must be one of"):
            function(x, dtype=dtype)


@ALL
def test_kernels_by_name(function) -> None:
    x = torch.randn(3, 5)
    for name in ("torch", "reference"):
        close(function(x, kernel=name), TORCHS[function](x, -1))
        close(function(x, kernel=name, scale=0.5), TORCHS[function](x * 0.5, -1))
    for name in ("fast", ["torch"]):
        with pytest.raises(ValueError, match=r"no kernel is named .*; there are safe"):
            function(x, kernel=name)
    with pytest.raises(ValueError, match="v2_vectorized"):
        function(x, kernel="v2_vectorized", scale=0.5)
