"""Public bug reports as inputs of the row operations, with the value that is right.

The values are float64's, rounded to the digits given. S-numbers are keys of lab/cases.py's REPORTS
or stand beside their source here.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from online_softmax import log_softmax, logsumexp, rowops, softmax
from rows_kit import DEVICES, INF, NAN

OPS = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp}
ALL = pytest.mark.parametrize("op", OPS)
ALONG = pytest.mark.parametrize("op", ["softmax", "log_softmax"])
HALVES_TOO = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
TORCHS = {"softmax": torch.softmax, "log_softmax": torch.log_softmax, "logsumexp": torch.logsumexp}


def close(got: Tensor, want: Tensor | list | float, atol: float = 2e-7, rtol: float = 2e-6) -> None:
    got = got.detach().cpu().double()
    want = torch.as_tensor(want, dtype=torch.float64).expand(got.shape)
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol, equal_nan=True)


def agree(op: str, x: Tensor, dim: int = -1) -> None:
    """With float64, within one rounding of x's dtype."""
    rtol = 2e-6 + (0.5 * torch.finfo(x.dtype).eps if x.dtype.itemsize == 2 else 0)
    want = TORCHS[op](x.detach().cpu().double(), dim)
    close(OPS[op](x, dim), want, atol=1e-6, rtol=rtol)


def gradient(op: str, x: Tensor, dim: int = -1, dy: Tensor | None = None, **options) -> Tensor:
    x = x.detach().requires_grad_()
    y = OPS[op](x, dim, **options)
    return torch.autograd.grad(y, x, torch.ones_like(y) if dy is None else dy)[0]


@DEVICES
@HALVES_TOO
@pytest.mark.parametrize("col", [0, 1, 2047, 50000, 65536, 99999])
def test_s01_one_finite_column(col: int, dtype: torch.dtype, device: str) -> None:
    x = torch.full((1, 100000), -INF, dtype=dtype, device=device)
    x[0, col] = 10
    one_hot = torch.zeros(1, 100000)
    one_hot[0, col] = 1
    close(softmax(x), one_hot, 0, 0)
    assert log_softmax(x)[0, col] == 0
    assert logsumexp(x) == 10
    close(gradient("softmax", x, dy=torch.randn(1, 100000, device=device).to(dtype)), 0.0)
    close(gradient("logsumexp", x), one_hot, 0, 0)
    loss = torch.nn.functional.nll_loss(log_softmax(x).float(), torch.tensor([col], device=device))
    assert loss == 0


@DEVICES
@HALVES_TOO
@ALL
def test_s05_s06_transposed(op: str, dtype: torch.dtype, device: str) -> None:
    x = torch.arange(1.0, 13, device=device).view(3, 4).t().to(dtype)
    if op == "softmax" and dtype == torch.float32:
        close(softmax(x, 1)[0], [0.0003293, 0.0179803, 0.9816904], 5e-8)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(4, 2, 8, generator=generator).to(device).to(dtype).transpose(0, 1)
    wide = torch.randn(4096, 64, generator=generator).to(device).to(dtype).t()
    for view in (x, torch.randn(32, 32).to(device).to(dtype).t(), batch, wide):
        for dim in range(view.dim()):
            agree(op, view, dim)
            same = OPS[op](view.contiguous(), dim)
            torch.testing.assert_close(OPS[op](view, dim), same)
            if rowops.has_kernel(op, view):  # of a kernel of ours, to the last bit
                assert torch.equal(OPS[op](view, dim), same)


@DEVICES
@ALL
def test_s07_s08_expanded(op: str, device: str) -> None:
    """Inputs and upstream gradients of stride 0, ten times."""
    x = torch.zeros(1000, 2, device=device)
    for _ in range(10):
        if op == "log_softmax":
            close(log_softmax(x), -0.6931472)
        if op == "logsumexp":
            close(logsumexp(x), 0.6931472)
        agree(op, torch.randn(1, 2, device=device).expand(1000, 2))
    for view in (torch.randn(32, 32, device=device), torch.randn(32, 32, device=device).t()):
        p = torch.softmax(view.cpu().double(), -1)
        want = {"softmax": torch.zeros(32, 32), "log_softmax": 1 - 32 * p, "logsumexp": p}[op]
        leaf = view.detach().requires_grad_()
        OPS[op](leaf).sum().backward()
        assert leaf.grad is not None
        close(leaf.grad, want, atol=5e-6)


