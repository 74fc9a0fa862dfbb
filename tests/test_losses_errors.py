"""What cross_entropy refuses, and how it says so."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional

from online_softmax import cross_entropy
from rows_kit import DEVICES

close = torch.testing.assert_close

X, T = torch.zeros(3, 5), torch.tensor([0, 1, 2])
WRONG = {
    "logits": (TypeError, "logits must be a Tensor, got list", lambda: cross_entropy([1.0], T)),
    "target": (TypeError, "target must be a Tensor, got list", lambda: cross_entropy(X, [0])),
    "integers": (
        NotImplementedError,
        "logits must be of a floating-point type, got torch.int64",
        lambda: cross_entropy(X.long(), T),
    ),
    "scalar": (RuntimeError, "a dimension for the classes", lambda: cross_entropy(X[0, 0], T[0])),
    "rows": (
        ValueError,
        re.escape("target must have shape (3,), that of logits (3, 5) without dim 1, got (2,)"),
        lambda: cross_entropy(X, T[:2]),
    ),
    "dimensions": (RuntimeError, "target must have shape", lambda: cross_entropy(X, T[:, None])),
    "classes as logits": (RuntimeError, "target must have", lambda: cross_entropy(X, X.long())),
    "int32": (RuntimeError, "int64 or uint8", lambda: cross_entropy(X, T.int())),
    "bool": (RuntimeError, "int64 or uint8", lambda: cross_entropy(X, T.bool())),
    "float": (RuntimeError, "is probabilities", lambda: cross_entropy(X, T.float())),
    "weight": (
        RuntimeError,
        re.escape("weight must have shape (5,), one for each class, got (4,)"),
        lambda: cross_entropy(X, T, weight=torch.ones(4)),
    ),
    "weight type": (
        RuntimeError,
        "weight must be of a float type",
        lambda: cross_entropy(X, T, weight=torch.ones(5).long()),
    ),
    "weight list": (
        TypeError,
        "weight must be a Tensor",
        lambda: cross_entropy(X, T, weight=[1.0] * 5),
    ),
    "weight gradient": (
        RuntimeError,
        "not differentiable by weight",
        lambda: cross_entropy(X, T, weight=torch.ones(5, requires_grad=True)),
    ),
    "reduction": (
        ValueError,
        "reduction must be .* got 'max'",
        lambda: cross_entropy(X, T, reduction="max"),
    ),
    "smoothing": (
        RuntimeError,
        re.escape("label_smoothing must be in [0, 1], got 1.5"),
        lambda: cross_entropy(X, T, label_smoothing=1.5),
    ),
    "z_loss": (ValueError, "z_loss must be at least 0", lambda: cross_entropy(X, T, z_loss=-1.0)),
    "z_loss type": (TypeError, "z_loss must be a float", lambda: cross_entropy(X, T, z_loss="1")),
    "softcap": (ValueError, "softcap must be above 0", lambda: cross_entropy(X, T, softcap=0.0)),
    "scale": (ValueError, "scale must be at least 0", lambda: cross_entropy(X, T, scale=-1.0)),
    "dim": (IndexError, "dim must be in", lambda: cross_entropy(X, T, dim=2)),
    "ignore_index": (
        RuntimeError,
        "ignore_index must be negative",
        lambda: cross_entropy(X, X, ignore_index=1),
    ),
    "ignore_index type": (
        TypeError,
        "ignore_index must be an int",
        lambda: cross_entropy(X, T, ignore_index=1.5),
    ),
    "kernel": (
        ValueError,
        "kernel 'v2_vectorized' cannot run this",
        lambda: cross_entropy(X, T, kernel="v2_vectorized"),
    ),
    "no kernel": (
        ValueError,
        "no kernel is named 'best': where target is classes there are registers, split",
        lambda: cross_entropy(X, T, kernel="best"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_classes_that_are_last() -> None:
    """The error says what to do, and that does it; where the shapes do not fit, it says nothing."""
    torch.manual_seed(0)
    logits, target = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    want = functional.cross_entropy(logits.flatten(0, -2), target.flatten())
    hint = re.escape(". If the classes are last: logits.flatten(0, -2) and target.flatten()")
    for given in (target, target.flatten()):
        with pytest.raises((RuntimeError, ValueError), match=hint) as raised:
            cross_entropy(logits, given)
        assert ("or dim=-1" in str(raised.value)) == (given is target)
    close(cross_entropy(logits.flatten(0, -2), target.flatten()), want)
    close(cross_entropy(logits, target, dim=-1), want)
    for other in (target[:1], target[:, :2], target[..., None]):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            cross_entropy(logits, other)
        assert "classes are last" not in str(raised.value)


@DEVICES
def test_devices_are_compared(device: str) -> None:
    other = "meta"
    with pytest.raises(RuntimeError, match=f"target must be on {device}.*, got meta"):
        cross_entropy(X.to(device), T.to(other))
    with pytest.raises(RuntimeError, match=f"weight must be on {device}.*, got meta"):
        cross_entropy(X.to(device), T.to(device), weight=torch.ones(5, device=other))


def test_a_forced_kernel() -> None:
    close(cross_entropy(X, T, kernel="reference"), functional.cross_entropy(X, T))
    p = torch.softmax(X, 1)
    close(cross_entropy(X, p, kernel="torch"), functional.cross_entropy(X, p))
