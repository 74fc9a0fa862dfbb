"""Measure a softmax between a prologue and an epilogue in compiled models, and store it.

python benchmarks/fusion.py --out benchmarks/results/h200/bench-fusion.jsonl [--seconds S]

A stored shape is skipped, so an interrupted run resumes. docs/performance.md draws its table.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from online_softmax.lab import benchclock, benchfile, fusion, inputs, ladder, scriptlog


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("fusion.py needs a CUDA GPU, and torch sees none here")
    begun, setting = time.perf_counter(), benchclock.gpu_setting()
    try:
        log, header = scriptlog.begin(given.out, "python benchmarks/fusion.py", ladder.CLOCK)
    except inputs.BadInput as error:
        sys.exit(f"error: {error}")
    kept = {
        (each["case"], each["dtype"], each["rows"], each["cols"])
        for part in log.kept
        for each in part.others
    }
    head = benchfile.header_line(header)
    for work in fusion.works():
        if (work.case, work.dtype, work.rows, work.cols) in kept:
            continue
        if time.perf_counter() - begun > given.seconds:
            print("the seconds are over; run it again for the rest", file=sys.stderr)
            break
        log.write(head + benchfile.line("fusion", fusion.measure(work, setting)))
        head = ""
        print(f"{work.text}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
