"""The row operations on tensors whose memory does not hold their values: no kernel reads those."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from online_softmax import rowops
from rows_kit import DEVICES
from test_rowops import OPS, oracle, run, wrong


def _entries(op: str) -> dict[str, tuple[int, Callable[..., Tensor]]]:
    """Each entry of an operation: of how many tensors of shape (3, 4) it is a function."""
    if op == "logsumexp":

        def back(dlse: Tensor, x: Tensor, lse: Tensor) -> Tensor:
            rows = dlse[:, 0], x, lse[:, 0]
            return rowops.logsumexp_backward(*rows, (1,), False, None, 1.0, False)

        return {"forward": (1, lambda x: run(op, x)), "backward": (3, back)}
    backward = lambda dy, y: rowops.backward(op, dy, y, -1, None, 1.0, False)  # noqa: E731
    return {"forward": (1, lambda x: run(op, x)), "backward": (2, backward)}


@DEVICES
@OPS
def test_values_that_memory_does_not_hold(op: str, device: str, monkeypatch) -> None:
    """A pending negation, and zeros without memory: no kernel reads them, first call or later."""
    x, with_values = torch.randn(3, 4, device=device), rowops.with_values
    imaginary = torch.complex(x, x).conj().imag
    zeros = torch._efficientzerotensor((3, 4), device=device)
    assert imaginary.is_neg()
    assert zeros._is_zerotensor()
    copied: list[Tensor] = []  # what was given a copy that memory holds

    def spy(t: Tensor) -> Tensor:
        plain = with_values(t)
        assert not plain.is_neg()
        assert not plain._is_zerotensor()
        if plain is not t:
            copied.append(t)
        return plain

    monkeypatch.setattr(rowops, "with_values", spy)
    for name, (count, call) in _entries(op).items():
        plain = torch.randn(count, 3, 4, device=device).unbind()
        for _ in range(3):  # on a GPU the last starts the launch of the first again
            call(*plain)
        assert copied == []
        for place in range(count):
            for odd, values in ((imaginary, -x), (zeros, torch.zeros_like(x))):
                # With the strides of the plain one, so that nothing but the values differs.
                lying = torch._neg_view(x) if odd is imaginary else odd
                for given in (odd, lying):
                    got = call(*plain[:place], given, *plain[place + 1 :])
                    want = call(*plain[:place], values, *plain[place + 1 :])
                    assert wrong(got, want.double(), 10.0) == "", f"{name}, tensor {place}"
                assert len(copied) == 2
                copied.clear()
    assert wrong(run(op, imaginary), oracle(op, -x), 10.0) == ""
