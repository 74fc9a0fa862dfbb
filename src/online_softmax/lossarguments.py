"""Arguments of the losses, checked once: what was given, and what is wanted.

The types of the errors are those of torch's cross_entropy.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from online_softmax import catalogue, ceops, float32
from online_softmax.arguments import (
    as_float,
    check_beside_input,
    check_bool,
    check_dim,
    check_kernel,
    shown,
)
from online_softmax.reference.ops import FP8, sum_dtype

CLASSES = (torch.int64, torch.uint8)
REDUCTIONS = ("mean", "sum", "none")
INT64_LIMIT = 2**63
_INFINITY = float("inf")


def check_class_dim(name: str, x: Tensor, dim: Any) -> int:
    """The dimension of the classes, counted from the front; torch's where None is given."""
    if x.dim() == 0:
        raise RuntimeError(f"{name}(): logits must have a dimension for the classes, got a scalar")
    if dim is None:
        return 1 if x.dim() > 1 else 0
    return check_dim(name, x, dim) % x.dim()


def targets_are_classes(name: str, x: Tensor, target: Any, dim: int) -> bool:
    """Whether target is classes; else it is probabilities."""
    check_beside_input(name, "target", target)
    if target.device != x.device:
        raise RuntimeError(
            f"{name}(): target must be on {x.device} like logits, got {target.device}"
        )
    rows = (*x.shape[:dim], *x.shape[dim + 1 :])
    if target.is_floating_point():
        if target.shape != x.shape:
            raise RuntimeError(
                f"{name}(): a target of a float type is probabilities, of logits' shape "
                f"{tuple(x.shape)}, got {target.dtype} of shape {tuple(target.shape)}; classes "
                f"are int64, of shape {rows}"
            )
        return False
    if target.shape != rows and not (x.dim() == 1 and target.shape == (1,)):
        wanted = f"{name}(): target must have shape {rows}, that of logits {tuple(x.shape)} "
        wanted += f"without dim {dim}, got {tuple(target.shape)}{_classes_last(x, target, dim)}"
        is_count = target.dim() == len(rows) and rows and target.shape[0] != rows[0]
        raise (ValueError if is_count else RuntimeError)(wanted)
    if target.dtype not in CLASSES:
        raise RuntimeError(
            f"{name}(): target must be int64 or uint8 (classes), or of a float type "
            f"(probabilities), got {target.dtype}"
        )
    return True


def check_classes(name: str, x: Tensor, target: Any, dim: int) -> None:
    """target is classes, where probabilities are none."""
    if isinstance(target, Tensor) and target.dtype not in CLASSES:
        raise RuntimeError(f"{name}(): target must be int64 or uint8, got {target.dtype}")
    targets_are_classes(name, x, target, dim)


def _classes_last(x: Tensor, target: Tensor, dim: int) -> str:
    """What to do where the shapes are those of logits whose classes stand last."""
    tokens = x.shape[:-1]
    is_flat = target.shape == (tokens.numel(),)
    if dim == x.dim() - 1 or not (is_flat or target.shape == tokens):
        return ""
    flat = "logits.flatten(0, -2) and target.flatten()"
    return f". If the classes are last: {flat}" + ("" if is_flat else ", or dim=-1")


def check_weight(name: str, x: Tensor, weight: Any, dim: int) -> None:
    check_beside_input(name, "weight", weight)
    if weight.shape != (x.shape[dim],):
        raise RuntimeError(
            f"{name}(): weight must have shape ({x.shape[dim]},), one for each class, got "
            f"{tuple(weight.shape)}"
        )
    if not weight.is_floating_point():
        raise RuntimeError(f"{name}(): weight must be of a float type, got {weight.dtype}")
    if weight.device != x.device:
        raise RuntimeError(
            f"{name}(): weight must be on {x.device} like logits, got {weight.device}"
        )


def check_ignore_index(name: str, index: Any, is_classes: bool = True) -> int:
    if type(index) is not int:
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(f"{name}(): ignore_index must be an int, got {index!r}")
        index = operator.index(index)
    if not -INT64_LIMIT <= index < INT64_LIMIT:
        raise ValueError(f"{name}(): ignore_index must be an int64, got {shown(index)}")
    if not is_classes and index >= 0:
        raise RuntimeError(
            f"{name}(): ignore_index must be negative where target is probabilities, got {index}"
        )
    return index


