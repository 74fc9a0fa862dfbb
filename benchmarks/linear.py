"""Measure linear_cross_entropy, forward and backward, beside rivals and matrix products alone.

python benchmarks/linear.py --out benchmarks/results/h200/bench-linear.jsonl [--tokens N ...]

A size that the file has is skipped. docs/performance.md draws its table. Without a GPU it runs on
the CPU, on small sizes alone, and counts no memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from online_softmax.lab import benchfile, inputs, linear, scriptlog

CLOCK = "Events around each call. Contenders interleaved; median of all rounds"
CPU_LOGITS = 2**24  # more of them would take a CPU minutes, and gigabytes


def size(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"give a whole number, at least 1, not {text}")
    return value


def main() -> int:
    planned = linear.Work()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=size, default=planned.tokens)
    parser.add_argument("--features", type=size, default=planned.features)
    parser.add_argument("--classes", type=size, default=planned.classes)
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32")
    parser.add_argument("--rounds", type=size, default=linear.ROUNDS)
    given = parser.parse_args()
    try:
        dtype = inputs.short_name(inputs.dtype_of(given.dtype))
        work = linear.Work(given.tokens, given.features, given.classes, dtype)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu" and work.tokens * work.classes > CPU_LOGITS:
            sys.exit(
                "linear.py needs a CUDA GPU for these sizes, and torch sees none here: give "
                f"tokens x classes of at most {CPU_LOGITS:,}"
            )
        command = f"python benchmarks/linear.py: {work.text}"
        log, header = scriptlog.begin(given.out, command, CLOCK, linear.PACKAGES)
    except inputs.BadInput as error:
        sys.exit(f"error: {error}")
    if linear.is_kept(log, work):
        print(f"{given.out} has {work.text}", file=sys.stderr)
        return 0
    begun = time.perf_counter()

    def say(text: str) -> None:
        spent = time.perf_counter() - begun
        print(f"{spent:.0f} s: {text}", file=sys.stderr, flush=True)

    line = linear.measure(work, device, given.rounds, say=say)
    log.write(benchfile.header_line(header) + benchfile.line("linear", line))
    for each in line["entries"]:
        if each["why"]:
            print(f"{each['name']}: {each['why']}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
