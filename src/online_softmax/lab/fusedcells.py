"""Cells that are more than a matrix: their tensors, who runs on them, and what is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from online_softmax.lab import attentionjudge, morecells, rotation
from online_softmax.lab.arena import Arena
from online_softmax.lab.benchclock import Setting
from online_softmax.lab.fusedsizes import MERGE, parsed
from online_softmax.lab.grid import Cell
from online_softmax.lab.moresizes import MORE_OPS
from online_softmax.lab.opjudge import Judged
from online_softmax.lab.rotation import Rotation

SEED = 1


def buffers(cell: Cell, setting: Setting) -> Rotation:
    """A cell's sets, in the setting's arena: (q, kv, out) of attention, (q, kv, g) of its backward,
    (outs, lses, out) of a merge, whose lses are about normal; others as morecells.py says."""
    count, is_cold = rotation.set_count(cell.ideal_bytes, setting.l2_bytes)
    return Rotation(made(cell, setting.arena, count, setting.device), is_cold)


def made(cell: Cell, arena: Arena, count: int, device: torch.device) -> list[tuple[Tensor, ...]]:
    """So many sets of a cell's tensors."""
    if cell.op in MORE_OPS:
        return morecells.made(cell, arena, count, device)
    dtype = getattr(torch, cell.dtype)
    # A failed capture leaves the default generator unusable: this one is the cell's own.
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(role: str, shape: tuple[int, ...], kind: torch.dtype = dtype) -> Tensor:
        return arena.cut(role, shape, kind, count, device).normal_(generator=generator)

    sizes = parsed(cell.sizes)
    if cell.op == MERGE:
        parts = (sizes["parts"], cell.rows)
        roles = [
            normal("first", (*parts, cell.cols)),
            normal("second", parts, torch.float32),
            normal("last", (cell.rows, cell.cols)),
        ]
    else:
        batch, heads, dim = sizes["batch"], sizes["heads"], sizes["head_dim"]
        queries = (batch, heads, cell.rows // (batch * heads), dim)
        roles = [
            normal("first", queries),
            normal("second", (2, batch, sizes["kv_heads"], cell.cols, dim)),
            normal("last", queries),
        ]
    return list(zip(*(role.unbind() for role in roles), strict=True))


def checked_rows(cell: Cell) -> int:
    """How many rows of the first result are compared with float64."""
    if cell.op in MORE_OPS:
        return morecells.checked_rows(cell)
    if cell.op == MERGE:
        return cell.rows
    sizes = parsed(cell.sizes)
    groups = sizes["batch"] * sizes["kv_heads"]
    return cell.rows // groups * min(groups, attentionjudge.GROUPS)


def checked_share(cell: Cell) -> float:
    """The part of a cell's work that is compared with float64."""
    if cell.op in MORE_OPS:
        return morecells.checked_share(cell)
    return checked_rows(cell) / cell.rows


def check(cell: Cell, tensors: Sequence[Tensor], made: Any, ulps: float) -> Judged:
    """Judge what a contender returned on a set."""
    if cell.op in MORE_OPS:
        return morecells.check(cell, tensors, made, ulps)
    if cell.op == MERGE:
        return attentionjudge.check_merge(tensors, made, ulps)
    return attentionjudge.check_attention(cell, tensors, made, ulps)
