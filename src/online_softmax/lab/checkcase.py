"""What the checks of public operations share: the case, its numbers, and how results are judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from online_softmax.lab import judge
from online_softmax.lab.contract import Ran

# Of attention and merges alone, shares of the largest element, by type: the output, the gradients;
# lse is float32.
OUT = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
GRADIENT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
LSE = 2e-5


@dataclass(frozen=True)
class Case:
    """One input of an operation."""

    name: str
    given: Any = None
    source: str = ""
    is_gradient: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def both(named: Sequence[tuple[str, Any]]) -> list[Case]:
    """Each input forward, and with its gradient."""
    return [
        Case(f"{name}{suffix}", given, is_gradient=bool(suffix))
        for name, given in named
        for suffix in ("", ", gradient")
    ]


def normal(
    case: Case, shape: Sequence[int], dtype: torch.dtype, device: str, role: str = ""
) -> Tensor:
    """Numbers of a case's own, others for each role; a CPU makes them, everywhere the same."""
    made = torch.randn(*shape, generator=judge.generator(case.name + role), dtype=torch.float64)
    return made.to(dtype).to(device)


def near(parts: Sequence[tuple[str, Tensor, Tensor, float]]) -> Ran:
    """Results beside float64 ones, each within a share of its largest element, at least 1."""
    worst = 0.0
    for what, got, want, share in parts:
        if got.shape != want.shape:
            return Ran(why=f"{what} is {tuple(got.shape)}, should be {tuple(want.shape)}")
        if not got.numel():
            continue
        same = got.double() == want
        off = (got.double() - want).abs().masked_fill(same, 0.0)
        allowed = share * max(float(want.nan_to_num(0.0, 0.0, 0.0).abs().max()), 1.0)
        largest = float(off.nan_to_num(math.inf).max())
        if not largest <= allowed:
            at = tuple(int(i) for i in (off.nan_to_num(math.inf) == largest).nonzero()[0])
            return Ran(
                why=f"{what}{list(at)} is {float(got[at]):.9g}, should be {float(want[at]):.9g} "
                f"(allowed error {allowed:.2g})"
            )
        worst = max(worst, largest)
    return Ran(max_error=worst)
