"""Measure the ladder on this machine's GPU and store it: the cells of README and lessons.

python benchmarks/ladder.py [--out benchmarks/results/h200] [--shard 0/1]

A cell is one process of `online-softmax ladder --save`; a stored cell is skipped, so an interrupted
run resumes. `--shard i/n` takes every n-th cell.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

CELLS = (
    (32768, 4096, "fp32"),
    (4096, 4096, "fp32"),
    (1, 1048576, "fp32"),
    (64, 131072, "fp32"),
    (32768, 4096, "bf16"),
    (4096, 4096, "bf16"),
    (1, 1048576, "bf16"),
    (64, 131072, "bf16"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--shard", default="0/1", metavar="I/N")
    options = parser.parse_args()
    index, count = (int(part) for part in options.shard.split("/"))
    failed = 0
    for rows, cols, dtype in CELLS[index::count]:
        path = options.out / f"ladder-{rows}x{cols}-{dtype}.jsonl"
        if path.exists():
            continue
        start = time.monotonic()
        command = [sys.executable, "-m", "online_softmax.lab.cli", "ladder"]
        command += ["--rows", str(rows), "--cols", str(cols), "--dtype", dtype]
        command += ["--against", "torch,compile", "--save", str(path)]
        status = subprocess.run(command, check=False).returncode
        failed += status != 0
        print(f"{path.name}: exit {status}, {time.monotonic() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
