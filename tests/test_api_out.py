"""out=: what is filled, what may alias, what is refused, as in torch."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from online_softmax import catalogue, log_softmax, rowops, softmax
from online_softmax.catalogue import DTYPES
from rows_kit import DEVICES

ALONG = pytest.mark.parametrize("function", [softmax, log_softmax])
TORCHS = {softmax: torch.softmax, log_softmax: torch.log_softmax}
close = torch.testing.assert_close


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ALONG
def test_out_of_any_strides(function, dtype, device: str) -> None:  # S64
    x = torch.randn(2, 3, device=device).to(dtype)
    want = function(x)
    for base, view in (
        (torch.full((2, 3), 7.0), lambda t: t),
        (torch.full((2, 6), 7.0), lambda t: t[:, ::2]),
        (torch.full((3, 2), 7.0), lambda t: t.t()),
        (torch.full((4, 5), 7.0), lambda t: t[1:3, 1:4]),
    ):
        base = base.to(dtype).to(device)
        out = view(base)
        version = out._version
        assert function(x, out=out) is out
        assert torch.equal(out, want)
        assert out._version > version  # autograd must notice the write
        assert int((base == 7).sum()) == base.numel() - out.numel()


@ALONG
def test_out_with_options(function) -> None:
    x = torch.tensor([[1.0, 2.0], [-torch.inf, -torch.inf]]).half()
    out = torch.empty(2, 2, dtype=torch.float32)
    function(x, 0, dtype=torch.float32, scale=0.5, out=out)
    close(out, TORCHS[function](x.float() * 0.5, 0), equal_nan=True)
    function(x, dtype=torch.float32, empty="zero", out=out)
    close(out, function(x, dtype=torch.float32, empty="zero"))
    fp8 = x.to(torch.float8_e5m2)
    close(function(fp8, out=torch.empty(2, 2).bfloat16()), function(fp8), equal_nan=True)


@DEVICES
@ALONG
def test_in_place(function, device: str) -> None:
    for make in (
        lambda: torch.randn(4, 33, device=device),
        lambda: torch.randn(33, 4, device=device).t(),
        lambda: torch.randn(4, 66, device=device)[:, ::2],
        lambda: torch.randn(4, 34, device=device)[:, 1:],
    ):
        x = make()
        want = function(x.clone())
        assert function(x, out=x) is x
        close(x, want)
        y = make()
        want = function(y.clone(), 0)
        close(function(y, 0, out=y.view_as(y)), want)  # the same memory by another tensor


@DEVICES
@ALONG
def test_overlap(function, device: str) -> None:
    """Refused where torch's elementwise operations refuse; right where they cannot tell."""
    b = torch.randn(40, device=device)
    x = b[:12].view(3, 4)
    for out in (b[1:13].view(3, 4), b[4:16].view(3, 4)):
        with pytest.raises(RuntimeError, match="out and x share part of their memory"):
            function(x, out=out)
    square = b[:16].view(4, 4)
    with pytest.raises(RuntimeError, match="share part"):
        function(square, out=square.t())
    halves = torch.randn(8, device=device)
    with pytest.raises(RuntimeError, match="share part"):
        function(halves[:4], dtype=torch.float16, out=halves.view(torch.float16)[:4])
    with pytest.raises(RuntimeError, match=r"several elements of out.*strides \(0, 1\)"):
        function(x, out=torch.empty(4, device=device).expand(3, 4))
    want = function(x)
    close(function(x, out=b[12:24].view(3, 4)), want)  # side by side
    wide = torch.randn(3, 8, device=device)
    left, right = wide[:, :4], wide[:, 4:]
    want, before = function(left), left.clone()
    close(function(left, out=right), want)  # interleaved rows of one base
    assert torch.equal(left, before)
    gaps = torch.randn(3, 9, device=device)
    want = function(gaps[:, :8:2].clone())
    close(function(gaps[:, :8:2], out=gaps[:, 2::2][:, :4]), want)  # overlapping, with gaps


