"""Attention from its definition: the recurrence with an output, over tiles of keys.

A row of scores is what one query makes of all keys. It is never whole: a tile of keys gives a tile
of scores, that gives a state (m, d, o), and states merge. With the query i of a head, its key j:

    z_ij   = cap(scale q_i k_j) + bias_ij, and -inf where i does not see j
    state  = the merge of OutputState.of(z_i, v) over tiles
    lse_i  = m + log d
    out_i  = o / d

A sink is a score more, without a vector: the state (sink, 1, 0), merged last. It is in out and not
in lse. All sums are in float32, or in float64 for float64 input. A query that sees no key has out 0
and lse -inf.

A block owns some queries of some heads and walks over the keys that they see. What it holds at a
time, a tile of scores, stays in a CPU's cache (`attentionplan.blocks`). The gradient is in
attention_gradient.py.

M. Milakov, N. Gimelshein: Online normalizer calculation for softmax, arXiv:1805.02867; M. N. Rabe,
C. Staats: Self-attention does not need O(n^2) memory, arXiv:2112.05682; T. Dao and others:
FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax.attentionplan import Blocks, Options
from online_softmax.attentionplan import blocks as planned
from online_softmax.reference.online import STATE_DTYPE
from online_softmax.reference.ops import held_in
from online_softmax.reference.outputs import OutputState


class Forward(NamedTuple):
    """What the forward gives, float32 (float64) but for out."""

    out: Tensor  # (batch, heads, q_len, value_dim), divided; of q's dtype, float32 with a state
    lse: Tensor  # (batch, heads, q_len) without the sink
    m: Tensor  # (batch, heads, q_len) the state without the sink
    d: Tensor  # (batch, heads, q_len)


class Place(NamedTuple):
    """What a block owns."""

    batch: slice
    kv_heads: slice
    heads: slice  # those that share the keys of kv_heads
    queries: slice

    def cut(self, t: Tensor) -> Tensor:
        """The queries' part of (batch, heads, q_len, ...), each 1 if it is one for all."""
        return _cut(t, self.batch, self.heads, self.queries)

    def cut_keys(self, t: Tensor) -> Tensor:
        """The part of (batch, kv_heads, ...)."""
        return _cut(t, self.batch, self.kv_heads)


class Block(NamedTuple):
    """What the scores of a block are made of."""

    q: Tensor  # (batch, kv_heads, rows, head_dim): queries that share keys, scaled, float32
    k: Tensor  # (batch, kv_heads, k_len, head_dim)
    v: Tensor  # (batch, kv_heads, k_len, value_dim)
    bias: Tensor | None  # (batch, heads, queries, k_len), each 1 if it is one for all
    mask: Tensor | None  # the same
    queries: slice
    q_len: int  # of all blocks
    group: int  # heads that share keys

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        o: Options,
        at: Place,
    ) -> Block:
        """Of whole tensors, shaped as in `forward`."""
        group = group_of(q, k)
        scaled = at.cut(q).to(STATE_DTYPE[q.dtype]) * o.scale_for(q.shape[-1])
        bias, mask = (t if t is None else at.cut(t) for t in (bias, mask))
        tensors = folded(scaled, group), at.cut_keys(k), at.cut_keys(v), bias, mask
        return cls(*tensors, at.queries, q.shape[2], group)

    def tiles(self, o: Options, keys: int) -> Iterator[slice]:
        """So many keys at a time, of those that a query of the block sees."""
        seen = o.seen(self.queries, self.q_len, self.k.shape[2])
        for start in range(seen.start, seen.stop, keys):
            yield slice(start, min(start + keys, seen.stop))

    def by_head(self, t: Tensor) -> Tensor:
        """(batch, kv_heads, rows, ...) -> (batch, heads, queries, ...)."""
        heads, queries = t.shape[1] * self.group, t.shape[2] // self.group
        return t.reshape(t.shape[0], heads, queries, *t.shape[3:])


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    o: Options,
    *,
    keeps_float: bool = False,
    blocks: Blocks | None = None,
) -> Forward:
    """Attention of each query over the keys that it sees.

    Args:
        q: (batch, heads, q_len, head_dim); float16, bfloat16, float32 or float64.
        k: (batch, kv_heads, k_len, head_dim); several heads of q share one of k where kv_heads is
            a divisor of heads.
        v: (batch, kv_heads, k_len, value_dim).
        bias: 4-D, each dimension that of (batch, heads, q_len, k_len) or 1; of any float type.
        mask: the same, bool: True takes part.
        sinks: (heads,) of any float type.
        o: the options.
        keeps_float: out is float32 (float64), whatever q is.
        blocks: what is computed at a time; None: as planned. The result depends on it by rounding
            alone.
    """
    blocks = blocks_for(q, k, v) if blocks is None else blocks

    def one(at: Place) -> Forward:
        block = Block.of(q, k, v, bias, mask, o, at)
        state = None
        for keys in block.tiles(o, blocks.keys):
            z = scores(block, keys, o).z
            part = OutputState.of(z, block.v[:, :, keys])
            state = part if state is None else state.merge(part)
        if state is None:
            state = OutputState.empty(block.q.shape[:-1], v.shape[-1], block.q.dtype, q.device)
        keys_alone = OutputState(*(block.by_head(t) for t in state))
        out = _output(keys_alone, None if sinks is None else sinks[at.heads], o)
        return Forward(out if keeps_float else out.to(q.dtype), keys_alone.lse(), *keys_alone[:2])

    # Joined, not written into one tensor: vmap and the second derivative take it.
    return _joined(
        [
            _joined([_joined([one(at) for at in head], 2) for head in batch], 1)
            for batch in places(q, k, blocks)
        ],
        0,
    )


