"""A softmax between a prologue and an epilogue in a compiled model: torch.compile alone, which may
fuse all of it, beside torch.compile around our operation, which it cannot look into.

A set is (x, keep, y): keep is a mask of bytes; y is not used, each contender makes its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import online_softmax
from online_softmax.lab import goals
from online_softmax.lab.benchclock import Setting
from online_softmax.lab.grid import ITEM_BYTES
from online_softmax.lab.refusal import one_line
from online_softmax.lab.rotation import Call, Rotation, set_count

SCALE, DROPPED = 0.7, 0.1
SHAPES = ((65536, 1024), (16384, 4096), (2048, 32768), (512, 131072))  # 2^26 elements each
DTYPES = ("bfloat16", "float32")
CHECKED_ELEMENTS = 2**22
ALONE, AROUND = "compile", "compile, ours"  # what the comparison is about
Line = dict[str, Any]
Softmax = Callable[[Tensor], Tensor]
Parts = tuple[Tensor, Tensor]  # bias and weight, (cols,)


def _weighted(softmax: Softmax, x: Tensor, keep: Tensor, parts: Parts) -> Tensor:
    bias, weight = parts
    return softmax(x * SCALE + bias) * weight


def _dropped(softmax: Softmax, x: Tensor, keep: Tensor, parts: Parts) -> Tensor:
    return softmax(x * SCALE + parts[0]) * keep * (1 / (1 - DROPPED))


# What a model does around a softmax; `keep` stands for dropout, so that a result can be checked.
CASES: dict[str, Callable[[Softmax, Tensor, Tensor, Parts], Tensor]] = {
    "softmax(x * a + bias) * weight": _weighted,
    "dropout(softmax(x * a + bias))": _dropped,
}


@dataclass(frozen=True)
class Work:
    """One case on one shape."""

    case: str
    dtype: str
    rows: int
    cols: int

    @property
    def text(self) -> str:
        return f"{self.case} {self.dtype} {self.rows} x {self.cols}"

    @property
    def ideal_bytes(self) -> int:
        """x in and a result out, once; the mask where the case has one."""
        mask = self.rows * self.cols if CASES[self.case] is _dropped else 0
        return 2 * self.rows * self.cols * ITEM_BYTES[self.dtype] + mask


def works(shapes: Iterable[tuple[int, int]] = SHAPES) -> list[Work]:
    """Every case on every shape in every type."""
    return [Work(case, dtype, *shape) for case in CASES for dtype in DTYPES for shape in shapes]


def _torchs(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def contenders(work: Work, parts: Parts) -> dict[str, Call]:
    """Each contender as a call on a set."""
    around = CASES[work.case]

    def call(softmax: Softmax, is_compiled: bool) -> Call:
        def function(x: Tensor, keep: Tensor) -> Tensor:
            return around(softmax, x, keep, parts)

        run = torch.compile(function, dynamic=False, fullgraph=True) if is_compiled else function
        return lambda x, keep, y: run(x, keep)

    torch.compiler.reset()  # after a few sizes Dynamo would run the same code eagerly
    return {
        "eager": call(_torchs, False),
        "eager, ours": call(online_softmax.softmax, False),
        ALONE: call(_torchs, True),
        AROUND: call(online_softmax.softmax, True),
    }


def buffers(work: Work, setting: Setting) -> tuple[Rotation, Parts]:
    """Rotating sets in the setting's arena, and what they share."""
    count, is_cold = set_count(work.ideal_bytes, setting.l2_bytes)
    matrix, dtype, device = (work.rows, work.cols), getattr(torch, work.dtype), setting.device
    generator = torch.Generator(device).manual_seed(0)
    x = setting.arena.cut("first", matrix, dtype, count, device, is_random=True)
    keep = setting.arena.cut("keep", matrix, torch.uint8, count, device)
    keep[:] = torch.rand(matrix, generator=generator, device=device) >= DROPPED
    y = setting.arena.cut("last", matrix[:1], dtype, count, device)
    bias = torch.randn(work.cols, generator=generator, device=device).to(dtype)
    weight = torch.randn(work.cols, generator=generator, device=device).to(dtype)
    sets = list(zip(x.unbind(), keep.unbind(), y.unbind(), strict=True))
    return Rotation(sets, is_cold), (bias, weight)


