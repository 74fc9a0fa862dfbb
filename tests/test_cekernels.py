"""The kernels of cross-entropy, by host execution: every cut, option and alignment."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from ce_kit import (
    FLOATS,
    IGNORED,
    LAYOUTS,
    VARIANTS,
    WIDTHS,
    arguments,
    build,
    close,
    cuts,
    expected,
    needs_compiler,
    options,
    problem,
    work,
)
from online_softmax import cekernels, rowkernels
from online_softmax.cuda import crossentropy_launch, launch
from online_softmax.rowplan import Row

pytestmark = needs_compiler


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_cut_agrees_with_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    launches, checks = [], []
    turn = itertools.cycle(VARIANTS)
    widths = WIDTHS[:: 2 if dtype == torch.float16 else 1]
    for cols, (start, gap) in itertools.product(widths, LAYOUTS):
        x, target = problem(5, cols, dtype, start, gap)
        for name, row in cuts(cols, x.itemsize).items():
            variant = next(turn)
            given = arguments(variant, cols)
            dloss = torch.randn(5)
            dx = None if row.kernel == "split" else torch.full(x.shape, 7.0, dtype=dtype)
            found, loss, lse = work(x, target, options(**given), row, dloss, dx)
            launches += found
            checks.append((f"{name} {variant} {cols}", x, target, given, dloss, loss, lse, dx))
    build(launches)
    launch.run(launches, torch.device("cpu"))
    for what, x, target, given, dloss, loss, lse, dx in checks:
        want_loss, want_lse, want_dx = expected(x, target, **given)
        try:
            close(loss, want_loss, 1e-6)
            close(lse, want_lse, 1e-6)
            if dx is not None:
                close(dx, want_dx * dloss[:, None], 1e-6, 2.0**-18)
        except AssertionError as error:
            raise AssertionError(what) from error


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_a_16_bit_gradient_while_floats_are_on_chip(dtype: torch.dtype) -> None:
    """Every cut, wherever both lie: each element written once and nothing beside, with the same
    bits."""
    torch.manual_seed(7)
    turn, launches, checks = itertools.cycle(VARIANTS), [], []
    for cols in (1, 6, 257, 1024):
        values, target = problem(5, cols, torch.float32)
        dloss = torch.randn(5)
        for name, row in cuts(cols, 4).items():
            if row.kernel == "split":
                continue
            given, dxs = arguments(next(turn), cols), []
            for start, place in ((0, 0), (0, 3), (1, 4), (3, 0), (2, 5)):
                x = torch.full((5, cols + 8), math.nan)[:, start : start + cols].copy_(values)
                base = torch.full((5, cols + 24), math.nan, dtype=dtype)
                dx = base[:, place : place + cols]
                found, loss, lse = work(x, target, options(**given), row, dloss, dx)
                launches += found
                dxs.append((base, dx, loss, lse))
            checks.append((f"{name} {cols}", values, target, given, dloss, dxs))
    build(launches)
    counts = launch.run(launches, torch.device("cpu"))
    assert counts.writes >= sum(dx.numel() for *_, dxs in checks for _, dx, _, _ in dxs)
    for what, values, target, given, dloss, dxs in checks:
        want_loss, want_lse, want_dx = expected(values, target, **given)
        floor = 2.0**-25 if dtype == torch.float16 else 0.0  # half the spacing near zero
        for base, dx, loss, lse in dxs:
            close(loss, want_loss, 1e-6)
            close(lse, want_lse, 1e-6)
            close(dx, want_dx * dloss[:, None], 1e-6 + floor, 2.0**-18)
            assert base.isnan().sum() == base.numel() - dx.numel(), what
            assert torch.equal(dx, dxs[0][1]), what


def test_one_read_of_floats_and_one_write_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As planned: the elements, each lane its target's logit, loss and lse."""
    counted = []
    run = launch.run
    monkeypatch.setattr(rowkernels, "has_kernels", lambda x: True)
    monkeypatch.setattr(launch, "run", lambda *args: counted.append(run(*args)))
    x, target = torch.randn(4, 8192), torch.tensor([0, 8191, 5, 7])
    dx = torch.empty(4, 8192, dtype=torch.bfloat16)
    cekernels.forward_with_gradient(x, target, torch.ones(()), out=dx)
    (counts,) = counted
    assert x.numel() <= counts.reads <= 1.1 * x.numel()
    assert counts.writes == x.numel() + 4 + 2 * 4


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_the_gradient_from_a_saved_lse(dtype: torch.dtype) -> None:
    """Apart, and over the logits themselves, which lie between NaN that stays."""
    torch.manual_seed(1)
    turn, cases, launches = itertools.cycle(VARIANTS), [], []
    for cols, (start, gap) in itertools.product((1, 100, 515, 3000), LAYOUTS):
        x, target = problem(5, cols, dtype, start, gap)
        given, dloss = arguments(next(turn), cols), torch.randn(()).expand(5)
        lse = expected(x, target, **given)[1].float()
        tensors = (dloss, x, target, lse, None, torch.empty_like(x))
        launches += crossentropy_launch.backward(*tensors, options(**given), False)
        launches += crossentropy_launch.backward(*tensors[:-1], x, options(**given), False)
        cases.append((start, cols, given, tensors))
    build(launches)
    for start, cols, given, (dloss, x, target, lse, *_) in cases:
        _, _, want = expected(x, target, **given)
        got = cekernels.backward(dloss, x, target, lse, **given)
        close(got, want * dloss[:, None], 1e-6, 2.0**-18)
        written = cekernels.backward(dloss, x, target, lse, **given, out=x)
        assert written is x
        assert torch.equal(x, got)
        base = x.as_strided((5, x.stride(0)), (x.stride(0), 1), 0)
        assert base[:, :start].isnan().all()
        assert base[:, start + cols :].isnan().all()


