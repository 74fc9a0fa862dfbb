"""cross_entropy with the gradient made in the forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from losses_kit import IGNORED, example
from online_softmax import cross_entropy
from rows_kit import GPU

close = torch.testing.assert_close


def _graph(y: Tensor) -> str:
    """The names of what recorded y, down to its leaves."""
    node, names = y.grad_fn, []
    while node is not None:
        names.append(node.name())
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return " ".join(names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradient_in_forward(reduction: str, dtype: torch.dtype) -> None:
    x, target, _ = example(6, classes=40)
    x = x.to(dtype).requires_grad_()
    kept = x.detach().clone()
    once = cross_entropy(x, target, reduction=reduction, grad_in_forward=True)
    usual = cross_entropy(x, target, reduction=reduction)
    assert "with_gradient" in _graph(once)
    assert "with_gradient" not in _graph(usual)
    assert torch.equal(once, usual)
    for factor in (1.0, -3.0, 0.0):
        upstream = torch.full_like(once, factor)
        (dx,) = torch.autograd.grad(once, x, upstream, retain_graph=True)
        (want,) = torch.autograd.grad(usual, x, upstream, retain_graph=True)
        eps = torch.finfo(dtype).eps
        close(dx, want, rtol=2 * eps, atol=1e-7)
    assert torch.equal(x.detach(), kept)
    with pytest.raises(RuntimeError, match="pass grad_in_forward=False"):
        torch.autograd.grad(usual.sum() + once.sum(), x, create_graph=True)


def test_gradient_in_forward_keeps_no_logits() -> None:
    """Of the activations of logits' size one is kept, and with lse two."""
    sizes: list[int] = []

    def pack(t: Tensor) -> Tensor:
        sizes.append(t.numel())
        return t

    x = torch.randn(4, 50, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3])
    for wants_lse, count in ((False, 1), (True, 2)):
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            cross_entropy(x, target, return_lse=wants_lse, grad_in_forward=True)
        assert sizes.count(x.numel()) == count


@pytest.mark.parametrize("place", [pytest.param("cuda", marks=GPU), "cpu"])
@pytest.mark.parametrize("dim", [-1, 1])
def test_the_last_backward_gives_away_what_was_made(place: str, dim: int) -> None:
    """And no other: a gradient that retain_graph gave stays as it is."""
    shape = (4, 3, 40) if dim == 1 else (4, 40)
    x = torch.randn(shape, device=place, requires_grad=True)
    target = torch.randint(3, x.sum(dim).shape, device=place)
    saved: list[torch.Tensor] = []
    keep = lambda t: saved.append(t) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = cross_entropy(x, target, dim=dim, grad_in_forward=True)
    (made,) = (t for t in saved if t.shape == x.shape)
    want = torch.autograd.grad(torch.nn.functional.cross_entropy(x.movedim(dim, 1), target), x)[0]
    doubled, tripled = (
        torch.autograd.grad(loss * times, x, retain_graph=True)[0] for times in (2, 3)
    )
    (last,) = torch.autograd.grad(loss * 5, x)
    for times, each in ((2, doubled), (3, tripled), (5, last)):
        torch.testing.assert_close(each, times * want, rtol=1e-5, atol=1e-7)
    addresses = [t.data_ptr() for t in (made, last, doubled, tripled)]
    assert addresses[0] == addresses[1]
    assert len(set(addresses)) == 3


def test_small_float16_gradients_survive() -> None:
    """1 / rows of a mean is not in what is made: a loss scale brings it back above the spacing."""
    x = torch.zeros(65_536, 2, dtype=torch.float16, requires_grad=True)
    target = torch.zeros(65_536, dtype=torch.int64)
    loss = cross_entropy(x, target, grad_in_forward=True)
    (dx,) = torch.autograd.grad(loss.float() * 1024.0, x)
    close(dx[:, 1], torch.full((65_536,), 0.5 * 1024 / 65_536, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_row_counts(dtype: torch.dtype) -> None:
    """What arrives is then infinite."""
    x = torch.randn(3, 5).to(dtype).requires_grad_()
    loss = cross_entropy(x, torch.full((3,), IGNORED), grad_in_forward=True)
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_overflow_is_seen(dtype: torch.dtype) -> None:
    """An infinite upstream is not hidden: loss scaling asks for it. Ignored rows stay 0."""
    x = torch.randn(3, 5).to(dtype).requires_grad_()
    loss = cross_entropy(x, torch.tensor([1, IGNORED, 2]), grad_in_forward=True)
    (dx,) = torch.autograd.grad(loss, x, torch.tensor(torch.inf, dtype=dtype))
    assert not dx[::2].isfinite().any()
    assert torch.equal(dx[1], torch.zeros_like(dx[1]))
