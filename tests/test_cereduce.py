"""What stands around the rows of a cross-entropy: losses in one, a gradient for what arrives."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ce_kit import FLOATS, IGNORED, LAYOUTS, build, needs_compiler
from online_softmax import cereduce
from online_softmax.cereduce import Reduction
from online_softmax.cuda import launch, reduce_launch
from online_softmax.reference.cross_entropy import Targets

close = torch.testing.assert_close
MANY = (1, 5, 33, 1000, 8192, 8193, 20_000)  # rows: a part of a block to three blocks
COLS = 50


def losses(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, target, weight); some rows are ignored, some of no class, with a number for a loss."""
    generator = torch.Generator().manual_seed(rows)
    target = torch.randint(COLS, (rows,), generator=generator)
    target[1::7], target[2::11] = IGNORED, COLS
    target[3::13] = -1
    loss = torch.rand(rows, generator=generator) * 12
    return loss, target, torch.rand(COLS, generator=generator)


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_losses_in_one(weighted: bool, dtype: torch.dtype) -> None:
    """As exact as float64 allows: rounded once to float32, and once to the type."""
    cases: list[tuple[Any, ...]] = []
    for rows, name in itertools.product(MANY, ("mean", "sum")):
        loss, target, weight = losses(rows)
        given, r = weight if weighted else None, Reduction(name, dtype)
        of_row = Targets.of(target, COLS, IGNORED).weights(weight.double(), torch.double)
        total = of_row.sum() if weighted else (of_row > 0).sum().double()
        divisor = total if name == "mean" else torch.ones((), dtype=torch.double)
        for inverts in (False, True):
            args = (target, given, COLS, IGNORED, r, inverts)
            result, got = cereduce.by_kernel(loss, *args)
            assert (result.dtype, result.shape, got.shape) == (dtype, (), ())
            assert result == (loss.double().sum() / divisor).float().to(dtype)
            close(got.double(), 1 / divisor if inverts else divisor, rtol=2.0**-23, atol=0)
            _, alone = cereduce.by_kernel(None, *args)
            assert torch.equal(alone, got)
        cases.append((loss, target, given, r, result))
    for loss, target, given, r, result in cases[::3]:  # the same bits again
        assert torch.equal(
            cereduce.by_kernel(loss, target, given, COLS, IGNORED, r, True)[0], result
        )


@needs_compiler
def test_targets_and_weights_are_read_early_only_where_they_were_there_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy that starts after the kernel of the rows has to end first: no dependent launch."""
    seen: list[bool] = []
    run = launch.run
    monkeypatch.setattr(
        launch, "run", lambda work, device: (seen.append(work[0].dependent), run(work, device))
    )
    loss, target, weight = losses(40)
    apart, wide = torch.stack([target, -target], 1)[:, 0], torch.stack([weight, -weight], 1)[:, 0]
    made = [
        cereduce.by_kernel(of_rows, t, w, COLS, IGNORED, Reduction("mean", torch.float32))[1]
        for of_rows in (loss, None)
        for t in (target, apart)
        for w in (weight, wide)
    ]
    assert seen == [True] + [False] * 7
    assert all(torch.equal(total, made[0]) for total in made)


@needs_compiler
def test_a_mean_of_no_row() -> None:
    target = torch.full((40,), IGNORED)
    for weight in (None, torch.rand(COLS), torch.zeros(COLS)):
        args = (target, weight, COLS, IGNORED, Reduction("mean", torch.float32))
        result, total = cereduce.by_kernel(torch.zeros(40), *args)
        assert result.isnan()
        assert total == 0
        result, total = cereduce.by_kernel(torch.full((40,), math.nan), *args)
        assert result.isnan()
        result, inverse = cereduce.by_kernel(torch.zeros(40), *args, inverts=True)
        assert inverse == math.inf
    loss = torch.tensor([1.0, math.inf, 2.0])
    args = (torch.arange(3), None, COLS, IGNORED)
    for name in ("mean", "sum"):
        result, _ = cereduce.by_kernel(loss, *args, Reduction(name, torch.bfloat16))
        assert result == math.inf
    result, _ = cereduce.by_kernel(loss[::2] * 40_000, args[0][:2], *args[1:],
                                   Reduction("sum", torch.float16))  # fmt: skip
    assert result == math.inf  # of float16


def test_blocks_follow_from_the_rows() -> None:
    assert [reduce_launch.blocks(n) for n in (0, 1, 8192, 8193, 1 << 20)] == [1, 1, 1, 2, 128]
    assert reduce_launch.blocks(1 << 40) == 1024


def gradient(cols: int, dtype: torch.dtype, start: int, gap: int) -> tuple[Tensor, Tensor]:
    """A made gradient among NaN, 0 in rows that do not count; and its targets."""
    base = torch.full((6, start + cols + gap), math.nan, dtype=dtype)
    made = base[:, start : start + cols].copy_(torch.randn(6, cols))
    target = torch.tensor([0, IGNORED, 0, cols, 0, -1])
    made[1::2] = 0
    return made, target


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_gradient_for_what_arrives(dtype: torch.dtype) -> None:
    """For one upstream, or one for each row; apart and over itself; NaN beside it stays."""
    cases, work = [], []
    widths = (1, 37, 1000, 9000)
    for cols, (start, gap), wide in itertools.product(widths, LAYOUTS, (False, True)):
        made, target = gradient(cols, dtype, start, gap)
        upstream = torch.tensor([0.5, math.inf, -3.0, math.nan, 1.0, math.inf])
        upstream = upstream.to(torch.float32 if wide else dtype)
        for each in (upstream, upstream[2].expand(6)):
            total = torch.tensor(7.0) if cols == 37 else None
            cases.append((made.clone(), made, target, each, total))
            work += reduce_launch.rescale(made, each, total, target, made, IGNORED)
            apart = torch.empty_like(cases[-1][0])
            work += reduce_launch.rescale(made, each, total, target, apart, IGNORED)
    build(work)
    for before, made, target, each, total in cases:
        made.copy_(before)
        ratio = each.double() / (1.0 if total is None else total)
        want = torch.where(Targets.of(target, made.shape[1], IGNORED).counts, ratio, 0.0)
        want = torch.where(before == 0, 0.0, before.double() * want[:, None])
        eps = torch.finfo(dtype).eps / 2 + 2.0**-22
        outside = made.as_strided((5, made.stride(0)), (made.stride(0), 1))[:, made.shape[1] :]
        for rescale in (cereduce.rescale_by_kernel, cereduce.rescale):
            got = rescale(made, each, total, target, IGNORED, False)
            close(got.double(), want, rtol=eps, atol=1e-7)
            assert torch.equal(made, before)
            assert rescale(made, each, total, target, IGNORED, True) is made
            assert torch.equal(made, got)
            assert outside.isnan().all()
            made.copy_(before)


@needs_compiler
def test_what_arrives_as_one_costs_nothing() -> None:
    made, target = gradient(3000, torch.bfloat16, 0, 0)
    ones = torch.ones(6)
    for upstream, total in ((ones[0].expand(6), None), (3 * ones[0].expand(6), 3 * ones[0])):
        work = reduce_launch.rescale(made, upstream, total, target, made, IGNORED)
        counts = launch.run(work, made.device)
        assert counts.writes == 0
        assert counts.reads <= 2 * 256 * work[0].grid
    some = ones.clone()
    some[4] = 2.0
    work = reduce_launch.rescale(made, some, None, target, made, IGNORED)
    assert launch.run(work, made.device).writes == 3000
