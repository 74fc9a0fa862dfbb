"""What the tests of devices and streams share: a call of every public operation, with its gradient.

A call's tensors are drawn on the CPU, so that they are the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from online_softmax import (
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

ROWS, COLS = 16, 1000
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Work:
    """An operation: the tensors that it takes, the differentiable ones first, and its call."""

    call: Callable[..., Any]
    leaves: tuple[tuple[int, ...], ...]  # shapes
    others: Callable[[], tuple[Tensor, ...]] = tuple  # targets, and where sequences begin
    dtype: torch.dtype = torch.float32

    def given(self, device: str, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(shape, generator=generator).to(self.dtype) for shape in self.leaves]
        return [t.to(device) for t in (*drawn, *self.others())]

    def run(self, given: Sequence[Tensor]) -> list[Tensor]:
        """What it gives, and the gradients by its leaves; nothing is read back."""
        leaves = [t.detach().requires_grad_() for t in given[: len(self.leaves)]]
        found = self.call(*leaves, *given[len(self.leaves) :])
        results = [t for t in _flat(found) if t is not None]
        ends = [t for t in results if t.requires_grad]
        above = [torch.full_like(t, 0.5) for t in ends]
        gradients = torch.autograd.grad(ends, leaves, above, allow_unused=True)
        return [t.detach() for t in (*results, *gradients) if t is not None]


def _flat(found: Any) -> tuple[Tensor | None, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _target() -> tuple[Tensor, ...]:
    target = torch.arange(ROWS) * 61 % COLS
    target[3] = -100
    return (target,)


def _ends() -> tuple[Tensor, ...]:
    return torch.tensor([0, 20, 60], dtype=torch.int32), torch.tensor([0, 70, 90]).int()


def _linear(memory: str) -> Work:
    shapes = (ROWS, 64), (COLS, 64)
    return Work(lambda x, w, t: linear_cross_entropy(x, w, t, memory=memory), shapes, _target, BF16)


def _merged(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Of states of two parts of the keys; the whole as output and lse."""
    parts = (slice(0, 100), slice(100, None))
    state = merge(*(attention_state(q, k[:, :, part], v[:, :, part]) for part in parts))
    return state.output(), state.lse()


def rows(cols: int = COLS, count: int = ROWS) -> dict[str, Work]:
    """The operations on rows and their losses, by so many columns."""
    shape = ((count, cols),)
    labels = torch.arange(count) * 61 % cols
    return {
        "softmax": Work(softmax, shape),
        "softmax, 16 bits": Work(softmax, shape, dtype=BF16),
        "softmax, dim 0": Work(lambda x: softmax(x, 0), shape),
        "log_softmax": Work(log_softmax, shape),
        "logsumexp": Work(logsumexp, shape),
        "cross_entropy": Work(cross_entropy, shape, lambda: (labels,), BF16),
        "cross_entropy, its gradient in the forward": Work(
            lambda x, t: cross_entropy(x, t, grad_in_forward=True), shape, lambda: (labels,)
        ),
        "token_stats": Work(
            lambda x, t: token_stats(x, t, top_k=20), shape, lambda: (labels,), BF16
        ),
    }


_TOKENS = ((1, 4, 60, 64), (1, 2, 90, 64), (1, 2, 90, 64))
_FEW = ((1, 4, 1, 64), (1, 2, 3000, 64), (1, 2, 3000, 64))
_PACKED = ((60, 4, 64), (90, 2, 64), (90, 2, 64))
WORKS: dict[str, Work] = {
    **rows(),
    "linear_cross_entropy, low": _linear("low"),
    "linear_cross_entropy, fast": _linear("fast"),
    "attention": Work(lambda *t: attention(*t, causal=True, return_lse=True), _TOKENS, dtype=BF16),
    "attention, a decode": Work(lambda *t: attention(*t, return_lse=True), _FEW, dtype=BF16),
    "attention_varlen": Work(
        lambda *t: attention_varlen(*t, 40, 70, causal=True), _PACKED, _ends, BF16
    ),
    "merge": Work(_merged, _FEW, dtype=BF16),
    "merge_outputs": Work(
        lambda *t: merge_outputs(t[:2], t[2:], base="e"),
        ((ROWS, 4, 64), (ROWS, 4), (ROWS, 4, 64), (ROWS, 4)),
    ),
}
