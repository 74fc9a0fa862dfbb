"""The launches of attention's kernels: results, strides, grids and compile-time numbers.

A launch is made from tensors of any device; meta tensors do where it is only to be built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from online_softmax import attentionplan as plan
from online_softmax.attentionplan import Options, Tiles, padded
from online_softmax.float32 import held
from online_softmax.plan import ceil_div, next_power_of_two
from online_softmax.triton import ALIGNED, attention
from online_softmax.triton.launcher import Launch, Own

FAR = 1 << 24  # elements from row to row


class Inputs(NamedTuple):
    """The tensors of a call. Packed sequences are (tokens, heads, dim), others have a batch."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    cu_seq_q: Tensor | None
    cu_seq_k: Tensor | None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seq_q is None else self.cu_seq_q.shape[0] - 1

    @property
    def has_scores(self) -> bool:
        """Whether tiles of scores come from memory: of a bias or a mask."""
        return self.bias is not None or self.mask is not None

    def unit(self) -> Inputs:
        """With the last dimension of q, k and v contiguous."""
        return self._replace(q=unit(self.q), k=unit(self.k), v=unit(self.v))


class Results(NamedTuple):
    """What a forward gives, and how; row tensors are of out's shape without its last dimension."""

    out: Tensor
    lse: Tensor
    m: Tensor | None
    d: Tensor | None
    launches: list[Launch]
    own: Own  # the memory of all this, and of parts


def interpreted() -> bool:
    """True if these kernels run on the CPU: TRITON_INTERPRET was set before Triton's import."""
    return not isinstance(attention.forward, triton.JITFunction)


def run(launches: Sequence[Launch], device: torch.device) -> list[Any]:
    """On the current stream of the device; what each launch gives back."""
    # numpy, which interprets, warns of inf - inf even where it is then dropped; a GPU does not.
    with np.errstate(all="ignore") if interpreted() else torch.cuda.device(device):
        return [launch.start() for launch in launches]


def forward(
    given: Inputs, o: Options, arch: str, with_state: bool, tiles: Tiles | None = None
) -> Results:
    """out, lse and, with_state, (m, d) in float32 of empty memory, and what fills them.

    Many keys of few queries are cut into parts, two launches, by the number of keys alone.

    Args:
        given: float16, bfloat16 or float32; dims up to 256.
        o: the options.
        arch: the architecture of the device.
        with_state: out is float32.
        tiles: in place of the planned ones.
    """
    given, own = given.unit(), Own(given.q.device)
    q, value_dim = given.q, given.v.shape[-1]
    out_dtype = torch.float32 if with_state else q.dtype
    fill = None if given.cu_seq_q is None else 0.0  # of tokens of no sequence
    out = own.make((*q.shape[:-1], value_dim), out_dtype, fill)
    lse = row_tensor(own, given, -math.inf)
    m, d = (row_tensor(own, given, fill) if with_state else None for fill in (-math.inf, 0.0))
    q_len, k_len = lengths(given, o)
    is_short = q_len <= plan.MAX_DECODE_QUERIES
    part_keys = plan.part_keys(k_len)
    is_packed = given.cu_seq_q is not None
    parts = plan.most_parts(k_len) if is_packed else ceil_div(k_len, part_keys)
    names: dict[str, Any]
    if not is_short or parts < 2:
        names = {
            "out_ptr": out, "lse_ptr": lse, "m_ptr": m, "d_ptr": d, "sinks_ptr": given.sinks,
            "out_strides": (*strides(out, given), 0), "row_strides": (*strides(lse, given), 0),
            "parts": 1, "part_keys": 0, "NAN_EMPTY": o.nan_empty, "IS_PART": False,
            "OVERLAPS": False,
        }  # fmt: skip
        return Results(out, lse, m, d, [_forward(given, o, arch, is_short, names, tiles)], own)
    o_parts, m_parts, d_parts = _parts(own, parts, out.shape)
    # Of packed sequences the same for all lengths: a sum's order follows from them.
    pieces = plan.merge_pieces(plan.MAX_PARTS if is_packed else parts, padded(value_dim))
    held = max(parts, attention.MERGED_AT_ONCE.value) if is_packed else parts
    overlaps = plan.has_dependent_launch(arch) and not interpreted()
    names = {
        "out_ptr": o_parts, "lse_ptr": None, "m_ptr": m_parts, "d_ptr": d_parts,
        "sinks_ptr": None, "out_strides": (*strides(o_parts[0], given), o_parts.stride(0)),
        "row_strides": (*strides(m_parts[0], given), m_parts.stride(0)), "parts": parts,
        "part_keys": part_keys, "NAN_EMPTY": False, "IS_PART": True, "OVERLAPS": overlaps,
    }  # fmt: skip
    fold = _forward(given, o, arch, True, names, tiles)
    names = {
        "o_ptr": o_parts, "m_parts_ptr": m_parts, "d_parts_ptr": d_parts, "out_ptr": out,
        "lse_ptr": lse, "m_ptr": m, "d_ptr": d, "sinks_ptr": given.sinks,
        "cu_q_ptr": given.cu_seq_q, "cu_k_ptr": given.cu_seq_k,
        "out_strides": strides(out, given), "row_strides": strides(lse, given),
        "q_len": q_len, "k_len": k_len, "heads": q.shape[1], "rows": lse.numel(),
        "parts": parts, "NAN_EMPTY": o.nan_empty, "OVERLAPS": overlaps, "VALUE_DIM": value_dim,
        "BLOCK_VALUE": padded(value_dim), "PARTS": next_power_of_two(held), "PIECES": pieces,
    }  # fmt: skip
    programs = given.batch * q.shape[1] * q_len * pieces
    merge = Launch(attention.merge_parts, programs, names, plan.MERGE_WARPS, 1, overlaps)
    return Results(out, lse, m, d, [fold, merge], own)


