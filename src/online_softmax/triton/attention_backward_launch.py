"""The launches of the kernels of attention's gradient; as attention_launch.py has the forward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from online_softmax import attentionplan as plan
from online_softmax.attentionplan import Options, Tiles
from online_softmax.plan import ceil_div
from online_softmax.triton import attention_backward, attention_bias
from online_softmax.triton.attention_launch import (
    Inputs,
    common,
    lengths,
    row_tensor,
    strides,
    unit,
    widest,
)
from online_softmax.triton.launcher import Launch, Own

ROWS_PREPARED = 64  # queries of a program that makes their two numbers
PREPARE_WARPS = 4


class Wanted(NamedTuple):
    """Which gradients a backward makes."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sinks: bool


class Gradients(NamedTuple):
    """None where it was not wanted; `sinks` of each query, to be summed."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    launches: list[Launch]
    own: Own  # the memory of all this


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    given: Inputs,
    out: Tensor,
    lse: Tensor,
    o: Options,
    wanted: Wanted,
    arch: str,
    tiles: Tiles | None = None,
) -> Gradients:
    """Gradients of empty memory, and what fills them; arguments as in the forward, and its results.

    Args:
        dout: of out's shape and q's dtype, any strides; dlse: of lse's shape, or None.
        wanted: which of them are made; k and v come together.
    """
    given, dout, out, lse = given.unit(), unit(dout), unit(out), lse.contiguous()
    q, k, v, bias = given[:4]
    (q_len, k_len), batch, heads = lengths(given, o), given.batch, q.shape[1]
    own = Own(q.device)
    lse2, delta = row_tensor(own, given, 0.0), row_tensor(own, given, 0.0)
    share = None if given.sinks is None else row_tensor(own, given, 0.0)
    dsinks = row_tensor(own, given, 0.0) if wanted.sinks else None
    known = {
        **common(given, o), "dout_ptr": dout, "out_ptr": out, "lse_ptr": lse,
        "dlse_ptr": None if dlse is None else dlse.to(torch.float32).contiguous(),
        "sinks_ptr": given.sinks, "lse2_ptr": lse2, "delta_ptr": delta, "share_ptr": share,
        "dsink_ptr": dsinks, "dout_strides": strides(dout, given),
        "out_strides": strides(out, given), "row_strides": strides(lse, given),
    }  # fmt: skip
    blocks = ceil_div(q_len, ROWS_PREPARED)
    prepared = Tiles(ROWS_PREPARED, 0, PREPARE_WARPS, 1)
    launches = [
        _launch(attention_backward.prepare, blocks * heads * batch, known, prepared, blocks=blocks)
    ]
    about = arch, q.element_size(), widest(given), given.has_scores
    fill = None if given.cu_seq_q is None else 0.0  # of tokens of no sequence
    dq = dk = dv = dbias = None
    if wanted.k or wanted.v:
        dk, dv = (own.make(t.shape, t.dtype, fill) for t in (k, v))
        t = tiles or plan.tiles("by_keys", *about)
        blocks = ceil_div(k_len, t.block_k)
        more = {"dk_ptr": dk, "dv_ptr": dv, "blocks": blocks}
        more |= {"dk_strides": strides(dk, given), "dv_strides": strides(dv, given)}
        programs = blocks * k.shape[1] * batch
        launches.append(_launch(attention_backward.by_keys, programs, known, t, **more))
    if wanted.q:
        dq = own.make(q.shape, q.dtype, fill)
        t = tiles or plan.tiles("by_queries", *about)
        blocks = ceil_div(q_len, t.block_q)
        more = {"dq_ptr": dq, "dq_strides": strides(dq, given), "blocks": blocks}
        programs = blocks * heads * batch
        launches.append(_launch(attention_backward.by_queries, programs, known, t, **more))
    if wanted.bias and bias is not None:
        dbias = own.make(bias.shape, bias.dtype, 0.0)
        t = tiles or plan.tiles("bias", *about)
        shared = tuple(n == 1 for n in bias.shape)
        blocks_of = (batch, heads, ceil_div(q_len, t.block_q), ceil_div(k_len, t.block_k))
        programs = math.prod(1 if s else n for s, n in zip(shared, blocks_of, strict=True))
        more = {"dbias_ptr": dbias, "dbias_strides": dbias.stride(), "SHARED": shared}
        programs = programs if min(blocks_of) else 0
        launches.append(_launch(attention_bias.by_bias, programs, known, t, **more, batches=batch))
    return Gradients(dq, dk, dv, dbias, dsinks, launches, own)


def _launch(kernel: Any, programs: int, known: dict[str, Any], t: Tiles, **more: Any) -> Launch:
    """Of what is known, what this kernel takes."""
    known = {**known, **more, "BLOCK_Q": t.block_q, "BLOCK_K": t.block_k}
    arguments = {name: known[name] for name in kernel.arg_names}
    return Launch(kernel, programs, arguments, t.warps, t.stages)
