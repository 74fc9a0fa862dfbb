"""The kernels that ship for rows, by host execution: each operation, strategy and alignment."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from online_softmax import rowkernels, rowplan, rowsweep
from online_softmax.cuda import host, outer_launch, row_launch
from online_softmax.plan import Problem
from online_softmax.rowplan import BACKWARD, OPERATIONS, Row

ARCH = "sm_90a"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = tuple(rowplan.IDEAS)
LAYOUTS = ((0, 0), (1, 0), (3, 5))  # elements before the first row, and between rows
WIDTHS = (1, 6, 8, 15, 33, 257, 1024, 2051)

needs_compiler = pytest.mark.skipif(
    host.compiler() is None, reason="host execution needs g++ or clang++"
)


def run(launches: list) -> None:
    for launch in launches:
        if launch.grid:
            host.launch(launch)


def matrix(rows: int, cols: int, dtype: torch.dtype, start: int, gap: int) -> Tensor:
    return (torch.randn(rows, cols + start + gap) * 3).to(dtype)[:, start : start + cols]


def awkward(cols: int, dtype: torch.dtype, start: int, gap: int) -> Tensor:
    x = matrix(5, cols, dtype, start, gap)
    if cols > 2:
        x[1], x[2, 1], x[3, 0] = -math.inf, math.nan, math.inf
    return x


def expected(op: str, x: Tensor, scale: float, zero_empty: bool) -> Tensor:
    wide = x.double() * scale
    if op == "logsumexp":
        return torch.logsumexp(wide, -1, keepdim=True)
    y = torch.softmax(wide, -1) if op == "softmax" else torch.log_softmax(wide, -1)
    if zero_empty:
        y[(wide == -math.inf).all(-1)] = 0.0 if op == "softmax" else -math.inf
    return y


def forward(op: str, x: Tensor, row: Row, scale: float = 1.0, zero_empty: bool = False) -> Tensor:
    y = torch.full((len(x), 1 if op == "logsumexp" else x.shape[1]), 7.0, dtype=x.dtype)
    run(row_launch.forward(op, x, y, scale, zero_empty, row, streams=True))
    return y


def close(got: Tensor, want: Tensor, atol: float) -> None:
    eps = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=4e-6 + eps, atol=atol, equal_nan=True)


def rows_of(kernel: str, op: str, cols: int, dtype: torch.dtype) -> Row | None:
    problem = Problem(5, cols, str(dtype).removeprefix("torch."), arch=ARCH)
    if rowplan.reasons(kernel, op, problem):
        return None
    return rowplan.forced(kernel, op, cols, problem.dtype, ARCH)


CASES = [*itertools.product(OPERATIONS, KERNELS)]


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("op", "kernel"), CASES, ids=lambda value: value)
def test_every_kernel_agrees_with_float64(op: str, kernel: str, dtype: torch.dtype) -> None:
    for (cols, (start, gap)), turn in zip(
        itertools.product(WIDTHS, LAYOUTS), itertools.cycle((0, 1)), strict=False
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
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_keeps_its_bits(op: str, kernel: str) -> None:
    """Alone or among others, at every address: the same bits."""
    cols, dtype = 1027, torch.bfloat16
    row = rows_of(kernel, op, cols, dtype)
    if row is None:
        return
    values = matrix(3, cols, dtype, 0, 0)

    def result(x: Tensor) -> Tensor:
        if op not in BACKWARD:
            return forward(op, x, row)
        dx, y = torch.empty(x.shape, dtype=dtype), values[: len(x)].softmax(-1)
        run(row_launch.backward(op, x, y, dx, 1.0, False, row, streams=True))
        return dx

    want = result(values)
    for start in range(8):
        base = torch.zeros(3, cols + start, dtype=dtype)
        base[:, start:] = values
        assert torch.equal(result(base[:, start:]), want)
    assert torch.equal(result(values[:1]), want[:1])


def placed(values: Tensor, position: int) -> Tensor:
    """A copy that begins so many elements past a 16-byte boundary."""
    base = torch.empty(values.numel() + 16, dtype=values.dtype)
    first = -base.data_ptr() % 16 // values.itemsize + position
    return base[first : first + values.numel()].view(values.shape).copy_(values)


@needs_compiler
@pytest.mark.parametrize("op", ["softmax", "softmax_backward"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tensor_may_begin_anywhere_beside_any_other(op: str, kernel: str) -> None:
    """x and y, or dy, y and dx, at every position in 16 bytes: as `out` and views of rows may lie.
    One row for several too: each begins where the tensor begins."""
    dtype, cols = torch.bfloat16, 203
    row = rows_of(kernel, op, cols, dtype)
    assert row is not None
    x, y = matrix(2, cols, dtype, 0, 0), matrix(2, cols, dtype, 0, 0).softmax(-1)
    repeated = placed(x[:1], 1).expand(5, -1)
    results = []
    for of_x, of_result in itertools.product(range(8), range(8)):
        for given in (placed(x, of_x), repeated):
            out = placed(torch.full((len(given), cols), 7.0, dtype=dtype), of_result)
            if op in BACKWARD:
                o = placed(y[:1].expand(5, -1) if given is repeated else y, (of_x + 3) % 8)
                run(row_launch.backward(op, given, o, out, 1.0, False, row, streams=False))
            else:
                run(row_launch.forward(op, given, out, 1.0, False, row, streams=False))
            results.append(out)
    assert all(torch.equal(each, results[0]) for each in results[::2])
    assert all(torch.equal(each, results[0][:1].expand(5, -1)) for each in results[1::2])


@needs_compiler
def test_of_words_that_begin_outside_the_matrix_none_is_read() -> None:
    launches: list = []
    for start, out_start, cols in itertools.product(range(4), range(4), (1, 4)):
        x, y = torch.randn(1, cols), torch.empty(1, cols)
        x, y = placed(x, start), placed(y, out_start)
        row = Row("registers", 1, 1, 32)
        launches += row_launch.forward("softmax", x, y, 1.0, False, row, streams=False)
    report = host.sanitize(launches, "address,undefined")
    assert report.ok, report.text


@needs_compiler
@pytest.mark.parametrize("op", BACKWARD)
def test_landed_and_registers_give_the_same_bits(op: str) -> None:
    """So a few rows need not wait for a landing; nor do blocks a row change a bit."""
    dtype = torch.bfloat16
    for cols in (5001, 4104):
        landed = Row("landed", 4, 0, 96, 2)
        x, y = matrix(3, cols, dtype, 0, 0), matrix(3, cols, dtype, 1, 0).softmax(-1).contiguous()
        results = []
        for row in (landed, Row("registers", 4, 0, 96, 2), Row("registers", 4, 0, 32, 8)):
            dx = torch.empty(x.shape, dtype=dtype)
            run(row_launch.backward(op, x.contiguous(), y, dx, 1.0, False, row, streams=False))
            results.append(dx)
        assert all(torch.equal(each, results[0]) for each in results), cols


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
