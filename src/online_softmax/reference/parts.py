"""Merging as the kernel has it: lists of tensors in, and the gradient by formula.

The parts are states (m, d, o), or pairs with m for lse and o for out. With w_i what part i counts
for once the maximum is m, t_i = o_i do, b the base of a pair's lse:

    states  u_i = w_i (d_i dd + t_i), do_i = w_i do, dd_i = w_i dd,
            dm_i = u_i + share_i (dm - sum u)
    pairs   p_i = w_i / d, u_i = p_i t_i, dout_i = p_i dout,
            dlse_i = log(b) (u_i - p_i sum u) + p_i dlse

share_i: parts that are equal to the maximum have equal shares of it. A part with m = -inf has no
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax.reference.online import STATE_DTYPE, State, join, merge
from online_softmax.reference.outputs import (
    LOG,
    OutputState,
    beside,
    counted,
    merge_pairs,
    merge_states,
)


class Parts(NamedTuple):
    """What is merged, a tensor of each part."""

    ms: Sequence[Tensor]  # (...), lse of pairs
    ds: Sequence[Tensor]  # (...); of pairs none
    os: Sequence[Tensor]  # (..., dim); of states without outputs none
    base: str  # "": states; "e" or "2": pairs, and the base of their lse

    def each(self, change: Callable[[Tensor], Tensor]) -> Parts:
        """With every tensor changed."""
        ms, ds, os = ([change(t) for t in each] for each in self[:3])
        return Parts(ms, ds, os, self.base)

    def some(self, at: slice) -> Parts:
        """Of these parts alone."""
        return Parts(self.ms[at], self.ds[at], self.os[at], self.base)


class Merged(NamedTuple):
    """m, d and o of the whole, or, stacked along a new first dimension, the gradients by the parts.
    What is not there has no element."""

    m: Tensor
    d: Tensor
    o: Tensor


def forward(parts: Parts) -> Merged:
    """The whole, of parts of one shape, dtype and device."""
    ms, ds, os, base = parts
    none = ms[0].new_empty(0)
    if base:
        out, lse = merge_pairs(list(zip(os, ms, strict=True)), base)
        return Merged(lse, none, out)
    if os:
        state = merge_states([OutputState(*each) for each in zip(ms, ds, os, strict=True)])
        return Merged(*state)  # type: ignore[call-arg]
    whole = merge_states([State(*each) for each in zip(ms, ds, strict=True)])
    return Merged(whole.m, whole.d, none)


def backward(dm: Tensor | None, dd: Tensor | None, do: Tensor | None, parts: Parts) -> Merged:
    """The gradients by all parts, from those by the whole; None: there is none."""
    ms, ds, os, base = parts
    to_m, to_o = ms[0].dtype, os[0].dtype if os else ms[0].dtype
    wide = torch.float64 if base else to_m
    maxima = [m.to(wide) * LOG[base] if base else m for m in ms]
    sums = [torch.ones_like(m) for m in maxima] if base else ds
    m, d = merge(*(State(*each) for each in zip(maxima, sums, strict=True)))
    sum_dtype = STATE_DTYPE[to_o]
    weights, us = [], []
    for at, part in enumerate(maxima):
        w = torch.where(part == -math.inf, 0.0, join(part, m)[1])
        w = w / torch.where(m.isfinite(), d, math.nan) if base else w
        w = torch.where(part == -math.inf, 0.0, w)
        u = torch.zeros_like(w)
        if do is not None and os:
            t = (counted(os[at].to(sum_dtype), part) * do.to(sum_dtype)).sum(-1)
            u = u + torch.where(part == -math.inf, 0.0, w * t.to(wide))
        if dd is not None and not base:
            u = u + torch.where(part == -math.inf, 0.0, w * dd * ds[at])
        weights.append(w)
        us.append(u)
    total = torch.stack(us).sum(0)
    if base:
        by_lse = torch.zeros_like(m) if dm is None else dm.to(wide)
        pairs = zip(us, weights, strict=True)
        by_m = [LOG[base] * (u - w * total) + w * by_lse for u, w in pairs]
    else:
        ties = torch.stack([(part == m) & (part != -math.inf) for part in maxima])
        rest = (torch.zeros_like(m) if dm is None else dm) - total
        shares = torch.where(ties, rest / ties.sum(0), 0.0)
        by_m = [u + share for u, share in zip(us, shares, strict=True)]
    by_d = [] if base else [w * (torch.zeros_like(w) if dd is None else dd) for w in weights]
    by_o = []
    if os:
        do = torch.zeros_like(os[0]) if do is None else do
        by_o = [(beside(w).to(sum_dtype) * do.to(sum_dtype)).to(to_o) for w in weights]
    by_m = [t.to(to_m) for t in by_m]
    m, d, o = (torch.stack(t) if t else ms[0].new_empty(0) for t in (by_m, by_d, by_o))
    return Merged(m, d, o)
