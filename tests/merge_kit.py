"""What the tests of merging share: parts of rows, gradients for what they give, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from online_softmax import mergekernels
from online_softmax.reference.parts import Merged, Parts
from rows_kit import GPU

INF, NAN = math.inf, math.nan
KINDS = ("states", "states_alone", "pairs_e", "pairs_2")
BASE = {"pairs_e": "e", "pairs_2": "2"}
kernels = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=GPU)])


class Given(Parts):  # type: ignore[misc]
    """Parts that can be cast."""

    def double(self) -> Given:
        return Given(*([t.double() for t in each] for each in self[:3]), self.base)


def parts(
    kind: str,
    count: int,
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    device: str,
    empties: bool = True,
    ties: bool = False,
) -> Given:
    """Random ones, of large and small maxima. With empties a quarter of the parts of a row has
    nothing, some rows have nothing at all, and what nothing gave is NaN; with ties the maxima of
    some rows are equal."""
    generator = torch.Generator().manual_seed(count * 100 + dim)
    rows = torch.Size(shape)
    scale = 10.0 ** torch.randint(-1, 3, shape, generator=generator)
    ms = [torch.randn(rows, generator=generator) * 2 + scale for _ in range(count)]
    ds = [torch.rand(rows, generator=generator) * 9 + 1 for _ in range(count)]
    os = [torch.randn((*rows, dim), generator=generator).to(dtype) for _ in range(count)]
    for m in ms[1:] if ties else ():
        m.view(-1)[1::5] = ms[0].view(-1)[1::5]
    if empties:
        for at in range(count):
            is_empty = torch.rand(rows, generator=generator) < 0.25
            is_empty.view(-1)[:: max(rows.numel() // 3, 3)] = True
            ms[at][is_empty], ds[at][is_empty], os[at][is_empty] = -INF, NAN, NAN
    ms, ds, os = ([t.to(device) for t in each] for each in (ms, ds, os))
    return Given(ms, [] if kind in BASE else ds, os if dim else [], BASE.get(kind, ""))


def upstream(whole: Merged) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients for m, d and o of the whole; of what is not there None."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for t in whole:
        made = torch.randn(t.shape, generator=generator).to(t.device, t.dtype)
        found.append(made if t.numel() else None)
    return found[0], found[1], found[2]


def same(got: Merged, want: Merged, given: Parts, bound: float) -> None:
    """Within a part of the row's largest; m of states exactly."""
    for name, one, other in zip(Merged._fields, got, want, strict=True):
        assert one.shape == other.shape, name
        if not one.numel():
            continue
        one, other = one.double(), other.double()
        finite = other[other.isfinite()].abs()
        most = float(finite.max()) if finite.numel() else 0.0
        torch.testing.assert_close(
            one, other, rtol=bound, atol=bound * (most + 0.1) / 4, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


def one_by_one(given: Given, whole: Merged, by: Merged, rows: Iterable[int]) -> None:
    """Each of these rows alone has the bits that it has among the others, gradients too."""
    above = upstream(whole)
    for row in rows:
        at = slice(row, row + 1)
        alone = Parts(*([t[at] for t in each] for each in given[:3]), given.base)
        for one, other in zip(mergekernels.forward(alone), whole, strict=True):
            assert torch.equal(one, other[at] if other.numel() else other)
        some = (t if t is None else t[at] for t in above)
        for one, other in zip(mergekernels.backward(*some, alone), by, strict=True):
            assert torch.equal(one, other[:, at] if other.numel() else other)
