"""What each step of attention's forward brings, by the clock; and what its machine code shows.

    python -m online_softmax.lab.attentionsteps --out steps.jsonl
    python -m online_softmax.lab.attentionsteps --out builds.jsonl --build sm_90a

The first checks every variant against float64 on a small size, in processes of their own that
compile side by side, then times the lesson's size: of each step all tiles that are tried in one
round, and the best of each step in three. The second needs no GPU. A variant that is not built, or
is wrong, is there with its reason. A file that is there is written anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import typer
from torch import Tensor

from online_softmax import jit
from online_softmax.arches import ARCHES
from online_softmax.lab import bench, grid, scriptlog, stepbuilds
from online_softmax.lab.bench import Timing
from online_softmax.lab.benchfile import header_line
from online_softmax.lab.fusedsizes import FEATURES, HEAD_DIMS, TOKENS, attention, parsed
from online_softmax.lab.grid import Cell
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.refusal import one_line
from online_softmax.lab.rotation import Call, Rotation, set_count
from online_softmax.lab.stepbuilds import Answer
from online_softmax.lab.stepkernel import NAMES, SHIPPED, Variant, allocate, launch, variants
from online_softmax.lab.steptables import (
    BUILT_KIND,
    KIND,
    Row,
    built_record,
    built_table,
    timed_table,
)
from online_softmax.triton.attention_launch import run

SECONDS = 150.0
MOST_WORKERS = 16  # by default: each has the GPU's context, half a GiB or so
SEED = 1
TENSORS = 4  # q, k, v and the output
REPLAYS, ROUND_US = 9, 60_000.0  # of a variant in a round, at most

Clock = Callable[[Rotation, dict[str, Call], int], dict[str, Timing]]  # the last: rounds
Say = Callable[[str], None]


def cells(shard: str = "0/1") -> list[Cell]:
    """The lesson's: one sequence of 16,384 tokens, 2,048 features.

    >>> [cell.rows * parsed(cell.sizes)["head_dim"] for cell in cells("0/2")]
    [33554432, 33554432]
    """
    shapes = [
        attention(1, FEATURES // dim, TOKENS, dim, causal)
        for dim in HEAD_DIMS
        for causal in (False, True)
    ]
    return grid.shard([Cell("attention", "bfloat16", *shape) for shape in shapes], shard)


def kind(cell: Cell) -> tuple[int, bool]:
    """head_dim, and whether it is causal."""
    sizes = parsed(cell.sizes)
    return sizes["head_dim"], bool(sizes["causal"])


# ---- timing


def gpu_clock(sets: Rotation, calls: dict[str, Call], rounds: int) -> dict[str, Timing]:
    """The project's clock."""
    return bench.interleaved(sets, calls, rounds, REPLAYS, tuple(calls), ROUND_US)


def rotation(cell: Cell, device: torch.device) -> Rotation:
    """Sets of q, k and v that with their outputs displace each other from the L2."""
    sizes = parsed(cell.sizes)
    shape = (sizes["batch"], sizes["heads"], cell.cols, sizes["head_dim"])
    l2_bytes = (
        torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    )
    count, is_cold = set_count(TENSORS * cell.rows * sizes["head_dim"] * 2, l2_bytes)
    generator = torch.Generator(device).manual_seed(SEED)

    def normal() -> Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made.normal_(generator=generator)

    return Rotation([(normal(), normal(), normal()) for _ in range(count)], is_cold)


def measure(
    cell: Cell, checked: dict[Variant, Answer], sets: Rotation, arch: str, clock: Clock, say: Say
) -> list[Row]:
    """A row a step, in the order of the steps.

    Args:
        cell: what is computed; checked: its variants, with what `stepbuilds.asked` says of each.
        sets: of q, k and v.
        arch: the GPU's architecture.
        clock: times calls; a call that raises is a refusal.
        say: is told what is done.
    """
    refused = {v: found for v, found in checked.items() if isinstance(found, str)}
    sound: dict[Variant, Call] = {}
    want: Tensor | None = None
    for variant in sorted((v for v in checked if v not in refused), key=_shipped_first):
        call = _call(variant, arch)
        try:  # the whole size has faults that a small one has not
            out = call(*sets.sets[0])
            want = out if want is None else want
            stepbuilds.judged(out, want)
        except (RuntimeError, ValueError) as error:
            refused[variant] = one_line(error)
            continue
        sound[variant] = call
    say(f"{cell.text}: {len(sound)} variants")
    tried = _timed(sound, sets, clock, 1, refused)
    best: dict[str, Variant] = {}
    for variant, timing in tried.items():
        other = best.get(variant.step)
        if other is None or timing.median_us < tried[other].median_us:
            best[variant.step] = variant
    final = _timed({v: sound[v] for v in best.values()}, sets, clock, bench.ROUNDS, refused)
    rows: list[Row] = []
    rate_before: float | None = None
    for step in NAMES:
        row = Row(
            step, *kind(cell), tried_us={v.numbers: t.median_us for v, t in tried.items()
                                         if v.step == step},
            refused={v.numbers: why for v, why in refused.items() if v.step == step},
        )  # fmt: skip
        chosen = best.get(step)
        if chosen is None or chosen not in final:
            rows.append(replace(row, why="; ".join(dict.fromkeys(row.refused.values()))))
            continue
        timing, answer = final[chosen], checked[chosen]
        tflops = cell.flops / timing.median_us / 1e6
        over = tflops / rate_before if rate_before and step != SHIPPED else None
        rate_before = tflops
        rms = None if isinstance(answer, str) else answer.get("rms")
        rows.append(
            replace(
                row, tiles=chosen.numbers, tflops=tflops, over=over, rms=rms,
                median_us=timing.median_us, rounds_us=timing.rounds_us,
            )
        )  # fmt: skip
    return rows