# ---- the parts


class Scores(NamedTuple):
    """A tile of scores, and what their gradient is multiplied with on its way to scale q k."""

    z: Tensor  # (batch, kv_heads, rows, keys), -inf where a query does not see a key
    slope: Tensor | None  # None: 1
    is_plain: bool  # whether nothing but an infinite product makes -inf


def scores(block: Block, keys: slice, o: Options) -> Scores:
    """What a block's queries make of these keys."""
    z, slope = block.q @ block.k[:, :, keys].to(block.q.dtype).mT, None
    if o.softcap is not None:
        cap = held_in(o.softcap, z.dtype)
        tanh = torch.tanh(z / cap)
        z, slope = cap * tanh, 1 - tanh.square()
    lengths = block.q_len, block.k.shape[2]
    sees_all = o.sees_all(block.queries, keys, *lengths)
    if sees_all and block.bias is None and block.mask is None:
        return Scores(z, slope, is_plain=True)
    by_head = block.by_head(z)
    if block.bias is not None:
        by_head = by_head + at_keys(block.bias, keys).to(z.dtype)
    seen = None if sees_all else visible(block.queries, keys, *lengths, o, z.device)
    if block.mask is not None:
        mask = at_keys(block.mask, keys)
        seen = mask if seen is None else seen & mask
    if seen is not None:
        by_head = torch.where(seen, by_head, -math.inf)
    return Scores(by_head.reshape(z.shape), slope, is_plain=False)


def visible(
    queries: slice, keys: slice, q_len: int, k_len: int, o: Options, device: torch.device
) -> Tensor:
    """(queries, keys) bool: which of these keys a query sees by its place."""
    place = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    place = place + o.diagonal(q_len, k_len)
    key = torch.arange(keys.start, keys.stop, device=device)
    seen = torch.ones((place.numel(), key.numel()), dtype=torch.bool, device=device)
    if o.left >= 0:
        seen &= key >= place - o.left
    if o.right >= 0:
        seen &= key <= place + o.right
    return seen


def _output(keys_alone: OutputState, sinks: Tensor | None, o: Options) -> Tensor:
    """(batch, heads, queries, value_dim), the sinks counted."""
    if sinks is None:
        return keys_alone.output("nan" if o.nan_empty else "zero")
    m = keys_alone.m
    sink = sinks.to(m.dtype).view(-1, 1).expand(m.shape)
    nothing = torch.zeros_like(keys_alone.o)
    out = keys_alone.merge(OutputState(sink, torch.ones_like(sink), nothing)).output()
    # Of a query without keys a sink would make 0 as well, which "nan" does not want.
    return torch.where(m.unsqueeze(-1) == -math.inf, math.nan if o.nan_empty else 0.0, out)


# ---- blocks


def blocks_for(q: Tensor, k: Tensor, v: Tensor) -> Blocks:
    """As planned for tensors of these shapes."""
    lengths = k.shape[0], k.shape[1], q.shape[2], k.shape[2]
    sizes = group_of(q, k), max(q.shape[-1], v.shape[-1], 1)
    return planned(lengths, *sizes, torch.get_num_threads(), q.device.type == "cpu")


def places(q: Tensor, k: Tensor, blocks: Blocks) -> list[list[list[Place]]]:
    """What each block owns: by part of the batch, heads and queries."""
    group = group_of(q, k)
    return [
        [
            [
                Place(
                    batch, kv_heads, slice(kv_heads.start * group, kv_heads.stop * group), queries
                )
                for queries in _steps(q.shape[2], blocks.queries)
            ]
            for kv_heads in _steps(k.shape[1], blocks.kv_heads)
        ]
        for batch in _steps(q.shape[0], blocks.batch)
    ]


def group_of(q: Tensor, k: Tensor) -> int:
    """Heads that share keys, at least 1."""
    return max(q.shape[1] // max(k.shape[1], 1), 1)


def folded(t: Tensor, group: int) -> Tensor:
    """(batch, heads, queries, ...) -> (batch, kv_heads, rows, ...): rows that share keys."""
    return t.reshape(t.shape[0], t.shape[1] // group, group * t.shape[2], *t.shape[3:])


def at_keys(t: Tensor, keys: slice) -> Tensor:
    """These keys of a bias, of a mask, or the one that is for all."""
    return t if t.shape[-1] == 1 else t[..., keys]


def _cut(t: Tensor, *parts: slice) -> Tensor:
    """Parts of the first dimensions; of one that is 1, all."""
    sizes = t.shape[: len(parts)]
    return t[tuple(slice(None) if n == 1 else s for n, s in zip(sizes, parts, strict=True))]


def _steps(length: int, step: int) -> list[slice]:
    """One without elements where there are none."""
    return [slice(i, min(i + step, length)) for i in range(0, max(length, 1), step)]


def _joined(parts: Sequence[Forward], dim: int) -> Forward:
    if len(parts) == 1:
        return parts[0]
    return Forward(*(torch.cat(each, dim) for each in zip(*parts, strict=True)))
