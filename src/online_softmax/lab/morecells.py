"""Further cells that are more than a matrix (moresizes.py): their tensors, and what is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from online_softmax.lab import attentionjudge, lossjudge, opjudge
from online_softmax.lab.arena import Arena
from online_softmax.lab.fusedsizes import parsed
from online_softmax.lab.grid import Cell
from online_softmax.lab.moresizes import FP8, LSE_BACKWARD, OUTER_OPS, STATS_BOTH, VARLEN, lengths
from online_softmax.lab.opjudge import Judged
from online_softmax.lab.tally import Tally

SEED = 1
FILLING = (*OUTER_OPS, FP8)  # operations whose contenders may fill the last tensor
FP8_DTYPE = torch.float8_e4m3fn
CHECKED_ELEMENTS = 2**24  # of each result


def made(cell: Cell, arena: Arena, count: int, device: torch.device) -> list[tuple[Tensor, ...]]:
    """So many sets: (x, dlse, lse, dx) of logsumexp's gradient, (x, y) along an outer dim,
    (x, source, y) of fp8, (x, target, dx) of a token's numbers, (q, kv, out) of packed
    sequences, tokens first."""
    dtype = getattr(torch, cell.dtype)
    # A failed capture leaves the default generator unusable: this one is the cell's own.
    generator = torch.Generator(device).manual_seed(SEED)

    def cut(role: str, shape: tuple[int, ...], kind: torch.dtype = dtype) -> Tensor:
        return arena.cut(role, shape, kind, count, device)

    def normal(role: str, shape: tuple[int, ...]) -> Tensor:
        return cut(role, shape).normal_(generator=generator)

    sizes, matrix = parsed(cell.sizes), (cell.rows, cell.cols)
    roles: list[Any]
    if cell.op == VARLEN:
        tokens = (cell.rows // sizes["heads"], sizes["heads"], sizes["head_dim"])
        roles = [normal("first", tokens), normal("second", (2, *tokens)), cut("last", tokens)]
    elif cell.op == LSE_BACKWARD:
        x, lse = normal("first", matrix), cut("third", matrix[:1], torch.float32)
        for each, of in zip(x.unbind(), lse.unbind(), strict=True):
            of.copy_(each.float().logsumexp(-1))
        roles = [x, normal("second", matrix[:1]), lse, cut("last", matrix)]
    elif cell.op == STATS_BOTH:
        target = cut("second", matrix[:1], torch.int64)
        target.random_(cell.cols, generator=generator)
        roles = [normal("first", matrix), target, cut("last", matrix)]
    elif cell.op == FP8:
        # x is the head of as many bytes as a copy reads that moves what the operation moves.
        numel = cell.rows * cell.cols
        source = cut("first", (-(-numel * (1 + dtype.itemsize) // 2),), torch.uint8)
        x = source[:, :numel].view(FP8_DTYPE).view(count, *matrix)
        for each in x:
            each.copy_(torch.empty(matrix, device=device).normal_(generator=generator))
        roles = [x, source, cut("last", matrix)]
    else:
        slices = (cell.rows, cell.cols, sizes["inner"])
        result = (cell.rows, sizes["inner"]) if cell.op == OUTER_OPS[2] else slices
        roles = [normal("first", slices), cut("last", result)]
    return list(zip(*(role.unbind() for role in roles), strict=True))


# ---- what is right


def _spread(count: int, of: int, device: torch.device) -> Tensor:
    """So many places, evenly spread, both ends among them."""
    count = min(max(count, 2), of)
    return torch.arange(count, device=device) * (of - 1) // max(count - 1, 1)


def _sequences(sizes: dict[str, int], longest: int) -> list[tuple[int, int]]:
    """The first, the last and the longest of packed sequences: where each begins and ends."""
    found, ends = lengths(sizes["batch"], longest), [0]
    for each in found:
        ends.append(ends[-1] + each)
    places = sorted({0, found.index(longest), len(found) - 1})
    return [(ends[i], ends[i + 1]) for i in places]


def checked_rows(cell: Cell) -> int:
    """How many rows of the result are compared with float64; along an outer dim, planes."""
    sizes = parsed(cell.sizes)
    if cell.op == VARLEN:
        tokens = sum(end - begin for begin, end in _sequences(sizes, cell.cols))
        return tokens * min(sizes["heads"], attentionjudge.GROUPS)
    most = CHECKED_ELEMENTS // (cell.cols * sizes.get("inner", 1))
    return min(cell.rows, max(most, 2))


def checked_inner(cell: Cell) -> int:
    """Along an outer dim, how many slices side by side in each of those planes."""
    most = CHECKED_ELEMENTS // (checked_rows(cell) * cell.cols)
    return min(max(most, 2), parsed(cell.sizes)["inner"])


def checked_share(cell: Cell) -> float:
    """The part of a cell's work that is compared with float64."""
    sizes = parsed(cell.sizes)
    if cell.op == VARLEN:  # whose work goes with the squares of lengths
        found = sum((end - begin) ** 2 for begin, end in _sequences(sizes, cell.cols))
        every = sum(length**2 for length in lengths(sizes["batch"], cell.cols))
        return found / every * min(sizes["heads"], attentionjudge.GROUPS) / sizes["heads"]
    share = checked_rows(cell) / cell.rows
    return share * checked_inner(cell) / sizes["inner"] if cell.op in OUTER_OPS else share


