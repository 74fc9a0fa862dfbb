"""linear_cross_entropy: check the arguments once, then call the library."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from online_softmax import library, linearops
from online_softmax.arguments import check_beside_input, check_bool, check_kernel, check_scale
from online_softmax.catalogue import DTYPES
from online_softmax.lossarguments import (
    check_ignore_index,
    check_reduction,
    check_smoothing,
    check_softcap,
    check_weight,
    check_z_loss,
    targets_are_classes,
)
from online_softmax.losses import Reduction
from online_softmax.reference.ops import is_autocast

Memory = Literal["low", "fast"]
MEMORY = ("low", "fast")


def linear_cross_entropy(
    input: Tensor,  # noqa: A002 (torch's name)
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    memory: Memory = "low",
    check_target: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """Cross-entropy of input @ linear_weight.T + linear_bias and the target, those logits never
    held whole; as `torch.nn.functional.linear_cross_entropy`.

    It is `cross_entropy(linear(input, linear_weight, linear_bias), target, ...)`, but that logits
    are not rounded to input's dtype: blocks of them are made in float32 (float64), folded to the
    loss and made again, or kept, for the gradient.

    Args:
        input: float16, bfloat16, float32 or float64; (features,) or (..., features); any device.
        linear_weight: (classes, features), of input's dtype; under autocast of any of these.
        target: classes, int64 or uint8, of input's shape without features; or probabilities, of a
            float type and (..., classes), for which logits are held whole, as the target is.
        linear_bias: (classes,), of input's dtype; under autocast of any.
        weight: (classes,), what each class counts for; of a float type. It has no gradient.
        reduction, label_smoothing, z_loss, softcap, scale, check_target: as for `cross_entropy`.
        ignore_index: as for `cross_entropy`; None: -100.
        memory: "low": blocks of the vocabulary; logits are made in the forward and again in the
            backward, four products in all with both gradients. With `tokens` rows, bfloat16 and
            blocks of `cols` classes it takes 6 tokens cols + 4 tokens features bytes beside the
            gradients, the first about 400 MB at most. "fast": logits and gradients are made at once
            in the forward, three products; it takes 4 chunk classes + 2 group classes bytes. A
            group is all tokens where these are at most 2 features, else the second is about 740 MB
            and 4 classes features bytes of sums are beside it. `docs/api.md` has the whole formula.
            Where no gradient is recorded, and for reduction="none", "fast" is "low". A gradient is
            a float32 sum, rounded once; a bfloat16 one of "fast" twice where the upstream gradient
            is no power of two: within 2**-7 + 2**-15 of the sum times it, else 2**-8 + 2**-15.
        kernel: "reference" keeps the kernels of cross-entropy out; None: they run where they can.

    Returns:
        The loss in input's dtype, float32 under autocast; 0-dim, or of target's shape for "none".
        Differentiable once, in reverse mode, by input, linear_weight and linear_bias; for more,
        and under transforms, take cross_entropy(linear(input, ...), target), as the errors say.

    Raises:
        TypeError: an argument is not a tensor, or a number or a bool is of another type.
        IndexError: a target is neither a class nor ignore_index, as for `cross_entropy`.
        ValueError: reduction, memory, z_loss, softcap, scale, ignore_index or kernel is none of
            these.
        RuntimeError: shapes, dtypes or devices do not fit; label_smoothing is not in [0, 1]; weight
            requires a gradient; a second derivative or one in forward mode is asked for.
        NotImplementedError: another dtype or layout, or a transform of `torch.func`.

    Examples:
        >>> import torch
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
        >>> head = torch.tensor([[2.0, 0.0], [0.0, 1.5], [1.0, 1.0], [0.0, 0.0]])
        >>> linear_cross_entropy(hidden, head, torch.tensor([0, 1, -100]))
        tensor(0.4387)
    """
    name = "linear_cross_entropy"
    optional = [t for t in (linear_bias, weight) if t is not None]
    given = (input, linear_weight, target, *optional)
    if not all(isinstance(t, Tensor) for t in given) and has_torch_function(given):
        return handle_torch_function(
            linear_cross_entropy,
            given,
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            scale=scale,
            memory=memory,
            check_target=check_target,
            kernel=kernel,
        )
    _check_matrices(name, input, linear_weight, linear_bias)
    # Of the logits' shape, without their elements.
    shape = (*input.shape[:-1], linear_weight.shape[0])
    logits = torch.empty((), dtype=input.dtype, device=input.device).expand(shape)
    axis = len(shape) - 1
    is_classes = targets_are_classes(name, logits, target, axis)
    if weight is not None:
        check_weight(name, logits, weight, axis)
    options = library.LossOptions(
        axis,
        check_ignore_index(name, -100 if ignore_index is None else ignore_index, is_classes),
        check_smoothing(name, label_smoothing),
        check_z_loss(name, z_loss),
        check_softcap(name, softcap),
        check_scale(name, scale),
    )
    check_reduction(name, reduction)
    check_memory(name, memory)
    checks = check_bool(name, "check_target", check_target)
    forced = _check_kernel(name, kernel, is_classes)
    if not is_classes:
        whole = functional.linear(input, linear_weight, linear_bias)
        loss = library.of_probabilities(whole, target, weight, reduction, options, forced, False)
        return cast("Tensor", loss)
    if target.dim() == len(shape):  # torch takes (1,) for a row alone
        target = target.reshape(())
    return library.of_linear(
        input,
        linear_weight,
        linear_bias,
        target,
        weight,
        reduction,
        options.of_row,
        memory,
        checks,
        forced,
    )


def check_memory(name: str, memory: Any) -> None:
    if not isinstance(memory, str) or memory not in MEMORY:
        raise ValueError(f'{name}(): memory must be "low" or "fast", got {memory!r}')


def _check_kernel(name: str, kernel: Any, is_classes: bool) -> str:
    """A kernel's name, or "" for None."""
    if kernel is None:
        return ""
    known = check_kernel(name, kernel)
    if is_classes and known not in linearops.KERNELS:
        there = ", ".join(linearops.KERNELS)
        raise ValueError(
            f"{name}(): kernel {known!r} cannot run this: of classes as target {there} does"
        )
    return known


