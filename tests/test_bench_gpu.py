"""The benchmark on a GPU for real: cells, a ranking, and every way to time a copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench_kit import HEADER
from online_softmax.lab import (
    benchclock,
    benchfile,
    ceilings,
    contenders,
    grid,
    opbench,
    tune,
)
from online_softmax.lab.grid import Cell
from online_softmax.lab.rotation import Follows, Overwrites, Rotation, bound

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("op", [*grid.OPS, *grid.LOSS_OPS])
def test_a_cell_on_the_gpu(op: str):
    cell = Cell(op, "bfloat16", 64, 1000)
    found = contenders.contenders(replace(cell, cols=grid.RIVAL_COLS[0]), ("torch", "compile"))
    row = opbench.measure(cell, found, benchclock.gpu_setting())
    assert row.is_right, row
    for name in ("ceiling", "torch", "compile"):
        entry = row.entry(name)
        assert entry.why == "", entry
        assert entry.clock == "graph"
        assert entry.median_us > 0
        assert entry.do_bench_us is None
    ours = row.entry("ours")
    assert ours.median_us > 0
    assert ours.do_bench_us > 0


@needs_gpu
@pytest.mark.gpu
def test_a_ranking_on_the_gpu():
    line = tune.tune(Cell("softmax", "float32", 64, 1000), benchclock.gpu_setting())
    best = line["ranking"][0]
    assert best["why"] == ""
    assert best["median_us"] > 0
    assert [each["why"] for each in line["ranking"] if each["why"]] == []
    assert benchfile.parse(
        benchfile.header_line(HEADER) + benchfile.line("tuning", {**line, "kind": "tuning"}), "x"
    )[0].others[0]["ranking"]


@needs_gpu
@pytest.mark.gpu
def test_every_way_to_time_a_copy_says_the_same():
    """Of known bytes: none counts the loop, the restoring or the clearing of the cache, which would
    double it; and the time grows with the bytes, since it is not that of a launch. The least of
    three tries: the GPU may have other work, which has made ways differ by 1.45."""
    here, found = benchclock.gpu_setting(), {}
    follows = Follows(lambda x, y: None, lambda made, x, y: ceilings.copy_call(x, y))
    in_rotation = (ceilings.copy_call, Overwrites(ceilings.copy_call), follows)
    for size in (2**28, 2**30):
        x = torch.randn(size // 4, device="cuda")
        sets = Rotation([(x.clone(), torch.empty_like(x)) for _ in range(3)], True)
        call = bound(ceilings.copy_call, sets.sets[0])
        cache = torch.empty(2 * here.l2_bytes, dtype=torch.uint8, device="cuda")
        tries = []
        for _ in range(3):
            timed = [here.interleaved(sets, {"copy": way}, ())["copy"] for way in in_rotation]
            tries.append([*(each.median_us for each in timed), here.do_bench(call, None),
                          benchclock._restored_us(call, lambda: None, cache)])  # fmt: skip
        found[size] = [min(way) for way in zip(*tries, strict=True)]
        assert max(found[size]) < 1.7 * min(found[size]), found
        assert 2 * size / min(found[size]) / 1e3 < here.limits.gbs, found
    assert min(found[2**30]) > 2.2 * max(found[2**28])


@needs_gpu
@pytest.mark.gpu
def test_a_copy_is_within_a_tenth_of_one_long_graph():
    """Two CUDA events around one replay of 999 copies: no rounds, no profiler. The least of three
    tries, as above."""
    here, x = benchclock.gpu_setting(), torch.randn(2**26, device="cuda")
    sets = Rotation([(x.clone(), torch.empty_like(x)) for _ in range(3)], True)
    runs = [bound(ceilings.copy_call, tensors) for tensors in sets.sets]
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), 333
    with torch.cuda.graph(graph):
        for _ in range(times):
            for run in runs:
                run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    alone, timed = [], []
    for _ in range(3):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        alone.append(start.elapsed_time(end) * 1000 / (times * len(runs)))
        found = here.interleaved(sets, {"copy": ceilings.copy_call}, ())
        timed.append(found["copy"].median_us)
    assert min(timed) == pytest.approx(min(alone), rel=0.1), (timed, alone)