@DEVICES
@ALL
def test_s11_s59_sums_of_halves(op: str, device: str) -> None:
    for dtype, rows, cols in (
        (torch.float16, 1, 4096),
        (torch.bfloat16, 1, 512),
        (torch.bfloat16, 1, 4096),
        (torch.float16, 64, 200),
    ):
        x = torch.zeros(rows, cols, dtype=dtype, device=device)
        agree(op, x)
        agree(op, torch.randn(rows, 2 * cols, device=device).to(dtype))
        p = torch.full((rows, cols), 1 / cols).double()
        want = {"softmax": p * 0, "log_softmax": 1 - cols * p, "logsumexp": p}[op]
        # A logarithm of size 8, rounded to 8 bits, is off by 1/64: so is exp of it.
        atol = 0.02 if op == "log_softmax" else 2e-6
        close(gradient(op, x), want, atol=atol, rtol=torch.finfo(dtype).eps)
    x = torch.zeros(20, 200, 1025, dtype=torch.float16, device=device)
    if op == "log_softmax":
        close(-log_softmax(x, 1).double().mean(), 5.296875, atol=1e-6)


@DEVICES
@ALL
def test_s12_scores_of_a_million(op: str, device: str) -> None:
    generator = torch.Generator().manual_seed(12)
    q = torch.randn(1, 10, 40, generator=generator)
    x = (q @ torch.randn(1, 40, 2, generator=generator) / 1e-6).to(device)
    agree(op, x)
    if op == "softmax":
        assert ((softmax(x).double().sum(-1) - 1).abs() <= 2**-22).all()


