"""Row kernels under trial, not in the package: right on this machine, and, with a GPU, how fast.

python benchmarks/experiments/rows/run.py [--out FILE] [--cells big|odd|all]

Without a GPU every variant runs through host execution on small shapes and is judged. With one,
every variant that fits a cell is judged on it and then timed, cold L2, beside the copy kernel,
torch.softmax and the package's own choice, interleaved in this process; one JSON line a cell.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from online_softmax import catalogue, plan
from online_softmax.cuda import launch
from online_softmax.cuda.launch import C_TYPE, Launch
from online_softmax.lab import ceilings, judge

Run = Callable[[Launch], object]
SOURCE = str(Path(__file__).with_name("rows.cu"))
COLS = (
    64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576
)  # fmt: skip
ODD = (1000, 5000, 32001, 50257, 100277, 128257, 201088)
ELEMENTS = 2**27


def _whole(*tensors: Tensor) -> str:
    """The template argument: whether all rows of all tensors are whole 16-byte vectors."""
    aligned = all(
        t.data_ptr() % 16 == 0
        and t.stride(0) * t.itemsize % 16 == 0
        and t.shape[1] * t.itemsize % 16 == 0
        for t in tensors
    )
    return str(aligned).lower()


def lse_launch(x: Tensor, out: Tensor, tile: int, block: int) -> Launch:
    """logsumexp of each row, a block a row, `tile` vectors a thread under way at once."""
    symbol = f"rows_lse<{C_TYPE[x.dtype]}, {tile}, {_whole(x)}>"
    args = (x, out, *x.shape, x.stride(0), 1.0)
    return Launch(SOURCE, symbol, args, len(x), block)


@dataclass(frozen=True)
class Variant:
    """Launch numbers of rows_in_registers. lanes 0: a row to a block, or to a cluster of blocks."""

    vectors: int
    lanes: int
    block: int
    cluster: int = 1

    def capacity(self, vector: int) -> int:
        """Columns that it can hold."""
        threads = self.lanes or self.block * self.cluster
        return threads * self.vectors * vector

    def _grid(self, rows: int) -> int:
        return plan.ceil_div(rows * self.lanes, self.block) if self.lanes else rows * self.cluster

    def launch(self, x: Tensor, y: Tensor, emit: str = "EmitSoftmax") -> Launch:
        kinds = f"{C_TYPE[x.dtype]}, {C_TYPE[y.dtype]}, {self.vectors}, {self.lanes}"
        symbol = f"rows_in_registers<{kinds}, {_whole(x, y)}, {emit}>"
        args = (x, y, *x.shape, x.stride(0), 1.0, 0)
        return Launch(SOURCE, symbol, args, self._grid(len(x)), self.block, cluster=self.cluster)

    def backward(self, dy: Tensor, y: Tensor, dx: Tensor, kind: str = "Softmax") -> Launch:
        kinds = f"{C_TYPE[y.dtype]}, {self.vectors}, {self.lanes}, {_whole(dy, y, dx)}"
        symbol = f"rows_backward<{kinds}, Backward{kind}>"
        args = (dy, y, dx, *y.shape, dy.stride(0), 1.0)
        return Launch(SOURCE, symbol, args, self._grid(len(y)), self.block, cluster=self.cluster)

    @property
    def name(self) -> str:
        where = f"{self.lanes} lanes" if self.lanes else f"{self.cluster} x {self.block}"
        return f"{where} x {self.vectors} ({self.block})"


@dataclass(frozen=True)
class Staged:
    """Launch numbers of rows_in_shared: a row to a block, or to a cluster of blocks."""

    block: int
    cluster: int

    def warp_vectors(self, cols: int, vector: int) -> int:
        warps = self.block // 32 * self.cluster
        return plan.ceil_div(plan.ceil_div(cols, vector), warps * 32) * 32

    def shared_bytes(self, cols: int, vector: int) -> int:
        return (self.warp_vectors(cols, vector) * self.block // 32 + 1) * 16

    def launch(self, x: Tensor, y: Tensor, emit: str = "EmitSoftmax") -> Launch:
        vector, cols = 16 // x.itemsize, x.shape[1]
        symbol = f"rows_in_shared<{C_TYPE[x.dtype]}, {_whole(x, y)}, {emit}>"
        args = (x, y, *x.shape, x.stride(0), 1.0, 0, self.warp_vectors(cols, vector))
        shared = self.shared_bytes(cols, vector)
        grid = len(x) * self.cluster
        return Launch(SOURCE, symbol, args, grid, self.block, self.cluster, shared)

    @property
    def name(self) -> str:
        return f"shared {self.cluster} x {self.block}"


def staged(cols: int, vector: int, most_bytes: int = 220_000) -> Iterator[Staged]:
    """What may hold a row of cols in shared memory, several blocks a multiprocessor if it can."""
    for cluster in (1, 2, 4, 8, 16):
        for block in (128, 256, 512):
            variant = Staged(block, cluster)
            is_worth_it = cluster == 1 or cols * 16 // vector >= 4096 * cluster
            if is_worth_it and variant.shared_bytes(cols, vector) <= most_bytes:
                yield variant


def variants(cols: int, vector: int) -> Iterator[Variant]:
    """What may hold a row of cols without much waste: capacity from cols to twice it."""
    vectors_a_row = plan.ceil_div(cols, vector)
    for vectors in (1, 2, 4, 8, 16):
        if vectors * vector > 64:
            continue
        for lanes in (4, 8, 16, 32):
            if vectors_a_row <= vectors * lanes < 2 * vectors_a_row + lanes:
                for block in (128, 256):
                    yield Variant(vectors, lanes, block)
        for cluster in (1, 2, 4, 8, 16):
            for block in (32, 64, 128, 256, 512):
                if block * vectors * vector * cluster < 2048 * cluster and cluster > 1:
                    continue
                if vectors_a_row <= vectors * block * cluster < 2 * vectors_a_row:
                    yield Variant(vectors, 0, block, cluster)


# ---- right


def wrong_here(x: Tensor, variant: Variant | Staged, run: Run) -> list[str]:
    """What is wrong with a variant's three directions on x, sentences."""
    found = []
    y = judge.output(*x.shape, x.dtype, x.device)
    run(variant.launch(x, y))
    verdict = judge.check(y, x)
    if not verdict.ok or judge.spilled(y):
        found.append(f"softmax: {verdict.why or 'wrote around y'}")
    wide = x.double()
    z = judge.output(*x.shape, x.dtype, x.device)
    run(variant.launch(x, z, "EmitLogSoftmax"))
    found += _differs("log_softmax", z, torch.log_softmax(wide, -1), 1e-6)
    if isinstance(variant, Staged):
        return found
    generator = torch.Generator(device=x.device).manual_seed(1)
    dy = torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)
    for kind, out in (("Softmax", y), ("LogSoftmax", z)):
        dx = judge.output(*x.shape, x.dtype, x.device)
        run(variant.backward(dy, out, dx, kind))
        g, o = dy.double(), out.double()
        if kind == "Softmax":
            want = o * (g - (g * o).sum(-1, keepdim=True))
        else:
            want = g - o.exp() * g.sum(-1, keepdim=True)
        # Float sums of terms that cancel: the error is that of their sizes.
        size = (g * o).abs().sum(-1).max() if kind == "Softmax" else g.abs().sum(-1).max()
        found += _differs(
            f"backward of {kind}", dx, want, 1e-6 * max(1.0, float(size.nan_to_num()))
        )
    return found