def wrong(work: Work, got: Tensor, tensors: tuple[Tensor, ...], parts: Parts) -> str:
    """What is wrong with a result, a sentence; "": nothing. Compared with float64 in some rows.

    Eager code rounds after each step, compiled code once: a result may be off by a few units of
    its type in the softmax's argument, and so in the result.
    """
    rows = min(work.rows, max(CHECKED_ELEMENTS // work.cols, 2))
    places = torch.arange(rows, device=got.device) * (work.rows - 1) // max(rows - 1, 1)
    x, keep = (t[places].double() for t in tensors[:2])
    want = CASES[work.case](_torchs, x, keep, (parts[0].double(), parts[1].double()))
    off = (got[places].double() - want).abs()
    eps = torch.finfo(got.dtype).eps
    argument = (x * SCALE + parts[0].double()).abs().amax(-1, keepdim=True)
    allowed = (want.abs() + 1e-6 * want.abs().amax(-1, keepdim=True)) * (
        (argument + 4) * 2 * eps + 1e-5
    )
    bad = ~(off <= allowed)  # NaN is bad too
    if not bool(bad.any()):
        return ""
    return (
        f"wrong: {int(bad.sum())} of {bad.numel()} compared are off by up to {float(off.max()):.3g}"
    )


def measure(work: Work, setting: Setting) -> Line:
    """Check and time the contenders of one case on one shape, as a line to keep."""
    sets, parts = buffers(work, setting)
    entries: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for name, call in contenders(work, parts).items():
        entries[name] = {"name": name, "why": ""}
        try:
            why = wrong(work, call(*sets.sets[0]), sets.sets[0], parts)
        except Exception as error:  # noqa: BLE001  a row
            why = one_line(error)
        entries[name]["why"] = why
        if not why:
            calls[name] = call
    for name, timing in setting.interleaved(sets, calls, list(calls)).items():
        if timing.refused:
            entries[name]["why"] = timing.refused
        else:
            entries[name] |= {"median_us": timing.median_us, "rounds_us": timing.rounds_us}
    return {"kind": "fusion", "case": work.case, "dtype": work.dtype, "rows": work.rows,
            "cols": work.cols, "ideal_bytes": work.ideal_bytes, "sets": len(sets.sets),
            "entries": list(entries.values())}  # fmt: skip


# ---- as a table


def faster(line: Line) -> str:
    """Which compiled model is faster, beyond the noise."""
    us = {each["name"]: each.get("median_us") for each in line["entries"]}
    if not us.get(ALONE) or not us.get(AROUND):
        return "—"
    ratio = us[ALONE] / us[AROUND]
    if 1 / goals.NOISE <= ratio <= goals.NOISE:
        return "alike"
    return "with ours" if ratio > 1 else "without ours"


def table(lines: Iterable[Line]) -> tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...], int]:
    """Title, heading, rows and how many columns are words; each shape as it was measured last."""
    latest = {(e["case"], e["dtype"], e["rows"], e["cols"]): e for e in lines}
    names: dict[str, None] = {}
    for line in latest.values():
        names |= dict.fromkeys(each["name"] for each in line["entries"])
    rows = []
    for line in latest.values():
        found = {each["name"]: each for each in line["entries"]}
        us = [found.get(name, {}).get("median_us") for name in names]
        shown = (f"{value:,.1f}" if value else "—" for value in us)
        size = f"{line['rows']:,} x {line['cols']:,}"
        rows.append((line["case"], f"{line['dtype']} {size}", *shown, faster(line)))
    head = ("what is computed", "rows x cols", *(f"{name} µs" for name in names), "faster compiled")
    return "A softmax between a prologue and an epilogue", head, tuple(rows), 2
