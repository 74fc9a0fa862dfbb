"""token_stats: every field against torch in float64, ties, gradients, compile, errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, func
from torch.autograd import gradcheck, gradgradcheck

from online_softmax import token_stats
from online_softmax.library import TokenStats
from rows_kit import DEVICES, INF, NAN, Tagged, double

close = torch.testing.assert_close


def _written_out(x: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """lse, entropy, log-probability and rank of the target."""
    z = x.double() / temperature
    log_p = torch.log_softmax(z, -1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    at = target.long().unsqueeze(-1)
    rank = 1 + (x.double() > x.double().gather(-1, at)).sum(-1)
    return torch.logsumexp(z, -1), entropy, log_p.gather(-1, at).squeeze(-1), rank


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3])
def test_agrees_with_float64(temperature: float, dtype: torch.dtype, device: str) -> None:
    for shape in ((), (1,), (6,), (2, 3)):
        x = (4 * double(*shape, 50, device=device)).to(dtype)
        target = torch.arange(x[..., 0].numel(), device=device).reshape(shape)
        stats = token_stats(x, target, top_k=20, temperature=temperature)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        tight = {"rtol": 1e-12, "atol": 1e-12} if exact == dtype == torch.float64 else {
            "rtol": 2e-6, "atol": 5e-6}  # fmt: skip
        for got, want in zip(stats[:3], _written_out(x, target, temperature)[:3], strict=True):
            assert (got.dtype, got.shape) == (exact, torch.Size(shape))
            close(got.double(), want, **tight)
        assert torch.equal(stats.target_rank, _written_out(x, target, temperature)[3])
        for row, indices, tops, lse in zip(
            x.reshape(-1, 50), stats.top_indices.reshape(-1, 20),
            stats.top_log_probs.reshape(-1, 20), stats.lse.reshape(-1), strict=True,
        ):  # fmt: skip
            values = row.tolist()
            wanted = sorted(range(50), key=lambda i: -values[i])[:20]
            assert indices.tolist() == wanted
            close(tops.double(), row[indices].double() / temperature - lse.double(),
                  rtol=1e-6, atol=1e-5)  # fmt: skip


def test_ties_go_to_the_lower_index_and_do_not_count() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0], [0.0] * 6]).to(torch.bfloat16)
    stats = token_stats(x, torch.tensor([4, 5]), top_k=6)
    assert stats.top_indices.tolist() == [[1, 2, 4, 0, 5, 3], [0, 1, 2, 3, 4, 5]]
    assert stats.target_rank.tolist() == [1, 1]
    assert token_stats(x, torch.tensor([0, 0])).target_rank.tolist() == [4, 1]
    many = torch.zeros(3, 5000)
    assert torch.equal(token_stats(many, top_k=7).top_indices, torch.arange(7).expand(3, 7))


def test_fields_that_are_not_asked_for() -> None:
    stats = token_stats(torch.zeros(2, 4))
    assert isinstance(stats, TokenStats)
    assert stats[2:] == (None, None, None, None)
    close(stats.entropy, torch.full((2,), 4.0).log())
    assert token_stats(torch.zeros(2, 4), torch.tensor([1, 2]))[4:] == (None, None)
    assert token_stats(torch.zeros(0, 4), top_k=2).top_indices.shape == (0, 2)


def test_masked_and_extreme_logits() -> None:
    x = torch.tensor([[0.0, -INF, 0.0], [-INF] * 3, [INF, 0.0, 1.0], [NAN, 0.0, 1.0]])
    x.requires_grad_()
    stats = token_stats(x, torch.tensor([1, 0, 0, 1]), top_k=1)
    close(stats.lse, torch.tensor([2.0, 0.0, INF, NAN]).log().where(
        torch.tensor([True, False, True, True]), torch.tensor(-INF)), equal_nan=True)  # fmt: skip
    close(stats.entropy, torch.tensor([0.6931472, NAN, NAN, NAN]), equal_nan=True)
    close(stats.target_log_prob, torch.tensor([-INF, NAN, NAN, NAN]), equal_nan=True)
    (dx,) = torch.autograd.grad(stats.entropy[0], x)
    close(dx[0], torch.zeros(3))
    assert torch.equal(token_stats(torch.tensor([0.0, 1e4]), torch.tensor(0)).entropy,
                       torch.tensor(0.0))  # fmt: skip


def test_gradients() -> None:
    x, target = double(3, 5, grad=True), torch.tensor([0, 4, 2])
    function = lambda x: token_stats(x, target, top_k=2, temperature=0.7)[:3]  # noqa: E731
    assert gradcheck(function, (x,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, (x,), check_fwd_over_rev=True)
    stats = token_stats(x, target, top_k=2)
    assert [t.requires_grad for t in stats] == [True, True, True, False, False, False]
    half = x.detach().half().requires_grad_()
    (dx,) = torch.autograd.grad(token_stats(half).entropy.sum(), half)
    assert dx.dtype == torch.float16


def test_transforms_and_subclasses() -> None:
    x, target = double(4, 3, 5), torch.tensor([[0, 1, 2]] * 4)
    call = lambda x, t: token_stats(x, t, top_k=2)  # noqa: E731
    for got, want in zip(torch.vmap(call)(x, target), call(x, target), strict=True):
        close(got, want)
    entropy = lambda x: token_stats(x).entropy.sum()  # noqa: E731
    written = lambda x: torch.special.entr(torch.softmax(x, -1)).sum()  # noqa: E731
    close(func.hessian(entropy)(x[0]), func.hessian(written)(x[0]))
    assert type(token_stats(x.as_subclass(Tagged)).entropy) is Tagged


def test_compile() -> None:
    torch._dynamo.reset()
    call = lambda x, t: token_stats(x, t, top_k=2, temperature=0.5)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, classes in ((3, 5), (4, 9)):
        x, target = double(rows, classes, grad=True), torch.arange(rows)
        results = [f(x, target) for f in (compiled, call)]
        for got, want in zip(*results, strict=True):
            close(got, want)
        close(*(torch.autograd.grad(each.entropy.sum(), x) for each in results))
    stats = compiled(x, torch.tensor([0, 9, -1, 1]))
    assert stats.target_log_prob.isnan().tolist() == [False, True, True, False]
    assert stats.target_rank[1:3].tolist() == [0, 0]


@DEVICES
@pytest.mark.parametrize("route", ["eager", "op", "composed"])
@pytest.mark.parametrize("temperature", [2.94e-39, 1e-38, 1e38, 1e46, 1e300])
def test_temperatures_at_the_ends_of_float32(temperature: float, route: str, device: str) -> None:
    """In no way is a probability of 0, or a logit of 0, lost; an entropy of 0 has no sign."""
    x = torch.tensor([[0.0, 1.0], [-INF, 0.0], [0.0, 0.0]], device=device)
    target = torch.tensor([1, 1, 0], device=device)
    call = lambda x: token_stats(x, target, top_k=1, temperature=temperature)  # noqa: E731
    if route == "op":
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    stats = torch.vmap(call, in_dims=1, out_dims=1)(x[:, None]) if route == "composed" else call(x)
    even = torch.tensor([float(temperature > 1), 0.0, 1.0], device=device) * 0.5
    shape = (3, 1) if route == "composed" else (3,)
    wanted = (torch.special.entr(even) * 2).reshape(shape)
    close(stats.entropy, wanted, rtol=1e-6, atol=0)
    if device == "cpu":
        assert not stats.entropy.signbit().any()
    log_p = torch.where(even > 0, even, 1.0).log().reshape(shape)
    close(stats.target_log_prob, log_p)
    close(stats.top_log_probs, log_p.unsqueeze(-1))


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_entropy_of_nothing_has_no_sign(dtype: torch.dtype, device: str) -> None:
    entropy = token_stats(torch.tensor([[0.0, 5000.0]], device=device, dtype=dtype)).entropy
    assert entropy.tolist() == [0.0]
    if device == "cpu" or dtype == torch.float64:  # not by a kernel
        assert not entropy.signbit().any()


X, T = torch.zeros(3, 5), torch.tensor([0, 1, 2])
WRONG = {
    "logits": (TypeError, "logits must be a Tensor", lambda: token_stats([1.0])),
    "scalar": (RuntimeError, "with a class", lambda: token_stats(torch.tensor(1.0))),
    "no class": (RuntimeError, "with a class", lambda: token_stats(X[:, :0])),
    "integers": (NotImplementedError, "floating-point", lambda: token_stats(X.long())),
    "target": (IndexError, r"token_stats\(\): target must be in \[0, 5\), got 5 at index \(2,\)",
               lambda: token_stats(X, torch.tensor([0, 1, 5]))),
    "target of a subclass": (IndexError, "got 9 at index",
                             lambda: token_stats(X.as_subclass(Tagged), torch.tensor([0, 9, 1]))),
    "tokens": (ValueError, "target must have shape", lambda: token_stats(X, T[:2])),
    "float": (RuntimeError, "target must be int64", lambda: token_stats(X, X)),
    "top_k": (ValueError, r"top_k must be in \[0, 5\], got 6", lambda: token_stats(X, top_k=6)),
    "top_k type": (TypeError, "top_k must be an int", lambda: token_stats(X, top_k=1.5)),
    "temperature": (ValueError, "above 0", lambda: token_stats(X, temperature=0.0)),
    "tiny": (ValueError, r"at least 2.939e-39, so that 1 / temperature is finite in float32, got",
             lambda: token_stats(X.half(), temperature=2.9e-39)),
    "tiny in float64": (ValueError, r"at least 5.563e-309, .* in float64, got 1e-320",
                        lambda: token_stats(X.double(), temperature=1e-320)),
    "bool": (RuntimeError, r"target must be int64 or uint8, got torch.bool$",
             lambda: token_stats(X, T.bool())),
    "floats": (RuntimeError, r"target must be int64 or uint8, got torch.float32$",
               lambda: token_stats(X, T.float())),
    "target list": (TypeError, "target must be a Tensor, got list", lambda: token_stats(X, [1])),
    "hot": (TypeError, "temperature must be a float", lambda: token_stats(X, temperature="1")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_what_overrides_torch_functions_is_asked() -> None:
    def call(x: Tensor, target: Tensor) -> Tensor:
        return token_stats(x, target, temperature=0.5).entropy

    traced = torch.fx.symbolic_trace(call)
    (node,) = (node for node in traced.graph.nodes if node.target is token_stats)
    assert node.kwargs == {"top_k": 0, "temperature": 0.5}
    x, target = torch.randn(3, 5), torch.tensor([0, 4, 1])
    close(traced(x, target), call(x, target))
