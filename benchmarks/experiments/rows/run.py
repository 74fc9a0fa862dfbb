"""Row kernels under trial, not in the package: right on this machine, and, with a GPU, how fast.

python benchmarks/experiments/rows/run.py [--out FILE] [--cells big,odd,few]

Without a GPU every variant runs through host execution on small shapes and is judged. With one,
every variant that fits a cell is judged on it and then timed, cold L2, beside the copy kernel,
torch.softmax and the package's own choice, interleaved in this process; one JSON line a cell.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from online_softmax import catalogue, jit, plan
from online_softmax.cuda import launch
from online_softmax.cuda.launch import C_TYPE, Launch
from online_softmax.lab import judge

Run = Callable[[Launch], object]
CEILINGS = str(Path(__file__).with_name("ceilings.cu"))
PACKED, LANDED, LSE = "rows.cu", "landed.cu", "streamed.cu"
COLS = (
    64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576
)  # fmt: skip
ODD = (1000, 5000, 32001, 50257, 128257, 201088)
FEW_ROWS = (1, 16)
FEW_COLS = (1024, 4096, 32000, 65536, 128256, 262144)
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


def lse_launch(x: Tensor, out: Tensor, tile: int, block: int, stream: bool = False) -> Launch:
    """logsumexp of each row, a block a row, `tile` vectors a thread under way at once."""
    symbol = (
        f"rows_streamed_lse<{C_TYPE[x.dtype]}, float, {tile}, {_whole(x)}, {str(stream).lower()}>"
    )
    args = (x, out, *x.shape, x.stride(0), 1.0)
    return Launch(LSE, symbol, args, len(x), block)


@dataclass(frozen=True)
class Variant:
    """Launch numbers of rows_packed. lanes 0: a row to a block, or to a cluster of blocks."""

    vectors: int
    lanes: int
    block: int
    cluster: int = 1
    stream: bool = False

    @property
    def _slots(self) -> int:
        return 0 if self.lanes else 16 * self.cluster * self.block // 32

    def _grid(self, rows: int) -> int:
        return plan.ceil_div(rows * self.lanes, self.block) if self.lanes else rows * self.cluster

    def launch(self, x: Tensor, y: Tensor, emit: str = "EmitSoftmax") -> Launch:
        kinds = f"{C_TYPE[x.dtype]}, {C_TYPE[y.dtype]}, {self.vectors}, {self.lanes}"
        whole = _whole(x) if emit == "EmitLse" else _whole(x, y)
        symbol = f"rows_in_registers<{kinds}, {whole}, {str(self.stream).lower()}, {emit}>"
        args = (x, y, *x.shape, x.stride(0), 1.0, 0)
        return Launch(
            PACKED, symbol, args, self._grid(len(x)), self.block, self.cluster, self._slots
        )

    def backward(self, dy: Tensor, y: Tensor, dx: Tensor, kind: str = "Softmax") -> Launch:
        kinds = f"{C_TYPE[y.dtype]}, {self.vectors}, {self.lanes}, {_whole(dy, y, dx)}"
        symbol = f"rows_in_registers_backward<{kinds}, {str(self.stream).lower()}, Backward{kind}>"
        args = (dy, y, dx, *y.shape, dy.stride(0), 1.0)
        return Launch(
            PACKED, symbol, args, self._grid(len(y)), self.block, self.cluster, self._slots
        )

    @property
    def name(self) -> str:
        where = f"{self.lanes} lanes" if self.lanes else f"{self.cluster} x {self.block}"
        return f"{where} x {self.vectors} ({self.block})" + " stream" * self.stream


SM_COUNT = 132
_resident: dict[tuple[str, int, int, int], int] = {}


def resident(one: Launch, x: Tensor) -> int:
    """Clusters of a kernel that a GPU holds at once."""
    key = (one.symbol, one.block, one.cluster, one.shared_bytes)
    if not x.is_cuda:
        return 2
    if key not in _resident:
        import cuda.core

        launch.run([replace(one, grid=one.cluster)], x.device)  # loads, lifts limits
        loaded = jit._load(x.device.index, one.file, one.symbol)
        config = cuda.core.LaunchConfig(
            grid=1, block=one.block, cluster=one.cluster, shmem_size=one.shared_bytes
        )
        _resident[key] = loaded.kernel.occupancy.max_active_clusters(
            config, stream=cuda.core.LEGACY_DEFAULT_STREAM
        )
    return _resident[key]


@dataclass(frozen=True)
class Landed:
    """Launch numbers of rows_landed: a row to a block or cluster; clusters stay."""

    vectors: int
    block: int
    cluster: int
    stream: bool = False

    def _shared(self, whole: str, tensors: int) -> int:
        words = self.vectors * 32 + (whole == "false")
        return self.block // 32 * (words * 16 * tensors + 16 * self.cluster)

    def _sized(self, one: Launch, x: Tensor) -> Launch:
        clusters = min(len(x), resident(one, x))
        return replace(one, grid=clusters * self.cluster)

    def launch(self, x: Tensor, y: Tensor, emit: str = "EmitSoftmax") -> Launch:
        whole = _whole(x, y)
        symbol = (
            f"rows_landed<{C_TYPE[x.dtype]}, {self.vectors}, {whole}, "
            f"{str(self.stream).lower()}, {emit}>"
        )
        args = (x, y, *x.shape, x.stride(0), 1.0, 0)
        shared = self._shared(whole, 1)
        return self._sized(Launch(LANDED, symbol, args, 0, self.block, self.cluster, shared), x)

    def backward(self, dy: Tensor, y: Tensor, dx: Tensor, kind: str = "Softmax") -> Launch:
        whole = _whole(dy, y, dx)
        symbol = (
            f"rows_landed_backward<{C_TYPE[y.dtype]}, {self.vectors}, {whole}, "
            f"{str(self.stream).lower()}, Backward{kind}>"
        )
        args = (dy, y, dx, *y.shape, dy.stride(0), 1.0)
        shared = self._shared(whole, 2)
        return self._sized(Launch(LANDED, symbol, args, 0, self.block, self.cluster, shared), y)

    @property
    def name(self) -> str:
        return f"landed {self.cluster} x {self.block} x {self.vectors}" + " stream" * self.stream


def variants(cols: int, vector: int) -> Iterator[Variant]:
    """What holds a row of cols, with blocks no larger than it needs."""
    row = plan.ceil_div(cols, vector)
    for vectors in (1, 2, 4, 6, 8, 12, 16):
        for lanes in (1, 2, 4, 8, 16, 32):
            if row <= vectors * lanes < 2 * row + lanes and vectors <= 8:
                for block in (128, 256):
                    yield Variant(vectors, lanes, block)
        for cluster in (1, 2, 4, 8, 16):
            block = plan.ceil_div(row, vectors * cluster * 32) * 32
            most = 1024 if vectors <= 2 else 512
            if 32 <= block <= most and (cluster == 1 or block * vectors * vector >= 2048):
                yield Variant(vectors, 0, block, cluster)


def landings(cols: int, vector: int) -> Iterator[Landed]:
    row = plan.ceil_div(cols, vector)
    for vectors in (4, 8, 12, 16):
        for cluster in (1, 2, 4, 8, 16):
            block = plan.ceil_div(row, vectors * cluster * 32) * 32
            if 64 <= block <= 512:
                yield Landed(vectors, block, cluster)


# ---- right


def _fits_backward(variant: Any, x: Tensor) -> bool:
    shared = variant._shared("false", 2) if isinstance(variant, Landed) else 0
    return shared <= 200_000 and variant.vectors <= 8


def wrong_here(x: Tensor, variant: Variant | Landed, run: Run) -> list[str]:
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
    if isinstance(variant, Variant):
        lse = judge.output(len(x), 1, torch.float32, x.device)
        run(variant.launch(x, lse, "EmitLse"))
        found += _differs("logsumexp", lse[:, 0], torch.logsumexp(wide, -1), 1e-6)
    if not _fits_backward(variant, x):
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


def lse_wrong_here(x: Tensor, tile: int, block: int, run: Run, stream: bool = False) -> list[str]:
    out = torch.full((len(x),), torch.nan, device=x.device)
    run(lse_launch(x, out, tile, block, stream))
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
        for cols in (1, 33, 257, 1024, 2051):
            for start, gap in ((0, 0), (1, 0), (3, 5)):
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
        small = [v for v in variants(cols, vector) if v.block <= 256]
        land = [Landed(4, plan.ceil_div(cols, vector * 4 * 32 * c) * 32, c) for c in (1, 2)]
        for variant in [*small[::9], *land]:
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


def add_call(a: Tensor, b: Tensor, c: Tensor) -> Launch:
    vectors = a.numel() * a.itemsize // 16
    return Launch(CEILINGS, "add", (a, b, c, vectors), plan.ceil_div(vectors, 256), 256)


def read_call(x: Tensor, out: Tensor) -> Launch:
    vectors = x.numel() * x.itemsize // 16
    return Launch(CEILINGS, "read", (x, out, vectors), plan.ceil_div(vectors, 1024), 256)


def compile_all(symbols: set[tuple[str, str]], arch: str) -> None:
    """Fill the disk cache with every kernel, on all cores."""
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for error in pool.map(_compiled, sorted(symbols), [arch] * len(symbols)):
            if error:
                print(error, flush=True)


def _compiled(which: tuple[str, str], arch: str) -> str:
    try:
        jit.compile(*which, arch)
    except Exception as error:  # noqa: BLE001  a row
        return f"{which[1]}: {str(error)[:300]}"
    return ""


def cells_of(kinds: list[str]) -> Iterator[tuple[int, int]]:
    for kind in kinds:
        if kind == "few":
            yield from ((rows, cols) for cols in FEW_COLS for rows in FEW_ROWS)
        else:
            yield from ((ELEMENTS // cols, cols) for cols in {"big": COLS, "odd": ODD}[kind])


FAMILIES = ["packed", "landed"]


def fitting(cols: int, vector: int) -> list[Any]:
    found: list[Any] = []
    if "packed" in FAMILIES:
        found += variants(cols, vector)
    if "landed" in FAMILIES and cols >= 8192:
        found += landings(cols, vector)
    return found


def symbols_for(cols: int, dtype: torch.dtype) -> set[tuple[str, str]]:
    """What one column count needs: shapes alone decide, so a matrix without storage will do."""
    vector = plan.VECTOR_BYTES // dtype.itemsize
    whole = cols % vector == 0
    x = torch.empty(2, cols, dtype=dtype)
    x = x if whole else torch.empty(2 * cols + 1, dtype=dtype)[1:].view(2, cols)
    found = set()
    for each in fitting(cols, vector):
        for one in (each, replace(each, stream=True)):
            launches = [one.launch(x, x)]
            if _fits_backward(each, x):
                launches += [one.backward(x, x, x)]
            if isinstance(each, Variant):
                launches += [one.launch(x, torch.empty(2, 1), "EmitLse")]
            if one is each:
                launches += [one.launch(x, x, "EmitLogSoftmax")]
                if _fits_backward(each, x):
                    launches += [one.backward(x, x, x, "LogSoftmax")]
            found |= {(launch.file, launch.symbol) for launch in launches}
    out = torch.empty(2)
    for tile in (1, 2, 4, 8):
        for stream in (False, True):
            one = lse_launch(x, out, tile, 32, stream)
            found.add((one.file, one.symbol))
    return found


def measure(kinds: list[str], operations: list[str], out: Path, dtypes: list[str]) -> int:
    """Judge and time every variant on every cell of a GPU."""
    from online_softmax.lab import bench

    generator = torch.Generator(device="cuda").manual_seed(0)
    start = time.monotonic()

    def run(each: Launch) -> None:
        launch.run([each], torch.device("cuda", torch.cuda.current_device()))

    work = [(rows, cols, getattr(torch, d)) for rows, cols in cells_of(kinds) for d in dtypes]
    work = [w for w in work if fitting(w[1], plan.VECTOR_BYTES // w[2].itemsize)]
    needed = set().union(*(symbols_for(c, d) for c, d in {(c, d) for _, c, d in work}))
    compile_all(needed, jit.device_arch(0))
    print(f"{len(needed)} kernels compiled, {time.monotonic() - start:.0f} s", flush=True)
    wrong: dict[tuple[str, int, str], list[str]] = {}
    for rows, cols, dtype in work:
        vector = plan.VECTOR_BYTES // dtype.itemsize
        x = torch.randn(rows, cols, device="cuda", generator=generator).to(dtype)
        fit = []
        for variant in fitting(cols, vector):
            key = (variant.name, cols, str(dtype))
            if key not in wrong:
                base = torch.randn(5, cols, device="cuda", generator=generator).to(dtype)
                try:
                    wrong[key] = wrong_here(base, variant, run)
                    torch.cuda.synchronize()
                except Exception as error:  # noqa: BLE001  a variant may not fit: a row
                    wrong[key] = [f"{type(error).__name__} {str(error)[:120]}"]
                if wrong[key]:
                    print(f"{dtype} {cols} {variant.name}: {wrong[key]}", flush=True)
            if not wrong[key]:
                fit.append(variant)
        buffers = bench.Buffers(x)
        for operation in operations:
            line = _cell(operation, x, buffers, fit, run)
            spent = time.monotonic() - start
            print(f"{spent:.0f} s {dtype} {rows} x {cols} {operation}: {line['text']}", flush=True)
            line |= {"dtype": str(dtype), "rows": rows, "cols": cols}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        del buffers, x
        torch.cuda.empty_cache()
    return 0


def _cell(operation: str, x: Tensor, buffers: Any, fit: list[Any], run: Run) -> dict[str, Any]:
    """One operation on one matrix: all variants ranked, the best timed beside the ceiling, with
    plain and with streaming accesses."""
    from online_softmax.lab import bench

    calls: dict[str, Any] = {}
    others: dict[str, Any] = {}
    outputs = {x.data_ptr(): other for (x, _), (other, _) in zip(
        buffers.sets, buffers.sets[1:] + buffers.sets[:1], strict=True)}  # fmt: skip
    sums = torch.empty(len(x), 1, device=x.device)
    if operation == "softmax":
        ceiling = bench.copy_call
        for v in fit:
            for one in (v, replace(v, stream=True)):
                calls[one.name] = lambda x, y, v=one: run(v.launch(x, y))
        chosen, _ = catalogue.choose(catalogue.problem_of(x))
        numbers = chosen.numbers(catalogue.problem_of(x))
        others = {
            "torch": bench.RIVALS["torch"](),
            "package": lambda x, y: chosen.run(x, y, numbers),
        }
    elif operation == "backward":
        # A set's x is dy, its y is dx; the output is one more rotating set.
        ceiling = lambda x, y: run(add_call(x, outputs[x.data_ptr()], y))  # noqa: E731
        for v in fit:
            if _fits_backward(v, x):
                s = replace(v, stream=True)
                for one in (v, s):
                    calls[one.name] = lambda x, y, v=one: run(
                        v.backward(x, outputs[x.data_ptr()], y)
                    )
    else:
        ceiling = lambda x, y: run(read_call(x, sums))  # noqa: E731
        for v in fit:
            if isinstance(v, Variant):
                s = replace(v, stream=True)
                for one in (v, s):
                    calls[one.name] = lambda x, y, v=one: run(v.launch(x, sums, "EmitLse"))
        for tile in (1, 2, 4, 8):
            for block in (32, 64, 128, 256, 512):
                if tile * block * 16 // x.itemsize > 2 * x.shape[1]:
                    continue
                if not lse_wrong_here(x[:5], tile, block, run):
                    for stream in (False, True):
                        name = f"loop {block} threads, tile {tile}" + " stream" * stream
                        calls[name] = lambda x, y, t=tile, b=block, s=stream: run(
                            lse_launch(x, sums, t, b, s)
                        )
    ranked = bench.interleaved(buffers, calls, rounds=1, replays=2)
    rest = {name for name in ranked if name.removesuffix(" stream") != name}
    best = sorted(set(ranked) - rest, key=lambda name: ranked[name].median_us)[:3]
    best += sorted(rest, key=lambda name: ranked[name].median_us)[:3]
    final = bench.interleaved(
        buffers, {"ceiling": ceiling, **others, **{name: calls[name] for name in best}}
    )
    limit = final["ceiling"].median_us
    text = ", ".join(f"{n} {t.median_us:.1f} ({limit / t.median_us:.3f})" for n, t in final.items())
    return {
        "operation": operation,
        "text": text,
        "final_us": {name: t.rounds_us for name, t in final.items()},
        "ranked_us": {name: round(t.median_us, 3) for name, t in ranked.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("rows.jsonl"))
    parser.add_argument("--cells", default="big,odd,few")
    parser.add_argument("--operations", default="softmax,backward,logsumexp")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--families", default="packed,landed")
    options = parser.parse_args()
    FAMILIES[:] = options.families.split(",")
    if not torch.cuda.is_available():
        return 1 if check_on_the_cpu() else 0
    kinds, operations = options.cells.split(","), options.operations.split(",")
    return measure(kinds, operations, options.out, options.dtypes.split(","))


if __name__ == "__main__":
    sys.exit(main())
