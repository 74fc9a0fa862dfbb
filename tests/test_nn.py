"""The modules: values, options, what they print, what they keep."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from online_softmax import cross_entropy, log_softmax, logsumexp, nn, softmax, token_stats

INF = float("inf")
close = torch.testing.assert_close
MODULES = {
    nn.Softmax: (torch.nn.Softmax, softmax),
    nn.LogSoftmax: (torch.nn.LogSoftmax, log_softmax),
}


@pytest.mark.parametrize("module", MODULES)
def test_in_place_of_torchs(module) -> None:
    torchs, function = MODULES[module]
    x = torch.randn(3, 4, requires_grad=True)
    for dim in (-1, 0):
        y = module(dim)(x)
        close(y, torchs(dim)(x))
        (dx,) = torch.autograd.grad(y[0, 0], x)
        (want,) = torch.autograd.grad(torchs(dim)(x)[0, 0], x)
        close(dx, want)
    rows = torch.tensor([[1.0, 2.0], [-INF, -INF]])
    close(module(scale=0.5, empty="zero")(rows), function(rows, scale=0.5, empty="zero"))


def test_logsumexp() -> None:
    x = torch.randn(2, 3, 4)
    close(nn.LogSumExp()(x), torch.logsumexp(x, -1))
    close(nn.LogSumExp((0, 2), keepdim=True)(x), torch.logsumexp(x, (0, 2), True))
    close(nn.LogSumExp(0, scale=0.5)(x), torch.logsumexp(x * 0.5, 0))
    empty = torch.full((2, 3), -INF, requires_grad=True)
    nn.LogSumExp(empty="zero")(empty).sum().backward()
    close(empty.grad, torch.zeros(2, 3))
    close(logsumexp(empty), torch.full((2,), -INF))


def test_what_they_print() -> None:
    assert repr(nn.Softmax()) == "Softmax(dim=-1)"
    assert repr(nn.Softmax(0, scale=0.5, empty="zero")) == 'Softmax(dim=0, scale=0.5, empty="zero")'
    assert repr(nn.LogSoftmax(1)) == "LogSoftmax(dim=1)"
    assert repr(nn.LogSumExp()) == "LogSumExp(dim=-1)"
    assert repr(nn.LogSumExp((0, 1), True)) == "LogSumExp(dim=(0, 1), keepdim=True)"


def test_options_are_checked_when_it_is_made() -> None:
    for module in (nn.Softmax, nn.LogSoftmax, nn.LogSumExp):
        with pytest.raises(ValueError, match=rf"{module.__name__}\(\): scale must be at least 0"):
            module(scale=-1.0)
        with pytest.raises(ValueError, match='empty must be "nan" or "zero"'):
            module(empty="none")
        with pytest.raises(IndexError, match="dim must be in"):
            module(3)(torch.randn(2, 2))


def test_in_a_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), nn.LogSoftmax(scale=0.5), nn.LogSumExp())
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    x = torch.randn(3, 4)
    want = torch.logsumexp(torch.log_softmax(model[0](x) * 0.5, -1), -1)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(each(x), want)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(x), want)
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_cross_entropy_loss() -> None:
    x, target = torch.randn(4, 5, requires_grad=True), torch.tensor([0, -100, 2, 4])
    weight = torch.rand(5)
    for options in ({}, {"label_smoothing": 0.1, "reduction": "sum"}, {"ignore_index": 2}):
        ours = nn.CrossEntropyLoss(weight, **options)
        theirs = torch.nn.CrossEntropyLoss(weight, **options)
        labels = target.clamp(min=0) if "ignore_index" in options else target
        close(ours(x, labels), theirs(x, labels))
        assert ours.state_dict().keys() == theirs.state_dict().keys() == {"weight"}
    module = nn.CrossEntropyLoss(z_loss=0.1, softcap=3.0, scale=0.5, dim=0, grad_in_forward=True)
    assert module.state_dict() == {}
    want = cross_entropy(x, target, z_loss=0.1, softcap=3.0, scale=0.5)
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with pytest.raises(ValueError, match="target must have shape"):
            each(x, target)
        close(each(x.T, target), want)
    assert repr(nn.CrossEntropyLoss()) == "CrossEntropyLoss()"
    assert repr(module) == (
        "CrossEntropyLoss(z_loss=0.1, softcap=3.0, scale=0.5, dim=0, grad_in_forward=True)"
    )
    assert repr(nn.CrossEntropyLoss(weight, reduction="sum")) == (
        "CrossEntropyLoss(weight, reduction='sum')"
    )
    over = nn.CrossEntropyLoss(grad_in_forward=True, overwrite_logits=True)
    hidden = x * 1.0
    over(hidden, target).backward()
    assert hidden._version > 0
    numbers = ({"z_loss": -1.0}, {"softcap": 0.0}, {"scale": -1.0})
    for wrong in ({"reduction": "max"}, *numbers, {"overwrite_logits": True}):
        with pytest.raises(ValueError, match=r"CrossEntropyLoss\(\): "):
            nn.CrossEntropyLoss(**wrong)
    with pytest.raises(RuntimeError, match="label_smoothing must be in"):
        nn.CrossEntropyLoss(label_smoothing=2.0)


def test_token_stats() -> None:
    x, target = torch.randn(2, 3, 7, requires_grad=True), torch.tensor([[0, 6, 3], [1, 2, 5]])
    module = nn.TokenStats(3, temperature=0.7)
    assert module.state_dict() == {}
    want = token_stats(x, target, top_k=3, temperature=0.7)
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        close(each(x, target), want)
    close(module(x).entropy, want.entropy)
    assert module(x).target_rank is None
    assert nn.TokenStats()(x, target=target).top_indices is None
    (dx,) = torch.autograd.grad(module(x, target).target_log_prob.sum(), x)
    close(dx, torch.autograd.grad(want.target_log_prob.sum(), x)[0])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    close(compiled(x, target), want)
    assert repr(nn.TokenStats()) == "TokenStats(top_k=0, temperature=1.0)"
    assert repr(module) == "TokenStats(top_k=3, temperature=0.7)"
    for error, words, wrong in (
        (ValueError, "top_k must be at least 0, got -1", {"top_k": -1}),
        (TypeError, "top_k must be an int", {"top_k": 1.5}),
        (ValueError, "temperature must be above 0", {"temperature": 0.0}),
        (ValueError, "temperature must be at least 5.563e-309", {"temperature": 1e-320}),
    ):
        with pytest.raises(error, match=rf"TokenStats\(\): {words}"):
            nn.TokenStats(**wrong)
    with pytest.raises(ValueError, match=r"token_stats\(\): top_k must be in \[0, 7\], got 8"):
        nn.TokenStats(8)(x)
