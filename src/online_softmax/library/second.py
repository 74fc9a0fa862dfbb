"""The gradient of a gradient, by torch's own derivatives of a formula in torch operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def pulled_back(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    given: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """The gradients by the inputs, for those by what function(*inputs) gives.

    Right in every order and under every transform: the result is differentiable by both.

    Args:
        function: of tensors, in differentiable torch operations.
        inputs: floats.
        given: None: there is none.
    """
    # Here, since it loads functorch, which no import of this package does.
    from torch.func import vjp

    results, pull = vjp(  # type: ignore[misc]
        lambda *t: tuple(function(*t)), *inputs
    )
    pairs = zip(given, results, strict=True)
    filled = tuple(torch.zeros_like(t) if g is None else g.to(t.dtype) for g, t in pairs)
    return tuple(pull(filled))
