"""Modules: softmax, log_softmax and logsumexp with their options, for `torch.nn.Sequential`.

They hold no parameters and no buffers, so a model's state dict is what it was.

>>> LogSoftmax(-1, scale=0.125)
LogSoftmax(dim=-1, scale=0.125)
"""

from __future__ import annotations

from torch import Tensor, nn

from online_softmax import api
from online_softmax.api import Empty
from online_softmax.arguments import check_empty, check_scale


class _RowModule(nn.Module):
    """What the three have in common: options, checked when the module is made."""

    scale: float
    empty: Empty

    def __init__(self, scale: float, empty: Empty) -> None:
        super().__init__()
        name = type(self).__name__
        self.scale = check_scale(name, scale)
        check_empty(name, empty)
        self.empty = empty

    def _options(self) -> str:
        """The options that differ from their defaults."""
        scale = "" if self.scale == 1.0 else f", scale={self.scale}"
        return scale + ("" if self.empty == "nan" else f', empty="{self.empty}"')


class Softmax(_RowModule):
    """`online_softmax.softmax` as a module, in place of `torch.nn.Softmax`.

    Args:
        dim: the dimension along which the result sums to 1. Unlike torch's, never guessed: -1.
        scale: at least 0 and finite; multiplies the input first.
        empty: what a slice that is all -inf gives: "nan" or "zero".

    Shapes: any; the result has the input's shape and dtype (bfloat16 for fp8, float32 under CUDA
    autocast). Raises ValueError for a wrong scale or empty, and what `softmax` raises.

    Example:
        >>> import torch
        >>> Softmax()(torch.tensor([1.0, 5.0, 3.0]))
        tensor([0.0159, 0.8668, 0.1173])
    """

    def __init__(self, dim: int = -1, *, scale: float = 1.0, empty: Empty = "nan") -> None:
        super().__init__(scale, empty)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return api.softmax(x, self.dim, scale=self.scale, empty=self.empty)

    def extra_repr(self) -> str:
        return f"dim={self.dim}{self._options()}"


class LogSoftmax(_RowModule):
    """`online_softmax.log_softmax` as a module; arguments as for `Softmax`.

    Example:
        >>> import torch
        >>> LogSoftmax()(torch.tensor([0.0, -95.0, -200.0]))
        tensor([   0.,  -95., -200.])
    """

    def __init__(self, dim: int = -1, *, scale: float = 1.0, empty: Empty = "nan") -> None:
        super().__init__(scale, empty)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return api.log_softmax(x, self.dim, scale=self.scale, empty=self.empty)

    def extra_repr(self) -> str:
        return f"dim={self.dim}{self._options()}"


class LogSumExp(_RowModule):
    """`online_softmax.logsumexp` as a module.

    Args:
        dim: one dimension, or a tuple of several.
        keepdim: whether the result keeps them, with length 1.
        scale: as for `Softmax`.
        empty: the gradient of a slice that is all -inf: "nan" or "zero".

    Example:
        >>> import torch
        >>> LogSumExp((0, 1))(torch.zeros(2, 3))
        tensor(1.7918)
    """

    def __init__(
        self,
        dim: int | tuple[int, ...] = -1,
        keepdim: bool = False,
        *,
        scale: float = 1.0,
        empty: Empty = "nan",
    ) -> None:
        super().__init__(scale, empty)
        self.dim = dim
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        return api.logsumexp(x, self.dim, self.keepdim, scale=self.scale, empty=self.empty)

    def extra_repr(self) -> str:
        keepdim = ", keepdim=True" if self.keepdim else ""
        return f"dim={self.dim}{keepdim}{self._options()}"
