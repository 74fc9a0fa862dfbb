"""The kernels that merge states or pairs (out, lse), on plain CUDA tensors: no autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from online_softmax import catalogue, notedcalls, rowkernels
from online_softmax.plan import MAX_GRID
from online_softmax.reference.parts import Merged, Parts

MOST_PARTS = 64  # of a launch: their addresses are 2 of the 4 KiB that its arguments may have


def takes(parts: Parts) -> bool:
    """Whether the kernels merge these: two parts or more of float32 states, or of pairs with a
    float32 lse and out of float32, float16 or bfloat16, with an element at least."""
    ms, _, os, base = parts
    if not rowkernels.has_kernels(ms[0]) or ms[0].dtype != torch.float32 or not ms[0].numel():
        return False
    if os and (not os[0].numel() or os[0].dtype not in catalogue.FLOATS):
        return False
    from online_softmax.cuda import merge_launch

    if not 2 <= len(ms) <= MOST_PARTS or (not base and os and os[0].itemsize != 4):
        return False
    dim, item = (os[0].shape[-1], os[0].itemsize) if os else (0, 4)
    return merge_launch.blocks(ms[0].numel(), dim, item) <= MAX_GRID


def forward(parts: Parts) -> Merged:
    """The parts merged: one read of each, one write. `takes` was yes."""
    count = len(parts.ms)

    def call() -> tuple[Tensor, ...]:
        from online_softmax.cuda import merge_launch

        ms, ds, os = _as_rows(parts)
        m = _empty(parts.ms[0])
        d = m if parts.base else _empty(parts.ms[0])
        o = _empty(parts.os[0]) if parts.os else m
        results = m.view(-1), d.view(-1), o.view(m.numel(), -1) if parts.os else os[0]
        notedcalls.run(merge_launch.forward(ms, ds, os, parts.base, *results), m.device)
        return m, d, o

    given = (*parts.ms, *parts.ds, *parts.os)
    options = parts.base, count, bool(parts.os)
    return _there(parts, notedcalls.repeated("merge", options, given, call))


def backward(dm: Tensor | None, dd: Tensor | None, do: Tensor | None, parts: Parts) -> Merged:
    """The gradients by all parts, stacked: one read of each part, one write. `takes` was yes."""
    count = len(parts.ms)
    if do is None and parts.os:
        do = torch.zeros_like(parts.os[0], memory_format=torch.contiguous_format)

    def call() -> tuple[Tensor, ...]:
        from online_softmax.cuda import merge_launch

        ms, ds, os = _as_rows(parts)
        to_m = _empty(parts.ms[0], count)
        to_d = to_m if parts.base else _empty(parts.ms[0], count)
        to_o = _empty(parts.os[0], count) if parts.os else to_m
        rows = parts.ms[0].numel()
        results = to_m.view(count, rows), to_d.view(count, rows)
        by_o, into = os[0], os[0].expand(count, *os[0].shape)
        if do is not None and parts.os:
            by_o, into = do.contiguous().view(rows, -1), to_o.view(count, rows, -1)
        by_m, by_d = (None if g is None else g.contiguous().view(-1) for g in (dm, dd))
        work = merge_launch.backward(by_m, by_d, by_o, ms, ds, os, parts.base, *results, into)
        notedcalls.run(work, to_m.device)
        return to_m, to_d, to_o

    given = (dm, dd, do, *parts.ms, *parts.ds, *parts.os)
    options = parts.base, count, bool(parts.os)
    return _there(parts, notedcalls.repeated("merge_backward", options, given, call))


def _as_rows(parts: Parts) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """m and d as (rows,), o as (rows, dim): views where strides allow it."""
    ms, ds = ([t.contiguous().view(-1) for t in each] for each in (parts.ms, parts.ds))
    if parts.os:
        return ms, ds, [catalogue.as_rows(o, (-1,)) for o in parts.os]
    return ms, ds, [m.view(-1, 1)[:, :0] for m in ms]


def _empty(like: Tensor, *first: int) -> Tensor:
    return notedcalls.empty((*first, *like.shape), like.dtype, like.device)


def _there(parts: Parts, found: tuple[Tensor, ...]) -> Merged:
    m, d, o = found
    none = m.new_empty(0)
    return Merged(m, none if parts.base else d, o if parts.os else none)
