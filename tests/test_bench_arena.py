"""Memory that cells share: aligned as a fresh tensor, apart by role, filled once, grown."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from bench_kit import lines, setting
from online_softmax.lab import arena, grid, opbench
from online_softmax.lab.arena import Arena
from online_softmax.lab.grid import Cell

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 333), (2, 256), (7,)])
def test_sets_are_contiguous_aligned_and_apart(shape: tuple[int, ...], dtype: torch.dtype):
    cut = Arena().cut("x", shape, dtype, 5, CPU)
    assert cut.shape == (5, *shape)
    places = [each.data_ptr() - cut.data_ptr() for each in cut.unbind()]
    assert all(each.is_contiguous() for each in cut.unbind())
    assert all(place % arena.ALIGNED_BYTES == 0 for place in places)
    size = torch.Size(shape).numel() * dtype.itemsize
    assert all(b - a >= size for a, b in pairwise(places))


def test_random_values_are_made_once_for_a_type():
    found = Arena()
    first = found.cut("x", (4, 1000), torch.float32, 2, CPU, is_random=True)
    assert 0.9 < float(first.std()) < 1.1
    assert not torch.equal(first[0], first[1])
    first[0, 0, 0] = 42.0
    again = found.cut("x", (2, 500), torch.float32, 3, CPU, is_random=True)
    assert again[0, 0, 0] == 42.0, "the same memory, as it was left"
    assert again.data_ptr() == first.data_ptr()
    half = found.cut("x", (2, 500), torch.float16, 3, CPU, is_random=True)
    assert 0.9 < float(half.float().std()) < 1.1
    assert half[0, 0, 0] != 42.0


def test_memory_grows_to_the_largest_need_and_is_told():
    found = Arena()
    assert found.held_bytes == 0
    for count, wanted in ((512, 512), (2048, 2048), (64, 2048)):
        found.cut("x", (count,), torch.uint8, 1, CPU)
        assert found.held_bytes == wanted
    found.cut("y", (1,), torch.float32, 3, CPU)
    assert found.held_bytes == 2048 + 3 * arena.ALIGNED_BYTES


@pytest.mark.parametrize("values", ["normal", "ascending"])
def test_a_cell_after_others_has_values_like_the_first(values: str):
    here = setting(values=values)
    for op in grid.OPS:
        for dtype in grid.DTYPES:
            for rows, cols in ((5, 40), (3, 333), (1, 7)):
                row = opbench.measure(Cell(op, dtype, rows, cols), lines(op), here)
                assert row.entry("ours").ok, (op, dtype, cols, row.entry("ours").why)
                x = opbench.buffers(Cell(op, dtype, rows, cols), here).sets[-1][0]
                assert bool(x.isfinite().all())
                assert values == "normal" or bool((x.diff(dim=-1) >= 0).all())
    opbench.buffers(Cell("softmax", "float32", 1, 4000), here)
    x = opbench.buffers(Cell("softmax", "float32", 5, 100), here).sets[0][0]
    assert 0.8 < float(x.std()) < 1.2, "not a part of the sorted row before"
