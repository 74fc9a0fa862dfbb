"""Every operation from its definition: the oracle, and the backend where no kernel of ours runs."""

from __future__ import annotations

from torch import Tensor

from online_softmax.reference.online import State, log_prob, lse


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - m) / d along `dim`.

    Args:
        x: any shape, device and strides; float16, bfloat16, float32 or float64. Halves accumulate
            in float32.
        dim: the dimension along which the result sums to 1.

    Returns:
        x's shape and dtype, rounded once. NaN in slices that are all -inf or hold NaN or +inf.

    Raises:
        NotImplementedError: x is of another dtype.
        IndexError: dim is out of range.

    >>> import torch
    >>> softmax(torch.tensor([1.0, 5.0, 3.0]))
    tensor([0.0159, 0.8668, 0.1173])
    """
    return State.of(x, dim).softmax(x, dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """(x - m) - log d along `dim`, the natural logarithm of `softmax`; arguments as there.

    >>> import torch
    >>> log_softmax(torch.tensor([0.0, -95.0, -200.0]))
    tensor([   0.,  -95., -200.])
    """
    return log_prob(x, State.of(x, dim), dim).to(x.dtype)


def logsumexp(x: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
    """m + log d along `dim`, a natural logarithm, in x's dtype; arguments as for `softmax`.

    -inf for slices that are all -inf or have no element, +inf for those with +inf, NaN for NaN.
    `keepdim` keeps `dim` with length 1.

    >>> import torch
    >>> logsumexp(torch.tensor([[1.0, 2.0], [-torch.inf, -torch.inf]]))
    tensor([2.3133,   -inf])
    """
    y = lse(State.of(x, dim)).to(x.dtype)
    return y.unsqueeze(dim) if keepdim and x.dim() else y
