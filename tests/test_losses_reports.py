"""Reports of wrong cross-entropies elsewhere, on every implementation: shapes, values, repeats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ce_kit
from ce_kit import IGNORED, INF, needs_compiler
from online_softmax import cross_entropy
from rows_kit import gpu

ran, place = ce_kit.ran, ce_kit.place  # fixtures
close = torch.testing.assert_close
ROUNDING = 2.0**-23  # of a denominator: log(1 + that), and a probability's distance from 1
FORWARD = pytest.mark.parametrize("in_forward", [False, True])


def both(x: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The loss and its gradient, for an upstream of ones."""
    leaf = x.detach().requires_grad_()
    loss = cross_entropy(leaf, target, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf, torch.ones_like(loss))[0]


def in_float64(x: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    wide = x.detach().cpu().double().requires_grad_()
    loss = functional.cross_entropy(wide, target.cpu(), **options)
    (dx,) = torch.autograd.grad(loss, wide, torch.ones_like(loss))
    return loss.detach().to(x.device), dx.to(x.device)


@FORWARD
@pytest.mark.parametrize("at", [0, 1, 2047, 50_000, 99_999])
def test_one_finite_logit(at: int, in_forward: bool, place: str) -> None:  # S01
    x = torch.full((1, 100_000), -INF, device=place)
    x[0, at] = 10.0
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        loss, dx = both(given, torch.tensor([at], device=place), grad_in_forward=in_forward)
        close(loss.float(), torch.zeros((), device=place), rtol=0, atol=ROUNDING)
        close(dx.float(), torch.zeros_like(x), rtol=0, atol=ROUNDING)
        _, lse = cross_entropy(given, torch.tensor([at], device=place), return_lse=True)
        assert lse == 10


@FORWARD
def test_other_strides(in_forward: bool, place: str) -> None:  # S06, S07
    """Transposed logits; a target and an upstream that are one element."""
    x = torch.randn(4, 2, 8, device=place)
    t = torch.randint(8, (4, 2), device=place)
    moved = x.transpose(0, 1)
    options = {"dim": -1, "grad_in_forward": in_forward}
    got, want = both(moved, t.T, **options), both(moved.contiguous(), t.T.contiguous(), **options)
    close(got, want, rtol=0, atol=0)
    x = torch.zeros(1000, 2, device=place)
    t = torch.zeros((), dtype=torch.int64, device=place).expand(1000)
    weight = torch.tensor(0.5, device=place).expand(2)
    for _ in range(3):
        for reduction, size in (("mean", 1000), ("none", 1)):
            loss, dx = both(x, t, weight=weight, reduction=reduction, grad_in_forward=in_forward)
            of_row = math.log(2) * (1 if reduction == "mean" else 0.5)
            close(loss, torch.full_like(loss, of_row))
            share = 0.5 if reduction == "mean" else 0.25
            close(dx, torch.tensor([-share, share], device=place).expand(1000, 2) / size)


@FORWARD
def test_a_summed_loss(in_forward: bool, place: str) -> None:  # S08
    """Whose upstream is one element for all rows."""
    x, t = torch.randn(5, 33, device=place), torch.randint(33, (5,), device=place)
    leaf = x.clone().requires_grad_()
    cross_entropy(leaf, t, reduction="none", grad_in_forward=in_forward).sum().backward()
    _, want = in_float64(x, t, reduction="sum")
    close(leaf.grad.double(), want, rtol=1e-5, atol=1e-7)
    close(leaf.grad.sum(-1), torch.zeros(5, device=place), rtol=0, atol=1e-6)  # S78


@FORWARD
def test_one_class_and_no_row(in_forward: bool, place: str) -> None:  # S15, S17
    x = torch.randn(3, 1, device=place)
    loss, dx = both(x, torch.zeros(3, dtype=torch.int64, device=place), grad_in_forward=in_forward)
    close((loss, dx), (torch.zeros_like(loss), torch.zeros_like(dx)), rtol=0, atol=ROUNDING)
    none = torch.zeros(0, 5, device=place)
    target = torch.zeros(0, dtype=torch.int64, device=place)
    for reduction, want in (("mean", math.nan), ("sum", 0.0)):
        loss, dx = both(none, target, reduction=reduction, grad_in_forward=in_forward)
        close(loss.item(), want, equal_nan=True)
        assert dx.shape == (0, 5)
    for cols in range(2, 70):
        x, t = torch.randn(2, cols, device=place), torch.tensor([0, cols - 1], device=place)
        got, want = both(x, t, grad_in_forward=in_forward), in_float64(x, t)
        close([each.double() for each in got], list(want), rtol=1e-5, atol=1e-6)


@FORWARD
def test_infinite_logits(in_forward: bool, place: str) -> None:  # S52, S53
    x = torch.tensor([[9.8505, -INF, 9.4739]], device=place)
    p = torch.softmax(x, -1)
    for target, smoothing, loss in ((0, 0.0, 0.5224718), (1, 0.0, INF), (0, 0.1, INF)):
        t = torch.tensor([target], device=place)
        options = {"label_smoothing": smoothing, "grad_in_forward": in_forward}
        got, dx = both(x, t, **options)
        close(got.item(), loss)
        q = torch.full_like(p, smoothing / 3)
        q[0, target] += 1 - smoothing
        close(dx, p - q)
    wide = torch.zeros(4, 5000, device=place)
    wide[1, 4999], wide[2, 0], wide[2, 1:64] = math.nan, math.nan, INF
    t = torch.tensor([0, 1, 2, 3], device=place)
    loss, dx = both(wide, t, reduction="none", grad_in_forward=in_forward)
    assert loss.isnan().tolist() == [False, True, True, False]
    assert dx.isnan().all(-1).tolist() == [False, True, True, False]
    assert dx[::3].isfinite().all()
    close(loss[::3], torch.full((2,), math.log(5000), device=place))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_sum_is_not_kept_in_a_half_type(dtype: torch.dtype, place: str) -> None:  # S59
    rows = 20_500
    t = torch.zeros(rows, dtype=torch.int64, device=place)
    mean = cross_entropy(torch.zeros(rows, 20, dtype=dtype, device=place), t)
    assert mean == torch.tensor(math.log(20)).to(dtype)
    spatial = torch.zeros(20, 20, 1025, dtype=dtype, device=place)
    assert cross_entropy(spatial, t.view(20, 1025)) == mean
    total = cross_entropy(torch.zeros(rows, 20, dtype=dtype, device=place), t, reduction="sum")
    assert total == (torch.tensor(math.log(20)).float() * rows).to(dtype)


def test_a_second_derivative(place: str) -> None:  # S60
    """By a penalty on the gradient, in float32; never silently 0."""
    x, t = torch.randn(4, 33, device=place), torch.tensor([0, IGNORED, 32, 5], device=place)
    found = []
    for leaf, function in ((x.clone(), cross_entropy), (x.double(), functional.cross_entropy)):
        leaf.requires_grad_()
        (dx,) = torch.autograd.grad(function(leaf, t), leaf, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), leaf)[0])
    close(found[0].double(), found[1], rtol=1e-4, atol=1e-7)
    assert found[0].abs().max() > 1e-3