def check(cell: Cell, tensors: Sequence[Tensor], made: Any, ulps: float) -> Judged:
    """Judge what a contender returned on a set."""
    like = tensors[-1]
    if why := attentionjudge.unfit(("the result",), made, (like,)):
        return Judged(False, math.nan, why)
    if cell.op == VARLEN:
        return _varlen(cell, tensors, made, ulps)
    places = _spread(checked_rows(cell), cell.rows, like.device)
    if cell.op == LSE_BACKWARD:
        return _lse_backward([t[places] for t in tensors[:3]], made[places], ulps)
    if cell.op == STATS_BOTH:
        x, target = (t[places] for t in tensors[:2])  # of log p[target] + H, over all tokens
        return lossjudge.stats_gradient(x, target, made[places], (0.0, 1.0, 1.0), ulps)
    if cell.op == FP8:
        return opjudge.check("softmax", [tensors[0][places].to(like.dtype)], made[places], ulps)
    beside = _spread(checked_inner(cell), parsed(cell.sizes)["inner"], like.device)
    x = tensors[0][places][:, :, beside].transpose(1, 2).reshape(-1, cell.cols)
    found = made[places][..., beside]
    found = found.transpose(1, 2).reshape(-1, cell.cols) if found.dim() == 3 else found.reshape(-1)
    return opjudge.check(cell.op.removesuffix("_outer"), [x], found, ulps)


def _lse_backward(given: Sequence[Tensor], got: Tensor, ulps: float) -> Judged:
    """dlse exp(x - lse); a rival may round lse, and x - lse, to its type."""
    tally, info = Tally(), torch.finfo(got.dtype)
    rounding = 0.0 if got.dtype == torch.float32 else ulps * info.eps
    spacing = ulps * info.smallest_normal * info.eps  # near 0
    for start in range(0, len(got), step := max(opjudge.CHUNK // got.shape[1], 1)):
        part = slice(start, start + step)
        x, dlse, lse = (t[part].double() for t in given)
        below = x - lse.unsqueeze(-1)
        want = dlse.unsqueeze(-1) * below.exp()
        rounded = below.abs() + lse.abs().unsqueeze(-1)
        of_log = (ulps - opjudge.OUR_ULPS) * info.eps * rounded
        allowed = (opjudge.RTOL + rounding + of_log) * want.abs() + spacing
        size = want.abs().amax(-1, keepdim=True)
        tally.add(want, got[part].double(), allowed, size, f"dx, from row {start} on ")
    return tally.judged()


def _varlen(cell: Cell, tensors: Sequence[Tensor], made: Any, ulps: float) -> Judged:
    """The first and last heads of some sequences; of all others there are numbers."""
    q, kv = tensors[:2]
    sizes, tally = parsed(cell.sizes), Tally()
    units = attentionjudge.OUR_UNITS if ulps <= opjudge.OUR_ULPS else attentionjudge.RIVAL_UNITS
    for begin, end in _sequences(sizes, cell.cols):
        for head in sorted({0, sizes["heads"] - 1}):
            mine, k, v = (t[begin:end, head].double() for t in (q, kv[0], kv[1]))
            parts = attentionjudge.probabilities(mine.unsqueeze(0), k, bool(sizes["causal"]))
            for rows, p in parts:
                found = made[begin:end, head][rows]
                want, size = (p @ v).squeeze(0), (p @ v.abs()).squeeze(0)
                attentionjudge.add(tally, units, f"from token {begin} on out", found, want, size)
    return tally.judged()
