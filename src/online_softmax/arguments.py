"""Arguments of the public functions, checked once: what was given, and what is wanted."""

from __future__ import annotations

import operator
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor

from online_softmax import catalogue
from online_softmax.reference.online import not_dense
from online_softmax.reference.ops import FP8

INPUT_DTYPES = (*catalogue.DTYPES, *FP8)
NUMPY_BOOLS = ("bool", "bool_")  # since NumPy 2, and before
EMPTY = {"nan": False, "zero": True}
_DTYPES = frozenset(INPUT_DTYPES)
_STRIDED = torch.strided
_INFINITY = float("inf")
_MOST = sys.float_info.max


def _named(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def check_input(name: str, x: Any, argument: str = "x") -> None:
    """x is a dense tensor of a dtype that we compute."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}(): {argument} must be a Tensor, got {type(x).__name__}")
    if x.layout is not _STRIDED or x.is_nested:
        raise not_dense(f"{name}(): {argument}", x)
    if x.dtype not in _DTYPES:
        _refuse_dtype(name, x.dtype, argument)


def check_beside_input(name: str, argument: str, t: Any) -> None:
    """t, which stands beside the input, is a dense tensor."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}(): {argument} must be a Tensor, got {type(t).__name__}")
    if t.layout is not _STRIDED or t.is_nested:
        raise not_dense(f"{name}(): {argument}", t)


def _refuse_dtype(name: str, dtype: torch.dtype, argument: str) -> NoReturn:
    if not dtype.is_floating_point:
        raise NotImplementedError(
            f"{name}(): {argument} must be of a floating-point type, got {dtype}: convert it "
            f"first, {argument}.float() for example"
        )
    wanted = _named(INPUT_DTYPES)
    raise NotImplementedError(f"{name}(): {argument} must be one of {wanted}, got {dtype}")


def check_dim(name: str, x: Tensor, dim: Any) -> int:
    """dim as an int in range, still negative if it was."""
    if type(dim) is not int:
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(f"{name}(): dim must be an int, got {dim!r}")
        dim = operator.index(dim)  # a NumPy integer, for example
    rank = x.dim() or 1
    if not -rank <= dim < rank:
        raise IndexError(
            f"{name}(): dim must be in [{-rank}, {rank - 1}] for a tensor of {x.dim()} "
            f"dimensions, got {dim}"
        )
    return dim


def check_dims(name: str, x: Tensor, dim: Any) -> tuple[int, ...]:
    """An int, or several in a tuple or list, as a tuple of different dims."""
    if not isinstance(dim, (tuple, list)):
        return (check_dim(name, x, dim),)
    dims = tuple(check_dim(name, x, each) for each in dim)
    if not dims:
        raise RuntimeError(f"{name}(): dim must name at least one dimension, got {dim!r}")
    if len({each % (x.dim() or 1) for each in dims}) < len(dims):
        raise RuntimeError(f"{name}(): dim names a dimension twice: {dim!r}")
    return dims


def check_scale(name: str, scale: Any) -> float:
    if type(scale) is not float and type(scale) is not int:
        scale = as_float(name, "scale", scale)  # a NumPy number, for example
    if not 0.0 <= scale <= _MOST:
        raise ValueError(f"{name}(): scale must be at least 0 and finite, got {shown(scale)}")
    return scale


def as_float(name: str, argument: str, value: Any, wanted: str = "a float") -> float:
    """A number of any type as a float; infinite where it is beyond all of them."""
    if isinstance(value, (Tensor, bool)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}(): {argument} must be {wanted}, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:  # of an int or a fraction
        return _INFINITY if value > 0 else -_INFINITY


def shown(number: float) -> str:
    """A number in an error's text; an int may have more digits than Python prints."""
    is_beyond = isinstance(number, int) and not -_MOST <= number <= _MOST
    return f"an int of {int(number).bit_length()} bits" if is_beyond else str(number)


def check_bool(name: str, argument: str, value: Any) -> bool:
    """True or False, Python's or NumPy's; a word such as "no" would count as true."""
    if value is True or value is False:
        return bool(value)
    kind = type(value)
    if kind is torch.SymBool or (kind.__module__ == "numpy" and kind.__name__ in NUMPY_BOOLS):
        return bool(value)
    raise TypeError(f"{name}(): {argument} must be a bool, got {kind.__name__}")


def check_empty(name: str, empty: Any) -> bool:
    """Whether an empty slice counts as zero."""
    if not isinstance(empty, str) or empty not in EMPTY:
        raise ValueError(f'{name}(): empty must be "nan" or "zero", got {empty!r}')
    return EMPTY[empty]


def check_dtype(name: str, dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}(): dtype must be a torch.dtype, got {dtype!r}")
    if dtype not in catalogue.DTYPES:
        wanted = _named(catalogue.DTYPES)
        raise NotImplementedError(f"{name}(): dtype must be one of {wanted}, got {dtype}")
    return dtype


def check_kernel(name: str, kernel: Any) -> str:
    if not isinstance(kernel, str) or kernel not in catalogue.KERNELS:
        there = ", ".join(catalogue.KERNELS)
        raise ValueError(f"{name}(): no kernel is named {kernel!r}; there are {there}")
    return str(kernel)


def check_out(name: str, out: Any) -> None:
    check_beside_input(name, "out", out)
