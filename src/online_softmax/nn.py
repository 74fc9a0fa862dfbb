"""Modules: the operations with their options, for `torch.nn.Sequential` and as losses.

They hold no parameters, and no buffers but the weight of a loss if one is given, as in torch, so a
model's state dict is what it was; `LinearCrossEntropyLoss` holds its `torch.nn.Linear`, as torch's.

>>> LogSoftmax(-1, scale=0.125)
LogSoftmax(dim=-1, scale=0.125)
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from online_softmax import api, library, linear, lossarguments, losses, stats
from online_softmax.api import Empty
from online_softmax.arguments import check_bool, check_empty, check_scale
from online_softmax.linear import Memory
from online_softmax.losses import Reduction


class _RowModule(nn.Module):
    """What the three of rows have in common: options, checked when the module is made."""

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

    Examples:
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

    Examples:
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

    Examples:
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
        self.keepdim = check_bool(type(self).__name__, "keepdim", keepdim)

    def forward(self, x: Tensor) -> Tensor:
        return api.logsumexp(x, self.dim, self.keepdim, scale=self.scale, empty=self.empty)

    def extra_repr(self) -> str:
        keepdim = ", keepdim=True" if self.keepdim else ""
        return f"dim={self.dim}{keepdim}{self._options()}"


class TokenStats(nn.Module):
    """`online_softmax.token_stats` as a module: of logits, and of a target if one is given.

    Args:
        top_k: how many of the largest to give, at least 0.
        temperature: as for the function; divides the logits.

    Shapes: logits (..., classes), target (...) or None; the result is the function's NamedTuple.
    Raises what the function raises, for a wrong number when the module is made.

    Examples:
        >>> import torch
        >>> TokenStats(top_k=1)(torch.tensor([[2.0, 0.0, 1.0]])).top_indices
        tensor([[0]])
    """

    def __init__(self, top_k: int = 0, *, temperature: float = 1.0) -> None:
        super().__init__()
        name = type(self).__name__
        self.top_k = stats.check_top_k(name, top_k)
        self.temperature = lossarguments.check_temperature(name, temperature)

    def forward(self, logits: Tensor, target: Tensor | None = None) -> library.TokenStats:
        return stats.token_stats(logits, target, top_k=self.top_k, temperature=self.temperature)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, temperature={self.temperature}"


_LOSS_OPTIONS = ("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "scale")


class _LossModule(nn.Module):
    """What the losses have in common: options, checked when the module is made."""

    weight: Tensor | None
    _more: tuple[str, ...]  # options of the one loss alone

    def __init__(
        self,
        weight: Tensor | None,
        ignore_index: int,
        reduction: Reduction,
        label_smoothing: float,
        z_loss: float,
        softcap: float | None,
        scale: float,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.register_buffer("weight", weight)
        self.ignore_index = lossarguments.check_ignore_index(name, ignore_index)
        lossarguments.check_reduction(name, reduction)
        self.reduction: Reduction = reduction
        self.label_smoothing = lossarguments.check_smoothing(name, label_smoothing)
        self.z_loss = lossarguments.check_z_loss(name, z_loss)
        self.softcap = lossarguments.check_softcap(name, softcap)
        self.scale = check_scale(name, scale)

    def _options(self) -> dict[str, Any]:
        """What the function is called with, beside the tensors."""
        return {name: getattr(self, name) for name in (*_LOSS_OPTIONS, *self._more)}


class CrossEntropyLoss(_LossModule):
    """`online_softmax.cross_entropy` as a module, in place of `torch.nn.CrossEntropyLoss`.

    Args:
        weight: (classes,), what each class counts for: a buffer, as in torch.
        ignore_index, reduction, label_smoothing, z_loss: as for the function.
        softcap, scale, dim, grad_in_forward, overwrite_logits: as for the function.

    Shapes: logits, target and the loss as for the function. Raises what the function raises, for a
    wrong number or reduction when the module is made.

    Examples:
        >>> import torch
        >>> CrossEntropyLoss(label_smoothing=0.1)(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(1.3863)
    """

    _more = ("dim", "grad_in_forward", "overwrite_logits")

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        scale: float = 1.0,
        dim: int | None = None,
        grad_in_forward: bool = False,
        overwrite_logits: bool = False,
    ) -> None:
        super().__init__(weight, ignore_index, reduction, label_smoothing, z_loss, softcap, scale)
        self.dim = dim
        self.grad_in_forward, self.overwrite_logits = lossarguments.check_in_forward(
            type(self).__name__, grad_in_forward, overwrite_logits
        )

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        loss = losses.cross_entropy(logits, target, weight=self.weight, **self._options())
        return cast("Tensor", loss)

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        defaults = CrossEntropyLoss()._options()
        given = [f"{k}={v!r}" for k, v in self._options().items() if v != defaults[k]]
        return ", ".join(given if self.weight is None else ["weight", *given])


class LinearCrossEntropyLoss(_LossModule):
    """`online_softmax.linear_cross_entropy` with a `torch.nn.Linear` of its own, in place of
    `torch.nn.LinearCrossEntropyLoss`; its state dict is the same.

    Args:
        in_features, num_classes, bias, device, dtype: of the `linear`, which maps input to logits.
        weight: (num_classes,), what each class counts for: a buffer, as in torch.
        reduction, ignore_index, label_smoothing, z_loss, softcap: as for the function.
        scale, memory: as for the function.

    Shapes: input (..., in_features), target and the loss as for the function. Raises what the
    function raises, for a wrong number or word when the module is made.

    Examples:
        >>> import torch
        >>> head = LinearCrossEntropyLoss(8, 100)
        >>> loss = head(torch.ones(4, 8), torch.tensor([0, 9, 99, -100]))
        >>> loss.backward()
        >>> head.linear.weight.grad.shape
        torch.Size([100, 8])
    """

    _more = ("memory",)

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        reduction: Reduction = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        scale: float = 1.0,
        memory: Memory = "low",
    ) -> None:
        ignored = -100 if ignore_index is None else ignore_index
        super().__init__(weight, ignored, reduction, label_smoothing, z_loss, softcap, scale)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        linear.check_memory(type(self).__name__, memory)
        self.memory: Memory = memory

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        return linear.linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            **self._options(),
        )

    def extra_repr(self) -> str:
        weight = "" if self.weight is None else "weight, "
        return f"{weight}reduction={self.reduction!r}, memory={self.memory!r}"
