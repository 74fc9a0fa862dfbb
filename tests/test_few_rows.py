"""What the number of rows decides: more blocks for few rows at the same bits; and other bits alone
where batch invariance was given up. By host execution."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from matrix_kit import ARCH, forward, matrix, needs_compiler, run
from online_softmax import batch_invariant, rowchoice, rowkernels, rowplan, softmax
from online_softmax.cuda import row_launch
from online_softmax.lab import opjudge
from online_softmax.plan import WARP, Problem
from online_softmax.rowplan import BACKWARD, OPERATIONS, Row
from test_invariance_gpu import changed, computed, moved

VECTORS = 2100  # of a row: it takes several blocks, whatever the operation
SHAPES = [(torch.float32, 0), (torch.float32, 1), (torch.bfloat16, 0), (torch.bfloat16, 3)]
FEW = (1, 9, 20)  # so that 16, 8 and 4 blocks a row find a multiprocessor each


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spread(op: str, cols: int, dtype: torch.dtype) -> tuple[Row, list[Row]]:
    """The cut of many rows that stay in registers, and what few rows make of it."""
    many = rowplan.forced("registers", op, cols, name(dtype), ARCH)
    found = [rowchoice.mechanism(many, op, Problem(rows, cols, name(dtype))) for rows in FEW]
    return many, found


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize(("dtype", "gap"), SHAPES)
def test_few_rows_take_more_blocks_of_fewer_warps(op: str, dtype: torch.dtype, gap: int) -> None:
    cols = VECTORS * 16 // dtype.itemsize - gap
    many, found = spread(op, cols, dtype)
    assert many.cluster * many.block >= 256
    for rows, few in zip(FEW, found, strict=True):
        if few != many:
            assert few == replace(many, cluster=few.cluster, block=few.block, why=few.why)
            assert many.cluster < few.cluster <= 16
            assert rows * few.cluster <= 132
            warps = many.cluster * many.block // WARP
            assert warps <= few.cluster * few.block // WARP < warps + few.cluster
    assert len({each.cluster for each in found}) > 1
    assert rowchoice.mechanism(many, op, Problem(4096, cols, name(dtype))) == many
    single = rowplan.numbers(op, 256, name(dtype), ARCH)
    assert rowchoice.mechanism(single, op, Problem(1, 256, name(dtype))) == single


@needs_compiler
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize(("dtype", "gap"), SHAPES)
def test_few_rows_have_the_bits_of_many(op: str, dtype: torch.dtype, gap: int) -> None:
    cols = VECTORS * 16 // dtype.itemsize - gap
    x = matrix(2, cols, dtype, 0, 0)
    x[1, cols // 3 :] = -math.inf
    y, dy = x.float().softmax(-1).to(dtype), matrix(2, cols, dtype, 0, 0)

    def result(row: Row) -> Tensor:
        if op not in BACKWARD:
            return forward(op, x, row)
        dx = torch.empty_like(y)
        run(row_launch.backward(op, dy, y, dx, 1.0, False, row, streams=False))
        return dx

    many, found = spread(op, cols, dtype)
    want = result(many)
    for few in {each.cluster: each for each in found if each != many}.values():
        assert torch.equal(result(few), want), few


@pytest.fixture
def by_hosts(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """CPU tensors go to host execution; the cuts that ran."""
    cuts: list[Row] = []
    original = row_launch.forward

    def launches(*arguments):
        cuts.append(arguments[5])
        return original(*arguments)

    monkeypatch.setattr(rowkernels, "has_kernels", lambda x: x.device.type == "cpu")
    monkeypatch.setattr(row_launch, "forward", launches)
    return cuts


@needs_compiler
@pytest.mark.parametrize("cols", [4096, 32_001])
@pytest.mark.parametrize("op", OPERATIONS)
def test_what_is_chosen_keeps_a_row_s_bits(op: str, cols: int, by_hosts: list[Row]) -> None:
    """Alone, off a 16-byte boundary, and among so many that fewer blocks share a row."""
    given = tuple(matrix(2, cols, torch.bfloat16, 0, 0) for _ in range(2 if op in BACKWARD else 1))
    want = computed(op, *given)
    assert torch.equal(computed(op, *changed(lambda t: moved(t[:1], 3), given)), want[:1])
    before = rowchoice.mechanism
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rowchoice, "mechanism", lambda row, op, p: before(row, op, replace(p, rows=9999))
        )
        assert torch.equal(computed(op, *given), want)


# ---- with batch invariance off


@needs_compiler
def test_bits_differ_only_where_it_was_given_up(by_hosts: list[Row]) -> None:
    """One row alone and the same among 17, of float32 results, where a sum's last bits show."""
    torch.manual_seed(5)
    x = (torch.randn(17, 20_480) * 3).bfloat16()
    many = softmax(x, dtype=torch.float32)
    assert torch.equal(softmax(x[:4], dtype=torch.float32), many[:4])
    with batch_invariant(False):
        assert torch.equal(softmax(x, dtype=torch.float32), many)
        few = softmax(x[:4], dtype=torch.float32)
        assert torch.equal(softmax(x[:1], dtype=torch.float32), few[:1])
        rounded = softmax(x[:4])
    assert [(cut.vectors, cut.cluster) for cut in by_hosts[3:]] == [(4, 8)] * 3
    assert {cut.vectors for cut in by_hosts[:3]} == {8}
    assert not torch.equal(few, many[:4])
    torch.testing.assert_close(few, many[:4], rtol=1e-6, atol=1e-12)
    verdict = opjudge.check("softmax", (x[:4],), rounded, opjudge.OUR_ULPS, 4)
    assert verdict.ok, verdict.why