def check_smoothing(name: str, smoothing: Any) -> float:
    if type(smoothing) is not float:
        smoothing = as_float(name, "label_smoothing", smoothing)
    if not 0.0 <= smoothing <= 1.0:
        raise RuntimeError(f"{name}(): label_smoothing must be in [0, 1], got {smoothing}")
    return smoothing


def check_z_loss(name: str, z_loss: Any) -> float:
    if type(z_loss) is not float:
        z_loss = as_float(name, "z_loss", z_loss)
    if not 0.0 <= z_loss < _INFINITY:
        raise ValueError(f"{name}(): z_loss must be at least 0 and finite, got {z_loss}")
    return z_loss


def check_softcap(name: str, softcap: Any) -> float | None:
    if softcap is None:
        return None
    if type(softcap) is not float:
        softcap = as_float(name, "softcap", softcap)
    if not 0.0 < softcap < _INFINITY:
        raise ValueError(f"{name}(): softcap must be above 0 and finite, or None, got {softcap}")
    return softcap


def check_temperature(name: str, temperature: Any, dtype: torch.dtype = torch.float64) -> float:
    """A temperature of logits of this dtype: its inverse multiplies them."""
    if type(temperature) is not float:
        temperature = as_float(name, "temperature", temperature)
    if not 0.0 < temperature < _INFINITY:
        raise ValueError(f"{name}(): temperature must be above 0 and finite, got {temperature}")
    if temperature < float32.NORMAL[0]:
        wide = sum_dtype(dtype)
        most = torch.finfo(wide).max
        if 1.0 / temperature > most:
            raise ValueError(
                f"{name}(): temperature must be at least {1.0 / most:.4g}, so that 1 / temperature "
                f"is finite in {str(wide).removeprefix('torch.')}, got {temperature}"
            )
    return temperature


def check_reduction(name: str, reduction: Any) -> None:
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f'{name}(): reduction must be "mean", "sum" or "none", got {reduction!r}')


def check_in_forward(name: str, grad_in_forward: Any, overwrite_logits: Any) -> tuple[bool, bool]:
    """What both are."""
    makes = check_bool(name, "grad_in_forward", grad_in_forward)
    overwrites = check_bool(name, "overwrite_logits", overwrite_logits)
    if overwrites and not makes:
        raise ValueError(f"{name}(): overwrite_logits=True wants grad_in_forward=True")
    return makes, overwrites


def check_can_overwrite(name: str, x: Tensor) -> None:
    """Whether x, of which a gradient is recorded, may be written over."""
    instead = "pass overwrite_logits=False, or a clone()"
    if x.is_leaf:
        what = "a leaf that requires grad, which is somebody's to keep"
    elif x._is_view() or x.is_neg():
        what = "a view of a tensor, which would be written over too (torch.nn.Linear with a bias "
        what += "gives one for an input of 3 dimensions)"
    elif x.dtype in FP8:
        what = f"{x.dtype}, in whose memory a gradient in bfloat16 has no room"
    elif x.retains_grad:
        what = "to keep their own gradient (retain_grad), which will stand in their place"
    elif _overlaps(x):
        what = f"of strides {x.stride()}, by which several elements share their memory"
    else:
        return
    raise RuntimeError(f"{name}(): overwrite_logits=True, but logits are {what}: {instead}")


def _overlaps(x: Tensor) -> bool:
    """Whether elements may share memory."""
    if x.numel() == 0:
        return False
    extent = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent = stride * size
    return False


def check_loss_kernel(name: str, kernel: Any, is_classes: bool) -> str:
    """A kernel's name, or "" for None."""
    if kernel is None:
        return ""
    if not is_classes:
        return check_kernel(name, kernel)
    if isinstance(kernel, str) and kernel in ceops.KERNELS:
        return kernel
    there = ", ".join(ceops.KERNELS)
    is_other = isinstance(kernel, str) and kernel in catalogue.KERNELS
    what = f"kernel {kernel!r} cannot run this" if is_other else f"no kernel is named {kernel!r}"
    raise ValueError(f"{name}(): {what}: where target is classes there are {there}")
