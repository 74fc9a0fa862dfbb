"""The kernels of cross-entropy: single values, infinities, targets, large logits and long rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import online_softmax
from ce_kit import (
    IGNORED,
    INF,
    arguments,
    close,
    expected,
    needs_compiler,
    options,
    problem,
    work,
)
from online_softmax import cekernels, rowkernels, rowplan
from online_softmax.cuda import launch
from online_softmax.cuda.launch import Launch
from online_softmax.reference import cross_entropy as reference
from online_softmax.rowplan import Row

pytestmark = needs_compiler


def check(x: Any, target: list[int], loss: Any, dx: Any, **given: Any) -> None:
    """Both ways to the loss and the gradient, for an upstream of ones."""
    logits, targets = torch.tensor(x), torch.tensor(target)
    want = torch.tensor(loss, dtype=torch.double)
    want_dx = torch.tensor(dx, dtype=torch.double)
    losses, lse = cekernels.forward(logits, targets, **given)
    close(losses, want, 1e-6)
    close(cekernels.backward(torch.ones(len(x)), logits, targets, lse, **given), want_dx, 1e-6)
    losses, lse, got = cekernels.forward_with_gradient(logits, targets, torch.ones(()), **given)
    close(losses, want, 1e-6)
    close(got, want_dx, 1e-6)


def test_infinite_logits() -> None:
    wide = torch.tensor([9.8505, -INF, 9.4739])
    p = torch.softmax(wide.double(), -1).tolist()
    check([wide.tolist()], [0], [0.5224718], [[p[0] - 1, 0.0, p[2]]])
    check([wide.tolist()], [1], [INF], [[p[0], -1.0, p[2]]])
    tenth = 0.1 / 3
    spread = [p[0] - 0.9 - tenth, -tenth, p[2] - tenth]
    check([wide.tolist()], [0], [INF], [spread], label_smoothing=0.1)
    nan = [math.nan] * 3
    bad = [[0.0, INF, 1.0], [-INF] * 3, [math.nan, 1.0, 2.0]]
    check(bad, [0, 0, 1], nan, [nan] * 3)
    check(bad, [IGNORED, 3, -1], [0.0, math.nan, math.nan], [[0.0] * 3] * 3)
    capped = torch.tensor([[INF, -INF, 0.0]])
    want_loss, _, _ = expected(capped, torch.tensor([0]), softcap=2.0)
    prob = torch.softmax(torch.tensor([2.0, -2.0, 0.0]).double(), -1)[2]
    check(capped.tolist(), [0], want_loss.tolist(), [[0.0, 0.0, float(prob)]], softcap=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_class_alone_costs_nothing(dtype: torch.dtype) -> None:
    """Exactly, whatever its logit: d is 1 however the product with log2(e) was rounded."""
    lone = (torch.randn(60) * torch.logspace(-2, 4, 60)).to(dtype)
    among = torch.full((60, 33), -INF, dtype=dtype)
    among[:, 5] = lone
    for logits, place in ((lone[:, None], 0), (among, 5)):
        target = torch.full((60,), place)
        for kernel in ("registers", "split"):
            loss, lse = cekernels.forward(logits, target, kernel=kernel)
            assert torch.equal(loss, torch.zeros(60))
            assert torch.equal(lse, lone.float())
        loss, _, dx = cekernels.forward_with_gradient(logits, target, torch.ones(()))
        assert torch.equal(loss, torch.zeros(60))
        close(dx, torch.zeros(logits.shape).double(), 2.0**-24)
    loss, _ = cekernels.forward(lone[:, None], torch.zeros(60, dtype=torch.int64), softcap=20.0)
    assert torch.equal(loss, torch.zeros(60))


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_a_warp_without_a_column_counts_nothing(softcap: float | None) -> None:
    """Its padding, which a cap makes finite, is not of the row."""
    x, target = torch.randn(3, 5), torch.tensor([0, 4, 2])
    want, _, want_dx = expected(x, target, softcap=softcap)
    for row in (Row("registers", 1, 0, 96), Row("registers", 1, 0, 32, 2)):
        dx = torch.full((3, 5), 7.0)
        given = options(softcap=softcap)
        launches, loss, _ = work(x, target, given, row, torch.ones(3), dx)
        launch.run(launches, x.device)
        close(loss, want, 1e-6)
        close(dx, want_dx, 1e-6)


def test_targets_that_are_ignored_or_no_class() -> None:
    ln3 = math.log(3.0)
    third = [[1 / 3, -2 / 3, 1 / 3], [1 / 3, 1 / 3, -2 / 3]]
    check([[1.0] * 3] * 2, [1, 2], [ln3, ln3], third, ignore_index=0)
    check([[1.0] * 3] * 2, [0, 2], [0.0, ln3], [[0.0] * 3, third[1]], ignore_index=0)
    spread = [0.0233640, 0.1780618, -0.2014257]  # twice what a mean of two gives
    logits, nothing = [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], [[0.0] * 3] * 2
    twice = [spread, spread[::-1]]
    check(logits, [2, 0], [0.6076060] * 2, twice, label_smoothing=0.2)
    check(logits, [-100, -100], [0.0, 0.0], nothing, label_smoothing=0.2)
    check(logits, [1000, -1], [math.nan] * 2, nothing)
    weight = torch.tensor([0.2, 0.3])
    loss, _ = cekernels.forward(
        torch.tensor([[1.0, 2.0], [3.0, 0.4]]), torch.tensor([-100, 1]), weight, label_smoothing=0.1
    )
    close(loss, torch.tensor([0.0, 0.7621352]).double(), 1e-6)


EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "smooth": {"label_smoothing": 0.1},
    "all_smooth": {"label_smoothing": 1.0},
    "capped": {"softcap": 10.0},
}


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("spread", [1, 10])
def test_errors_are_at_most_torchs(options: dict[str, Any], spread: int) -> None:
    """In float32: torch's largest, and 2^-23 of the loss or of a probability."""
    torch.manual_seed(6)
    x, target = torch.randn(64, 1500) * spread, torch.randint(1500, (64,))
    want, _, want_dx = expected(x, target, **options)
    leaf = x.clone().requires_grad_()
    z = leaf * options.get("scale", 1.0)
    if "softcap" in options:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    smoothing = options.get("label_smoothing", 0.0)
    torchs = cross_entropy(z, target, reduction="none", label_smoothing=smoothing)
    (torchs_dx,) = torch.autograd.grad(torchs.sum(), leaf)
    rest = torch.empty(64)
    loss, lse = cekernels.forward(x, target, lse_rest=rest, **options)
    apart = cekernels.backward(torch.ones(64), x, target, lse, lse_rest=rest, **options)
    both = cekernels.forward_with_gradient(x, target, torch.ones(()), **options)
    most = (torchs.double() - want).abs().max() + want * 2.0**-23
    assert ((loss.double() - want).abs() <= most).all()
    assert ((both.loss.double() - want).abs() <= most).all()
    most_dx = (torchs_dx.double() - want_dx).abs().max() + 2.0**-23
    assert (apart.double() - want_dx).abs().max() <= most_dx
    assert (both.dlogits.double() - want_dx).abs().max() <= most_dx


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_large_logits_cost_no_digits(smoothing: float) -> None:
    """1e6 and what differs from it by little: lse has no digits left for the loss."""
    torch.manual_seed(4)
    x = 1e6 + torch.randn(4, 300) * 2
    target = torch.tensor([0, 17, 150, 299])
    want, _, want_dx = expected(x, target, label_smoothing=smoothing)
    rest = torch.empty(4)
    loss, lse = cekernels.forward(x, target, label_smoothing=smoothing, lse_rest=rest)
    close(loss, want, 1e-6)
    assert rest.abs().max() > 1e-3
    given: dict[str, Any] = {"label_smoothing": smoothing, "lse_rest": rest}
    close(cekernels.backward(torch.ones(4), x, target, lse, **given), want_dx, 1e-7, 2.0**-18)
    kept = cekernels.forward_with_gradient(x, target, torch.ones(4), label_smoothing=smoothing)
    close(kept.loss, want, 1e-6)
    close(kept.dlogits, want_dx, 1e-7, 2.0**-18)
    x = torch.full((2, 300), -3.0e38)
    x[0, 5], x[0, 7], x[1, 9] = 3.2e38, 3.2e38, 2.9e38
    loss, _ = cekernels.forward(x, torch.tensor([5, 9]))
    close(loss, torch.tensor([math.log(2.0), 0.0]).double(), 1e-6)


