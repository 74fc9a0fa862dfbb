"""Numbers beyond a float or an int64, and what is no bool: every function that has such an one."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from online_softmax import (
    attention,
    attention_state,
    attention_varlen,
    cross_entropy,
    explain,
    linear_cross_entropy,
    log_softmax,
    logsumexp,
    nn,
    softmax,
    token_stats,
)

Call = Callable[..., Any]
X, T = torch.randn(3, 5), torch.tensor([0, 1, 4])
Q, PACKED, ENDS = X[None, None], X[:, None], torch.tensor([0, 3])


def loss(**options: Any) -> Any:
    return cross_entropy(X, T, **options)


def of_probabilities(**options: Any) -> Any:
    return cross_entropy(X, X.softmax(1), **options)


def linear(**options: Any) -> Any:
    return linear_cross_entropy(X, torch.eye(5), T, **options)


def whole(**options: Any) -> Any:
    return attention(Q, Q, Q, **options)


def packed(**options: Any) -> Any:
    return attention_varlen(PACKED, PACKED, PACKED, ENDS, ENDS, 3, 3, **options)


def state(**options: Any) -> Any:
    return attention_state(Q, Q, Q, **options)


def head(**options: Any) -> Any:
    return nn.LinearCrossEntropyLoss(5, 5, **options)


def stats(**options: Any) -> Any:
    return token_stats(X, **options)


def over(**options: Any) -> Any:
    return logsumexp(X, **options)


ROWS: list[Call] = [lambda **o: softmax(X, **o), lambda **o: log_softmax(X, **o), over]
MODULES: list[Call] = [nn.Softmax, nn.LogSoftmax, nn.LogSumExp]
LOSSES: list[Call] = [loss, of_probabilities, linear, nn.CrossEntropyLoss, head]
ATTENTIONS: list[Call] = [whole, packed, state]
NUMBERS = [
    *((call, "scale", ValueError) for call in (*ROWS, *MODULES, *LOSSES, *ATTENTIONS)),
    *((call, "softcap", ValueError) for call in (*LOSSES, *ATTENTIONS)),
    *((call, "z_loss", ValueError) for call in LOSSES),
    *((call, "label_smoothing", RuntimeError) for call in LOSSES),
    (stats, "temperature", ValueError),
    (nn.TokenStats, "temperature", ValueError),
]


BEYOND = ["a", "b", "c", "d"]  # Python prints no int so long


@pytest.mark.parametrize(
    "beyond", [10**400, -(10**400), 10**5000, Fraction(10**400, 3)], ids=BEYOND
)
def test_numbers_beyond_a_float(beyond: Any) -> None:
    for call, argument, error in NUMBERS:
        with pytest.raises(error, match=rf"\(\): {argument} must be .*, got .*(int of|inf)"):
            call(**{argument: beyond})


def test_ints_that_a_float_holds() -> None:
    for call in (*ROWS, loss, of_probabilities, linear, whole, packed):
        assert call(scale=2).equal(call(scale=2.0))
    assert stats(temperature=2).lse.equal(stats(temperature=2.0).lse)
    assert loss(label_smoothing=1, z_loss=1).equal(loss(label_smoothing=1.0, z_loss=1.0))


@pytest.mark.parametrize("beyond", [2**63, -(2**63) - 1, 10**400, -(10**5000)], ids=BEYOND)
def test_an_ignore_index_beyond_an_int64(beyond: int) -> None:
    for call in LOSSES:
        with pytest.raises(ValueError, match=r"\(\): ignore_index must be an int64, got"):
            call(ignore_index=beyond)
    assert loss(ignore_index=-(2**63)).equal(loss())
    assert linear(ignore_index=2**63 - 1).equal(linear())


def test_sizes_that_no_tensor_has() -> None:
    for call in (
        lambda n: explain(n, 5),
        lambda n: explain(5, n, op="linear_cross_entropy"),
        lambda n: explain(5, 5, inner=n),
        lambda n: explain(5, 5, op="linear_cross_entropy", hidden=n),
        lambda n: explain(5, 5, op="merge", parts=n),
    ):
        for size in (2**63, 10**400):
            with pytest.raises(ValueError, match=r"must be at most 9223372036854775807"):
                call(size)
        assert call(2**40)


BOOLS = [
    (over, "keepdim"),
    (nn.LogSumExp, "keepdim"),
    *((call, "return_lse") for call in (loss, of_probabilities, whole, packed)),
    *((call, "check_target") for call in (loss, of_probabilities, linear)),
    *((call, "grad_in_forward") for call in (loss, of_probabilities, nn.CrossEntropyLoss)),
    *((call, "overwrite_logits") for call in (loss, of_probabilities, nn.CrossEntropyLoss)),
]


@pytest.mark.parametrize("wrong", ["no", "", 0, 2, None, 1.0, torch.tensor(True)], ids=repr)
def test_what_is_no_bool(wrong: Any) -> None:
    for call, argument in BOOLS:
        kind = type(wrong).__name__
        with pytest.raises(TypeError, match=rf"\(\): {argument} must be a bool, got {kind}$"):
            call(**{argument: wrong})


def test_numpys_bools() -> None:
    assert over(keepdim=np.bool_(True)).shape == (3, 1)
    assert over(keepdim=np.bool_(False)).shape == (3,)
    assert isinstance(loss(return_lse=np.bool_(False), check_target=np.True_), Tensor)
    assert len(whole(return_lse=np.True_)) == 2


def test_bools_and_ints_in_a_compiled_function() -> None:
    def call(x: Tensor) -> tuple[Tensor, ...]:
        return cross_entropy(x, T, return_lse=True, scale=2, z_loss=1), logsumexp(x, keepdim=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), call(X))
