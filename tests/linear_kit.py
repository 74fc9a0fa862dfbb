"""What the tests of linear_cross_entropy share: small problems, the formula, and a fine cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from losses_kit import IGNORED, written_out
from online_softmax import linearplan, rowkernels

MEMORY = pytest.mark.parametrize("memory", ["low", "fast"])
EVERY: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.05, "softcap": 3.0, "scale": 1.3}


def cut_finely(monkeypatch: pytest.MonkeyPatch, cells: int = 512) -> None:
    """Blocks of so many logits of float32 and not more, so that a small problem has several."""
    chunks = ("FAST_CHUNK_BYTES", "FAST_CHUNK_BYTES_BESIDE_SUMS")
    for name in ("LOW_BLOCK_BYTES", "FAST_GROUP_BYTES", *chunks):
        monkeypatch.setattr(linearplan, name, 4 * cells)
    monkeypatch.setattr(linearplan, "TILE", 4)
    monkeypatch.setattr(linearplan, "LEAST_COLS", 4)
    monkeypatch.setattr(linearplan, "LEAST_TOKENS", 4)


def take_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA kernels, by host execution."""
    monkeypatch.setattr(rowkernels, "has_kernels", lambda x: True)


def example(
    tokens: int = 12,
    features: int = 5,
    classes: int = 77,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """input, linear_weight, linear_bias, target: some tokens ignored."""
    generator = torch.Generator().manual_seed(tokens + classes)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.double)  # noqa: E731
    matrices = [draw(tokens, features), draw(classes, features), draw(classes)]
    target = torch.randint(classes, (tokens,), generator=generator)
    target[1::5] = IGNORED
    x, w, b = (t.to(dtype).to(device) for t in matrices)
    return x, w, b, target.to(device)


def by_logits(x: Tensor, w: Tensor, target: Tensor, *, linear_bias: Any = None, **o: Any) -> Tensor:
    """The same by whole logits and torch's own."""
    logits = functional.linear(x, w, linear_bias)
    rows = logits.reshape(-1, logits.shape[-1])
    loss = written_out(rows, target.reshape(-1), **o)
    return loss.reshape(target.shape) if o.get("reduction") == "none" else loss


def gradients(
    function: Any, leaves: list[Tensor], upstream: Tensor | None = None
) -> tuple[Tensor, ...]:
    """What function() gives, and its gradients by the leaves."""
    result = function()
    given = torch.ones_like(result) if upstream is None else upstream.to(result.dtype)
    return result.detach(), *torch.autograd.grad(result, leaves, given)
