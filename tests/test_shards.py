"""Shards of the classes: the reference and its kernels, by host execution, against float64."""

from __future__ import annotations

import itertools
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ce_kit import IGNORED, INF, VARIANTS, arguments, build, close, expected, needs_compiler
from online_softmax import cekernels, linearplan, shardkernels
from online_softmax.cuda import crossentropy_launch
from online_softmax.cuda.crossentropy_launch import Options
from online_softmax.reference import cross_entropy as reference
from online_softmax.reference import shards
from online_softmax.reference.shards import Shard

KINDS = [shards, pytest.param(shardkernels, marks=needs_compiler)]
BOTH = pytest.mark.parametrize("module", KINDS, ids=["reference", "kernels"])
TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of a gradient
CUTS = ((7,), (1, 6), (100, 33, 67), (257, 0, 515), (2051, 1024))  # columns of each shard


def problem(classes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits that are not aligned, and targets: some ignored, some no class."""
    base = torch.full((6, classes + 4), math.nan, dtype=dtype)
    x = base[:, 3 : classes + 3].copy_(torch.randn(6, classes) * 3)
    target = torch.tensor([0, classes - 1, IGNORED, classes // 2, classes, -1])
    return x, target


def split(x: Tensor, cols: tuple[int, ...]) -> list[tuple[Tensor, Shard]]:
    firsts = [0, *itertools.accumulate(cols)]
    return [(x[:, a:b], Shard(a, x.shape[1])) for a, b in itertools.pairwise(firsts)]


def fold(module: ModuleType, pieces: list[Any], target: Tensor, given: dict[str, Any]) -> Tensor:
    options = {k: v for k, v in given.items() if k != "weight"}
    one_each = [
        (module if z.numel() else shards).fold(z, target, given.get("weight"), shard, **options)
        for z, shard in pieces
    ]
    return torch.cat(one_each, 1)


def compiled(variant: str) -> None:
    """The gradients of the test below, together: a part of the time that one by one would take."""
    work, row = [], torch.empty(6)
    for cols, dtype in itertools.product(CUTS, TYPES):
        given = arguments(variant, sum(cols))
        o = cekernels.launch_options(given.pop("weight", None), reference.Options(**given))
        x, target = problem(sum(cols))
        for z, shard in split(x, cols):
            if z.numel():
                tensors = (row, z, target, row, row, torch.empty(z.shape, dtype=dtype))
                work += crossentropy_launch.backward(*tensors, o, False, None, *shard)
    build(work)


@BOTH
@pytest.mark.parametrize("variant", VARIANTS)
def test_shards_agree_with_float64(module: ModuleType, variant: str) -> None:
    """The loss, lse and the gradient, of every 16-bit type as well, from the partials of shards."""
    if module is shardkernels:
        compiled(variant)
    torch.manual_seed(0)
    for cols, dtype in itertools.product(CUTS, TYPES):
        given = arguments(variant, sum(cols))
        x, target = problem(sum(cols))
        pieces = split(x, cols)
        weight, options = given.pop("weight", None), given
        given = {"weight": weight, **options}
        partials = fold(module, pieces, target, given)
        rest = torch.empty(6)
        ends = (partials, target, weight, sum(cols))
        loss, lse = module.finish(*ends, **options, lse_rest=rest)
        want_loss, want_lse, want_dx = expected(x, target, **given)
        close(loss, want_loss, 2e-6)
        close(lse, want_lse, 1e-6)
        close(lse.double() + rest.double(), want_lse, 1e-6)
        dloss = torch.randn(6)
        for z, shard in pieces:
            if not z.numel():
                continue
            dx = torch.full(z.shape, 7.0, dtype=dtype)
            tensors = (dloss, z, target, lse, weight, shard)
            got = module.backward(*tensors, **options, lse_rest=rest, out=dx)
            assert got is dx
            part = slice(shard.first, shard.first + z.shape[1])
            want = want_dx[:, part] * dloss[:, None]
            floor = 2.0**-25 if dtype == torch.float16 else 0.0  # half the spacing near zero
            close(dx, want, 1e-6 + floor, 2.0**-18)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_in_blocks_are_rows(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference on a CPU: 6 rows as 4 and 2, in a shard of two."""
    torch.manual_seed(3)
    options = arguments(variant, 60)
    weight = options.pop("weight", None)
    x, target = problem(60)
    z, shard = split(x, (20, 40))[1]
    lse, rest = x.logsumexp(1), torch.randn(6) * 1e-8
    dloss, dlse = torch.randn(2, 6)

    def run() -> tuple[Tensor, Tensor]:
        above = {"lse_rest": rest, "dlse": dlse, **options}
        dx = shards.backward(dloss, z, target, lse, weight, shard, **above)
        return shards.fold(z, target, weight, shard, **options), dx

    whole = run()
    monkeypatch.setattr(linearplan, "CPU_NUMBERS", 160)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    sizes: list[int] = []
    rows = shards._gradient
    monkeypatch.setattr(shards, "_gradient", lambda *a: sizes.append(len(a[1])) or rows(*a))
    for got, want in zip(run(), whole, strict=True):
        assert torch.equal(got, want)
    assert sizes == [4, 2]


@BOTH
@pytest.mark.parametrize("variant", ["plain", "all"])
def test_partials_merge_in_any_grouping(module: ModuleType, variant: str) -> None:
    """Empty ones included; a shard that is all -inf spoils nothing."""
    torch.manual_seed(1)
    given = arguments(variant, 50)
    weight = given.pop("weight", None)
    x, target = problem(50)
    if variant == "plain":
        x[:, 20:30] = -INF
        target[3] = 35
    parts = fold(module, split(x, (20, 10, 20)), target, {"weight": weight, **given})
    nothing = shards.fold(x[:, :0], target, weight, Shard(0, 50), **given)
    assert (nothing == torch.tensor([-INF, 0.0, 0.0, 0.0, 0.0])[: nothing.shape[-1]]).all()
    a, b, c = parts.split(1, 1)
    join = lambda *each: module.merge(torch.cat(each, 1))  # noqa: E731
    groupings = [
        parts,
        join(a, b, c),
        join(join(a, b), c),
        join(a, join(b, c)),
        join(c, a, b),
        join(nothing, join(nothing, nothing), a, join(b, nothing), c),
    ]
    want, want_lse, _ = expected(x, target, weight, **given)
    for each in groupings:
        assert each.isnan().sum() == 0
        loss, lse = module.finish(each, target, weight, 50, **given)
        close(loss, want, 2e-6)
        close(lse, want_lse, 1e-6)
    only = module.merge(torch.cat([nothing, nothing], 1))
    assert torch.equal(only, nothing)


@BOTH
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_large_offset_costs_no_digits(module: ModuleType, smoothing: float) -> None:
    torch.manual_seed(2)
    x = 1e6 + torch.randn(4, 300) * 2
    target = torch.tensor([0, 17, 150, 299])
    want, _, want_dx = expected(x, target, label_smoothing=smoothing)
    pieces, given = split(x, (100, 13, 187)), {"label_smoothing": smoothing}
    partials, rest = fold(module, pieces, target, given), torch.empty(4)
    loss, lse = module.finish(partials, target, None, 300, **given, lse_rest=rest)
    close(loss, want, 1e-6)
    assert rest.abs().max() > 1e-3
    for z, shard in pieces:
        tensors = (torch.ones(4), z, target, lse, None, shard)
        dx = module.backward(*tensors, **given, lse_rest=rest)
        part = slice(shard.first, shard.first + z.shape[1])
        close(dx, want_dx[:, part], 1e-7, 2.0**-18)


@BOTH
@pytest.mark.parametrize("variant", ["plain", "all"])
def test_the_gradient_by_lse(module: ModuleType, variant: str) -> None:
    """Of all rows, those too that do not count; alone, and beside the loss's, of any stride."""
    torch.manual_seed(3)
    given = arguments(variant, 515)
    weight = given.pop("weight", None)
    x, target = problem(515)
    _, lse, want = expected(x, target, weight, **given)
    z = x.double().requires_grad_()
    mapped = z * given.get("scale", 1.0)
    if "softcap" in given:
        mapped = given["softcap"] * torch.tanh(mapped / given["softcap"])
    (by_lse,) = torch.autograd.grad(torch.logsumexp(mapped, -1).sum(), z)
    dloss = torch.randn(6)
    for dlse in (torch.randn(6), torch.randn(12)[::2], torch.randn(()).expand(6)):
        tensors = (x, target, lse.float(), weight, Shard(0, 515))
        rest = (lse - lse.float()).float()
        both = module.backward(dloss, *tensors, **given, dlse=dlse, lse_rest=rest)
        wanted = want * dloss[:, None] + by_lse * dlse[:, None]
        close(both, wanted, 1e-6, 2.0**-18)
        alone = module.backward(None, *tensors, **given, dlse=dlse, lse_rest=rest)
        close(alone, by_lse * dlse[:, None], 1e-6, 2.0**-18)


@needs_compiler
@pytest.mark.parametrize("cols", [131, 3, 2])
def test_stores_of_half_words_at_every_address(cols: int) -> None:
    """A 16-bit gradient of floats: each element written once and nothing beside, with the same bits
    wherever both lie; rows of less than a word too."""
    torch.manual_seed(4)
    values, target = torch.randn(3, cols) * 3, torch.tensor([0, cols - 1, cols // 2])
    lse = torch.logsumexp(values, -1)
    gradient = torch.softmax(values.double(), -1)
    gradient[torch.arange(3), target] -= 1.0
    shard, dloss = Shard(0, cols), torch.ones(3)
    want = None
    for start, place in itertools.product(range(4), range(8)):
        x = torch.full((3, cols + 7), math.nan)[:, start : start + cols].copy_(values)
        base = torch.full((3, cols + 14), math.nan, dtype=torch.bfloat16)
        dx = base[:, place : place + cols]
        shardkernels.backward(dloss, x, target, lse, None, shard, out=dx)
        assert base.isnan().sum() == base.numel() - dx.numel()
        close(dx, gradient, 1e-6)
        want = dx.clone() if want is None else want
        assert torch.equal(dx, want)


@needs_compiler
def test_one_read_and_one_write() -> None:
    from online_softmax.cuda import launch

    x, target = torch.randn(4, 1000), torch.tensor([0, 999, 5, 1000])
    partials = torch.empty(4, crossentropy_launch.shard_parts(1000, 4), 3)
    work = crossentropy_launch.fold_shard(x, target, partials, Options(), 0, 1000)
    counts = launch.run(work, x.device)
    assert counts.reads <= x.numel() + 3 * 32
    assert counts.writes == partials.numel()
    dx = torch.empty(4, 1000, dtype=torch.bfloat16)
    row = torch.ones(4)
    back = crossentropy_launch.backward(row, x, target, row, None, dx, Options(), True)
    counts = launch.run(back, x.device)
    assert (counts.reads, counts.writes) == (x.numel() + 3 * 32, x.numel() + 3)
