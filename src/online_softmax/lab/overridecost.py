"""What `override_torch` costs the host: torch's own functions before it and with it in force.

The host's microseconds of a call, as hostcost.py counts them. An override is for the whole process,
so its ways follow one another instead of taking turns; torch without one goes first, before there
is any registration that could stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from online_softmax import rowops
from online_softmax.library.override import Override, Takes

TORCH = "torch"
WAYS = (TORCH, "override in force, torch's kernel runs", "override in force, our kernel runs")

Plain = Callable[[], Any]
Timed = Callable[[dict[str, Plain]], dict[str, dict[str, float]]]  # figures of each call, by name


def _calls(x: Tensor) -> dict[str, Plain]:
    """torch's functions that an override reaches, by what they are."""
    given = x.detach().clone().requires_grad_()
    y, dy = torch.softmax(x, -1), torch.ones_like(x)
    backward = torch.ops.aten._softmax_backward_data.default
    return {
        "softmax": lambda: torch.softmax(x, -1),
        "softmax, a gradient recorded": lambda: torch.softmax(given, -1),
        "softmax's backward": lambda: backward(dy, y, -1, x.dtype),
        "log_softmax": lambda: torch.log_softmax(x, -1),
        "logsumexp": lambda: torch.logsumexp(x, -1),
    }


def measure(x: Tensor, timed: Timed) -> list[dict[str, Any]]:
    """Each call in each way: name, way and what `timed` gives of it.

    On a CPU torch's kernels stand for ours, which it has not, behind the same choice.
    """
    ours: Takes = rowops.has_kernel if x.is_cuda else (lambda *_: True)
    takes: tuple[Takes | None, ...] = (None, lambda *_: False, ours)
    lines: list[dict[str, Any]] = []
    for way, taken in zip(WAYS, takes, strict=True):
        override = None if taken is None else Override(x.device.type.upper(), taken)
        try:
            found = timed(_calls(x))
        finally:
            if override:
                override.remove()
        lines += [{"name": name, "way": way, **figures} for name, figures in found.items()]
    return lines


def table(lines: list[dict[str, Any]]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Kept lines as a heading and rows, a call each."""
    by_call: dict[str, dict[str, float]] = {}
    for line in lines:
        by_call.setdefault(line["name"], {})[line["way"]] = line["median_us"]
    ways = list(dict.fromkeys(line["way"] for line in lines))
    rows = [
        (name, *(f"{found[way]:.1f}" if way in found else "—" for way in ways))
        for name, found in by_call.items()
    ]
    return ("call of torch's", *(f"{way}, µs" for way in ways)), tuple(rows)