@FORWARD
@pytest.mark.parametrize("weighted", [False, True])
def test_the_same_bits_every_time(weighted: bool, in_forward: bool, place: str) -> None:  # S80
    rows = 1 << 20 if place == "cuda" else 9000
    x, t = torch.randn(rows, 2, device=place), torch.randint(2, (rows,), device=place)
    t[::5] = IGNORED
    options: dict[str, Any] = {"grad_in_forward": in_forward}
    if weighted:
        options["weight"] = torch.tensor([0.3, 1.7], device=place)
    for reduction in ("mean", "sum"):
        first = both(x, t, reduction=reduction, **options)
        for _ in range(20 if place == "cuda" else 2):
            again = both(x, t, reduction=reduction, **options)
            assert all(map(torch.equal, first, again))
        wide = {"weight": options["weight"].cpu().double()} if weighted else {}
        want = in_float64(x, t, reduction=reduction, **wide)
        size = 4e-7 * float(want[1].abs().max())
        close([each.double() for each in first], list(want), rtol=1e-5, atol=size)


@FORWARD
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_same_bits_of_classes_in_front(
    weighted: bool, reduction: str, in_forward: bool, place: str
) -> None:
    """S80: spatial, classes along dim 1; where kernels run on the CPU a part of it."""
    shape = (2, 2, 16, 16) if place == "cpu" else (16, 2, 256, 256)
    x = torch.randn(shape, device=place)
    t = torch.randint(2, (shape[0], *shape[2:]), device=place)
    t[..., ::5] = IGNORED
    weight = torch.tensor([0.3, 1.7], device=place) if weighted else None
    options = {"reduction": reduction, "weight": weight, "grad_in_forward": in_forward}
    first = both(x, t, **options)
    for _ in range(20 if place == "cuda" else 2):
        assert all(map(torch.equal, first, both(x, t, **options)))
    wide = None if weight is None else weight.cpu().double()
    want = in_float64(x, t, reduction=reduction, weight=wide)
    size = 4e-7 * float(want[1].abs().max())
    close([each.double() for each in first], list(want), rtol=1e-5, atol=size)


@gpu
@FORWARD
def test_odd_in_both(in_forward: bool) -> None:  # S83
    x = torch.randn(4005, 8193, device="cuda").half()
    t = torch.randint(8193, (4005,), device="cuda")
    got = both(x, t, reduction="none", grad_in_forward=in_forward)
    want = in_float64(x, t, reduction="none")
    close([each.double() for each in got], list(want), rtol=2.0**-9, atol=1e-6)


@gpu
@FORWARD
def test_past_two_to_the_31_elements(in_forward: bool) -> None:  # S72: 4.3 GB a tensor
    rows, cols = 32_768 + 16, 65_536
    x = torch.randn(1, cols, device="cuda").half().expand(rows, cols).clone()
    x[-10:] = torch.randn(10, cols, device="cuda").half()
    t = torch.randint(cols, (rows,), device="cuda")
    got = both(x, t, reduction="none", grad_in_forward=in_forward)
    alone = both(x[-10:], t[-10:], reduction="none", grad_in_forward=in_forward)
    assert all(torch.equal(a[-10:], b) for a, b in zip(got, alone, strict=True))
    assert got[1].isfinite().all()


@needs_compiler
def test_kernels_ran_here(place: str, ran: list[str]) -> None:
    """What these tests call "kernels" runs them."""
    cross_entropy(torch.zeros(2, 3, device=place), torch.tensor([0, 1], device=place))
    assert (place == "cuda") or ran == ["in_registers", "reduce"]
