"""Who runs in a cell of `merge`: each a call on (outs, lses, out), the parts one behind another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import online_softmax
from online_softmax.lab import ceilings
from online_softmax.lab.contender import Contender
from online_softmax.lab.grid import Cell
from online_softmax.lab.rotation import Call


def _ours() -> Call:
    """merge_outputs, as inference engines exchange parts: outputs and natural log-sum-exps."""

    def call(outs: Tensor, lses: Tensor, out: Tensor) -> Any:
        with torch.no_grad():
            return online_softmax.merge_outputs(
                *zip(outs.unbind(), lses.unbind(), strict=True), base="e"
            )

    return call


def _eager(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(lses, 0)
    weights = (lses - lse).exp().unsqueeze(-1)
    return (outs.float() * weights).sum(0).to(outs.dtype), lse


def _torch() -> Call:
    return lambda outs, lses, out: _eager(outs, lses)


def _compile() -> Call:
    torch.compiler.reset()
    compiled = torch.compile(_eager, dynamic=False)
    return lambda outs, lses, out: compiled(outs, lses)


def _ceiling() -> Call:
    """Two parts: two reads and a write. More: a read of them all, the one write not in it."""

    def call(outs: Tensor, lses: Tensor, out: Tensor) -> None:
        if len(outs) == 2:
            ceilings.add_call(outs[0], outs[1], out)
        else:
            ceilings.read_call(outs, out)

    return call


RIVALS = {"torch": _torch, "compile": _compile}


def contenders(cell: Cell, rivals: tuple[str, ...]) -> list[Contender]:
    """The lines of a cell, the ceiling first."""
    return [
        Contender("ceiling", "ceiling", _ceiling),
        Contender("ours", "ours", _ours),
        *(Contender(name, "rival", RIVALS[name]) for name in rivals if name in RIVALS),
    ]
