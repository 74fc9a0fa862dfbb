"""Attention on plain tensors: which implementation runs a call. No autograd, no subclass.

Arguments are checked above, in attentions.py. Results are contiguous, in the order and shapes of
the op: a tensor that was not asked for has no element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from online_softmax import catalogue
from online_softmax.attentionplan import MAX_HEAD_DIM, Options
from online_softmax.reference import attention as reference
from online_softmax.reference import packed
from online_softmax.reference.online import STATE_DTYPE
from online_softmax.reference.outputs import without_autocast
from online_softmax.reference.packed import Packed
from online_softmax.rowops import with_values

KERNELS = ("triton", "reference")  # what `kernel=` may name
TENSORS = ("q", "k", "v", "bias", "mask", "sinks", "cu_seq_q", "cu_seq_k")

Tensors = Sequence[Tensor | None]  # these eight


def reasons(q: Tensor, v: Tensor) -> list[str]:
    """Why the Triton kernels cannot run this, each a sentence; empty: they can."""
    why = []
    if q.dtype not in catalogue.FLOATS:
        why.append(f"it takes float32, float16 and bfloat16; this is {q.dtype}")
    widest = max(q.shape[-1], v.shape[-1])
    if widest > MAX_HEAD_DIM:
        why.append(f"it takes dims up to {MAX_HEAD_DIM}; this has {widest}")
    missing = catalogue.lacks("triton")
    if missing is not None:
        return [*why, missing]
    if not q.is_cuda:
        from online_softmax.triton.attention_launch import interpreted

        if q.device.type != "cpu" or not interpreted():
            why.append(
                f"it runs on CUDA tensors; this one is on {q.device} (interpreted on the CPU, if "
                "TRITON_INTERPRET=1 was set before Triton was imported)"
            )
    return why


def takes_triton(q: Tensor, v: Tensor, kernel: str) -> bool:
    """Whether the Triton kernels run this: on CUDA wherever they can, else where they are named.

    ValueError if they are named and cannot.
    """
    if kernel == "reference" or (not kernel and not q.is_cuda):
        return False
    why = reasons(q, v)
    if why and kernel:
        raise ValueError(f"attention(): kernel 'triton' cannot run this: {'; '.join(why)}")
    return not why


def forward(
    tensors: Tensors, o: Options, with_state: bool, kernel: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, m, d).

    Args:
        tensors: q, k, v; bias and mask, 4-D, or None; sinks or None; the first tokens of packed
            sequences or None, twice. Shapes as in `reference.attention` and `reference.packed`.
        o: the options.
        with_state: out is float32 (float64), m and d are there.
        kernel: the name of a kernel to force, or "".
    """
    given = _ready(tensors)
    q, k, v, bias, mask, sinks, cu_seq_q, cu_seq_k = given
    if q is None or k is None or v is None:
        raise AssertionError("attention has q, k and v")
    if takes_triton(q, v, kernel):
        from online_softmax.triton import attention_launch

        inputs = attention_launch.Inputs(*given)  # type: ignore[arg-type]
        made = attention_launch.forward(inputs, o, catalogue.arch_of(q), with_state)
        attention_launch.run(made.launches, q.device)
        out, lse, m, d = made[:4]
    else:
        with without_autocast(q.device.type):
            if cu_seq_q is not None and cu_seq_k is not None:
                lens = Packed(cu_seq_q, cu_seq_k)
                out, lse, m, d = packed.forward(q, k, v, sinks, lens, o, keeps_float=with_state)
            else:
                rest = bias, mask, sinks, o
                out, lse, m, d = reference.forward(q, k, v, *rest, keeps_float=with_state)
    state = (m, d) if with_state and m is not None and d is not None else (_none(lse), _none(lse))
    return out.contiguous(), lse.contiguous(), *(t.contiguous() for t in state)  # type: ignore[return-value]


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    o: Options,
    wanted: Sequence[bool],
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients by q, k, v, bias and sinks; no element where it is not wanted.

    Args:
        dout, dlse: the gradients by what `forward` gave; None: there is none.
        wanted: which of the five.
        tensors, out, lse, o, kernel: as for `forward`, and what it gave.
    """
    given = _ready(tensors)
    q, k, v, bias, mask, sinks, cu_seq_q, cu_seq_k = given
    if q is None or k is None or v is None:
        raise AssertionError("attention has q, k and v")
    dout, dlse = with_values(dout), None if dlse is None else with_values(dlse)
    found: Sequence[Tensor | None]
    if takes_triton(q, v, kernel):
        from online_softmax.triton import attention_backward_launch, attention_launch

        inputs = attention_launch.Inputs(*given)  # type: ignore[arg-type]
        which = attention_backward_launch.Wanted(*wanted)
        above, arch = (dout.to(q.dtype), dlse), catalogue.arch_of(q)
        made = attention_backward_launch.backward(*above, inputs, out, lse, o, which, arch)
        attention_launch.run(made.launches, q.device)
        dsinks = None
        if made.sinks is not None and sinks is not None:
            dsinks = made.sinks.sum((0, 2) if cu_seq_q is None else 0).to(sinks.dtype)
        found = (*made[:4], dsinks)
    else:
        with without_autocast(q.device.type):
            if cu_seq_q is not None and cu_seq_k is not None:
                lens = Packed(cu_seq_q, cu_seq_k)
                found = packed.backward(dout, dlse, q, k, v, sinks, lens, out, lse, o)
            else:
                rest = bias, mask, sinks, out, lse, o
                found = reference.backward(dout, dlse, q, k, v, *rest)
    return tuple(  # type: ignore[return-value]
        t.contiguous() if t is not None and is_wanted else _none(q)
        for t, is_wanted in zip(found, wanted, strict=True)
    )


def fake(tensors: Tensors, o: Options, with_state: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors of the results' shapes and dtypes."""
    q, v = tensors[0], tensors[2]
    if q is None or v is None:
        raise AssertionError("attention has q, k and v")
    wide = STATE_DTYPE[q.dtype]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=wide if with_state else q.dtype)
    lse, m, d = (q.new_empty(q.shape[:-1], dtype=wide) for _ in range(3))
    return (out, lse, m, d) if with_state else (out, lse, _none(lse), _none(lse))


def fake_backward(
    tensors: Tensors, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    by = (*tensors[:4], tensors[5])
    q = tensors[0]
    if q is None:
        raise AssertionError("attention has q, k and v")
    return tuple(  # type: ignore[return-value]
        torch.empty_like(t, memory_format=torch.contiguous_format)
        if t is not None and is_wanted
        else _none(q)
        for t, is_wanted in zip(by, wanted, strict=True)
    )


def _ready(tensors: Tensors) -> list[Tensor | None]:
    """With their values in memory: no negation is pending."""
    return [t if t is None else with_values(t) for t in tensors]


def _none(like: Tensor) -> Tensor:
    return like.new_empty(0)