def _parts(own: Own, parts: int, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """o, m and d of each part, float32, in one piece of memory; each begins on 16 bytes."""
    *rows, value_dim = shape
    numbers = parts * math.prod(rows)
    size = ceil_div(numbers, ALIGNED) * ALIGNED
    whole = own.make((size * (value_dim + 2),), torch.float32)
    numbers_at = [math.prod(rows[at:]) for at in range(len(rows) + 1)]
    o_at = [*(value_dim * stride for stride in numbers_at), 1]
    return (
        whole.as_strided((parts, *shape), o_at),
        whole.as_strided((parts, *rows), numbers_at, size * value_dim),
        whole.as_strided((parts, *rows), numbers_at, size * (value_dim + 1)),
    )


def _forward(
    given: Inputs,
    o: Options,
    arch: str,
    is_short: bool,
    names: dict[str, Any],
    tiles: Tiles | None,
) -> Launch:
    """The first kernel; names: what depends on whether the keys are in parts."""
    heads, (q_len, _) = given.q.shape[1], lengths(given, o)
    known = common(given, o)
    pack = known["GROUP"] if is_short else 1
    if tiles is None and is_short:
        tiles = plan.decode(given.q.element_size(), widest(given), q_len * pack)
    t = tiles or plan.tiles(
        "forward", arch, given.q.element_size(), widest(given), given.has_scores
    )
    blocks = ceil_div(q_len * pack, t.block_q)
    known |= {**names, "blocks": blocks, "PACK": pack, "BLOCK_Q": t.block_q, "BLOCK_K": t.block_k}
    programs = names["parts"] * blocks * (heads // pack) * given.batch
    return Launch(attention.forward, programs, known, t.warps, t.stages)


# ---- what kernels are told


def common(given: Inputs, o: Options) -> dict[str, Any]:
    """What several kernels are told."""
    q, k, v, bias, mask = given[:5]
    q_len, k_len = lengths(given, o)
    reach = q_len + k_len  # further than any: the numbers stay small
    return {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "bias_ptr": bias,
        "mask_ptr": None if mask is None else mask.view(torch.uint8),
        "cu_q_ptr": given.cu_seq_q, "cu_k_ptr": given.cu_seq_k,
        "q_strides": strides(q, given), "k_strides": strides(k, given),
        "v_strides": strides(v, given), "bias_strides": shared_strides(bias),
        "mask_strides": shared_strides(mask),
        "q_len": q_len, "k_len": k_len, "heads": q.shape[1],
        "scale": o.scale_for(q.shape[-1]),
        "softcap": None if o.softcap is None else held(o.softcap),
        "left": None if o.left < 0 else min(o.left, reach),
        "right": None if o.right < 0 else min(o.right, reach),
        "TOP_LEFT": o.top_left, "IS_PLAIN": bias is None and o.is_plain(q.shape[-1]),
        "GROUP": q.shape[1] // k.shape[1], "DIM": q.shape[-1], "VALUE_DIM": v.shape[-1],
        "BLOCK_DIM": padded(q.shape[-1]), "BLOCK_VALUE": padded(v.shape[-1]),
        "WIDEN": interpreted(),
    }  # fmt: skip


def lengths(given: Inputs, o: Options) -> tuple[int, int]:
    """Of queries and keys; the longest of packed sequences."""
    if given.cu_seq_q is not None:
        return o.max_q, o.max_k
    return given.q.shape[2], given.k.shape[2]


def unit(t: Tensor) -> Tensor:
    """With the last dimension contiguous, and rows so near that 128 of them span 2^31 elements."""
    is_near = max(t.stride(), default=0) < FAR or t.stride(0 if t.dim() == 3 else 2) < FAR
    is_unit = t.stride(-1) == 1 or t.shape[-1] == 1
    return t if is_unit and is_near else t.contiguous()


def strides(t: Tensor, given: Inputs) -> tuple[int, int, int]:
    """Of batch, head and row."""
    if given.cu_seq_q is None:
        return t.stride(0), t.stride(1), t.stride(2)
    return 0, t.stride(1), t.stride(0)


def shared_strides(t: Tensor | None) -> tuple[int, ...]:
    """Of four dimensions, 0 where there is one element for all."""
    if t is None:
        return 0, 0, 0, 0
    return tuple(0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True))


def row_tensor(own: Own, given: Inputs, fill: float) -> Tensor:
    """Float32, a number a query; `fill` for tokens of no sequence."""
    is_packed = given.cu_seq_q is not None
    return own.make(given.q.shape[:-1], torch.float32, fill if is_packed else None)


def widest(given: Inputs) -> int:
    """The larger of the padded dims."""
    return max(padded(given.q.shape[-1]), padded(given.v.shape[-1]))