@DEVICES
def test_s13_s51_logarithms_are_not_lost(device: str) -> None:
    x = torch.tensor([[0.0, 1, -1, 0]], device=device) - 1e7
    want = [-1.6265234, -0.6265234, -2.6265234, -1.6265234]
    close(log_softmax(x), [want])
    close(log_softmax(x.repeat(3, 1).t(), 0), torch.tensor([want]).t())
    close(log_softmax(torch.tensor([0.0, -95, -200], device=device)), [0.0, -95.0, -200.0])
    x = torch.tensor([0.0, 200.0], device=device)
    assert log_softmax(x)[0] == -200
    close(gradient("log_softmax", x, dy=torch.tensor([-1.0, 0.0], device=device)), [-1.0, 1.0])


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_s14_an_empty_row_among_others(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([[1.0, 2], [-INF, -INF], [0, 1]], device=device).to(dtype)
    rough = 1e-2 if dtype.itemsize == 2 else 2e-7
    close(logsumexp(x), [2.3132617, -INF, 1.3132617], rough)
    for op in ("softmax", "log_softmax"):
        agree(op, x)
        assert OPS[op](x)[1].isnan().all()
    for op in OPS:
        dx = gradient(op, x)
        assert dx[1].isnan().all()
        assert dx[::2].isfinite().all()
        assert (gradient(op, x, empty="zero")[1] == 0).all()
    close(gradient("logsumexp", x)[2], [0.2689414, 0.7310586], rough)


@DEVICES
@ALL
@pytest.mark.parametrize("shape", [(0, 2), (10, 0), (4, 0, 5, 2), (0, 0)])
def test_s15_nothing(op: str, shape: tuple[int, ...], device: str) -> None:
    x = torch.empty(shape, device=device)
    for dim in range(-len(shape), len(shape)):
        want = TORCHS[op](x, dim)
        y = OPS[op](x, dim)
        assert torch.equal(y, want)
        assert gradient(op, x, dim).shape == shape


@DEVICES
@ALL
def test_s17_one_column(op: str, device: str) -> None:
    for cols in (1, *range(2, 129, 9)):
        x = torch.randn(3, cols, generator=torch.Generator().manual_seed(cols)).to(device)
        agree(op, x)
        agree(op, x.t(), 0)
    x = x[:, :1]
    close(OPS[op](x), {"softmax": 1.0, "log_softmax": 0.0, "logsumexp": x[:, 0].cpu()}[op], 0, 0)
    close(gradient(op, x), 1.0 if op == "logsumexp" else 0.0, 0, 0)


@DEVICES
def test_s20_one_upstream_value_a_row(device: str) -> None:
    """Cross-entropy by hand: labels 0, none, 2, upstream 1, 5, 2."""
    x = torch.tensor([[2.0, 0, 1], [0, 3, 0], [1, 1, 1]], device=device, requires_grad=True)
    y = log_softmax(x)
    loss = torch.stack([-y[0, 0], 0 * y[1, 0], -y[2, 2]])
    close(loss, [0.4076060, 0, 1.0986123])
    loss.backward(torch.tensor([1.0, 5, 2], device=device))
    want = [[-0.3347590, 0.0900306, 0.2447285], [0, 0, 0], [0.6666667, 0.6666667, -1.3333333]]
    close(x.grad, want)
    x = x.detach().requires_grad_()
    loss = logsumexp(x) - torch.stack([x[0, 0], logsumexp(x)[1], x[2, 2]])
    loss.backward(torch.tensor([1.0, 5, 2], device=device))
    close(x.grad, want)


@DEVICES
@ALL
def test_s22_the_input_is_left_alone(op: str, device: str) -> None:
    for make in (lambda t: t, torch.tanh):
        leaf = torch.randn(3, 7, device=device, requires_grad=True)
        x = make(leaf)
        before = x.detach().clone()
        first = OPS[op](x).square().sum()
        first.backward(retain_graph=True)
        one = leaf.grad.clone()
        second = OPS[op](x).square().sum()
        assert torch.equal(second, first)
        first.backward(retain_graph=True)
        assert torch.equal(leaf.grad, 2 * one)
        second.backward()
        torch.testing.assert_close(leaf.grad, 3 * one)
        assert torch.equal(x.detach(), before)


@DEVICES
def test_s30_s52_s54_s78_values(device: str) -> None:
    def t(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    close(softmax(t(-245000, -245010)), [0.9999546, 0.0000454], 5e-8)
    close(log_softmax(t(-245000, -245010)), [-0.0000454, -10.0000454], 1e-7)
    close(logsumexp(t(-245000, -245010)), -245000)
    masked = t(9.8505, -INF, 9.4739)
    close(-log_softmax(masked)[0], 0.5224718)
    assert -log_softmax(masked)[1] == INF
    p = torch.softmax(masked.cpu().double(), 0)
    close(gradient("log_softmax", masked, dy=t(0, -1, 0)), [p[0], -1, p[2]])
    close(softmax(-200 + t(0, 0.001, 0.002)), torch.softmax(t(0, 0.001, 0.002).cpu(), 0), 1e-5)
    close(logsumexp(t(*[-200.0] * 448)), -200 + 6.1047932, 1e-5)
    close(gradient("log_softmax", t(0.1, 0.9)), [0.3799490, -0.3799490])


@DEVICES
@ALL
def test_s53_nan(op: str, device: str) -> None:
    last = torch.zeros(2, 5000)
    last[0, -1] = NAN
    short = torch.tensor([[NAN, 1, 2], [0, 1, 2]])
    after = torch.tensor([[NAN, *[INF] * 63], [0.0] * 64])
    for x in (last, short, after):
        y = OPS[op](x.to(device))
        assert y[0].isnan().all()
        assert y[1].isfinite().all()
        dx = gradient(op, x.to(device))
        assert dx[0].isnan().all()
        assert dx[1].isfinite().all()


@DEVICES
@HALVES_TOO
@ALL
def test_s63_s66_s76_dims_and_strides(op: str, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(63)
    padded = torch.randn(2, 8, 2, 2, generator=generator).to(device).to(dtype)[:, :4]
    rows = torch.randn(5, 40, generator=generator).to(device).to(dtype)[:, :33]
    high = (200 + 100 * torch.rand(4, 64, 33, generator=generator)).to(device).to(dtype)
    five = torch.randn(2, 1, 11, 7, 5, generator=generator).to(device).to(dtype)
    for x in (padded, rows, high, -high, five):
        for dim in range(-x.dim(), x.dim()):
            agree(op, x, dim)
    for x in (padded, rows):
        for dim in range(x.dim()):
            assert torch.equal(gradient(op, x, dim), gradient(op, x.contiguous(), dim))
    for dim in (5, -6):
        with pytest.raises(IndexError):
            OPS[op](five, dim)


@ALL
def test_s68_integers_are_refused(op: str) -> None:
    """torch's softmax refuses them, its logsumexp converts; both here say what to do."""
    for x in (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.bool)):
        with pytest.raises(NotImplementedError, match=r"x\.float\(\) for example"):
            OPS[op](x)
    close(logsumexp(torch.full((20, 30, 100), 100 - 4, dtype=torch.int64).float()), 96 + 4.6051702)
