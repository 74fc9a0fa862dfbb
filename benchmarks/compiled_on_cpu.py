"""What torch.compile makes of ours on a CPU, beside the same of torch's own functions.

Each in one thread, the fastest of several rounds, forward alone and with the backward:

    python benchmarks/compiled_on_cpu.py --rows 256 --cols 4096
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import online_softmax

WARM_CALLS, CALLS, ROUNDS = 8, 25, 4
Call = Callable[[Tensor], Tensor]


def pairs(target: Tensor) -> dict[str, tuple[Call, Call]]:
    """Ours and torch's, by operation."""
    ours = online_softmax
    return {
        "softmax": (ours.softmax, lambda x: torch.softmax(x, -1)),
        "log_softmax": (ours.log_softmax, lambda x: torch.log_softmax(x, -1)),
        "logsumexp": (ours.logsumexp, lambda x: torch.logsumexp(x, -1)),
        "cross_entropy": (
            lambda x: ours.cross_entropy(x, target),  # type: ignore[dict-item, return-value]
            lambda x: functional.cross_entropy(x, target),
        ),
    }


def both(call: Call, x: Tensor) -> Callable[[], Any]:
    """The call and its backward, by a gradient of ones."""

    def run() -> None:
        x.grad = None
        y = call(x)
        y.backward(torch.ones_like(y))

    return run


def median_us(run: Callable[[], Any]) -> float:
    """Of CALLS calls in a row."""
    spent = []
    for _ in range(CALLS):
        start = time.perf_counter()
        run()
        spent.append(time.perf_counter() - start)
    return 1e6 * statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--cols", type=int, default=4096)
    given = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(given.rows, given.cols)
    leaf = x.clone().requires_grad_()
    target = torch.randint(given.cols, (given.rows,))
    for op, (ours, torchs) in pairs(target).items():
        calls = {"ours": ours, "torch": torchs}
        calls |= {f"{name} compiled": torch.compile(call) for name, call in calls.items()}
        for what in ("forward", "with backward"):
            runs = {
                name: both(call, leaf) if what != "forward" else lambda call=call: call(x)
                for name, call in calls.items()
            }
            for run in runs.values():
                for _ in range(WARM_CALLS):
                    run()
            rounds = [{name: median_us(run) for name, run in runs.items()} for _ in range(ROUNDS)]
            least = {name: min(each[name] for each in rounds) for name in runs}
            print(op, what, ", ".join(f"{name} {us:,.0f} us" for name, us in least.items()))


if __name__ == "__main__":
    main()