@pytest.mark.parametrize("variant", ["plain", "all"])
def test_a_long_row(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As planned, split; and the gradient where a row has no room in registers, in place."""
    torch.manual_seed(5)
    cols = 70_001
    x, target = problem(2, cols, torch.bfloat16)
    given, dloss = arguments(variant, cols), torch.tensor([0.5, -2.0])
    want_loss, want_lse, want_dx = expected(x, target, **given)
    ran: list[str] = []
    run = launch.run

    def note(launches: list[Launch], device: torch.device) -> None:
        ran.extend(each.symbol.partition("<")[0] for each in launches)
        run(launches, device)

    monkeypatch.setattr(launch, "run", note)
    loss, lse = cekernels.forward(x, target, **given)
    assert ran == ["cross_entropy_fold", "cross_entropy_merge"]
    close(loss, want_loss, 1e-6)
    close(lse, want_lse, 1e-6)
    cut = rowplan.numbers("logsumexp", cols, "bfloat16", "sm_90a")
    monkeypatch.setattr(rowkernels, "numbers", lambda op, matrix, kernel: cut)
    given_loss, _, dx = cekernels.forward_with_gradient(x, target, dloss, **given, out=x)
    assert ran[2:] == ["cross_entropy_fold", "cross_entropy_merge", "cross_entropy_backward"]
    assert dx is x
    assert torch.equal(given_loss, loss)
    close(dx, want_dx * dloss[:, None], 1e-6, 2.0**-18)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lse_has_a_gradient(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels alone, with and without the loss's, of ignored rows too."""
    torch.manual_seed(7)
    monkeypatch.setattr(rowkernels, "has_kernels", lambda x: True)
    monkeypatch.setattr(reference, "backward", None)
    x = torch.randn(4, 65).to(dtype).requires_grad_()
    target = torch.tensor([0, 64, IGNORED, 7])
    wide = x.detach().double().requires_grad_()
    for factor in (0.0, 1.5):
        loss, lse = online_softmax.cross_entropy(x, target, return_lse=True)
        weights = torch.tensor([1.0, -2.0, 0.5, 3.0])
        (dx,) = torch.autograd.grad(factor * loss.float() + (weights * lse).sum(), x)
        true = factor * cross_entropy(wide, target) + (weights * wide.logsumexp(-1)).sum()
        close(dx, torch.autograd.grad(true, wide)[0], 1e-6, 2.0**-18)


def test_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 3)
    assert not cekernels.takes(x)
    monkeypatch.setattr(rowkernels, "has_kernels", lambda x: True)
    assert cekernels.takes(x)
    assert cekernels.takes(x, 30.0, 0.5)
    assert not cekernels.takes(x.double())
    assert not cekernels.takes(x, None, -1.0)
    assert not cekernels.takes(x, 0.0)
    assert not cekernels.takes(x, 1e30, 1e-20)
