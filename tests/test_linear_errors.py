"""linear_cross_entropy: its module, and what its errors say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from linear_kit import by_logits, example
from online_softmax import linear_cross_entropy, nn

close = torch.testing.assert_close


def test_the_module_is_torchs() -> None:
    x, w, b, target = example(dtype=torch.float32)
    weight = torch.rand(77)
    ours = nn.LinearCrossEntropyLoss(5, 77, bias=True, weight=weight, label_smoothing=0.1)
    state = {"linear.weight": w, "linear.bias": b, "weight": weight}
    ours.load_state_dict(state)
    want = by_logits(x, w, target, linear_bias=b, weight=weight, label_smoothing=0.1)
    close(ours(x, target), want)
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):
        theirs = torch.nn.LinearCrossEntropyLoss(
            5, 77, bias=True, weight=weight, label_smoothing=0.1
        )
        theirs.load_state_dict(ours.state_dict())
        close(ours(x, target), theirs(x, target))
    more = nn.LinearCrossEntropyLoss(5, 77, z_loss=0.1, softcap=3.0, scale=0.5, memory="fast")
    more.load_state_dict({"linear.weight": w})
    close(more(x, target), by_logits(x, w, target, z_loss=0.1, softcap=3.0, scale=0.5))
    assert repr(more).splitlines()[0] == "LinearCrossEntropyLoss("
    assert more.extra_repr() == "reduction='mean', memory='fast'"
    with pytest.raises(ValueError, match=r"LinearCrossEntropyLoss\(\): memory must be"):
        nn.LinearCrossEntropyLoss(5, 77, memory="little")


X, W, T = torch.zeros(4, 3), torch.zeros(7, 3), torch.zeros(4, dtype=torch.int64)
WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "linear_weight must be a Tensor, got list", {"linear_weight": [1.0]}),
    (NotImplementedError, "input must be one of", {"input": X.long()}),
    (RuntimeError, r"must be \(classes, 3\).* got \(7, 4\)", {"linear_weight": torch.zeros(7, 4)}),
    (RuntimeError, r"got \(7, 2, 3\)", {"linear_weight": torch.zeros(7, 2, 3)}),
    (RuntimeError, r"must have shape \(7,\)", {"linear_bias": torch.zeros(6)}),
    (RuntimeError, "one dtype is wanted", {"linear_weight": W.bfloat16()}),
    (RuntimeError, "got a scalar", {"input": torch.zeros(())}),
    (ValueError, r"target must have shape \(4,\)", {"target": T[:2]}),
    (IndexError, r"target must be in \[0, 7\).* got 7 at index \(0,\)", {"target": T + 7}),
    (
        IndexError,
        r"got 9 at index \(0, 1\)",
        {"input": X.reshape(2, 2, 3), "target": torch.tensor([[0, 9], [1, 1]])},
    ),
    (RuntimeError, r"weight must have shape \(7,\)", {"weight": torch.ones(3)}),
    (RuntimeError, "label_smoothing must be in", {"label_smoothing": 2.0}),
    (ValueError, "reduction must be", {"reduction": "median"}),
    (ValueError, 'memory must be "low" or "fast"', {"memory": "none"}),
    (ValueError, "z_loss must be", {"z_loss": -1.0}),
    (ValueError, "cannot run this", {"kernel": "safe"}),
    (ValueError, "no kernel is named", {"kernel": "best"}),
    (TypeError, "ignore_index must be an int", {"ignore_index": "none"}),
    (RuntimeError, "not differentiable by weight", {"weight": torch.ones(7, requires_grad=True)}),
]


@pytest.mark.parametrize(("error", "words", "wrong"), WRONG, ids=[words for _, words, _ in WRONG])
def test_errors_say_what_is_wanted(
    error: type[Exception], words: str, wrong: dict[str, Any]
) -> None:
    given: dict[str, Tensor] = {"input": X, "linear_weight": W, "target": T}
    with pytest.raises(error, match=rf"linear_cross_entropy\(\): .*{words}"):
        linear_cross_entropy(**{**given, **wrong})
    close(linear_cross_entropy(X, W, T, ignore_index=None, kernel="reference"),
          torch.tensor(7.0).log())  # fmt: skip