def lse_wrong_here(x: Tensor, tile: int, block: int, run: Run) -> list[str]:
    out = torch.full((len(x),), torch.nan, device=x.device)
    run(lse_launch(x, out, tile, block))
    return _differs("logsumexp", out, torch.logsumexp(x.double(), -1), 1e-6)


def _differs(what: str, got: Tensor, want: Tensor, atol: float) -> list[str]:
    rtol = 4e-6 + torch.finfo(got.dtype).eps * (got.dtype != torch.float32)
    if torch.allclose(got.double(), want, rtol=rtol, atol=atol, equal_nan=True):
        return []
    off = (got.double() - want).abs().nan_to_num()
    nans = f"NaN at {int(got.isnan().sum())}, should be {int(want.isnan().sum())}"
    return [f"{what}: off by {float(off.max()):.3g}, {nans}"]


def awkward(generator: torch.Generator) -> Iterator[Tensor]:
    """Small matrices of every 16-byte phase, with infinities and NaN."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for cols in (1, 5, 33, 64, 131, 257, 1000, 1024, 2051):
            for start, gap in ((0, 0), (1, 0), (3, 5), (0, 1)):
                base = torch.randn(5, cols + start + gap, generator=generator).mul(3).to(dtype)
                x = base[:, start : start + cols]
                if cols > 2:
                    x[1], x[2, 1], x[3, 0] = -torch.inf, torch.nan, torch.inf
                yield x


def check_on_the_cpu() -> int:
    """Every kind of variant on awkward shapes through host execution; how many were wrong."""
    from online_softmax.cuda import host

    wrong = count = 0
    for x in awkward(torch.Generator().manual_seed(0)):
        vector, cols = plan.VECTOR_BYTES // x.itemsize, x.shape[1]
        small = [v for v in variants(cols, vector) if v.block <= 128 and v.cluster in (1, 2, 4)]
        few = [v for v in staged(cols, vector) if v.block == 128 and v.cluster in (1, 2)]
        for variant in [*small[::7], *few[:2]]:
            for found in wrong_here(x, variant, host.launch):
                wrong += 1
                print(f"{x.dtype} {tuple(x.shape)} stride {x.stride(0)} {variant.name}: {found}")
            count += 1
        for found in lse_wrong_here(x, 2, 64, host.launch):
            wrong += 1
            print(f"{x.dtype} {tuple(x.shape)} stride {x.stride(0)}: {found}")
    print(f"{count} variants on matrices, {wrong} wrong")
    return wrong


# ---- fast


def measure(cells: str, operations: list[str], out: Path | None) -> int:
    """Judge and time every variant on every cell of a GPU."""
    from online_softmax.lab import bench

    cols_list = {"big": COLS, "odd": ODD, "all": COLS + ODD}[cells]
    generator = torch.Generator(device="cuda").manual_seed(0)

    def run(each: Launch) -> None:
        launch.run([each], torch.device("cuda", torch.cuda.current_device()))

    wrong = 0
    for dtype in (torch.bfloat16, torch.float32):
        vector = plan.VECTOR_BYTES // dtype.itemsize
        for cols in cols_list:
            x = torch.randn(ELEMENTS // cols, cols, device="cuda", generator=generator).to(dtype)
            fitting, few = [], x[:37]
            for variant in [*variants(cols, vector), *staged(cols, vector)]:
                if isinstance(variant, Staged) and cols < 16384:
                    continue
                try:
                    found = wrong_here(few, variant, run)
                    torch.cuda.synchronize()
                except Exception as error:  # noqa: BLE001  a variant may not fit: a row
                    found = [f"{type(error).__name__} {str(error)[:120]}"]
                if found:
                    wrong += 1
                    print(f"{dtype} {cols} {variant.name}: {found}", flush=True)
                else:
                    fitting.append(variant)
            buffers = bench.Buffers(x)
            for operation in operations:
                line = _cell(operation, x, buffers, fitting, run)
                print(f"{dtype} {tuple(x.shape)} {operation}: {line['text']}", flush=True)
                if out:
                    with out.open("a") as file:
                        file.write(
                            json.dumps({**line, "dtype": str(dtype), "shape": x.shape}) + "\n"
                        )
            del buffers, x
            torch.cuda.empty_cache()
    return wrong


def _cell(operation: str, x: Tensor, buffers: Any, fitting: list[Any], run: Run) -> dict[str, Any]:
    """One operation on one matrix: all variants ranked, the best three timed beside the ceiling."""
    from online_softmax.lab import bench

    calls: dict[str, Any] = {}
    others: dict[str, Any] = {}
    if operation == "softmax":
        ceiling = bench.copy_call
        calls = {v.name: lambda x, y, v=v: run(v.launch(x, y)) for v in fitting}
        chosen, _ = catalogue.choose(catalogue.problem_of(x))
        numbers = chosen.numbers(catalogue.problem_of(x))
        others = {
            "torch": bench.RIVALS["torch"](),
            "package": lambda x, y: chosen.run(x, y, numbers),
        }
    elif (
        operation == "backward"
    ):  # a set's x is dy, its y is dx; the output is one more rotating set
        outputs = {x.data_ptr(): other for (x, _), (other, _) in zip(
            buffers.sets, buffers.sets[1:] + buffers.sets[:1], strict=True)}  # fmt: skip
        ceiling = lambda x, y: ceilings.add_call(x, outputs[x.data_ptr()], y)  # noqa: E731
        calls = {
            v.name: lambda x, y, v=v: run(v.backward(x, outputs[x.data_ptr()], y))
            for v in fitting
            if isinstance(v, Variant)
        }
    else:
        sums = torch.empty(len(x), device=x.device)
        ceiling = lambda x, y: ceilings.read_call(x, sums)  # noqa: E731
        for tile in (1, 2, 4, 8):
            for block in (32, 64, 128, 256, 512):
                if tile * block * 16 // x.itemsize > 2 * x.shape[1]:
                    continue
                if not lse_wrong_here(x[:37], tile, block, run):
                    calls[f"{block} threads, tile {tile}"] = lambda x, y, t=tile, b=block: run(
                        lse_launch(x, sums, t, b)
                    )
    ranked = bench.interleaved(buffers, calls, rounds=1, replays=3)
    best = sorted(ranked, key=lambda name: ranked[name].median_us)[:3]
    final = bench.interleaved(
        buffers, {"ceiling": ceiling, **others, **{name: calls[name] for name in best}}
    )
    limit = final["ceiling"].median_us
    text = ", ".join(f"{n} {t.median_us:.1f} ({limit / t.median_us:.3f})" for n, t in final.items())
    return {
        "operation": operation,
        "text": text,
        "final_us": {name: t.rounds_us for name, t in final.items()},
        "ranked_us": {name: t.median_us for name, t in ranked.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cells", choices=("big", "odd", "all"), default="all")
    parser.add_argument("--operations", default="softmax,backward,logsumexp")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        return 1 if check_on_the_cpu() else 0
    return 1 if measure(options.cells, options.operations.split(","), options.out) else 0


if __name__ == "__main__":
    sys.exit(main())
