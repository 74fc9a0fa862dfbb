"""The kernels that ship for rows, by host execution: each operation, strategy and alignment."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from matrix_kit import (
    ARCH,
    FLOATS,
    KERNELS,
    LAYOUTS,
    WIDTHS,
    awkward,
    close,
    expected,
    forward,
    matrix,
    needs_compiler,
    rows_of,
    run,
)
from online_softmax import rowkernels, rowplan, rowsweep
from online_softmax.cuda import outer_launch, row_launch
from online_softmax.rowplan import BACKWARD, OPERATIONS

CASES = [*itertools.product(OPERATIONS, KERNELS)]


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("op", "kernel"), CASES, ids=lambda value: value)
def test_every_kernel_agrees_with_float64(op: str, kernel: str, dtype: torch.dtype) -> None:
    widths = WIDTHS[2::3] if dtype == torch.float16 else WIDTHS  # its words are bfloat16's
    for (cols, (start, gap)), turn in zip(
        itertools.product(widths, LAYOUTS), itertools.cycle((0, 1)), strict=False
    ):
        row = rows_of(kernel, op, cols, dtype)
        if row is None:
            assert (kernel in rowplan.NEEDS, op) == (True, "logsumexp")
            return
        scale, zero_empty = ((1.0, False), (0.5, True))[turn]
        x = awkward(cols, dtype, start, gap)
        if op not in BACKWARD:
            got, want = forward(op, x, row, scale, zero_empty), expected(op, x, scale, zero_empty)
            close(got, want, 1e-6)
            continue
        y = expected(op.removesuffix("_backward"), x, scale, zero_empty).to(dtype)
        dy, dx = matrix(5, cols, dtype, gap, start), torch.full((5, cols), 7.0, dtype=dtype)
        run(row_launch.backward(op, dy, y, dx, scale, zero_empty, row, streams=False))
        g, o = dy.double(), y.double()
        if op.startswith("log"):
            want = scale * (g - o.exp() * g.sum(-1, keepdim=True))
        else:
            want = scale * o * (g - (g * o).sum(-1, keepdim=True))
        if zero_empty:
            want[(x == -math.inf).all(-1)] = 0.0
        close(dx, want, 1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_values_are_shifted_exactly(dtype: torch.dtype) -> None:
    """1e6 and what differs from it by little; and where a product with log2(e) is past float32."""
    base = 60000.0 if dtype == torch.float16 else 1e6
    x = (base + torch.randn(2, 300) * (32 if dtype != torch.float32 else 2)).to(dtype)
    row = rowplan.numbers("softmax", 300, str(dtype).removeprefix("torch."), ARCH)
    close(forward("softmax", x, row), torch.softmax(x.double(), -1), 1e-7)
    if dtype == torch.float16:
        return
    x = torch.full((2, 300), -3.0e38).to(dtype)
    x[0, 5], x[0, 7], x[1, 9] = 3.2e38, 3.2e38, 2.9e38
    close(forward("softmax", x, row), torch.softmax(x.double(), -1), 1e-7)
    lse = rowplan.numbers("logsumexp", 300, str(dtype).removeprefix("torch."), ARCH)
    close(forward("logsumexp", x, lse), torch.logsumexp(x.double(), -1, keepdim=True), 1e-7)


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_lone_element_has_all_the_probability(kernel: str, dtype: torch.dtype) -> None:
    """d is 1 where one element is finite, however its product with log2(e) was rounded: its
    log-probability is 0, and lse is the element."""
    x, rows = torch.full((60, 257), -math.inf, dtype=dtype), torch.arange(60)
    lone = (torch.randn(60) * torch.logspace(-2, 4, 60)).to(dtype)
    x[rows, 4 * rows] = lone
    for op in ("log_softmax", "softmax", "logsumexp"):
        row = rows_of(kernel, op, 257, dtype)
        if row is None:
            assert (kernel in rowplan.NEEDS, op) == (True, "logsumexp")
            continue
        got = forward(op, x, row)
        if op == "logsumexp":
            assert torch.equal(got[:, 0], lone)
        elif op == "log_softmax":
            assert torch.equal(got[rows, 4 * rows], torch.zeros(60, dtype=dtype))
        else:
            torch.testing.assert_close(got.sum(-1), torch.ones(60, dtype=dtype))


@needs_compiler
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_half_in_float32_out(op: str, kernel: str) -> None:
    for cols, start in ((33, 0), (1024, 0), (515, 1)):
        row = rows_of(kernel, op, cols, torch.float16)
        assert row is not None
        x = awkward(cols, torch.float16, start, 0)
        y = torch.empty(5, cols)
        run(row_launch.forward(op, x, y, 1.0, False, row, streams=True))
        close(y, expected(op, x, 1.0, False), 1e-6)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize("dtype", rowplan.ITEM_BYTES)
def test_every_width_has_numbers_that_hold_it(arch: str, dtype: str) -> None:
    per_vector = 16 // rowplan.ITEM_BYTES[dtype]
    for op in OPERATIONS:
        for cols in (0, 1, 7, 63, 1000, 4097, 32001, 65536, 66976, 131073, 196617, 10**6, 10**7):
            row = rowplan.numbers(op, cols, dtype, arch)
            vectors = rowplan.vectors_a_row(cols, rowplan.ITEM_BYTES[dtype])
            tried = rowsweep.sweep(op, cols, dtype, arch)
            assert tried[0] == row
            for each in tried:
                threads = each.lanes or each.block * each.cluster * each.parts
                assert threads * each.vectors >= vectors, (op, cols, each)
                assert each.block % 32 == 0
                assert each.block <= rowplan.MAX_ROW_BLOCK
                assert each.cluster == 1 or rowplan.has_clusters(arch)
            assert row.why
            if row.kernel != "split":
                assert cols <= rowplan.most_cols(row.kernel, op, dtype, arch)
            assert cols < 10**7 or row.kernel == "split"
            assert per_vector * vectors >= cols


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_along_a_dimension_that_is_not_the_last(op: str, dtype: torch.dtype) -> None:
    for shape in ((2, 3, 8), (1, 33, 64), (3, 7, 1), (2, 100, 24), (2, 300, 33), (1, 2100, 8)):
        x = (torch.randn(shape) * 3).to(dtype)
        x[0, :, 0], x[0, 1, -1] = -math.inf, math.nan
        for scale, zero_empty in ((1.0, False), (0.5, True)):
            y = torch.full(shape, 7.0, dtype=dtype)
            run([outer_launch.outer(op, x, y, 1, scale, zero_empty)])
            want = expected(op, x.movedim(1, -1), scale, zero_empty).movedim(-1, 1)
            close(y, want, 1e-6)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cols", [5, 70, 300, 2100])
def test_along_another_dim_bits_follow_from_its_length(cols: int, dtype: torch.dtype) -> None:
    """Not from whether the inner rows are whole 16-byte vectors, by their length or address."""
    whole = matrix(cols, 16, dtype, 0, 0).view(1, cols, 16)
    moved = torch.empty(whole.numel() + 1, dtype=dtype)[1:].view(whole.shape)
    found, symbols = [], set()
    for x in (whole, moved.copy_(whole), whole[..., :3].contiguous()):
        y = torch.empty_like(x)
        launch = outer_launch.outer("softmax", x, y, 1, 1.0, False)
        run([launch])
        found.append(y[..., :3])
        symbols.add(launch.symbol)
    assert len(symbols) == 2  # 16 bytes a thread, and one element
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_compiler
@pytest.mark.parametrize("shape", [(7, 3, 2), (2, 4, 3, 1), (3, 5, 8)])
def test_along_another_dim_no_launch_has_more_blocks_than_a_grid(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, dim = torch.randn(shape), len(shape) - 2
    whole: list = []
    monkeypatch.setattr(rowkernels, "_run", lambda work, device: whole.extend(work))
    want = rowkernels.forward("softmax", x, dim, None, 1.0, False, "", None)
    run(whole)
    assert len(whole) == 1
    parts: list = []
    monkeypatch.setattr(rowkernels, "_run", lambda work, device: parts.extend(work))
    monkeypatch.setattr(rowplan, "MAX_GRID", 5)
    y = rowkernels.forward("softmax", x, dim, None, 1.0, False, "", None)
    run(parts)
    assert len(parts) > 1
    assert max(launch.grid for launch in parts) <= 5
    assert torch.equal(y, want)
    torch.testing.assert_close(y, torch.softmax(x, dim))
