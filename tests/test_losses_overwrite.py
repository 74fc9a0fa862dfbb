"""cross_entropy that writes its gradient over the logits: values, and what is an error then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func

import ce_kit
from losses_kit import IGNORED, example
from online_softmax import cross_entropy

ran, place = ce_kit.ran, ce_kit.place  # fixtures
close = torch.testing.assert_close
OVER: dict[str, Any] = {"grad_in_forward": True, "overwrite_logits": True}


def hidden(x: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A leaf, and logits made of it that nobody has saved."""
    leaf = x.to(dtype).requires_grad_()
    return leaf, leaf * 1.0


class Kept:
    """What is saved for a backward."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __call__(self, t: Tensor) -> Tensor:
        self.tensors.append(t)
        return t


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradient(reduction: str, dtype: torch.dtype, place: str) -> None:
    """For the expected upstream and for others, in the memory of the logits alone."""
    x, target, weight = example(6, classes=40, device=place)
    options = {"weight": weight, "label_smoothing": 0.1, "z_loss": 0.1, "reduction": reduction}
    for factor in (1.0, -3.0, 0.0):
        leaf, logits = hidden(x, dtype)
        address, kept = logits.data_ptr(), Kept()
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda t: t):
            loss = cross_entropy(logits, target, **options, **OVER)
        assert {t.data_ptr() for t in kept.tensors if t.numel() == x.numel()} == {address}
        usual = cross_entropy(leaf, target, **options)
        assert torch.equal(loss, usual)
        upstream = torch.linspace(factor, 2 * factor, loss.numel(), dtype=dtype, device=place)
        upstream = upstream.reshape(loss.shape)
        (dx,) = torch.autograd.grad(loss, leaf, upstream)
        (want,) = torch.autograd.grad(usual, leaf, upstream)
        close(dx, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
        close(logits, dx)  # leaf is logits, so this is the gradient
        assert logits.data_ptr() == address


class Lay(torch.autograd.Function):
    """x in memory of its own, its dimensions in an order and with gaps between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: tuple[int, ...], gap: int) -> Tensor:
        strides, step = [0] * x.dim(), 1
        for d in reversed(order):
            strides[d], step = step, step * (x.shape[d] + gap)
        return torch.empty_strided(x.shape, strides, device=x.device).copy_(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return g, None, None


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_layout(dim: int, place: str) -> None:
    x, target, _ = example(3, 4, classes=33, device=place)
    leaf = x.float().movedim(1, dim).clone().requires_grad_()
    (want,) = torch.autograd.grad(cross_entropy(leaf, target, dim=dim), leaf)
    for order, gap in itertools.product(itertools.permutations(range(3)), (0, 3)):
        logits = Lay.apply(leaf, order, gap)
        loss = cross_entropy(logits, target, dim=dim, **OVER)
        (dx,) = torch.autograd.grad(loss, leaf)
        close(dx, want)
        assert torch.equal(logits, dx)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_infinite_upstream(reduction: str, place: str) -> None:
    """It reaches the rows that count; the others keep their 0."""
    x, target, _ = example(4, classes=9, device=place)
    leaf, logits = hidden(x)
    loss = cross_entropy(logits, target, reduction=reduction, **OVER)
    (dx,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, torch.inf))
    assert target[0] == IGNORED
    assert torch.equal(dx[0], torch.zeros_like(dx[0]))
    assert not dx[1:].isfinite().any()
    leaf, logits = hidden(x)
    loss = cross_entropy(logits, torch.full_like(target, IGNORED), reduction=reduction, **OVER)
    (dx,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
    assert torch.equal(dx, torch.zeros_like(dx))


def kept(x: Tensor) -> Tensor:
    x.retain_grad()
    return x


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "leaf": (lambda x: x, "a leaf that requires grad"),
    "view of a leaf": (lambda x: x.view(4, 7), "a view of a tensor"),
    "view": (lambda x: (x * 1.0).view(4, 7), "a view of a tensor"),
    "part": (lambda x: (x * 1.0)[:, :6], "a view of a tensor"),
    "expanded": (lambda x: (x[:1] * 1.0).expand(4, 7), "a view of a tensor"),
    "of several": (lambda x: torch.stack([x, x]).unbind()[1], "a view of a tensor"),
    "keeps its gradient": (lambda x: kept(x * 1.0), "to keep their own gradient"),
    "negative": (lambda x: torch.complex(x, x).conj().imag, "a view of a tensor"),
    "fp8": (lambda x: x.to(torch.float8_e5m2), "a gradient in bfloat16 has no room"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_written_over(what: str) -> None:
    make, message = REFUSED[what]
    leaf = torch.randn(4, 7).requires_grad_()
    logits = make(leaf)
    before, version = logits.detach().clone(), logits._version
    target = torch.tensor([0, 1, 2, 3])
    with pytest.raises(RuntimeError, match=rf"overwrite_logits=True, but logits are .*{message}"):
        cross_entropy(logits, target, **OVER)
    assert torch.equal(logits.detach().float(), before.float())
    assert logits._version == version


def test_overlapping_elements_are_not_written_over() -> None:
    class Overlapping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.empty_strided((4, 7), (3, 1)).fill_(1.0)

    logits = Overlapping.apply(torch.randn(4, 7).requires_grad_())
    with pytest.raises(RuntimeError, match=r"of strides \(3, 1\), by which several"):
        cross_entropy(logits, torch.tensor([0, 1, 2, 3]), **OVER)


def test_no_elements_share_no_memory() -> None:
    """Whatever the strides: a clone of an expanded tensor without elements keeps its 0."""
    leaf = torch.randn(1, 5).expand(0, 5).requires_grad_()
    logits = leaf.clone()
    assert logits.stride() == (0, 1)
    loss = cross_entropy(logits, torch.empty(0, dtype=torch.int64), reduction="sum", **OVER)
    (dx,) = torch.autograd.grad(loss, leaf)
    assert loss == 0.0
    assert dx.shape == (0, 5)


def test_it_wants_the_gradient_in_the_forward() -> None:
    with pytest.raises(ValueError, match="overwrite_logits=True wants grad_in_forward=True"):
        cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), overwrite_logits=True)


