"""Gradients as a training step asks for them; the one place of the lab that names autograd.

Not `backward()`: what that leaves in `.grad` may be a copy, which no step with logits in the middle
of a model makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Made(torch.autograd.Function):
    """What something made: no leaf, and no view, on the memory of `given`."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, given: list[Tensor]) -> Tensor:
        return given[0]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dx, None


def of(loss: Callable[..., Any], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The gradients of loss(*tensors), a number, by each; every tensor is a leaf anew, on its own
    memory."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(loss(*leaves), leaves)


def of_made(loss: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The gradient by x as a model's layer made it, which may be overwritten as a leaf may not. It
    is asked of what the layer was given, as in a model: of what is overwritten there is none."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(loss(_Made.apply(leaf, [x.detach()])), leaf)[0].detach()


def recorded(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What a function makes, and the leaves that it was made of: for `by`."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    return function(*leaves), leaves


def by(made: tuple[Tensor, list[Tensor]], upstream: Tensor) -> tuple[Tensor, ...]:
    """The gradients of what `recorded` gave by each leaf; it can be asked again."""
    out, leaves = made
    return torch.autograd.grad(out, leaves, upstream, retain_graph=True)
