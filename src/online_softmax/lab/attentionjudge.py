"""Judging attention, its gradients and merged parts against float64.

Of attention the heads that share the first and the last keys are compared whole; of all others it
is known that there is a number everywhere. An error is a share of what was added up in that
element, with signs left out: of an output the values by their probabilities, of a gradient its
terms. A kernel in a 16-bit type rounds probabilities, their gradients and the result to it, which
is one and a half units of such a share at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from online_softmax.lab.fusedsizes import parsed
from online_softmax.lab.grid import Cell
from online_softmax.lab.opjudge import ATOL, OUR_ULPS, RTOL, Judged
from online_softmax.lab.tally import Tally

CHUNK = 2**25  # float64 scores at a time
GROUPS = 2  # heads that share keys, compared whole: the first and the last
EXACT = 1e-4  # of the share: float32 arithmetic over thousands of terms
OUR_UNITS, RIVAL_UNITS = 2.0, 8.0  # of rounding, of the share
BACKWARD = ("dq", "dk", "dv")


def add(tally: Tally, units: float, what: str, found: Tensor, want: Tensor, size: Tensor) -> None:
    """Compare one result; `size`, of want's shape, is what an error is a share of."""
    info = torch.finfo(found.dtype)
    rounding = 0.0 if found.dtype == torch.float32 else units * info.eps
    allowed = (EXACT + rounding) * size + info.smallest_normal * info.eps
    tally.add(want, found.double(), allowed, size, what)


def unfit(names: Sequence[str], made: Any, wanted: Sequence[Tensor]) -> str:
    """Why results are none, a sentence; "": each has its shape and type, and numbers throughout."""
    found = made if isinstance(made, (tuple, list)) else (made,)
    if len(found) < len(names):
        return f"{len(found)} results, should be {', '.join(names)}"
    for name, got, like in zip(names, found, wanted, strict=False):
        if not isinstance(got, Tensor) or got.shape != like.shape or got.dtype != like.dtype:
            given = f"{tuple(got.shape)} {got.dtype}" if isinstance(got, Tensor) else repr(got)[:60]
            return f"{name} is {given}, should be {tuple(like.shape)} {like.dtype}"
        if math.isnan(float(got.sum(dtype=torch.float32))):
            return f"{int(got.isnan().sum())} of {got.numel()} elements of {name} are NaN"
    return ""


def check_attention(cell: Cell, tensors: Sequence[Tensor], made: Any, ulps: float) -> Judged:
    """Judge what a contender gave: the output, or of a backward the gradients of q, k and v.

    Args:
        cell: of an operation of fusedsizes.ATTENTION_OPS.
        tensors: the set that it was called with.
        made: what it returned.
        ulps: opjudge.OUR_ULPS for ours, more for a rival.
    """
    q, kv = tensors[:2]
    is_backward = cell.op == "attention_backward"
    names = BACKWARD if is_backward else ("out",)
    if why := unfit(names, made, (q, kv[0], kv[1]) if is_backward else (q,)):
        return Judged(False, math.nan, why)
    tally, units = Tally(), OUR_UNITS if ulps <= OUR_ULPS else RIVAL_UNITS
    shared = q.shape[1] // kv.shape[2]
    is_causal = bool(parsed(cell.sizes)["causal"])
    for batch, head in _groups(kv.shape[1], kv.shape[2]):
        heads = slice(head * shared, (head + 1) * shared)
        k, v = kv[0, batch, head].double(), kv[1, batch, head].double()
        mine = q[batch, heads].double()
        if not is_backward:
            got = made[0] if isinstance(made, (tuple, list)) else made
            for rows, p in probabilities(mine, k, is_causal):
                add(tally, units, "out", got[batch, heads, rows], p @ v, p @ v.abs())
            continue
        g = tensors[2][batch, heads].double()
        wanted = _gradients(mine, k, v, g, is_causal)
        found = (made[0][batch, heads], made[1][batch, head], made[2][batch, head])
        for name, got, (want, size) in zip(BACKWARD, found, wanted, strict=True):
            add(tally, units, name, got, want, size)
    return tally.judged()


def _groups(batch: int, kv_heads: int) -> list[tuple[int, int]]:
    count = batch * kv_heads
    places = sorted({i * (count - 1) // max(GROUPS - 1, 1) for i in range(GROUPS)})
    return [(place // kv_heads, place % kv_heads) for place in places]


def probabilities(q: Tensor, k: Tensor, is_causal: bool) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of queries, and their probabilities: (heads, chunk, keys)."""
    heads, q_len, dim = q.shape
    key = torch.arange(len(k), device=k.device)
    step = max(CHUNK // (heads * len(k)), 1)
    for start in range(0, q_len, step):
        rows = slice(start, min(start + step, q_len))
        z = q[:, rows] @ k.t() * dim**-0.5
        if is_causal:
            query = torch.arange(rows.start, rows.stop, device=k.device) + len(k) - q_len
            z.masked_fill_(key > query[:, None], -math.inf)
        yield rows, torch.softmax(z, -1)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, is_causal: bool
) -> list[tuple[Tensor, Tensor]]:
    """The gradients of q, k and v, each with its size, of heads that share k and v."""
    found = [(torch.zeros_like(t), torch.zeros_like(t)) for t in (q, k, v)]
    (dq, dq_size), (dk, dk_size), (dv, dv_size) = found
    scale = q.shape[-1] ** -0.5
    for rows, p in probabilities(q, k, is_causal):
        mine, up = q[:, rows], g[:, rows]
        out = p @ v
        of_out = (up * out).sum(-1, keepdim=True)
        dz = p * (up @ v.t() - of_out) * scale
        terms = (up.abs() * out.abs()).sum(-1, keepdim=True)
        size = p * (up.abs() @ v.abs().t() + terms) * scale
        dq[:, rows], dq_size[:, rows] = dz @ k, size @ k.abs()
        dk += torch.einsum("hqk,hqd->kd", dz, mine)
        dk_size += torch.einsum("hqk,hqd->kd", size, mine.abs())
        dv += torch.einsum("hqk,hqd->kd", p, up)
        dv_size += torch.einsum("hqk,hqd->kd", p, up.abs())
    return found


def check_merge(tensors: Sequence[Tensor], made: Any, ulps: float) -> Judged:
    """Judge merged parts: (out, lse)."""
    outs, lses = tensors[:2]
    if why := unfit(("out", "lse"), made, (outs[0], lses[0])):
        return Judged(False, math.nan, why)
    tally, units = Tally(), OUR_UNITS if ulps <= OUR_ULPS else RIVAL_UNITS
    step = max(CHUNK // outs[:, 0].numel(), 1)
    for start in range(0, outs.shape[1], step):
        rows = slice(start, start + step)
        wide = lses[:, rows].double()
        lse = torch.logsumexp(wide, 0)
        weights = (wide - lse).exp().unsqueeze(-1)
        parts = outs[:, rows].double()
        size = (parts.abs() * weights).sum(0)
        add(tally, units, "out", made[0][rows], (parts * weights).sum(0), size)
        near = (RTOL * lse.abs() + ATOL) / EXACT
        add(tally, units, "lse", made[1][rows], lse, near)
    return tally.judged()
