"""What was timed of the steps of attention's forward, and what was built, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from online_softmax.lab.laddertables import table

if TYPE_CHECKING:
    from online_softmax.lab.stepbuilds import Answer
    from online_softmax.lab.stepkernel import Variant

NONE = "—"
KIND, BUILT_KIND = "attention_step", "attention_step_build"  # of a stored line
HEAD = ("head_dim", "keys", "step", "tiles", "TFLOP/s", "over the step before")


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
    return table(HEAD, timed_lines(rows), text=4)


def timed_lines(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """A line a step, under HEAD."""
    return [
        (
            str(row.head_dim), _keys(row.causal), row.step, row.tiles or row.why,
            NONE if row.tflops is None else f"{row.tflops:.0f}",
            NONE if row.over is None else f"{100 * (row.over - 1):+.1f} %",
        )
        for row in rows
    ]  # fmt: skip


def stored_tables(lines: Sequence[dict[str, Any]]) -> list[tuple[str, tuple[str, ...], Any, int]]:
    """What was kept of steps: title, head, lines, columns of text; of what was built too."""
    names = [each.name for each in fields(Row)]
    timed = [
        Row(**{name: line[name] for name in names if name in line})
        for line in lines
        if line["kind"] == KIND
    ]
    stored = [line for line in lines if line["kind"] == BUILT_KIND]
    built = [_built_line(line, line.get("why", line)) for line in stored]
    title = "Attention's forward, step by step"
    found: list[tuple[str, tuple[str, ...], Any, int]] = []
    if timed:
        found.append((title, HEAD, tuple(timed_lines(timed)), 4))
    if built:
        found.append((f"{title}: what is built", BUILT_HEAD, tuple(built), 4))
    return found


FIGURES = {
    "registers": "registers", "spill_store_bytes": "spilled bytes", "shared_bytes": "shared bytes",
    "wgmma": "wgmma", "tma_loads": "TMA loads", "cp_async": "cp.async", "all_warps": "warps",
    "roles": "roles", "setmaxnreg": "setmaxnreg", "registers_of_roles": "its registers",
}  # fmt: skip


BUILT_HEAD = ("step", "head_dim", "keys", "tiles", *FIGURES.values())


def built_table(built: dict[Variant, Answer]) -> str:
    """Of people: a line a variant; instructions are as many as stand in the code."""
    lines = [_built_line(built_record(variant), found) for variant, found in built.items()]
    return table(BUILT_HEAD, lines, text=4)


def built_record(variant: Variant) -> dict[str, Any]:
    """What a stored line says of a variant, beside what was found."""
    return {**asdict(variant), "numbers": variant.numbers}


def _built_line(variant: dict[str, Any], found: Answer) -> tuple[str, ...]:
    keys = _keys(variant["causal"])
    first = (variant["step"], str(variant["head_dim"]), keys, variant["numbers"])
    if isinstance(found, str):
        return (*first, found, *("",) * (len(FIGURES) - 1))
    return (*first, *(_figure(found[name]) for name in FIGURES))


def _figure(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or NONE
    return NONE if value is None else str(value)


def _keys(causal: bool) -> str:
    return "causal" if causal else "all keys"
