"""A row's bits, by host execution: wherever it lies, among whichever others, by whichever cut."""

from __future__ import annotations

import itertools
import platform

import pytest
import torch
from torch import Tensor

from matrix_kit import (
    KERNELS,
    forward,
    matrix,
    needs_compiler,
    placed,
    rows_of,
    run,
)
from online_softmax.cuda import host, row_launch
from online_softmax.cuda.host import toolchain
from online_softmax.rowplan import BACKWARD, OPERATIONS, Row


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


@needs_compiler
@pytest.mark.parametrize("op", OPERATIONS)
def test_no_bit_hangs_on_what_the_compiler_fuses(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device compiler makes a b + c one operation where it sees them together: in a loop over
    words, not past them. float32, since products of 16-bit types are exact."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    flags = [flag for flag in toolchain.FLAGS if not flag.startswith("-ffp-contract")]
    fusing = [*flags, "-ffp-contract=fast", *(["-mfma"] if is_x86 else [])]
    monkeypatch.setattr(toolchain, "FLAGS", tuple(fusing))
    cols, cuts = 1027, [Row("registers", 2, 0, 160), Row("registers", 2, 0, 96, 2)]
    cuts += [Row("landed", 2, 0, 160)] * (op != "logsumexp")
    values = matrix(64, cols, torch.float32, 0, 0)
    want = None
    shape = (64, 1 if op == "logsumexp" else cols)
    for cut, start in itertools.product(cuts, range(4)):
        x, got = placed(values, start), placed(torch.empty(shape), start)
        if op in BACKWARD:
            y = placed(values.softmax(-1), start)
            run(row_launch.backward(op, x, y, got, 1.0, False, cut, streams=False))
        else:
            run(row_launch.forward(op, x, got, 1.0, False, cut, streams=False))
        want = got if want is None else want
        assert torch.equal(got, want), (cut, start)


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
