"""Rank the cuts of cross-entropy's kernels: the loss, its gradient from lse, and both in one go.

python benchmarks/cross_entropy_cuts.py --out FILE [--cols 4096,50257] [--dtype bf16,fp32]

What the tables of rowtables.py for "cross_entropy" and "cross_entropy_in_forward" were chosen from.
Shares of a read kernel (loss) or a copy kernel (the others) of the same tensors; the planned cut
has a star. A file that is there is written anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from online_softmax import jit, rowplan, rowsweep
from online_softmax.cuda import crossentropy_launch as ce
from online_softmax.cuda import launch
from online_softmax.cuda.launch import Launch
from online_softmax.lab import ceilings, inputs, scriptlog
from online_softmax.lab.benchfile import header_line
from online_softmax.rowplan import Row
from online_softmax.rowtables import SHARES

COLS = "4096,8192,16384,32000,50257,65536,128256,128257,151936,201088,262144"
BYTES = 1 << 29  # of the logits: far past any L2
SETS, REPEATS = 2, 7
BACKWARD_CUTS = ((64, 4), (128, 4), (256, 4), (64, 8), (64, 2))  # threads, vectors a lane
ARCH = "sm_90a"
Calls = dict[str, Callable[[int], list[Launch]]]


def name_of(row: Row, planned: Row) -> str:
    """A cut in a word: kernel, vectors a lane, threads, blocks a row, parts a row."""
    star = "*" if row == planned else ""
    return f"{row.kernel} {row.vectors} x {row.block} x {row.cluster} x {row.parts}{star}"


def calls(
    x: list[Tensor], dx: list[Tensor], target: Tensor, rows: list[Tensor]
) -> dict[str, Calls]:
    """What is timed, by what it computes."""
    loss, lse, ones = rows
    cols, dtype, options = x[0].shape[1], str(x[0].dtype).removeprefix("torch."), ce.Options()
    found: dict[str, Calls] = {"loss": {}, "gradient": {}, "both": {}}

    def of_loss(row: Row, i: int) -> list[Launch]:
        if row.kernel == "split":
            return ce.split(x[i], target, loss, lse, None, options, row)
        return ce.in_registers(x[i], target, None, loss, lse, None, None, options, row, True)

    def of_both(row: Row, i: int) -> list[Launch]:
        return ce.in_registers(x[i], target, ones, loss, lse, None, dx[i], options, row, True)

    def of_gradient(row: Row, i: int) -> list[Launch]:
        return ce.backward(ones, x[i], target, lse, None, dx[i], options, True, row=row)

    planned = rowplan.numbers(ce.FOLD_OP, cols, dtype, ARCH)
    for row in dict.fromkeys((planned, *rowsweep.sweep("logsumexp", cols, dtype, ARCH))):
        if row.kernel == "registers" or (row.kernel == "split" and row.parts > 1):
            found["loss"][name_of(row, planned)] = lambda i, row=row: of_loss(row, i)
    planned = rowplan.numbers(ce.GRADIENT_OP, cols, dtype, ARCH)
    for row in dict.fromkeys((planned, *rowsweep.sweep("softmax", cols, dtype, ARCH))):
        if row.kernel == "registers":
            found["both"][name_of(row, planned)] = lambda i, row=row: of_both(row, i)
    for cut in BACKWARD_CUTS:
        row = rowplan.shares(ce.BACKWARD_OP, cols, x[0].itemsize, cut)
        star = "*" if cut == SHARES[ce.BACKWARD_OP] else ""
        found["gradient"][f"{cut[1]} x {cut[0]}{star}"] = lambda i, row=row: of_gradient(row, i)
    return found


def tensors(cols: int, dtype: torch.dtype, device: str) -> tuple[list, list, Tensor, list]:
    """Logits, gradients, targets; and loss, lse and an upstream of one for all rows."""
    rows = BYTES // (cols * dtype.itemsize)
    make = torch.randn if device == "cuda" else torch.empty
    x = [make(rows, cols, device=device, dtype=dtype) for _ in range(SETS)]
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    target += torch.arange(rows, device=device) % cols if device == "cuda" else 0
    loss, lse = (torch.zeros(rows, device=device) for _ in range(2))
    ones = torch.ones((), device=device).expand(rows)
    return x, [torch.empty_like(each) for each in x], target, [loss, lse, ones]


def compiled(key: tuple[str, str]) -> None:
    """One kernel compiled into the cache on disk."""
    jit.compile(*key, ARCH)


def microseconds(call: Callable[[int], None]) -> float:
    """The median over REPEATS of a CUDA graph of a call on each set, a call."""
    for i in range(SETS):
        call(i)
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for i in range(SETS):
            call(i)
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / SETS)
    return sorted(found)[REPEATS // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cols", default=COLS, help="column counts, with commas between")
    parser.add_argument("--dtype", default="bf16,fp32")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("cross_entropy_cuts.py needs a CUDA GPU, and torch sees none here")
    given.out.unlink(missing_ok=True)
    command = f"python benchmarks/cross_entropy_cuts.py --cols {given.cols} --dtype {given.dtype}"
    log, header = scriptlog.begin(given.out, command, "CUDA graph of two calls; median of seven")
    log.write(header_line(header))
    cells = [
        (int(cols), inputs.dtype_of(dtype))
        for dtype in given.dtype.split(",")
        for cols in given.cols.split(",")
    ]
    kernels = set()
    for cols, dtype in cells:
        for group in calls(*tensors(cols, dtype, "meta")).values():
            kernels |= {(w.file, w.symbol) for call in group.values() for w in call(0)}
    with ProcessPoolExecutor() as pool:
        list(pool.map(compiled, sorted(kernels)))
    for cols, dtype in cells:
        x, dx, target, rows = tensors(cols, dtype, "cuda")
        rows[1].copy_(torch.logsumexp(x[0], -1).float())
        seen, device = torch.zeros(1, dtype=torch.int32, device="cuda"), x[0].device
        read = microseconds(lambda i, x=x, seen=seen: ceilings.read_call(x[i], seen))
        copy = microseconds(lambda i, x=x, dx=dx: ceilings.copy_call(x[i], dx[i]))
        line: dict = {"kind": "cuts", "dtype": str(dtype).removeprefix("torch."), "cols": cols}
        line |= {"rows": len(target), "read_us": read, "copy_us": copy}
        for what, group in calls(x, dx, target, rows).items():
            first = next(iter(group.values()))  # which else would be timed cold
            microseconds(lambda i, c=first, at=device: launch.run(c(i), at))
            limit = read if what == "loss" else copy
            shares = {
                name: round(limit / microseconds(lambda i, c=c, at=device: launch.run(c(i), at)), 4)
                for name, c in group.items()
            }
            line[what] = dict(sorted(shares.items(), key=lambda each: -each[1]))
            best = "; ".join(f"{name}: {share:.3f}" for name, share in list(line[what].items())[:3])
            print(f"{line['dtype']} {len(target)} x {cols} {what}: {best}", file=sys.stderr)
        log.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
