"""The kernels of token_stats: infinities, large logits, small entropies; and the gradient, by every
mix of what is differentiable. Without a GPU by host execution; on one as they run."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from matrix_kit import FLOATS, LAYOUTS, needs_compiler
from online_softmax import rowkernels, statskernels
from online_softmax.cuda import launch, tokenstats_launch
from online_softmax.cuda.tokenstats_launch import Upstream
from rows_kit import DEVICES, INF, NAN
from stats_kit import NO_CLASS, among_nan, run, written_out

pytestmark = needs_compiler
close = torch.testing.assert_close
SUBSETS = [which for which in itertools.product((False, True), repeat=3) if any(which)]


def test_single_values() -> None:
    x = torch.tensor([[0.0, -INF, 0.0], [-INF] * 3, [INF, 0.0, 1.0], [NAN, 0.0, 1.0], [2.0, 0, 1]])
    stats = statskernels.forward(x, torch.tensor([1, 0, 2, 1, 2]), top_k=2)
    close(stats.lse, torch.tensor([math.log(2), -INF, INF, NAN, 2.4076]), equal_nan=True,
          rtol=0, atol=1e-4)  # fmt: skip
    close(stats.entropy, torch.tensor([math.log(2), NAN, NAN, NAN, 0.8324]), equal_nan=True,
          rtol=0, atol=1e-4)  # fmt: skip
    close(stats.log_prob, torch.tensor([-INF, NAN, NAN, NAN, -1.4076]), equal_nan=True,
          rtol=0, atol=1e-4)  # fmt: skip
    assert stats.rank.tolist() == [3, 1, 2, 2, 2]
    assert stats.top_indices.tolist() == [[0, 2], [0, 1], [0, 2], [0, 2], [0, 2]]
    one = statskernels.forward(torch.tensor([[3.0], [-INF]]), torch.tensor([0, 0]), top_k=1)
    close(one.lse, torch.tensor([3.0, -INF]))
    close(one.entropy, torch.tensor([0.0, NAN]), equal_nan=True)
    close(one.top_log_probs[:, 0], torch.tensor([0.0, NAN]), equal_nan=True, rtol=0, atol=3e-7)
    assert one.rank.tolist() == [1, 1]
    far = statskernels.forward(torch.tensor([[0.0, -95.0, -200.0]]), top_k=3)
    close(far.top_log_probs, torch.tensor([[0.0, -95.0, -200.0]]), rtol=0, atol=3e-7)
    last = torch.zeros(1, 5000)
    last[0, -1] = NAN
    stats = statskernels.forward(last, torch.tensor([0]), top_k=3)
    assert [bool(t.isnan().all()) for t in stats[:3]] == [True] * 3
    assert stats.top_indices.tolist() == [[4999, 0, 1]]


@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0])
def test_entropies_of_every_size(scale: float) -> None:
    """From the largest to none: no digits are lost where it is a difference of large numbers."""
    x = torch.randn(16, 3000) * torch.logspace(-3, 1.5, 16)[:, None]
    want = written_out(x, torch.zeros(16, dtype=torch.int64), 0, scale)[1]
    z = x * scale
    p = torch.softmax(z, -1)
    torchs = -(p * torch.log_softmax(z, -1)).sum(-1)
    most = (torchs.double() - want).abs() + 2.0**-20 * want + 3e-7
    got = statskernels.forward(x, scale=scale).entropy
    assert ((got.double() - want).abs() <= most).all()
    assert (got >= 0).all()


def test_large_logits_cost_no_digits() -> None:
    target = torch.tensor([0, 17, 150, 299])
    for x, scale in (
        (1e6 + torch.randn(4, 300) * 2, 1.0),
        (-1e5 + torch.randn(4, 300), 1.0),
        (torch.randn(4, 300) * 1e-3, 1000.0),
        (torch.randn(4, 300) * 1e3, 1e-3),
    ):
        stats = statskernels.forward(x, target, top_k=5, scale=scale)
        want = written_out(x, target, 5, scale)
        for got, exact in zip(stats[1:6], want[1:], strict=True):
            close(got.double(), exact.double(), rtol=3e-6, atol=1e-5)
    x = torch.full((2, 300), -3.0e38)
    x[0, 5], x[0, 7], x[1, 9] = 3.2e38, 3.2e38, 2.9e38
    stats = statskernels.forward(x, torch.tensor([5, 9]), top_k=2)
    close(stats.entropy, torch.tensor([math.log(2.0), 0.0]))
    close(stats.log_prob, torch.tensor([-math.log(2.0), 0.0]))
    least = torch.full((1, 40), torch.finfo(torch.float16).min, dtype=torch.float16)
    least[0, ::2] = -INF
    stats = statskernels.forward(least, top_k=3)
    close(stats.entropy, torch.tensor([math.log(20.0)]))
    assert stats.top_indices.tolist() == [[1, 3, 5]]


def test_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 3)
    assert not statskernels.takes(x)
    monkeypatch.setattr(rowkernels, "has_kernels", lambda x: True)
    assert statskernels.takes(x)
    assert statskernels.takes(x.reshape(1, 2, 3).half(), 0.5)
    assert statskernels.takes(x.to(torch.float8_e5m2))
    assert not statskernels.takes(x.double())
    assert not statskernels.takes(x, 0.0)
    assert not statskernels.takes(x[:0])
    assert not statskernels.takes(torch.empty(1, statskernels.MOST_COLS + 1, device="meta"))
    assert not statskernels.takes(torch.empty(2**20, 2**24, device="meta"))  # too many parts


# ---- the gradient


def gradient_of(x: Tensor, target: Tensor, upstream: list[Tensor | None], scale: float) -> Tensor:
    """By autograd, in float64; of rows whose target is no class its log-probability has none."""
    wide = x.double().requires_grad_()
    log_p = torch.log_softmax(wide * scale, -1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(-1)
    is_class = (target >= 0) & (target < x.shape[1])
    log_prob = log_p.gather(1, torch.where(is_class, target, 0)[:, None])[:, 0]
    fields = (torch.logsumexp(wide * scale, -1), entropy, torch.where(is_class, log_prob, 0.0))
    total = sum((f * g).sum() for f, g in zip(fields, upstream, strict=True) if g is not None)
    (dx,) = torch.autograd.grad(total, wide)
    return dx


@DEVICES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_gradient(dtype: torch.dtype, device: str) -> None:
    """Apart, and over the logits themselves, which lie between NaN that stays."""
    launches, cases, turn = [], [], itertools.cycle(SUBSETS)
    for cols, (start, gap) in itertools.product((1, 7, 100, 515, 3000), LAYOUTS):
        values = (torch.randn(5, cols, device=device) * 3).to(dtype)
        if cols > 7:
            values[2, ::3] = -INF
        target = torch.tensor([0, cols - 1, cols // 2, NO_CLASS, -1], device=device)
        x = among_nan(values, start, gap)
        stats = statskernels.forward(x, target, scale=0.7)
        given = torch.randn(3, 5, device=device)
        given[0] = given[0, 0]
        rows = [given[0, :1].expand(5), given[1], given[2]]
        upstream = [g if there else None for g, there in zip(rows, next(turn), strict=True)]
        dx = torch.full_like(values, 7.0)
        tensors = (x, target, stats.entropy, stats.state)
        launches += tokenstats_launch.backward(Upstream(*upstream), *tensors, dx, 0.7, True)
        cases.append((upstream, values, start, *tensors, dx))
    run(launches, torch.device(device))
    for upstream, values, start, x, target, entropy, state, dx in cases:
        want = gradient_of(values, target, upstream, 0.7)
        eps = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        close(dx.double(), want, rtol=3e-6 + eps, atol=4e-6)
        args = (x, target, entropy, state)
        over = statskernels.backward(*upstream, *args, scale=0.7, out=x)
        assert over is x
        assert torch.equal(x, dx)
        base = x.as_strided((5, x.stride(0)), (x.stride(0), 1), 0)
        assert base[:, :start].isnan().all()
        assert base[:, start + x.shape[1] :].isnan().all()


def test_gradients_of_rows_that_are_not_normal() -> None:
    """As of the row operations: logsumexp of a row with inf has a gradient, 0 but at inf."""
    x = torch.tensor([[-INF] * 3, [INF, 0.0, -INF], [NAN, 0.0, 1.0], [0.0, -INF, 0.0]])
    target, one = torch.tensor([0, 1, 1, 0]), torch.ones(4)
    stats = statskernels.forward(x, target)
    rest = (x, target, stats.entropy, stats.state)
    by_lse = statskernels.backward(one, None, None, *rest)
    nan, row = [NAN] * 3, [0.5, 0.0, 0.5]
    want = torch.tensor([nan, [NAN, 0.0, 0.0], nan, row])
    close(by_lse, want, equal_nan=True, rtol=0, atol=3e-7)
    by_entropy = statskernels.backward(None, one, None, *rest)
    close(by_entropy, torch.tensor([nan, nan, nan, [0.0] * 3]), equal_nan=True, rtol=0, atol=3e-7)
    by_target = statskernels.backward(None, None, one, *rest)
    close(
        by_target,
        torch.tensor([nan, nan, nan, [0.5, 0.0, -0.5]]),
        equal_nan=True,
        rtol=0,
        atol=3e-7,
    )


@DEVICES
def test_the_gradient_keeps_its_bits(device: str) -> None:
    cols = 1027
    values = torch.randn(3, cols, device=device).bfloat16()
    target, g = torch.tensor([5, 0, 1026], device=device), torch.randn(3, device=device)
    stats = statskernels.forward(values, target)
    rest = (target, stats.entropy, stats.state)
    want = statskernels.backward(g, g, g, values, *rest)
    for start in range(8):
        x = among_nan(values, start, 0)
        assert torch.equal(statskernels.backward(g, g, g, x, *rest), want)
    alone = statskernels.backward(
        g[:1], g[:1], g[:1], values[:1], target[:1], stats.entropy[:1], stats.state[:1]
    )
    assert torch.equal(alone, want[:1])


def test_one_read_and_one_write() -> None:
    x, target = torch.randn(5, 1000).bfloat16(), torch.tensor([0, 1, -1, 1000, 999])
    one = torch.ones(5)
    work = tokenstats_launch.backward(
        Upstream(one, one, one), x, target, one, torch.ones(5, 2), torch.empty_like(x), 1.0, True
    )
    counts = launch.run(work, x.device)
    assert (counts.reads, counts.writes) == (x.numel() + 3 * 32, x.numel() + 3)
