"""What a call costs on the host, piece by piece, with the kernels replaced by an allocation.

python benchmarks/host_cost.py [--rows 8] [--cols 1024]

Microseconds a call on CPU tensors: the least of many repetitions, so that a busy machine shows
little. What remains on a GPU is the launch, which the kernel's own figures have.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from online_softmax import arguments, log_softmax, logsumexp, rowops, softmax
from online_softmax.library import eager, routes
from online_softmax.library.calculus import Along
from online_softmax.library.override import Override

CALLS, REPETITIONS = 300, 120


def microseconds(function: Callable[[], Any]) -> float:
    """The least, over the repetitions, of the mean time of a call."""
    least = float("inf")
    for _ in range(REPETITIONS + 1):
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        least = min(least, time.perf_counter() - start)
    return least / CALLS * 1e6


def pieces(x: torch.Tensor) -> list[tuple[str, Callable[[], Any]]]:
    g = x.clone().requires_grad_()
    y = torch.softmax(x, -1)
    options = Along(-1, None, 1.0, False)
    plain = (None, 1.0, False, "")
    return [
        ("the allocation that stands for a kernel", lambda: torch.empty_like(x)),
        ("softmax(x)", lambda: softmax(x)),
        ("  check x", lambda: arguments.check_input("softmax", x)),
        ("  check dim", lambda: arguments.check_dim("softmax", x, -1)),
        ("  check scale", lambda: arguments.check_scale("softmax", 1.0)),
        ("  choose the route, and the allocation", lambda: routes.along("softmax", x, -1, *plain)),
        ("    traced, subclass or mode?", lambda: routes.takes_op(x)),
        ("    gradient or transform?", lambda: routes.is_recorded(x)),
        ("log_softmax(x)", lambda: log_softmax(x)),
        ("logsumexp(x)", lambda: logsumexp(x)),
        ("softmax(x), a gradient recorded", lambda: softmax(g)),
        ("  the options as a tuple", lambda: Along(-1, None, 1.0, False)),
        ("  autograd.Function", lambda: eager.forward_entry["softmax"](g, options, "")),
        ("logsumexp(x), a gradient recorded", lambda: logsumexp(g)),
        ("backward, from autograd's call to the kernel", lambda: _backward(y, options)),
    ]


def _backward(y: torch.Tensor, options: Along) -> torch.Tensor:
    with torch.no_grad():
        return eager.backward_entry["softmax"](y, y, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--cols", type=int, default=1024)
    given = parser.parse_args()
    x = torch.randn(given.rows, given.cols)
    g = x.clone().requires_grad_()
    lse = torch.logsumexp(x, -1)

    def torchs(name: str) -> None:
        calls = (lambda: torch.softmax(x, -1), lambda: torch.softmax(g, -1))
        figures = (*map(microseconds, calls), microseconds(lambda: torch.logsumexp(x, -1)))
        print("| " + " | ".join((name, *(f"{figure:.1f}" for figure in figures))) + " |")

    print("| torch's functions | softmax | with a gradient recorded | logsumexp |")
    torchs("torch")
    with Override("CPU", lambda *_: False):
        torchs("override in force, torch's kernel runs")
    rowops.forward = rowops.backward = lambda *_: torch.empty_like(x)
    rowops.logsumexp = lambda *_: torch.empty_like(lse)
    with Override("CPU", lambda *_: True):
        torchs("override in force, an allocation for our kernel")
    print("| ours | us |")
    for name, function in pieces(x):
        print(f"| {name} | {microseconds(function):.2f} |")


if __name__ == "__main__":
    main()
