"""token_stats through its kernels: which calls take them, the same fields and gradients as without.

On a CPU the kernels run by host execution, as if it had a GPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

from matrix_kit import FLOATS, needs_compiler
from online_softmax import statskernels, token_stats
from online_softmax.cuda import launch
from online_softmax.cuda.launch import Launch
from online_softmax.library import TokenStats
from online_softmax.library import stats as library_stats
from rows_kit import Tagged, double

pytestmark = needs_compiler
close = torch.testing.assert_close
FOLD = ["token_stats_fold", "token_stats_merge"]
BACK = ["token_stats_backward"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that have run, by name; those of token_stats take CPU tensors too."""
    found: list[str] = []
    run = launch.run

    def note(launches: list[Launch], device: torch.device) -> None:
        found.extend(each.symbol.partition("<")[0] for each in launches)
        run(launches, device)

    takes = lambda x, scale: x.dtype != torch.float64 and x.numel() > 0  # noqa: E731
    monkeypatch.setattr(statskernels, "takes", takes)
    monkeypatch.setattr(launch, "run", note)
    return found


def composed(x: Tensor, target: Tensor | None, top_k: int = 0, temperature: float = 1.0):
    target = None if target is None else target.long()
    return library_stats._composed(x, target, top_k, 1.0 / temperature)


def same(got: TokenStats, want: TokenStats) -> None:
    for a, b in zip(got, want, strict=True):
        if b is None:
            assert a is None
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            close(a, b, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn], ids=str)
def test_fields(dtype: torch.dtype, ran: list[str]) -> None:
    x = (3 * double(2, 3, 50)).to(dtype)
    target = torch.arange(6).reshape(2, 3)
    same(token_stats(x, target, top_k=20, temperature=0.7), composed(x, target, 20, 0.7))
    assert ran == FOLD
    same(token_stats(x), composed(x, None))
    one = token_stats(x[0, 0], target[0, 1].to(torch.uint8), top_k=3)
    same(one, composed(x[0, 0], target[0, 1], 3))
    assert one.lse.shape == ()
    assert one.top_indices.shape == (3,)
    moved = x.transpose(0, 1)
    same(token_stats(moved, target.T), composed(moved, target.T))
    across = x.transpose(-1, 0).contiguous().transpose(-1, 0)  # classes are not side by side
    same(token_stats(across, target, top_k=1), composed(across, target, 1))
    assert ran == FOLD * 5
    same(token_stats(x[:0], target[:0], top_k=2), composed(x[:0], target[:0], 2))
    wrong = token_stats(x[0], torch.tensor([0, 50, -1]), top_k=50)
    assert wrong.target_rank.tolist() == [wrong.target_rank[0], 0, 0]
    assert wrong.target_log_prob.isnan().tolist() == [False, True, True]
    assert ran == FOLD * 6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("fields", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_gradients(fields: tuple[int, ...], dtype: torch.dtype, ran: list[str]) -> None:
    x = (3 * double(2, 3, 50)).to(dtype).requires_grad_()
    target, weights = torch.arange(6).reshape(2, 3), torch.linspace(-1, 1, 6).reshape(2, 3)
    found = []
    for function, of in ((token_stats, x), (composed, x.float())):  # rounded once
        stats = function(of, target, top_k=2, temperature=0.7)
        flags = [t.requires_grad for t in stats]
        assert flags == [True, True, True, False, False, False]
        total = sum((stats[i] * weights * (i + 1)).sum() for i in fields)
        found.append(torch.autograd.grad(total, x)[0])
    assert ran == FOLD + BACK
    assert found[0].dtype == dtype
    eps = torch.finfo(dtype).eps
    close(*found, rtol=2e-6 if dtype == torch.float32 else eps, atol=5e-6 + eps / 64)
    with torch.no_grad():
        assert token_stats(x, target).entropy.grad_fn is None
    leaf = x.detach().requires_grad_()
    token_stats(leaf.transpose(0, 1), target.T).entropy.sum().backward()  # expanded upstream
    token_stats(leaf).lse.sum().backward()
    wanted = composed(x, target)
    (dx,) = torch.autograd.grad(wanted.entropy.sum() + wanted.lse.sum(), x)
    close(leaf.grad, dx, rtol=2 * eps, atol=5e-6 + eps)


def test_second_derivatives(ran: list[str]) -> None:
    x = (3 * double(3, 40)).float().requires_grad_()
    target, weights = torch.tensor([0, 4, 2]), torch.linspace(-1, 1, 120).reshape(3, 40)
    found = []
    for function in (token_stats, composed):
        upstream = torch.linspace(0.5, 1, 3).requires_grad_()
        stats = function(x, target)
        total = ((stats.entropy + stats.lse - stats.target_log_prob) * upstream).sum()
        (dx,) = torch.autograd.grad(total, x, create_graph=True)
        found.append(torch.autograd.grad((dx * weights).sum(), (x, upstream)))
    assert ran == FOLD + BACK  # the second are made of torch's operations
    for a, b in zip(*found, strict=True):
        close(a, b, rtol=1e-5, atol=1e-5)


def test_a_gradient_that_nobody_gives(ran: list[str]) -> None:
    x = double(3, 5).float().requires_grad_()
    stats = token_stats(x, torch.tensor([0, 1, 2]))
    (dx,) = torch.autograd.grad(stats.lse.sum() + 0 * stats.entropy.detach().sum(), x)
    close(dx, torch.softmax(x, -1).detach())
    assert ran == FOLD + BACK


def test_what_takes_no_kernels(ran: list[str]) -> None:
    x, target = double(4, 3, 5).float(), torch.tensor([[0, 1, 2]] * 4)
    call = lambda x, t: token_stats(x, t, top_k=2)  # noqa: E731
    same(TokenStats(*torch.vmap(call)(x, target)), composed(x, target, 2))
    func.hessian(lambda x: token_stats(x).entropy.sum())(x[0, 0])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        lse = forward_ad.unpack_dual(token_stats(dual).lse)
    close(lse.tangent, torch.ones(4, 3))
    token_stats(x.double())
    with torch.device("meta"):
        meta = token_stats(torch.empty(4, 6, device="meta").double(), top_k=3)
    assert meta.top_indices.shape == (4, 3)
    assert ran == []
    token_stats(x, target)
    assert ran == FOLD


def test_what_takes_the_op(ran: list[str]) -> None:
    """torch.compile, with its gradient, and subclasses run the kernels too."""
    torch._dynamo.reset()
    x, target = double(4, 3, 5).float().requires_grad_(), torch.tensor([[0, 1, 2]] * 4)
    call = lambda x, t: token_stats(x, t, top_k=2, temperature=0.7)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, composed):
        options = (2, 0.7) if function is composed else ()
        stats = TokenStats(*function(x, target, *options))
        total = (stats.lse + 2 * stats.entropy - stats.target_log_prob).sum()
        found.append((stats, torch.autograd.grad(total, x)[0]))
    assert ran == FOLD + BACK
    same(found[0][0], found[1][0])
    close(found[0][1], found[1][1], rtol=2e-6, atol=5e-6)
    tagged = token_stats(x.detach().as_subclass(Tagged), target)
    assert type(tagged.entropy) is Tagged
    assert ran == FOLD + BACK + FOLD
    close(tagged.entropy.as_subclass(Tensor), composed(x.detach(), target).entropy)