def _check_matrices(name: str, x: Any, linear_weight: Any, linear_bias: Any) -> None:
    given = {"input": x, "linear_weight": linear_weight}
    given |= {} if linear_bias is None else {"linear_bias": linear_bias}
    for argument, t in given.items():
        _check_floats(name, argument, t)
        if t.device != x.device:
            raise RuntimeError(
                f"{name}(): {argument} must be on {x.device} like input, got {t.device}"
            )
    if not x.dim():
        raise RuntimeError(f"{name}(): input must be (..., features), got a scalar")
    if linear_weight.dim() != 2 or linear_weight.shape[1] != x.shape[-1]:
        raise RuntimeError(
            f"{name}(): linear_weight must be (classes, {x.shape[-1]}), the features those of "
            f"input {tuple(x.shape)}, got {tuple(linear_weight.shape)}"
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise RuntimeError(
            f"{name}(): linear_bias must have shape ({linear_weight.shape[0]},), one for each "
            f"class, got {tuple(linear_bias.shape)}"
        )
    dtypes = {t.dtype for t in given.values()}
    is_cast = is_autocast(x.device.type) and torch.float64 not in dtypes
    if len(dtypes) > 1 and not is_cast:
        types = ", ".join(f"{argument} {t.dtype}" for argument, t in given.items())
        raise RuntimeError(
            f"{name}(): one dtype is wanted, or autocast of types but float64, got {types}"
        )


def _check_floats(name: str, argument: str, t: Any) -> None:
    check_beside_input(name, argument, t)
    if t.dtype not in DTYPES:
        wanted = ", ".join(str(dtype) for dtype in DTYPES)
        raise NotImplementedError(f"{name}(): {argument} must be one of {wanted}, got {t.dtype}")