def _shipped_first(variant: Variant) -> bool:
    """What ships says what the others' whole outputs should be."""
    return variant.step != SHIPPED


def _call(variant: Variant, arch: str) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, out = launch(variant, q, k, v, arch)
        run([start], q.device)
        return out

    return call


def _timed(
    calls: dict[Variant, Call],
    sets: Rotation,
    clock: Clock,
    rounds: int,
    refused: dict[Variant, str],
) -> dict[Variant, Timing]:
    """The times of those that have one; the others' reasons go to `refused`."""
    by_name = {f"{v.step}: {v.numbers}": v for v in calls}
    found = clock(sets, {name: calls[v] for name, v in by_name.items()}, rounds) if calls else {}
    refused.update({by_name[name]: t.refused for name, t in found.items() if t.refused})
    return {by_name[name]: t for name, t in found.items() if not t.refused}


# ---- the command


def timed_rows(
    wanted: Sequence[Cell], device: torch.device, arch: str, seconds: float, workers: int,
    clock: Clock, say: Say,
) -> Iterator[list[Row]]:  # fmt: skip
    """Each cell's rows; after so many seconds of timing no further cell begins."""
    begun = time.perf_counter()
    every = [v for cell in wanted for v in variants(*kind(cell), arch)]
    say(f"{len(every)} variants compiled and checked by {workers} processes")
    checked = stepbuilds.asked(every, arch, True, workers)
    say(f"checked after {time.perf_counter() - begun:.0f} s")
    allocate()
    begun = time.perf_counter()
    for cell in wanted:
        if time.perf_counter() - begun > seconds:
            why = f"not timed: {seconds:g} seconds were over"
            yield [Row(step, *kind(cell), why=why) for step in NAMES]
            continue
        mine = {v: a for v, a in checked.items() if (v.head_dim, v.causal) == kind(cell)}
        yield measure(cell, mine, rotation(cell, device), arch, clock, say)


def main(arguments: Sequence[str] | None = None) -> int:
    workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of timing: no cell begins after them"
    )
    parser.add_argument("--shard", default="0/1", help="i/n, such as 0/4")
    parser.add_argument("--workers", type=int, default=workers, help="processes to compile")
    parser.add_argument("--build", metavar="ARCH", help="build for it and time nothing: sm_90a")
    given = parser.parse_args(arguments)
    if not given.build and not torch.cuda.is_available():
        sys.exit(
            "attentionsteps needs a CUDA GPU, and torch sees none here; with --build sm_90a it "
            "says what its kernels take without one"
        )
    if given.build and given.build not in ARCHES:
        sys.exit(f"attentionsteps: --build {given.build} is not among {', '.join(ARCHES)}")
    if given.workers < 1:
        sys.exit(f"attentionsteps: --workers {given.workers}: give 1 or more")
    try:
        wanted = cells(given.shard)
    except BadInput as error:
        sys.exit(f"attentionsteps: {error}")
    begun = given.out.with_name(f"{given.out.name}.part")  # it replaces the file once it has times
    begun.unlink(missing_ok=True)
    command = "python -m online_softmax.lab.attentionsteps"
    command += f" --build {given.build}" if given.build else ""
    log, header = scriptlog.begin(begun, command, "nothing is timed" if given.build else "graph")
    log.write(header_line(header))

    def say(text: str) -> None:
        typer.echo(text, err=True)

    if given.build:
        every = [v for cell in wanted for v in variants(*kind(cell), given.build)]
        built = stepbuilds.asked(every, given.build, False, given.workers)
        for variant, answer in built.items():
            figures = {"why": answer} if isinstance(answer, str) else answer
            line = {"kind": BUILT_KIND, **built_record(variant), "arch": given.build}
            log.write(json.dumps(line | figures) + "\n")
        begun.replace(given.out)
        typer.echo(built_table(built))
        return 0
    arch = jit.device_arch()
    rows: list[Row] = []
    device = torch.device("cuda", torch.cuda.current_device())
    for found in timed_rows(wanted, device, arch, given.seconds, given.workers, gpu_clock, say):
        for row in found:
            log.write(json.dumps({"kind": KIND, **asdict(row)}) + "\n")
        rows += found
    typer.echo(timed_table(rows))
    if all(row.median_us is None for row in rows):
        begun.unlink()
        sys.exit("attentionsteps: nothing was timed, and nothing is kept: the reasons stand above")
    begun.replace(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
