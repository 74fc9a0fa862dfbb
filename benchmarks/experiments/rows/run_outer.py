"""Softmax along a dimension that is not the last, under trial: right here, and on a GPU how fast.

python benchmarks/experiments/rows/run_outer.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from online_softmax import plan
from online_softmax.cuda import launch
from online_softmax.cuda.launch import C_TYPE, Launch
from online_softmax.lab import judge

SOURCE = str(Path(__file__).with_name("outer.cu"))
STATE_BYTES = 8
SMALL = ((2, 3, 8), (1, 33, 64), (3, 7, 1), (2, 100, 24), (2, 64, 33), (1, 129, 8))
CELLS = (  # (outer, cols, inner), about 2^27 elements
    (16, 32, 262144),
    (64, 64, 32768),
    (128, 1000, 1024),
    (8, 4096, 4096),
    (1, 32768, 4096),
    (2048, 1024, 64),
    (64, 1024, 2049),
)


@dataclass(frozen=True)
class Variant:
    """Launch numbers of outer_softmax: lx threads along inner, ty along the dimension."""

    lx: int
    ty: int
    width: int  # neighbouring inner elements a thread
    held: int  # elements of the dimension a thread keeps in registers; 0: two reads

    def launch(self, x: Tensor, y: Tensor) -> Launch:
        outer, cols, inner = x.shape
        tiles = plan.ceil_div(inner, self.lx * self.width)
        threads = self.lx * self.ty
        return Launch(
            SOURCE,
            f"outer_softmax<{C_TYPE[x.dtype]}, {self.width}, {self.held}>",
            (x, y, cols, inner, 1.0, 0, tiles, self.ty),
            outer * tiles,
            threads,
            shared_bytes=threads * self.width * STATE_BYTES,
        )


def variants(cols: int, inner: int, vector: int) -> Iterator[Variant]:
    """All that fit: whole vectors where rows are whole, shares from cols to twice that."""
    width = vector if inner % vector == 0 else 1
    for lx in (4, 8, 16, 32, 64):
        for ty in (1, 2, 4, 8, 16, 32, 64, 128):
            if not 32 <= lx * ty <= 512 or lx * width >= 2 * inner + 32 * width:
                continue
            if lx * ty * width * STATE_BYTES > 48 * 1024:
                continue
            yield Variant(lx, ty, width, 0)
            for held in (1, 2, 4, 8, 16, 32):
                if held * width <= 64 and cols <= held * ty < 2 * cols:
                    yield Variant(lx, ty, width, held)


def wrong_here(x: Tensor, variant: Variant) -> str:
    y = torch.full_like(x, torch.nan)
    launch.run([variant.launch(x, y)], x.device)
    return judge.check(y, x, 1).why


def check_on_the_cpu() -> int:
    wrong = count = 0
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SMALL:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
            x[0, :, 0], x[0, 0, -1] = -torch.inf, torch.nan
            for variant in list(variants(shape[1], shape[2], 16 // dtype.itemsize))[::3]:
                why = wrong_here(x, variant)
                count += 1
                if why:
                    wrong += 1
                    print(f"{dtype} {shape} {variant}: {why}")
    print(f"{count} launches, {wrong} wrong")
    return wrong


def measure(out: Path | None) -> int:
    from online_softmax.lab import bench, ceilings

    wrong = 0
    generator = torch.Generator(device="cuda").manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in CELLS:
            x = torch.randn(shape, device="cuda", generator=generator).to(dtype)
            calls: dict[str, bench.Call] = {}
            for variant in variants(shape[1], shape[2], 16 // dtype.itemsize):
                why = wrong_here(x, variant)
                if why:
                    wrong += 1
                    print(f"WRONG {dtype} {shape} {variant}: {why}", flush=True)
                    continue
                calls[str(variant)] = lambda x, y, v=variant: launch.run([v.launch(x, y)], x.device)
            buffers = bench.Buffers(x)
            ranked = bench.interleaved(buffers, calls, rounds=1, replays=3)
            best = sorted(ranked, key=lambda name: ranked[name].median_us)[:3]
            final = bench.interleaved(
                buffers,
                {
                    "copy": ceilings.copy_call,
                    "torch": lambda x, y: torch.softmax(x, 1, out=y),
                    **{name: calls[name] for name in best},
                },
            )
            copy = final["copy"].median_us
            timed = {
                n: (round(t.median_us, 2), round(copy / t.median_us, 3)) for n, t in final.items()
            }
            print(f"{dtype} {shape}: {timed}", flush=True)
            if out:
                line = {"dtype": str(dtype), "shape": shape, "final": timed}
                line["ranked_us"] = {n: t.median_us for n, t in ranked.items()}
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            del buffers, x
            torch.cuda.empty_cache()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    wrong = measure(options.out) if torch.cuda.is_available() else check_on_the_cpu()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
