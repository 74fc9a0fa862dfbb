"""What was timed of the steps of attention's forward, and what was built, as tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from online_softmax.lab.laddertables import table
from online_softmax.lab.stepbuilds import Answer
from online_softmax.lab.stepkernel import Variant

NONE = "—"


@dataclass(frozen=True)
class Row:
    """A step in one cell, with the best of its tiles. None: not known; `why` says why."""

    step: str
    head_dim: int
    causal: bool
    why: str = ""
    tiles: str = ""
    tflops: float | None = None
    over: float | None = None  # its rate over that of the step before, of those with a time
    median_us: float | None = None  # a call
    rounds_us: tuple[float, ...] = ()
    rms: float | None = None  # error of the small size, in parts of the truth's
    tried_us: dict[str, float] = field(default_factory=dict)  # by tiles, the round that ranked them
    refused: dict[str, str] = field(default_factory=dict)  # by tiles, why they have no time


def timed_table(rows: Iterable[Row]) -> str:
    """Of people: a line a step."""
    head = ("head_dim", "keys", "step", "tiles", "TFLOP/s", "over the step before")
    lines = [
        (
            str(row.head_dim), _keys(row.causal), row.step, row.tiles or row.why,
            NONE if row.tflops is None else f"{row.tflops:.0f}",
            NONE if row.over is None else f"{100 * (row.over - 1):+.1f} %",
        )
        for row in rows
    ]  # fmt: skip
    return table(head, lines, text=4)


FIGURES = {
    "registers": "registers", "spill_store_bytes": "spilled bytes", "shared_bytes": "shared bytes",
    "wgmma": "wgmma", "tma_loads": "TMA loads", "cp_async": "cp.async", "all_warps": "warps",
    "roles": "roles", "setmaxnreg": "setmaxnreg", "registers_of_roles": "its registers",
}  # fmt: skip


def built_table(built: dict[Variant, Answer]) -> str:
    """Of people: a line a variant; instructions are as many as stand in the code."""
    head = ("step", "head_dim", "keys", "tiles", *FIGURES.values())
    lines = []
    for variant, found in built.items():
        first = (variant.step, str(variant.head_dim), _keys(variant.causal), variant.numbers)
        if isinstance(found, str):
            lines.append((*first, found, *("",) * (len(FIGURES) - 1)))
        else:
            lines.append((*first, *(_figure(found[name]) for name in FIGURES)))
    return table(head, lines, text=4)


def _figure(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or NONE
    return NONE if value is None else str(value)


def _keys(causal: bool) -> str:
    return "causal" if causal else "all keys"
