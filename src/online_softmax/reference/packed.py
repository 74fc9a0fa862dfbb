"""Attention of packed sequences, one after the other: the lengths are read on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax.attentionplan import Options
from online_softmax.reference import attention, attention_gradient
from online_softmax.reference.attention import Forward
from online_softmax.reference.attention_gradient import Gradients
from online_softmax.reference.online import STATE_DTYPE


class Packed(NamedTuple):
    """Where sequence s begins: elements s and s + 1 of each are its first token and its end."""

    cu_seq_q: Tensor  # (sequences + 1,) int32 or int64
    cu_seq_k: Tensor

    def slices(self) -> Iterator[tuple[slice, slice]]:
        ends = [each.tolist() for each in self]
        for at in range(len(ends[0]) - 1):
            q, k = (slice(each[at], each[at + 1]) for each in ends)
            yield q, k


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    packed: Packed,
    o: Options,
    *,
    keeps_float: bool = False,
) -> Forward:
    """As `attention.forward` of each sequence.

    Args:
        q: (total_q, heads, head_dim); k, v: (total_k, kv_heads, head_dim or value_dim).
        packed: which tokens are a sequence's. A token of none has out 0 and lse -inf.

    Returns:
        out (total_q, heads, value_dim); lse, m and d (total_q, heads).
    """
    wide = STATE_DTYPE[q.dtype]
    out = q.new_zeros((*q.shape[:2], v.shape[-1]), dtype=wide if keeps_float else q.dtype)
    lse, m, d = (q.new_full(q.shape[:2], fill, dtype=wide) for fill in (-torch.inf, -torch.inf, 0))
    for at_q, at_k in packed.slices():
        tokens = _as_batch(q[at_q]), _as_batch(k[at_k]), _as_batch(v[at_k])
        one = attention.forward(*tokens, None, None, sinks, o, keeps_float=keeps_float)
        for whole, part in zip((out, lse, m, d), one, strict=True):
            whole[at_q] = part[0].transpose(0, 1)
    return Forward(out, lse, m, d)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    packed: Packed,
    out: Tensor,
    lse: Tensor,
    o: Options,
) -> Gradients:
    """As `attention_gradient.backward` of each sequence; shapes as in `forward`."""
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    wide_sinks = None if sinks is None else sinks.to(STATE_DTYPE[q.dtype])
    dsinks = None if wide_sinks is None else torch.zeros_like(wide_sinks)
    for at_q, at_k in packed.slices():
        upstream = _as_batch(dout[at_q]), None if dlse is None else _rows(dlse[at_q])
        tokens = _as_batch(q[at_q]), _as_batch(k[at_k]), _as_batch(v[at_k])
        saved = _as_batch(out[at_q]), _rows(lse[at_q])
        one = attention_gradient.backward(*upstream, *tokens, None, None, wide_sinks, *saved, o)
        for whole, part, at in ((dq, one.q, at_q), (dk, one.k, at_k), (dv, one.v, at_k)):
            whole[at] = part[0].transpose(0, 1)
        if dsinks is not None and one.sinks is not None:
            dsinks += one.sinks
    by_sinks = None if dsinks is None or sinks is None else dsinks.to(sinks.dtype)
    return Gradients(dq, dk, dv, None, by_sinks)


def _as_batch(t: Tensor) -> Tensor:
    """(tokens, heads, dim) -> (1, heads, tokens, dim)."""
    return t.transpose(0, 1).unsqueeze(0)


def _rows(t: Tensor) -> Tensor:
    """(tokens, heads) -> (1, heads, tokens)."""
    return t.t().unsqueeze(0)
