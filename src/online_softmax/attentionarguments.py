"""Arguments of attention, checked once: what was given, and what is wanted.

The types of the errors are those of torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from online_softmax import catalogue
from online_softmax.arguments import as_float, check_beside_input
from online_softmax.attentionops import KERNELS
from online_softmax.attentionplan import Options
from online_softmax.lossarguments import check_softcap

CAUSAL = {False: False, True: True, "top_left": True}
INT32_MOST = 2**31 - 1
_INFINITY = float("inf")


def check_tokens(name: str, q: Any, k: Any, v: Any, rank: int, names: tuple[str, ...]) -> None:
    """q, k and v: dense, of one dtype and device, of shapes that belong together.

    rank: 4 for (batch, heads, length, dim), 3 for (tokens, heads, dim).
    """
    for argument, t in zip(names, (q, k, v), strict=True):
        check_beside_input(name, argument, t)
        if t.dtype not in catalogue.DTYPES:
            wanted = ", ".join(str(dtype) for dtype in catalogue.DTYPES)
            raise NotImplementedError(
                f"{name}(): {argument} must be one of {wanted}, got {t.dtype}"
            )
        if t.dim() != rank:
            dims = "(batch, heads, length, dim)" if rank == 4 else "(tokens, heads, dim)"
            raise RuntimeError(f"{name}(): {argument} must be {dims}, got {tuple(t.shape)}")
    dtypes, devices = ([getattr(t, what) for t in (q, k, v)] for what in ("dtype", "device"))
    if len(set(dtypes)) > 1:
        given = ", ".join(str(dtype) for dtype in dtypes)
        raise RuntimeError(f"{name}(): {', '.join(names)} must have one dtype, got {given}")
    if len(set(devices)) > 1:
        given = ", ".join(str(device) for device in devices)
        raise RuntimeError(f"{name}(): {', '.join(names)} must be on one device, got {given}")
    q_shape, k_shape, v_shape = (tuple(t.shape) for t in (q, k, v))
    heads_at = rank - 3 if rank == 4 else 1
    if k_shape[:-1] != v_shape[:-1] or (rank == 4 and q_shape[0] != k_shape[0]):
        raise RuntimeError(
            f"{name}(): {names[1]} and {names[2]} must have the same shape but for the last "
            f"dimension{', and the batch of ' + names[0] if rank == 4 else ''}, got {q_shape}, "
            f"{k_shape} and {v_shape}"
        )
    if q_shape[-1] != k_shape[-1] or not q_shape[-1] or not v_shape[-1]:
        raise RuntimeError(
            f"{name}(): {names[0]} and {names[1]} must have one head_dim, at least 1, got "
            f"{q_shape} and {k_shape}, {names[2]} {v_shape}"
        )
    if not k_shape[heads_at] or q_shape[heads_at] % k_shape[heads_at]:
        raise RuntimeError(
            f"{name}(): the number of heads of {names[1]} and {names[2]} must divide that of "
            f"{names[0]}, got {q_shape[heads_at]} and {k_shape[heads_at]}"
        )


def check_options(
    name: str,
    causal: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    empty: Any,
    lengths: tuple[int, int] = (0, 0),
) -> Options:
    """The options of a call. A window and causal together: both hold."""
    if not isinstance(causal, (bool, str)) or causal not in CAUSAL:
        raise ValueError(f'{name}(): causal must be True, False or "top_left", got {causal!r}')
    left, right = check_window(name, window)
    if causal:
        right = 0
    if empty not in ("zero", "nan"):
        raise ValueError(f'{name}(): empty must be "zero" or "nan", got {empty!r}')
    return Options(
        *lengths,
        check_scale(name, scale),
        left,
        right,
        causal == "top_left",
        check_softcap(name, softcap),
        empty == "nan",
    )


def check_scale(name: str, scale: Any) -> float | None:
    if scale is None:
        return None
    if type(scale) is not float:
        scale = as_float(name, "scale", scale, "a float or None")
    if not -_INFINITY < scale < _INFINITY:
        raise ValueError(f"{name}(): scale must be finite, got {scale}")
    return scale


def check_window(name: str, window: Any) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"{name}(): window must be two ints, (left, right), got {window!r}")
    left, right = (_index(n) for n in window)
    if left is None or right is None:
        raise ValueError(f"{name}(): window must be two ints, (left, right), got {window!r}")
    if left < -1 or right < -1:
        raise ValueError(f"{name}(): window must be at least -1 on each side, got {window!r}")
    return min(left, INT32_MOST), min(right, INT32_MOST)


def _index(n: Any) -> int | None:
    """An int of any kind as one; None: it is none."""
    if type(n) is int:
        return n
    return operator.index(n) if hasattr(n, "__index__") and not isinstance(n, bool) else None


def check_beside(name: str, argument: str, t: Any, q: Tensor, k: Tensor) -> Tensor | None:
    """bias or mask as four dimensions, each that of the scores or 1."""
    if t is None:
        return None
    check_beside_input(name, argument, t)
    if argument == "mask" and t.dtype != torch.bool:
        raise RuntimeError(
            f"{name}(): mask must be bool (True takes part), got {t.dtype}: what is added to the "
            "scores is bias"
        )
    if argument == "bias" and t.dtype not in catalogue.DTYPES:
        raise RuntimeError(
            f"{name}(): bias must be of a float type, got {t.dtype}: what says which keys take "
            "part is mask, bool"
        )
    if t.device != q.device:
        raise RuntimeError(f"{name}(): {argument} must be on {q.device} like q, got {t.device}")
    whole = (*q.shape[:3], k.shape[2])
    shape = (1,) * (4 - t.dim()) + tuple(t.shape)
    if t.dim() > 4 or not all(n in (1, full) for n, full in zip(shape, whole, strict=True)):
        raise RuntimeError(
            f"{name}(): {argument} must broadcast to (batch, heads, q_len, k_len) {whole}, got "
            f"{tuple(t.shape)}"
        )
    return t[(None,) * (4 - t.dim())] if t.dim() < 4 else t


def check_sinks(name: str, sinks: Any, q: Tensor, heads: int) -> None:
    if sinks is None:
        return
    check_beside_input(name, "sinks", sinks)
    if sinks.shape != (heads,):
        raise RuntimeError(
            f"{name}(): sinks must have shape ({heads},), one for each head of queries, got "
            f"{tuple(sinks.shape)}"
        )
    if sinks.dtype not in catalogue.DTYPES:
        raise RuntimeError(f"{name}(): sinks must be of a float type, got {sinks.dtype}")
    if sinks.device != q.device:
        raise RuntimeError(f"{name}(): sinks must be on {q.device} like q, got {sinks.device}")


def check_sequences(name: str, q: Tensor, cu_seq_q: Any, cu_seq_k: Any) -> None:
    for argument, t in (("cu_seq_q", cu_seq_q), ("cu_seq_k", cu_seq_k)):
        check_beside_input(name, argument, t)
        if t.dim() != 1 or not t.numel() or t.dtype not in (torch.int32, torch.int64):
            raise RuntimeError(
                f"{name}(): {argument} must be (sequences + 1,), int32 or int64, got "
                f"{tuple(t.shape)} {t.dtype}"
            )
        if t.device != q.device:
            raise RuntimeError(
                f"{name}(): {argument} must be on {q.device} like query, got {t.device}"
            )
    if cu_seq_q.shape != cu_seq_k.shape:
        raise RuntimeError(
            f"{name}(): cu_seq_q and cu_seq_k must be of as many sequences, got "
            f"{cu_seq_q.shape[0]} and {cu_seq_k.shape[0]} elements"
        )


def check_length(name: str, argument: str, length: Any) -> int:
    found = None if isinstance(length, Tensor) else _index(length)
    if found is None:
        raise TypeError(f"{name}(): {argument} must be an int, got {type(length).__name__}")
    if found < 0:
        raise ValueError(f"{name}(): {argument} must be at least 0, got {length}")
    return found


def check_attention_kernel(name: str, kernel: Any) -> str:
    """A kernel's name, or "" for None."""
    if kernel is None:
        return ""
    if not isinstance(kernel, str) or kernel not in KERNELS:
        there = ", ".join(KERNELS)
        raise ValueError(f"{name}(): no kernel is named {kernel!r}; there are {there}")
    return kernel