def test_batched_gradients(ran: list[str]) -> None:
    """A batch of upstream gradients has no memory: torch takes it apart before the op."""
    x, target = double(3, 5).float().requires_grad_(), torch.tensor([0, 4, 2])
    found = []
    for function in (token_stats, composed):
        stats = function(x, target)
        total = stats.lse + 2 * stats.entropy - stats.target_log_prob
        found.append(torch.autograd.grad(total, x, torch.eye(3), is_grads_batched=True)[0])
    assert ran == FOLD + BACK * 3
    close(*found, rtol=2e-6, atol=5e-6)


def test_values_that_memory_does_not_hold(ran: list[str]) -> None:
    x = torch.view_as_complex(double(3, 5, 2).float()).conj().imag
    assert x.is_neg()
    same(token_stats(x, top_k=2), composed(x, None, 2))
    assert ran == FOLD


def test_forward_mode_through_a_recorded_gradient(ran: list[str]) -> None:
    """Dual upstream gradients of a forward that no dual level saw."""
    x, target = double(3, 5).float().requires_grad_(), torch.tensor([0, 4, 2])
    weights, along = torch.linspace(1, 2, 3), torch.tensor([1.0, -1.0, 0.5])
    found = []
    for function in (token_stats, composed):
        total = function(x, target).entropy
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(weights, along)
            (dx,) = torch.autograd.grad(total, x, dual, retain_graph=True)
            found.append(forward_ad.unpack_dual(dx))
    assert ran == FOLD + BACK
    for got, want in zip(*found, strict=True):
        close(got, want, rtol=2e-6, atol=5e-6)
