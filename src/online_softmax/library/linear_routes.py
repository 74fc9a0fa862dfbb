"""The way in to linear_cross_entropy: autocast, which op, then the reduction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from online_softmax import linearfast
from online_softmax.ceops import Options
from online_softmax.library import linear_traced
from online_softmax.library.linear_traced import INSTEAD, NAME
from online_softmax.library.private import functorch_active
from online_softmax.reference.cross_entropy import Targets
from online_softmax.reference.ops import is_autocast, sum_dtype

_NOT_TRANSFORMED = f"{NAME}(): takes no tensors of torch.func's transforms: {INSTEAD}"
_NOT_BY_WEIGHT = f"{NAME}(): not differentiable by weight: pass weight.detach()"


def of_linear(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    o: Options,
    memory: str,
    check: bool,
    kernel: str,
) -> Tensor:
    """The loss of (..., features) for classes, (...); arguments checked, any kind of tensor.

    Raises:
        RuntimeError: weight requires a gradient.
        NotImplementedError: a transform of torch.func is at work.
    """
    if functorch_active():
        raise NotImplementedError(_NOT_TRANSFORMED)
    records = torch.is_grad_enabled()
    if weight is not None and weight.requires_grad and records:
        raise RuntimeError(_NOT_BY_WEIGHT)
    casts = is_autocast(x.device.type) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(x.device.type) if casts else x.dtype
    options = linear_traced.LinearOptions(dtype, *o)
    tokens = math.prod(target.shape)
    rows = x.reshape(tokens, x.shape[-1])
    target = target.to(torch.int64)
    weight = None if weight is None else weight.to(sum_dtype(dtype)).contiguous()
    given = (rows, linear_weight, linear_bias, target, weight)
    needs = [records and t is not None and t.requires_grad for t in given[:3]]
    if memory == "fast" and reduction != "none" and any(needs):
        is_done = linearfast.divides(reduction, dtype)
        how = (is_done, check, needs, kernel)
        loss = linear_traced.op_with_gradient(*given, *options, *how)[0]
    else:
        is_done = False
        loss = linear_traced.op(*given, *options, check, kernel)[0]
        loss = loss.sum() if reduction != "none" else loss.reshape(target.shape)
    if reduction == "mean" and not is_done:
        counted = Targets.of(target, linear_weight.shape[0], o.ignore_index)
        total = (
            counted.counts.sum() if weight is None else counted.weights(weight, weight.dtype).sum()
        )
        loss = loss / total
    return loss.to(torch.float32 if casts else x.dtype)