def test_a_wrong_target_leaves_logits_as_they_are() -> None:
    x, target, _ = example(4)
    _, logits = hidden(x)
    before = logits.detach().clone()
    with pytest.raises(IndexError, match="got 7"):
        cross_entropy(logits, target.fill_(7), **OVER)
    assert torch.equal(logits, before)
    assert logits._version == 0


# ---- who still needs the logits is told


CHANGED = "modified by an inplace operation"


def test_who_has_saved_the_logits(place: str) -> None:
    x, target, _ = example(4, device=place)
    leaf = x.float().requires_grad_()
    logits = leaf.tanh()  # whose backward needs its result
    loss = cross_entropy(logits, target, **OVER)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    _, logits = hidden(x)
    squares = logits.square().sum()
    seen = logits.view(-1).exp().sum()
    loss = cross_entropy(logits, target, **OVER)
    with pytest.raises(RuntimeError, match=CHANGED):
        squares.backward()
    seen.backward()  # it has saved its own result
    usual = cross_entropy(hidden(x)[1], target)
    close(loss, usual)


def test_another_loss_before_and_after(place: str) -> None:
    x, target, _ = example(4, device=place)
    _, logits = hidden(x)
    before = cross_entropy(logits, target)
    loss = cross_entropy(logits, target, **OVER)
    with pytest.raises(RuntimeError, match=CHANGED):
        before.backward()
    after = cross_entropy(logits, target)
    with pytest.raises(RuntimeError, match="computed from the logits afterwards has no gradient"):
        (loss + after).backward()


def test_logits_that_change_after_the_loss(place: str) -> None:
    x, target, _ = example(4, device=place)
    _, logits = hidden(x)
    loss = cross_entropy(logits, target, **OVER)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


def test_one_backward(place: str) -> None:
    x, target, _ = example(4, device=place)
    leaf, logits = hidden(x)
    loss = cross_entropy(logits, target, **OVER)
    loss.backward(retain_graph=True)
    kept = leaf.grad.clone()
    for factor in (1.0, 2.0):
        with pytest.raises(RuntimeError, match="the loss has one backward"):
            (factor * loss).backward(retain_graph=True)
    assert torch.equal(leaf.grad, kept)
    leaf, logits = hidden(x)
    loss = cross_entropy(logits, target, **OVER)
    with pytest.raises(RuntimeError, match="pass grad_in_forward=False"):
        torch.autograd.grad(loss, leaf, create_graph=True)


def test_lse_has_no_gradient(place: str) -> None:
    x, target, _ = example(4, device=place)
    leaf, logits = hidden(x)
    loss, lse = cross_entropy(logits, target, return_lse=True, **OVER)
    close(lse, torch.logsumexp(leaf, 1))
    with pytest.raises(RuntimeError, match="so lse has no gradient"):
        (loss + lse.sum()).backward()
    leaf, logits = hidden(x)
    loss, lse = cross_entropy(logits, target, return_lse=True, **OVER)
    loss.backward()
    assert lse.isfinite().all()
    assert leaf.grad.abs().sum() > 0


# ---- where it has no effect


def _dual(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(x, x))


NO_EFFECT: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "no gradient": lambda call, x: call(x.detach()),
    "no_grad": torch.no_grad()(lambda call, x: call(x)),
    "inference_mode": torch.inference_mode()(lambda call, x: call(x)),
    "forward mode": _dual,
    "func.grad": lambda call, x: func.grad(call)(x.detach()),
    "compile": lambda call, x: torch.compile(call, fullgraph=True, backend="aot_eager")(x),
}


@pytest.mark.parametrize("what", NO_EFFECT)
def test_without_effect_logits_stay(what: str) -> None:
    x, target, _ = example(4)
    _, logits = hidden(x)
    before = logits.detach().clone()
    torch._dynamo.reset()
    NO_EFFECT[what](lambda x: cross_entropy(x, target, **OVER), logits)
    assert torch.equal(logits.detach(), before)
    p = torch.softmax(before.flip(0), 1)
    cross_entropy(logits, p, **OVER).backward()
    assert torch.equal(logits.detach(), before)
