"""Cross-entropy by blocks of rows: as the reference, whatever the blocks, options and values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ce_kit import IGNORED, INF, LAYOUTS, VARIANTS, arguments, expected
from online_softmax import ceblocks
from online_softmax.reference import cross_entropy as reference

close = torch.testing.assert_close
NARROW, WIDE = 5, 40  # columns


@pytest.fixture(params=[1, 1 << 30], ids=["a row a block", "one block"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceblocks, "BLOCK_BYTES", request.param)


def problem(cols: int, dtype: torch.dtype, start: int = 0, gap: int = 0) -> tuple[Tensor, Tensor]:
    """Logits among NaN, and targets, some ignored and some of no class."""
    base = torch.full((7, start + cols + gap), math.nan, dtype=dtype)
    x = base[:, start : start + cols].copy_(3 * torch.randn(7, cols))
    return x, torch.tensor([cols - 1, IGNORED, 0, cols, 2, -1, 1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cols", [1, 3, NARROW, WIDE])
@pytest.mark.usefixtures("blocks")
def test_agrees_with_the_reference(cols: int, variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(cols)
    given = arguments(variant, cols)
    weight = given.pop("weight", None)
    sums = (
        {"rtol": 1e-13, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 1e-6}
    )
    rounded = {**sums, "rtol": sums["rtol"] + torch.finfo(dtype).eps}
    for start, gap in LAYOUTS:
        x, target = problem(cols, dtype, start, gap)
        target = torch.where((target < cols) | (target == 3), target, 0)
        wide = torch.double if dtype == torch.double else torch.float32
        rest, want_rest = torch.empty(2, 7, dtype=wide)
        loss, lse = ceblocks.forward(x, target, weight, lse_rest=rest, **given)
        want, want_lse = reference.forward(x, target, weight, lse_rest=want_rest, **given)
        close((loss, lse), (want, want_lse), equal_nan=True, **sums)
        close(lse.double() + rest, want_lse.double() + want_rest, **sums)
        assert rest.abs().max() <= lse.abs().max() * torch.finfo(wide).eps
        dloss, dlse = torch.randn(2, 7, dtype=wide)
        for above in ((dloss, None), (dloss, dlse), (None, dlse)):
            args = (above[0], x, target, lse, weight)
            dx = ceblocks.backward(*args, lse_rest=rest, dlse=above[1], **given)
            want_dx = reference.backward(*args, lse_rest=rest, dlse=above[1], **given)
            close(dx, want_dx, **rounded)
        one = torch.full((), 0.7, dtype=wide)
        want_dx = reference.backward(one.expand(7), x, target, lse, weight, lse_rest=rest, **given)
        for out in (None, torch.empty_like(x), x):
            both = ceblocks.forward_with_gradient(x, target, one, weight, out=out, **given)
            close(both[:2], (loss, lse), equal_nan=True, rtol=0, atol=0)  # the same bits
            close(both[2], want_dx, **rounded)
            assert out is None or both[2] is out
        outside = x.as_strided((6, x.stride(0)), (x.stride(0), 1))[:, cols:]
        assert outside.isnan().all()


@pytest.mark.parametrize("cols", [NARROW, WIDE])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"softcap": 3.0, "z_loss": 0.1}])
@pytest.mark.usefixtures("blocks")
def test_infinite_logits(options: dict[str, Any], cols: int) -> None:
    """In any row, counted or not: as the reference, and no other row changes."""
    x = torch.randn(8, cols)
    x[1, 2], x[2], x[3, 0], x[4] = INF, -INF, math.nan, -INF
    x[4, 1], x[5, 3:], x[6, 0], x[7, 1] = 4.0, -INF, -INF, math.nan
    target = torch.tensor([0, 2, 0, 1, 1, 4, IGNORED, IGNORED])
    args = (x, target)
    loss, lse = ceblocks.forward(*args, **options)
    want, want_lse = reference.forward(*args, **options)
    close((loss, lse), (want, want_lse), equal_nan=True, rtol=1e-6, atol=1e-6)
    ones = torch.ones(8)
    dx = ceblocks.backward(ones, *args, lse, **options)
    want_dx = reference.backward(ones, *args, lse, **options)
    close(dx, want_dx, equal_nan=True, rtol=1e-5, atol=1e-7)
    both = ceblocks.forward_with_gradient(*args, torch.ones(()), **options)
    close(both, (loss, lse, dx), equal_nan=True)


@pytest.mark.parametrize("cols", [NARROW, WIDE, 3000])
def test_errors_are_those_of_float32(cols: int) -> None:
    """Far from 0 as well: the maximum is subtracted first."""
    torch.manual_seed(1)
    for offset in (0.0, 1e6):
        x = (offset + 4 * torch.randn(20, cols)).float()
        target = torch.randint(cols, (20,))
        want, want_lse, want_dx = expected(x, target)
        rest = torch.empty(20)
        loss, lse = ceblocks.forward(x, target, lse_rest=rest)
        close(loss.double(), want, rtol=2.0**-22, atol=2e-6)
        close(lse.double() + rest.double(), want_lse, rtol=2.0**-40, atol=2e-6)
        dx = ceblocks.backward(torch.ones(20), x, target, lse, lse_rest=rest)
        close(dx.double(), want_dx, rtol=4e-6, atol=2.0**-22)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    x, target = torch.zeros(shape), torch.full(shape[:1], IGNORED)
    loss, lse = ceblocks.forward(x, target)
    assert torch.equal(loss, torch.zeros(shape[0]))
    dx = ceblocks.backward(torch.ones(shape[0]), x, target, lse)
    both = ceblocks.forward_with_gradient(x, target, torch.ones(()))
    assert dx.shape == both[2].shape == shape


def test_blocks_hold_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many bytes for each thread, a row at least; no room of its own where the result is one."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(ceblocks, "BLOCK_BYTES", 8 * 4 * 10)
    x = torch.zeros(50, 10)
    found = list(ceblocks._blocks(x))
    assert [block.start for block, _ in found] == [0, 24, 48]
    assert [len(p) for _, p in found] == [24, 24, 2]
    dx = torch.empty_like(x)
    assert [p.data_ptr() for _, p in ceblocks._blocks(x, dx)] == [
        dx[start:].data_ptr() for start in (0, 24, 48)
    ]
    assert [block.start for block, _ in ceblocks._blocks(torch.zeros(3, 1000))] == [0, 1, 2]
    monkeypatch.setattr(ceblocks, "MOST_BYTES", 40 * 10)
    assert [block.start for block, _ in ceblocks._blocks(x)] == [0, 10, 20, 30, 40]
