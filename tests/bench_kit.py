"""What the benchmark's tests share: a setting without a GPU, times that are given, contenders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from online_softmax.lab.bench import Timing
from online_softmax.lab.benchclock import Setting
from online_softmax.lab.benchfile import Header
from online_softmax.lab.contenders import Contender
from online_softmax.lab.grid import Cell
from online_softmax.lab.rotation import Call, Overwrites, Rotation

HEADER = Header("2026-01-01T00:00:00+00:00", "online-softmax bench", "a GPU", {"sources": "abc"})
SPREAD = 0.01  # of a median: how far fake rounds are apart
RIGHT: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda x: torch.softmax(x.double(), -1),
    "log_softmax": lambda x: torch.log_softmax(x.double(), -1),
    "logsumexp": lambda x: torch.logsumexp(x.double(), -1),
    "softmax_backward": lambda dy, y: (
        y.double() * (dy.double() - (dy.double() * y.double()).sum(-1, keepdim=True))
    ),
    "log_softmax_backward": lambda dy, y: (
        dy.double() - y.double().exp() * dy.double().sum(-1, keepdim=True)
    ),
}


def timing(us: float) -> Timing:
    rounds = (us * (1 - SPREAD), us, us * (1 + SPREAD))
    return Timing(us, rounds[0], rounds[2], rounds)


def clock(us: Mapping[str, float], uncaptured: Sequence[str]) -> Any:
    """Calls everything once on every set, as a capture does; then says the given times."""

    def interleaved(
        sets: Rotation, calls: dict[str, Call], may_fail: Sequence[str]
    ) -> dict[str, Timing]:
        found = {}
        for name, call in calls.items():
            for tensors in sets.sets:
                call(*tensors)
            if isinstance(call, Overwrites):
                sets.restore()
            nan = float("nan")
            if name in uncaptured:
                assert name in may_fail
                found[name] = Timing(nan, nan, nan, refused="RuntimeError: it synchronises")
            else:
                found[name] = timing(us.get(name, 100.0))
        return found

    return interleaved


def setting(
    us: Mapping[str, float] | None = None,
    uncaptured: Sequence[str] = (),
    free_bytes: int = 2**40,
    **more: Any,
) -> Setting:
    """The CPU with a clock that says what it is told; do_bench says 77."""
    us = us or {}

    def do_bench(call: Callable[[], Any], before: Callable[[], None] | None) -> float:
        if before:
            before()
        call()
        return 77.0

    given: dict[str, Any] = {
        "device": torch.device("cpu"),
        "l2_bytes": 4096,
        "interleaved": clock(us, uncaptured),
        "quick": clock(us, uncaptured),
        "do_bench": do_bench,
        "free_bytes": lambda: free_bytes,
        "synchronize": lambda: None,
    }
    return Setting(**(given | more))


def right(op: str) -> Call:
    """Fills the last tensor of a set with the right result."""

    def call(*tensors: Tensor) -> None:
        tensors[-1].copy_(RIGHT[op](*tensors[:-1]))

    return call


def returning(op: str) -> Call:
    """Returns the right result in a tensor of its own."""
    return lambda *tensors: RIGHT[op](*tensors[:-1]).to(tensors[-1].dtype)


def wrong(op: str) -> Call:
    def call(*tensors: Tensor) -> None:
        right(op)(*tensors)
        tensors[-1].view(-1)[-1] += 1

    return call


def lines(op: str, ours: Call | None = None, **rivals: Call) -> list[Contender]:
    """A ceiling that does nothing, ours, and rivals by name."""
    found = [
        Contender("ceiling", "ceiling", lambda: lambda *tensors: None),
        Contender("ours", "ours", lambda: ours or right(op)),
    ]
    for name, call in rivals.items():
        found.append(Contender(name, "rival", lambda call=call: call))
    return found


def cells(count: int) -> list[Cell]:
    return [Cell("softmax", "float32", 2, 8 + n) for n in range(count)]


def make(cell: Cell) -> list[Contender]:
    """Contenders of any cell, all right."""
    return lines(cell.op, theirs=right(cell.op))