@ALONG
def test_a_wrong_shape_is_resized(function) -> None:
    """With a warning if there was something in it, as torch's out= does."""
    x = torch.randn(3, 4)
    for empty in (torch.empty(0), torch.empty(3, 0)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(function(x, out=empty), function(x))
        assert empty.shape == (3, 4)
    for other in (torch.empty(3, 5), torch.empty(12), torch.empty(4, 3)):
        with pytest.warns(UserWarning, match=r"was resized to \(3, 4\), the shape of x") as caught:
            function(x, out=other)
        assert caught[0].filename == __file__
        close(other, function(x))
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(x, 1, out=torch.empty(3, 5))


@ALONG
def test_out_is_refused(function) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match=r"out must have dtype torch.float32, got torch.float64"):
        function(x, out=torch.empty(3, 4, dtype=torch.double))
    with pytest.raises(RuntimeError, match=r"out must have dtype torch.float16"):
        function(x, dtype=torch.float16, out=torch.empty(3, 4))
    with pytest.raises(RuntimeError, match="out must be on cpu like x, got meta"):
        function(x, out=torch.empty(3, 4, device="meta"))
    with pytest.raises(TypeError, match="out must be a Tensor, got list"):
        function(x, out=[1.0])
    with pytest.raises(NotImplementedError, match="out must be a dense tensor"):
        function(x, out=torch.empty(3, 4).to_sparse())


@ALONG
def test_out_and_gradients(function) -> None:
    """An error where a gradient would be recorded: torch's of most functions."""
    x, needs = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    for given, out in ((needs, torch.empty(3, 4)), (x, needs), (needs, needs)):
        with pytest.raises(RuntimeError, match="out= does not support automatic differentiation"):
            function(given, out=out)
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            torch.add(given, 1, out=out)
    with torch.no_grad():
        out = torch.empty(3, 4)
        assert not function(needs, out=out).requires_grad
        close(out, function(needs))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        function(forward_ad.make_dual(x, x), out=torch.empty(3, 4))
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.vmap(lambda v: function(v, out=torch.empty(4)))(x)


@ALONG
def test_a_result_that_backward_needs_was_overwritten(function) -> None:  # S22
    """The write into out counts as a change of what autograd saved."""
    x = torch.randn(3, 4, requires_grad=True)
    y = function(x)
    with torch.no_grad():
        function(torch.randn(3, 4), out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@ALONG
def test_inference_tensors(function) -> None:
    with torch.inference_mode():
        x = torch.randn(3, 4)
        out = torch.empty(3, 4)
        close(function(x, out=out), function(x))
    close(function(x), TORCHS[function](x, -1))
    with pytest.raises(RuntimeError, match="inference"):
        function(x, out=x)


@ALONG
def test_out_with_a_pending_negation(function) -> None:
    """`z.imag` of a conjugate: memory holds the opposite of the values."""
    x, z = torch.randn(3, 4), torch.zeros(3, 4, dtype=torch.complex64)
    out = z.conj().imag
    assert function(x, out=out) is out
    close(out, function(x))
    close(z.imag, -function(x))


@ALONG
def test_nothing_into_out(function) -> None:
    for shape in ((0, 3), (3, 0)):
        assert function(torch.empty(shape), out=torch.empty(shape)).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_kernel_writes_straight_into_out(dtype: torch.dtype, monkeypatch) -> None:
    """Unless it reads there, or out is not contiguous; the result is the same everywhere."""
    written = []

    def run(x: Tensor, y: Tensor, numbers: object) -> None:
        written.append(y.data_ptr())
        y.copy_(torch.softmax(x, -1))

    record = replace(catalogue.KERNELS["torch"], run=run)
    monkeypatch.setattr(catalogue, "choose", lambda problem: (record, ""))
    x = torch.randn(4, 4).to(dtype)
    for result in (dtype, torch.float32):
        for dim in (0, 1):
            want = rowops.forward("softmax", x, dim, result, 1.0, False, "")
            out, turned = torch.empty(4, 4, dtype=result), torch.empty(4, 4, dtype=result).t()
            negated = torch._neg_view(torch.empty(4, 4, dtype=result))
            for each in (out, turned, negated):
                got = rowops.forward("softmax", x, dim, result, 1.0, False, "", each)
                assert got is each
                assert torch.equal(each, want)
                assert (written[-1] == each.data_ptr()) == (each is out and dim == 1)
    want = rowops.forward("softmax", x, -1, None, 1.0, False, "")
    assert rowops.forward("softmax", x, -1, None, 1.0, False, "", x) is x
    assert written[-1] != x.data_ptr()
    assert torch.equal(x, want)
