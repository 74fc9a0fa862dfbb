"""Which cells the benchmark has: the counts and lists that its results are held to."""

from __future__ import annotations

import doctest

import pytest

from online_softmax.lab import grid
from online_softmax.lab.grid import Cell
from online_softmax.lab.inputs import BadInput


def test_examples_in_docstrings_hold():
    from online_softmax.lab import (
        accuracy,
        benchlist,
        contenders,
        doubts,
        fusedsizes,
        goals,
        hostcost,
        rotation,
    )

    for module in (
        accuracy,
        grid,
        benchlist,
        contenders,
        doubts,
        fusedsizes,
        goals,
        hostcost,
        rotation,
    ):
        tried = doctest.testmod(module, verbose=False)
        assert tried.attempted > 0, module
        assert tried.failed == 0, module


WANTED = (
    32, 64, 96, 128, 192, 256, 384, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096, 5000, 6144, 8192,
    12288, 16384, 32000, 32001, 32768, 50257, 50304, 65536, 100277, 128256, 131072, 151936, 201088,
    262144, 524288, 1048576, 4194304,
)  # fmt: skip


def test_all_has_every_width_large_and_from_1024_in_few_rows():
    shapes = grid.shapes("all")
    for cols in WANTED:
        assert (grid.WHOLE // cols, cols) in shapes
        few = {rows for rows, other in shapes if other == cols and rows in grid.SMALL_ROWS}
        assert few >= ({1, 2, 4, 8, 16, 64, 256} if cols >= 1024 else set())


def test_large_cells_have_about_as_many_elements():
    for name in ("big", "odd"):
        for rows, cols in grid.shapes(name):
            assert 0 <= grid.WHOLE - rows * cols < cols
            assert Cell("softmax", "float32", rows, cols).is_large
    assert len(grid.shapes("big")) == 36
    assert [cols for _, cols in grid.shapes("odd")] == [
        1000, 5000, 32001, 50257, 100277, 128257, 151936, 201088
    ]  # fmt: skip


def test_the_headline_s_cells_are_seventeen():
    main = [c for c in grid.cells(["softmax"], ["bfloat16"], grid.shapes("all")) if c.is_main]
    assert len(main) == 17
    shapes = {(cell.rows, cell.cols) for cell in main}
    assert {(1048576, 128), (128, 1048576), (134217, 1000), (26843, 5000), (4194, 32001)} < shapes
    assert {(2670, 50257), (1046, 128257)} < shapes
    assert all(cell.has_rivals for cell in main)


def test_small_cells():
    shapes = grid.shapes("small")
    assert {rows for rows, _ in shapes} == {1, 2, 4, 8, 16, 64, 256}
    assert min(cols for _, cols in shapes) == 1024
    assert len(shapes) == 7 * len([cols for cols in grid.BIG_COLS if cols >= 1024])


@pytest.mark.parametrize(
    ("rows", "cols", "wanted"),
    [(1, 1024, True), (2, 1024, False), (256, 1048576, True), (64, 32000, True), (2, 50257, True),
     (667, 201088, True), (32768, 4096, True), (32, 4194304, False), (2621440, 51, False)],
)  # fmt: skip
def test_where_every_rival_is_timed(rows: int, cols: int, wanted: bool):
    assert Cell("softmax", "float32", rows, cols).has_rivals is wanted


@pytest.mark.parametrize(
    ("op", "dtype", "large", "small", "odd"),
    [
        ("softmax", "bfloat16", True, True, True),
        ("logsumexp", "float32", True, True, True),
        ("softmax_backward", "float32", True, False, True),
        ("log_softmax", "bfloat16", True, False, True),
        ("log_softmax_backward", "bfloat16", False, False, True),
        ("softmax", "float16", False, False, True),
    ],
)
def test_rivals_are_timed_where_they_had_figures_before(
    op: str, dtype: str, large: bool, small: bool, odd: bool
):
    found = [
        Cell(op, dtype, *shape).has_rivals for shape in ((32768, 4096), (4, 65536), (8, 32001))
    ]
    assert found == [large, small, odd]


def test_all_has_each_cell_of_the_others_once():
    every = grid.shapes("all")
    assert len(set(every)) == len(every)
    assert {shape for name in ("big", "small", "odd") for shape in grid.shapes(name)} == set(every)


@pytest.mark.parametrize("count", [1, 3, 7, 10_000])
def test_shards_make_up_the_whole(count: int):
    cells = grid.cells(grid.OPS, grid.DTYPES, grid.shapes("odd"))
    shards = [grid.shard(cells, f"{index}/{count}") for index in range(count)]
    assert sorted(map(repr, (c for each in shards for c in each))) == sorted(map(repr, cells))


@pytest.mark.parametrize("text", ["", "1", "4/4", "-1/4", "1/0", "a/b", "1/4/2"])
def test_a_shard_that_is_none(text: str):
    with pytest.raises(BadInput, match="--shard"):
        grid.shard([], text)


@pytest.mark.parametrize("text", ["", "4096", "4x-1", "4x5x6"])
def test_a_shape_that_is_none(text: str):
    with pytest.raises(BadInput, match="ROWSxCOLS"):
        grid.parse_shapes(text)


def test_least_bytes():
    moved = {op: Cell(op, "bfloat16", 10, 100).ideal_bytes for op in grid.OPS}
    assert moved == {
        "softmax": 4000, "log_softmax": 4000, "softmax_backward": 6000,
        "log_softmax_backward": 6000, "logsumexp": 2020,
    }  # fmt: skip
    assert Cell("softmax", "float32", 10, 100).ideal_bytes == 8000


# ---- losses


def test_large_cells_of_losses_are_those_that_rivals_were_measured_on():
    shapes = grid.shapes("big", "cross_entropy")
    known = {(65536, 4096), (8388, 32000), (5341, 50257), (4096, 65536), (2092, 128256),
             (1766, 151936), (1024, 262144)}  # fmt: skip
    assert known < set(shapes)
    assert sorted(cols for _, cols in shapes) == sorted((*grid.LOSS_COLS, grid.TOKENS[1]))
    large = [Cell("cross_entropy", "bfloat16", *shape) for shape in shapes]
    assert [cell.is_main for cell in large] == [True] * 13 + [False]  # the last: 4,096 x 128,256
    assert all(cell.has_rivals and cell.is_loss for cell in large)
    assert not Cell("softmax", "bfloat16", 65536, 4096).is_large


def test_few_tokens_are_for_what_serving_runs():
    for op in grid.LOSS_OPS:
        few = grid.shapes("small", op)
        assert {rows for rows, _ in few} == (
            {1, 16, 256} if op in ("cross_entropy", "token_stats") else set()
        )
        assert set(few) < set(grid.shapes("all", op))
    cells = grid.grid_cells(grid.EVERY_OP, ["float32"], "odd")
    shapes = [(cell.rows, cell.cols) for cell in cells if cell.op == "cross_entropy_both"]
    assert shapes == [(5341, 50257), (2092, 128257), (1766, 151936), (1334, 201088)]
    assert len([cell for cell in cells if cell.op == "softmax"]) == 8


def test_least_bytes_of_losses():
    moved = {op: Cell(op, "bfloat16", 10, 100).ideal_bytes for op in grid.LOSS_OPS}
    assert moved == {
        "cross_entropy": 2080, "cross_entropy_both": 6080, "cross_entropy_in_forward": 4080,
        "token_stats": 4680,
    }  # fmt: skip


def test_memory_of_losses_has_a_copy_of_what_is_overwritten():
    takes = {op: Cell(op, "bfloat16", 8388, 32000).memory_bytes(2, 5) for op in grid.LOSS_OPS}
    matrix = 8388 * 32000 * 2
    assert takes["cross_entropy_both"] > takes["cross_entropy"] + (2 + 2 * 5) * matrix
    assert takes["token_stats"] > 24 * matrix
    assert max(takes.values()) < 100 * 2**30
