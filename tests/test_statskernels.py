"""The kernels of token_stats: every cut, type, alignment and order of elements. Without a GPU by
host execution; on one as they run."""

from __future__ import annotations

import itertools

import pytest
import torch

from matrix_kit import FLOATS, LAYOUTS, needs_compiler
from online_softmax import statskernels
from online_softmax.cuda import host, launch, tokenstats_launch
from online_softmax.cuda.tokenstats_launch import Upstream
from online_softmax.plan import WARP
from rows_kit import DEVICES, INF, NAN
from stats_kit import NO_CLASS, among_nan, check, cuts, orders, run, work, written_out

pytestmark = needs_compiler
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)
WIDTHS = (1, 6, 8, 33, 257, 1024, 2051, 9001)
FOUND = (0, 1, 7, 20, 33, 128)  # of the first elements


@DEVICES
@DTYPES
def test_every_cut_agrees_with_float64(dtype: torch.dtype, device: str) -> None:
    launches, checks = [], []
    turn = itertools.cycle(FOUND)
    for cols, (start, gap) in itertools.product(WIDTHS, LAYOUTS):
        values = (torch.randn(4, cols) * 3).to(dtype).to(device)
        target = torch.tensor([0, cols - 1, cols // 2, NO_CLASS], device=device)
        x = among_nan(values, start, gap)
        for name, row in cuts(cols, x.itemsize).items():
            top_k = min(next(turn), cols)
            found, results = work(x, target, top_k, 0.7, row)
            launches += found
            checks.append((f"{name} {cols} from {start}, {top_k}:", x, target, top_k, results))
    run(launches, torch.device(device))
    for what, x, target, top_k, results in checks:
        check(results[1:], written_out(x, target, top_k, 0.7), what)


@DEVICES
@DTYPES
def test_orders(dtype: torch.dtype, device: str) -> None:
    """Equal elements, rows in order, infinities and NaN, in all parts of a row and in few: also
    where far more elements reach the bound than are written down."""
    launches, checks = [], []
    for cols in (300, 5003, 9000):
        x = torch.stack([*orders(cols).values()]).to(dtype).to(device)
        target = torch.full((len(x),), cols // 2, device=device)
        for name, row in cuts(cols, x.itemsize).items():
            for top_k in (1, 20, 128):
                found, results = work(x, target, top_k, 1.0, row)
                launches += found
                checks.append((f"{name} {cols}, {top_k}:", x, target, top_k, results))
    run(launches, torch.device(device))
    for what, x, target, top_k, results in checks:
        want = written_out(x, target, top_k, 1.0)
        for at, order in enumerate(orders(300)):
            got = [t[at : at + 1] for t in results[1:]]
            check(got, [t[at : at + 1] for t in want], f"{order} {what}")


@DTYPES
def test_all_elements_are_the_first(dtype: torch.dtype) -> None:
    for cols in (1, 20, 128):
        rows = orders(max(cols, 20))
        x = torch.stack([*rows.values()])[:, -cols:].to(dtype)
        target = torch.zeros(len(x), dtype=torch.int64)
        stats = statskernels.forward(x, target, top_k=cols)
        check(stats[:6], written_out(x, target, cols, 1.0), f"{cols}")


@DEVICES
@pytest.mark.parametrize("cut", ["planned", "small", "single"])
@DTYPES
def test_a_row_keeps_its_bits(dtype: torch.dtype, cut: str, device: str) -> None:
    """Alone or among others, at every address: the same bits."""
    cols = 3011
    values = (torch.randn(3, cols, device=device) * 3).to(dtype)
    target = torch.tensor([5, 0, cols - 1], device=device)
    row = cuts(cols, values.itemsize)[cut]
    found, want = work(values, target, 20, 0.3, row)
    run(found, values.device)
    for start in range(16 // values.itemsize):
        for rows, gap in ((3, 0), (3, 1), (1, 0)):
            x = among_nan(values[:rows], start, gap)
            found, got = work(x, target[:rows], 20, 0.3, row)
            run(found, x.device)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b[:rows])


def test_no_order_of_threads_changes_a_bit() -> None:
    cols = 5003
    x = torch.stack([*orders(cols).values()]).bfloat16()
    target = torch.arange(len(x))
    row = cuts(cols, x.itemsize)["planned"]
    assert (row.block // WARP, row.parts) == (3, 1)
    results = []
    for order in (0, 1, 2, 3):
        found, filled = work(x, target, 20, 1.0, row)
        for each in found:
            host.launch(each, order=order)
        results.append(filled)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def test_one_read() -> None:
    """As counted: the elements; the target's, once a part and once more; and again those that are
    written down, which on random elements are few more than asked for."""
    rows, cols, top_k = 5, 9000, 20
    x, target = torch.randn(rows, cols).bfloat16(), torch.arange(rows)
    row = tokenstats_launch.cut(cols, x.itemsize, 8, 2)
    assert (row.parts, row.block) == (5, WARP)
    launches, _ = work(x, target, 0, 1.0, row)
    looks = rows * row.parts * row.block + rows * WARP  # each thread asks for the target
    plain = launch.run(launches, x.device)
    assert plain.reads == x.numel() + looks
    launches, _ = work(x, target, top_k, 1.0, row)
    counts = launch.run(launches, x.device)
    written_down = counts.reads - plain.reads
    assert top_k * rows * row.parts <= written_down <= 3 * top_k * rows * row.parts
    launches, _ = work(x, None, 0, 1.0, row)
    assert launch.run(launches, x.device).reads == x.numel()


def test_parts_follow_from_columns() -> None:
    for item in (2, 4):
        for cols in (1, 255, 256, 2049, 32_001, 50_257, 128_256, 128_257, 1 << 24):
            row = tokenstats_launch.cut(cols, item)
            held = row.parts * row.block * row.vectors * 16 // item
            assert cols <= held
            assert held - cols < row.block * row.vectors * 16 // item  # no part is empty
            assert row.block <= 256
            for top_k in (1, 20, 21, 64, 128):
                groups = tokenstats_launch.groups(row, top_k)
                in_all = groups * row.block // WARP
                assert in_all <= tokenstats_launch.MOST_GROUPS
                assert groups & (groups - 1) == 0
                assert in_all >= 1.5 * top_k or groups == WARP or 2 * in_all > 256


def test_more_than_the_kernels_find() -> None:
    x, target = torch.randn(3, 400).bfloat16(), torch.tensor([0, 1, -1])
    stats = statskernels.forward(x, target, top_k=150, scale=2.0)
    check(stats[:6], written_out(x, target, 150, 2.0))


@pytest.mark.parametrize("row", [[1.0, 2.0, 5.0, 4.0, 5.0]])
def test_equal_elements_for_every_count(row: list[float]) -> None:
    x = torch.tensor([row])
    for top_k in range(1, 6):
        stats = statskernels.forward(x, top_k=top_k)
        assert stats.top_indices.tolist() == [[2, 4, 3, 1, 0][:top_k]]


def test_four_of_rows_that_are_not_normal() -> None:
    """Distinct indices in range, and the next row's as ever."""
    cols = 1000
    x = torch.full((5, cols), -INF)
    x[0] = NAN
    x[2, [700, 3, 900]] = torch.tensor([1.0, 2.0, 3.0])
    x[3:] = torch.randn(2, cols)
    x[3, 500] = NAN
    stats = statskernels.forward(x, torch.zeros(5, dtype=torch.int64), top_k=4)
    assert stats.top_indices[:3].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [900, 3, 700, 0]]
    assert stats.top_indices[3, 0] == 500
    assert stats.top_log_probs[[0, 1, 3]].isnan().all()
    assert stats.top_log_probs[2, 3] == -INF
    check(stats[:6], written_out(x, torch.zeros(5, dtype=torch.int64), 4, 1.0))


# ---- under the host sanitizers


def test_sanitizers() -> None:
    """Rows that end inside a word, behind them nothing; few elements that reach the bound, many,
    and lists of several warps."""
    launches = []
    for cols, dtype, top_k in ((10003, torch.bfloat16, 20), (5003, torch.float32, 40)):
        base = torch.randn(4 * cols + 1).to(dtype)
        x = base[1:].view(4, cols)
        x[2] = 1.0
        x[3] = -INF
        target = torch.tensor([0, cols - 1, NO_CLASS, 5])
        row = tokenstats_launch.cut(cols, x.itemsize, 4, 2)
        assert (row.parts, row.block) == (tokenstats_launch.MERGED + 1, 2 * WARP)
        found, results = work(x, target, top_k, 1.0, row)
        one = torch.ones(4)
        upstream = Upstream(one, one, one)
        tensors = (x, target, results.entropy, results.state, torch.empty_like(x))
        launches += found + tokenstats_launch.backward(upstream, *tensors, 1.0, True)
    for sanitizer in ("address,undefined", "thread"):
        report = host.sanitize(launches, sanitizer=sanitizer)
        assert report.ok, report.text
