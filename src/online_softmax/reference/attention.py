"""Attention from its definition: the recurrence with an output, over tiles of keys.

A row of scores is what one query makes of all keys. It is never whole: a tile of keys gives a tile
of scores, that gives a state (m, d, o), and states merge. With the query i of a head, its key j:

    z_ij   = cap(scale q_i k_j) + bias_ij, and -inf where i does not see j
    state  = the merge of OutputState.of(z_i, v) over tiles
    lse_i  = m + log d
    out_i  = o / d

A sink is a score more, without a vector: the state (sink, 1, 0), merged last. It is in out and not
in lse. The gradient goes through the tiles again, with p_ij = exp(z_ij - lse_i), the keys' share
beside the sink w_i = 1 / (1 + exp(sink - lse_i)), and delta_i = dout_i out_i:

    dv_j   = sum_i p_ij w_i dout_i
    dz_ij  = p_ij (w_i (dout_i v_j - delta_i) + dlse_i),  summed where a bias is shared: dbias
    dsink  = -sum_i (1 - w_i) delta_i
    ds_ij  = dz_ij scale (1 - tanh^2),  the cap's slope
    dq_i   = sum_j ds_ij k_j,  dk_j = sum_i ds_ij q_i

All sums are in float32, or in float64 for float64 input. A query that sees no key has out 0, lse
-inf and no gradient.

M. Milakov, N. Gimelshein: Online normalizer calculation for softmax, arXiv:1805.02867; M. N. Rabe,
C. Staats: Self-attention does not need O(n^2) memory, arXiv:2112.05682; T. Dao and others:
FlashAttention, arXiv:2205.14135, whose gradient this is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax.attentionplan import Options
from online_softmax.reference.online import STATE_DTYPE, join
from online_softmax.reference.outputs import OutputState

TILE = 128  # keys of a tile


class Forward(NamedTuple):
    """What the forward gives, float32 (float64) but for out."""

    out: Tensor  # (batch, heads, q_len, value_dim), divided; of q's dtype, float32 with a state
    lse: Tensor  # (batch, heads, q_len) without the sink
    m: Tensor  # (batch, heads, q_len) the state without the sink
    d: Tensor  # (batch, heads, q_len)


class Gradients(NamedTuple):
    """By each input, in its dtype and shape; None where it was not there."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None


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
    tile: int = TILE,
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
        tile: keys at a time; the result depends on it by rounding alone.
    """
    wide = STATE_DTYPE[q.dtype]
    kv_heads, k_len = k.shape[1], k.shape[2]
    state = OutputState.empty(_folded(q, kv_heads).shape[:-1], v.shape[-1], wide, q.device)
    for start in range(0, k_len, tile):
        keys = slice(start, start + tile)
        z = scores(q, k[:, :, keys], bias, mask, start, k_len, o).z
        part = OutputState.of(_folded(z, kv_heads), v[:, :, keys].to(wide))
        state = state.merge(part)
    keys_alone = OutputState(*(_unfolded(t, q) for t in state))
    m, d, output = keys_alone
    whole = keys_alone
    if sinks is not None:
        sink = sinks.to(wide).view(-1, 1).expand(m.shape)
        whole = whole.merge(OutputState(sink, torch.ones_like(sink), torch.zeros_like(output)))
    # Of a query without keys a sink would make 0 as well, which "nan" does not want.
    empty = math.nan if o.nan_empty else 0.0
    out = torch.where(m.unsqueeze(-1) == -math.inf, empty, whole.output())
    return Forward(out if keeps_float else out.to(q.dtype), keys_alone.lse(), m, d)


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
    tile: int = TILE,
) -> Gradients:
    """The gradients, from those by out and by lse (None: it has none), and what `forward` gave."""
    wide = STATE_DTYPE[q.dtype]
    rows = Rows.of(dout, dlse, out, lse.to(wide), sinks)
    kv_heads, k_len = k.shape[1], k.shape[2]
    q_rows, dout_rows = _folded(q.to(wide), kv_heads), _folded(rows.dout, kv_heads)
    weighted = _folded(rows.dout * rows.keys_share.unsqueeze(-1), kv_heads)
    dq = torch.zeros_like(q_rows)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dbias = None if bias is None else bias.new_zeros(bias.shape, dtype=wide)
    for start in range(0, k_len, tile):
        keys = slice(start, start + tile)
        k_tile, v_tile = k[:, :, keys].to(wide), v[:, :, keys].to(wide)
        z, slope = scores(q, k_tile, bias, mask, start, k_len, o)
        p = rows.prob(z)
        dp = _unfolded(dout_rows @ v_tile.mT, q)
        dz = p * rows.upstream(dp)
        if dbias is not None:
            shared = dbias[..., keys] if dbias.shape[-1] > 1 else dbias
            shared += dz.sum_to_size(shared.shape)
        ds = _folded(dz * slope, kv_heads)
        dq += ds @ k_tile
        dk[:, :, keys] = (ds.mT @ q_rows).to(k.dtype)
        dv[:, :, keys] = (_folded(p, kv_heads).mT @ weighted).to(v.dtype)
    dsinks = None
    if sinks is not None:
        dsinks = -((1 - rows.keys_share) * rows.delta).sum((0, 2)).to(sinks.dtype)
    by_bias = None if dbias is None or bias is None else dbias.to(bias.dtype)
    return Gradients(_unfolded(dq, q).to(q.dtype), dk, dv, by_bias, dsinks)


# ---- the parts


class Scores(NamedTuple):
    """A tile of scores, and what their gradient is multiplied with on its way to q k."""

    z: Tensor  # (batch, heads, q_len, keys), -inf where a query does not see a key
    slope: Tensor | float


def scores(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    start: int,
    k_len: int,
    o: Options,
) -> Scores:
    """What all queries make of the keys from `start` on, k of k_len in all."""
    wide, keys = STATE_DTYPE[q.dtype], slice(start, start + k.shape[2])
    scale = o.scale_for(q.shape[-1])
    z = scale * _unfolded(_folded(q.to(wide), k.shape[1]) @ k.to(wide).mT, q)
    slope: Tensor | float = scale
    if o.softcap is not None:
        tanh = torch.tanh(z / o.softcap)
        z, slope = o.softcap * tanh, scale * (1 - tanh.square())
    if bias is not None:
        z = z + (bias if bias.shape[-1] == 1 else bias[..., keys]).to(wide)
    seen = visible(q.shape[2], k_len, keys, o, q.device)
    if mask is not None:
        seen = seen & (mask if mask.shape[-1] == 1 else mask[..., keys])
    return Scores(torch.where(seen, z, -math.inf), slope)


def visible(q_len: int, k_len: int, keys: slice, o: Options, device: torch.device) -> Tensor:
    """(q_len, keys) bool: which of these keys, of k_len in all, a query sees by its place."""
    place = torch.arange(q_len, device=device).unsqueeze(1) + o.diagonal(q_len, k_len)
    key = torch.arange(keys.start, keys.stop, device=device)
    seen = torch.ones((q_len, key.numel()), dtype=torch.bool, device=device)
    if o.left >= 0:
        seen &= key >= place - o.left
    if o.right >= 0:
        seen &= key <= place + o.right
    return seen


class Rows(NamedTuple):
    """What a query brings to its row of gradients; nothing of one that sees no key."""

    dout: Tensor  # (batch, heads, q_len, value_dim)
    dlse: Tensor  # (batch, heads, q_len)
    delta: Tensor  # (batch, heads, q_len) dout out
    lse: Tensor  # (batch, heads, q_len)
    keys_share: Tensor  # (batch, heads, q_len) w: what the keys count for beside the sink

    @classmethod
    def of(
        cls, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor | None
    ) -> Rows:
        is_empty = lse == -math.inf
        given = torch.zeros_like(lse) if dlse is None else dlse.to(lse.dtype)
        given = torch.where(is_empty, 0.0, given)
        dout = torch.where(is_empty.unsqueeze(-1), 0.0, dout.to(lse.dtype))
        out = torch.where(is_empty.unsqueeze(-1), 0.0, out.to(lse.dtype))
        share = torch.ones_like(lse)
        if sinks is not None:
            sink = sinks.to(lse.dtype).view(-1, 1).expand(lse.shape)
            m, w_keys, w_sink = join(torch.where(is_empty, 0.0, lse), sink)
            share = torch.where(m.isfinite(), w_keys / (w_keys + w_sink), math.nan)
        return cls(dout, given, (dout * out).sum(-1), lse, share)

    def prob(self, z: Tensor) -> Tensor:
        """exp(z - lse): 0 where a key is not seen, NaN in a row whose lse is +inf or NaN."""
        lse = self.lse.unsqueeze(-1)
        p = torch.where(lse.isfinite(), torch.exp(z - lse), math.nan)
        return torch.where(z == -math.inf, 0.0, p)

    def upstream(self, dp: Tensor) -> Tensor:
        """What p is multiplied with to give dz."""
        w, delta, dlse = (t.unsqueeze(-1) for t in (self.keys_share, self.delta, self.dlse))
        return w * (dp - delta) + dlse


def _folded(t: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, q_len, ...) -> (batch, kv_heads, heads / kv_heads q_len, ...): rows that
    share keys."""
    group = t.shape[1] // max(kv_heads, 1)
    return t.reshape(t.shape[0], kv_heads, group * t.shape[2], *t.shape[3:])


def _unfolded(t: Tensor, q: Tensor) -> Tensor:
    return t.reshape(*q.shape[:3], *t.shape[3:])
