"""Attention on plain tensors: which implementation runs a call. No autograd, no subclass.

Arguments are checked above, in attentions.py. Results are contiguous, in the order of the op; one
that was not asked for is None, in whose place the op has a tensor without elements (`filled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from online_softmax import attentionkernels, catalogue, decodekernels, keptcalls
from online_softmax.attentionplan import MAX_HEAD_DIM, Options
from online_softmax.reference import attention as reference
from online_softmax.reference import attention_gradient, packed
from online_softmax.reference.online import STATE_DTYPE
from online_softmax.reference.outputs import without_autocast
from online_softmax.reference.packed import Packed
from online_softmax.rowops import with_values

KERNELS = ("cuda", "triton", "reference")  # what `kernel=` may name; "cuda" is of forwards alone
TENSORS = ("q", "k", "v", "bias", "mask", "sinks", "cu_seq_q", "cu_seq_k")

Tensors = Sequence[Tensor | None]  # these eight
Made = tuple[Any, ...]  # tensors, None where one is not wanted


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


def takes_cuda(given: Tensors, kernel: str) -> bool:
    """Whether the CUDA kernel of few queries runs a forward: on CUDA wherever it can.

    ValueError if it is named and cannot.
    """
    if kernel not in ("", "cuda"):
        return False
    why = decodekernels.reasons(given)
    if why and kernel:
        raise ValueError(f"attention(): kernel 'cuda' cannot run this: {'; '.join(why)}")
    return not why


def takes_triton(q: Tensor, v: Tensor, kernel: str) -> bool:
    """Whether the Triton kernels run this: on CUDA wherever they can, else where they are named.

    ValueError if they are named and cannot.
    """
    if kernel == "reference" or (kernel != "triton" and not q.is_cuda):
        return False
    why = reasons(q, v)
    if why and kernel == "triton":
        raise ValueError(f"attention(): kernel 'triton' cannot run this: {'; '.join(why)}")
    return not why


def forward(tensors: Tensors, o: Options, with_state: bool, kernel: str) -> Made:
    """(out, lse, m, d), the last two None unless with_state.

    Args:
        tensors: q, k, v; bias and mask, 4-D, or None; sinks or None; the first tokens of packed
            sequences or None, twice. Shapes as in `reference.attention` and `reference.packed`.
        o: the options.
        with_state: out is float32 (float64).
        kernel: the name of a kernel to force, or "".
    """
    options = o, with_state, kernel
    found = keptcalls.again(attentionkernels.FORWARD, options, tensors)
    if found is not None:
        return found
    given = _ready(tensors)
    q, k, v, bias, mask, sinks, cu_seq_q, cu_seq_k = given
    if q is None or k is None or v is None:
        raise AssertionError("attention has q, k and v")
    if takes_cuda(given, kernel):
        return decodekernels.forward(given, *options)
    if takes_triton(q, v, kernel):
        return attentionkernels.forward(given, *options)
    with without_autocast(q.device.type):
        if cu_seq_q is not None and cu_seq_k is not None:
            lens = Packed(cu_seq_q, cu_seq_k)
            made: Made = packed.forward(q, k, v, sinks, lens, o, keeps_float=with_state)
        else:
            rest = bias, mask, sinks, o
            made = reference.forward(q, k, v, *rest, keeps_float=with_state)
    made = tuple(t.contiguous() for t in made)
    return made if with_state else (*made[:2], None, None)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    o: Options,
    wanted: Sequence[bool],
    kernel: str,
) -> Made:
    """The gradients by q, k, v, bias and sinks; None where it is not wanted.

    Args:
        dout, dlse: the gradients by what `forward` gave; None: there is none.
        wanted: which of the five.
        tensors, out, lse, o, kernel: as for `forward`, and what it gave.
    """
    wanted = tuple(wanted)
    given = dout, dlse, *tensors, out, lse
    found = keptcalls.again(attentionkernels.BACKWARD, (o, wanted, kernel), given)
    if found is None:
        dout, dlse, *tensors, out, lse = _ready(given)  # type: ignore[assignment]
        q, k, v, bias, mask, sinks, cu_seq_q, cu_seq_k = tensors
        if q is None or k is None or v is None:
            raise AssertionError("attention has q, k and v")
        if not takes_triton(q, v, kernel):
            with without_autocast(q.device.type):
                if cu_seq_q is not None and cu_seq_k is not None:
                    lens = Packed(cu_seq_q, cu_seq_k)
                    found = packed.backward(dout, dlse, q, k, v, sinks, lens, out, lse, o)
                else:
                    rest = bias, mask, sinks, out, lse, o
                    found = attention_gradient.backward(dout, dlse, q, k, v, *rest)
            return tuple(
                t.contiguous() if t is not None and is_wanted else None
                for t, is_wanted in zip(found, wanted, strict=True)
            )
        found = attentionkernels.backward(dout, dlse, tensors, out, lse, o, wanted, kernel)
    dq, dk, dv, dbias, by_query = found
    dsinks, sinks = None, tensors[5]
    if by_query is not None and sinks is not None:
        dsinks = by_query.sum((0, 2) if tensors[6] is None else 0).to(sinks.dtype)
    return dq, dk if wanted[1] else None, dv if wanted[2] else None, dbias, dsinks


def filled(made: Made, like: Tensor) -> tuple[Tensor, ...]:
    """As ops give results: what is not there has no element."""
    return tuple(like.new_empty(0) if t is None else t for t in made)


def fake(tensors: Tensors, o: Options, with_state: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors of the results' shapes and dtypes."""
    q, v = tensors[0], tensors[2]
    if q is None or v is None:
        raise AssertionError("attention has q, k and v")
    wide = STATE_DTYPE[q.dtype]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=wide if with_state else q.dtype)
    lse, m, d = (q.new_empty(q.shape[:-1], dtype=wide) for _ in range(3))
    return (out, lse, m, d) if with_state else (out, lse, lse.new_empty(0), lse.new_empty(0))


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
        else q.new_empty(0)
        for t, is_wanted in zip(by, wanted, strict=True)
    )


def _ready(tensors: Tensors) -> list[Tensor | None]:
    """With their values in memory: no negation is pending."""
    return [t if t is None else with_values(t) for t in tensors]
