"""What the tests of the torch side share: each operation with options, and the same in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from online_softmax import log_softmax, logsumexp, softmax

INF, NAN = float("inf"), float("nan")
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gpu(test: Callable) -> Callable:
    """A test that runs where there is a GPU alone."""
    for mark in GPU:
        test = mark(test)
    return test


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])


class Tagged(Tensor):
    """A subclass that does nothing."""


@dataclass(frozen=True)
class Variant:
    """A call of ours, and of torch's, that should agree."""

    op: str
    ours: Callable[[Tensor], Tensor]
    torchs: Callable[[Tensor], Tensor]
    arguments: tuple[Any, ...]  # of the registered op, after x and before `kernel`

    def op_call(self, x: Tensor) -> Tensor:
        return getattr(torch.ops.online_softmax, self.op).default(x, *self.arguments, "")


VARIANTS = {
    "softmax": Variant("softmax", softmax, lambda x: torch.softmax(x, -1), (-1, None, 1.0, False)),
    "softmax_scaled": Variant(
        "softmax",
        lambda x: softmax(x, 0, scale=0.3),
        lambda x: torch.softmax(0.3 * x, 0),
        (0, None, 0.3, False),
    ),
    "softmax_zero": Variant(
        "softmax",
        lambda x: softmax(x, empty="zero"),
        lambda x: torch.softmax(x, -1),
        (-1, None, 1.0, True),
    ),
    "log_softmax": Variant(
        "log_softmax", log_softmax, lambda x: torch.log_softmax(x, -1), (-1, None, 1.0, False)
    ),
    "log_softmax_scaled_zero": Variant(
        "log_softmax",
        lambda x: log_softmax(x, 0, scale=1.7, empty="zero"),
        lambda x: torch.log_softmax(1.7 * x, 0),
        (0, None, 1.7, True),
    ),
    "logsumexp": Variant(
        "logsumexp",
        logsumexp,
        lambda x: torch.logsumexp(x, -1),
        ((-1,), False, None, 1.0, False),
    ),
    "logsumexp_scaled": Variant(
        "logsumexp",
        lambda x: logsumexp(x, 0, True, scale=0.3, empty="zero"),
        lambda x: torch.logsumexp(0.3 * x, 0, True),
        ((0,), True, None, 0.3, True),
    ),
    "logsumexp_dims": Variant(
        "logsumexp",
        lambda x: logsumexp(x, (0, -1)),
        lambda x: torch.logsumexp(x, (0, -1)),
        ((0, -1), False, None, 1.0, False),
    ),
}
EACH = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def double(*shape: int, device: str = "cpu", grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.double).to(device)
    return x.requires_grad_(grad)
