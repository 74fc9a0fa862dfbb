"""The gradient of attention, by tiles of scores that are made again.

With p_ij = exp(z_ij - lse_i), the keys' share beside the sink w_i = 1 / (1 + exp(sink - lse_i)),
delta_i = dout_i out_i, and the rest as in attention.py:

    dv_j   = sum_i p_ij w_i dout_i
    dz_ij  = p_ij (w_i (dout_i v_j - delta_i) + dlse_i),  summed where a bias is shared: dbias
    dsink  = -sum_i (1 - w_i) delta_i
    ds_ij  = dz_ij (1 - tanh^2),  the cap's slope
    dq_i   = scale sum_j ds_ij k_j,  dk_j = scale sum_i ds_ij q_i

All sums are in float32, or in float64 for float64 input. A query that sees no key has no gradient.

T. Dao and others: FlashAttention, arXiv:2205.14135, whose gradient this is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax.attentionplan import Blocks, Options
from online_softmax.reference.attention import (
    Block,
    Place,
    at_keys,
    blocks_for,
    folded,
    places,
    scores,
)
from online_softmax.reference.online import STATE_DTYPE, join


class Gradients(NamedTuple):
    """By each input, in its dtype and shape; None where it was not there."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    o: Options,
    *,
    blocks: Blocks | None = None,
) -> Gradients:
    """The gradients, from those by out and by lse (None: it has none), and what `forward` gave.

    Tiles are changed in place: this is not to be differentiated. Arguments as for `forward`.
    """
    wide, scale = STATE_DTYPE[q.dtype], o.scale_for(q.shape[-1])
    blocks = blocks_for(q, k, v) if blocks is None else blocks
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (k.new_zeros(t.shape, dtype=wide) for t in (k, v))
    dbias = None if bias is None else bias.new_zeros(bias.shape, dtype=wide)
    dsinks = None if sinks is None else sinks.new_zeros(sinks.shape, dtype=wide)
    for at in (at for batch in places(q, k, blocks) for head in batch for at in head):
        block = Block.of(q, k, v, bias, mask, o, at)
        rows = Rows.of(dout, dlse, out, lse.to(wide), sinks, at, block.group)
        by_q = block.q.new_zeros(block.q.shape)  # contiguous, whatever q is
        by_k, by_v = at.cut_keys(dk), at.cut_keys(dv)
        for keys in block.tiles(o, blocks.keys):
            z, slope, is_plain = scores(block, keys, o)
            p = rows.prob(z, is_plain)
            _add_product(by_v[:, :, keys], p.mT, rows.dout)
            dp = rows.dout @ block.v[:, :, keys].to(wide).mT
            dz = dp.sub_(rows.delta).mul_(p)
            if dbias is not None:
                shared = at_keys(at.cut(dbias), keys)
                shared += block.by_head(dz).sum_to_size(shared.shape)
            ds = dz if slope is None else dz.mul_(slope)
            _add_product(by_k[:, :, keys], ds.mT, block.q)
            _add_product(by_q, ds, block.k[:, :, keys].to(wide))
        at.cut(dq).copy_(block.by_head(by_q.mul_(scale)))
        if dsinks is not None:
            dsinks[at.heads] -= rows.by_sink.sum((0, 2))
    return Gradients(
        dq,
        dk.to(k.dtype),
        dv.to(v.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
        None if dsinks is None or sinks is None else dsinks.to(sinks.dtype),
    )


class Rows(NamedTuple):
    """What a block's queries bring to their rows of gradients; nothing of one that sees no key."""

    dout: Tensor  # (batch, kv_heads, rows, value_dim) w dout
    delta: Tensor  # (batch, kv_heads, rows, 1) w delta - dlse
    lse: Tensor  # (batch, kv_heads, rows, 1) NaN where it is not finite, 0 where no key is seen
    by_sink: Tensor  # (batch, heads, queries) (1 - w) delta

    @classmethod
    def of(
        cls,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        at: Place,
        group: int,
    ) -> Rows:
        """Of whole tensors, shaped as in `backward`."""
        lse = at.cut(lse)
        is_empty = lse == -math.inf
        dout, out = (
            torch.where(is_empty.unsqueeze(-1), 0.0, at.cut(t).to(lse.dtype)) for t in (dout, out)
        )
        delta = given = (dout * out).sum(-1)
        by_sink = torch.zeros_like(delta)
        if sinks is not None:
            sink = sinks[at.heads].to(lse.dtype).view(-1, 1).expand(lse.shape)
            m, w_keys, w_sink = join(torch.where(is_empty, 0.0, lse), sink)
            share = torch.where(m.isfinite(), w_keys / (w_keys + w_sink), math.nan)
            dout, given, by_sink = dout * share.unsqueeze(-1), delta * share, delta * (1 - share)
        if dlse is not None:
            given = given - torch.where(is_empty, 0.0, at.cut(dlse).to(lse.dtype))
        shift = torch.where(is_empty, 0.0, torch.where(lse.isfinite(), lse, math.nan))
        delta, shift = (folded(t.unsqueeze(-1), group) for t in (given, shift))
        return cls(folded(dout, group), delta, shift, by_sink)

    def prob(self, z: Tensor, is_plain: bool) -> Tensor:
        """exp(z - lse) in z's place: 0 where a key is not seen, else NaN where lse is NaN or +inf.

        is_plain: z is -inf nowhere but where q k is: there 0 comes by itself, and NaN goes before.
        """
        unseen = None if is_plain else z == -math.inf
        p = z.sub_(self.lse).exp_()
        return p if unseen is None else p.masked_fill_(unseen, 0.0)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, for which total's first two dimensions are one in memory."""
    heads = total.shape[0] * total.shape[1]
    total.view(heads, *total.shape[2:]).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))