@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("cut", ["lanes", "block", "cluster", "split"])
def test_a_row_keeps_its_bits(cut: str, variant: str) -> None:
    """Alone or among others, at every address, in place or apart: the same bits."""
    torch.manual_seed(2)
    cols = 1027
    values, target = problem(3, cols, torch.bfloat16)
    given, dloss = options(**arguments(variant, cols)), torch.ones(3)
    row = cuts(cols, 2).get(cut) or Row("registers", 5, 32, 64)

    def results(x: Tensor, dx: Tensor | None) -> list[Tensor]:
        launches, loss, lse = work(x, target[: len(x)], given, row, dloss[: len(x)], dx)
        launch.run(launches, x.device)
        return [loss, lse]

    writes = row.kernel == "registers"
    first = torch.empty_like(values) if writes else None
    want = results(values, first)
    for start in range(8):
        base = torch.zeros(3, cols + start, dtype=values.dtype)
        x = base[:, start:].copy_(values)
        apart = torch.empty_like(values) if writes else None
        assert all(map(torch.equal, results(x, apart), want))
        if writes:
            assert torch.equal(apart, first)
            assert all(map(torch.equal, results(x, x), want))
            assert torch.equal(x, first)
    alone = torch.empty_like(values[:1]) if writes else None
    assert all(map(torch.equal, results(values[:1], alone), [each[:1] for each in want]))
    assert not writes or torch.equal(alone, first[:1])


def test_the_backward_keeps_its_bits() -> None:
    torch.manual_seed(3)
    values, target = problem(3, 1027, torch.bfloat16)
    lse = torch.logsumexp(values.float(), -1)
    want = cekernels.backward(torch.ones(3), values, target, lse)
    for start in range(8):
        x = torch.zeros(3, 1027 + start, dtype=values.dtype)[:, start:].copy_(values)
        assert torch.equal(cekernels.backward(torch.ones(3), x, target, lse), want)
    alone = cekernels.backward(torch.ones(1), values[:1], target[:1], lse[:1])
    assert torch.equal(alone, want[:1])


def test_one_read_and_one_write() -> None:
    """As counted: the elements, and for each row that has a class its target's logit."""
    x, target = problem(5, 1000, torch.bfloat16)
    assert [int(t) for t in target[1:4]] == [IGNORED, 1000, -1]
    row, dx = cuts(1000, 2)["block"], torch.empty_like(x)
    launches, *_ = work(x, target, options(), row, torch.ones(5), dx)
    counts = launch.run(launches, x.device)
    groups = 2 * 64 // 32  # warps of a row that look
    assert counts.reads <= x.numel() + 2 * groups * 32
    assert counts.writes == x.numel() + 2 + 2 * 5  # loss and lse
    work_back = crossentropy_launch.backward(
        torch.ones(5), x, target, torch.ones(5), None, dx, options(), True
    )
    counts = launch.run(work_back, x.device)
    assert (counts.reads, counts.writes) == (x.numel() + 2 * 32, x.numel() + 2)
