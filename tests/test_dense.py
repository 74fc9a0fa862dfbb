"""Sparse, oneDNN's and nested tensors: refused by every function that takes a tensor, and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from online_softmax import (
    OutputState,
    State,
    attention,
    attention_state,
    attention_varlen,
    cross_entropy,
    linear_cross_entropy,
    log_softmax,
    logsumexp,
    merge,
    merge_outputs,
    softmax,
    token_stats,
)

X, T = torch.ones(3, 4), torch.tensor([0, 1, 2])
WHOLE, PAIR = OutputState.of(X, torch.ones(4, 2)), (torch.ones(3, 2), torch.ones(3))
Q, PACKED, ENDS = X[None, None], X[:, None], torch.tensor([0, 3])
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.sparse_coo": lambda t: t.to_sparse(),
    "torch.sparse_csr": lambda t: t.to_sparse_csr() if t.dim() == 2 else t.to_sparse(),
    "torch._mkldnn": lambda t: t.to_mkldnn() if t.dtype == torch.float32 else t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
}
Call = Callable[[Tensor], Any]
CALLS: dict[str, tuple[Tensor, Call]] = {  # by what the error names
    "softmax(): x": (X, softmax),
    "log_softmax(): x": (X, log_softmax),
    "logsumexp(): x": (X, logsumexp),
    "softmax(): out": (X, lambda t: softmax(X, out=t)),
    "cross_entropy(): logits": (X, lambda t: cross_entropy(t, T)),
    "cross_entropy(): target": (T, lambda t: cross_entropy(X, t)),
    "cross_entropy(): weight": (X[0], lambda t: cross_entropy(X, T, weight=t)),
    "linear_cross_entropy(): input": (X, lambda t: linear_cross_entropy(t, X, T)),
    "linear_cross_entropy(): linear_weight": (X, lambda t: linear_cross_entropy(X, t, T)),
    "linear_cross_entropy(): target": (T, lambda t: linear_cross_entropy(X, X, t)),
    "linear_cross_entropy(): weight": (X[:, 0], lambda t: linear_cross_entropy(X, X, T, weight=t)),
    "token_stats(): logits": (X, token_stats),
    "token_stats(): target": (T, lambda t: token_stats(X, t)),
    "attention(): q": (Q, lambda t: attention(t, Q, Q)),
    "attention_state(): v": (Q, lambda t: attention_state(Q, Q, t)),
    "attention(): bias": (X[:, :3], lambda t: attention(Q, Q, Q, bias=t)),
    "attention(): mask": (X[:, :3] > 0, lambda t: attention(Q, Q, Q, mask=t)),
    "attention(): sinks": (X[0, :1], lambda t: attention(Q, Q, Q, sinks=t)),
    "attention_varlen(): cu_seq_k": (
        ENDS,
        lambda t: attention_varlen(PACKED, PACKED, PACKED, ENDS, t, 3, 3),
    ),
    "State.of(): x": (X, State.of),
    "State.softmax(): x": (X, lambda t: State.of(X).softmax(t)),
    "OutputState.of(): x": (X, lambda t: OutputState.of(t, X.T)),
    "OutputState.of(): v": (X.T.clone(), lambda t: OutputState.of(X, t)),
    "merge(): m and d of argument 1": (X, lambda t: merge(State(t, t), State(X, X))),
    "merge(): m and d of argument 2": (X, lambda t: State(X, X).merge(State(X, t))),
    "merge(): o of argument 2": (WHOLE.o, lambda t: merge(WHOLE, WHOLE._replace(o=t))),
    "merge(): o of argument 1": (WHOLE.o, lambda t: merge(WHOLE._replace(o=t))),
    "merge_outputs(): pair 1: out": (PAIR[0], lambda t: merge_outputs((t, PAIR[1]), base="e")),
    "merge_outputs(): pair 2: lse": (
        PAIR[1],
        lambda t: merge_outputs(PAIR, (PAIR[0], t), base="2"),
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*nested tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_dense(kind: str) -> None:
    for what, (dense, call) in CALLS.items():
        given = KINDS[kind](dense)
        named = "a nested tensor" if given.is_nested else f"one of layout {given.layout}"
        with pytest.raises(NotImplementedError) as raised:
            call(given)
        assert str(raised.value) == f"{what} must be a dense tensor, got {named}"


def test_probabilities_that_are_not_dense() -> None:
    with pytest.raises(NotImplementedError, match=r"target must be a dense tensor"):
        cross_entropy(X, X.to_sparse())
    cross_entropy(X, X)


def test_the_calls_are_right_but_for_that() -> None:
    for dense, call in CALLS.values():
        call(dense)
