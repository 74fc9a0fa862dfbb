"""The kernels that merge states and pairs, by host execution and on a GPU: values, gradients, rows
without elements, layouts, and what stands around the parts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ce_kit import FLOATS, needs_compiler
from merge_kit import INF, KINDS, NAN, kernels, one_by_one, parts, same, upstream
from online_softmax import mergekernels, rowkernels
from online_softmax.cuda import host, launch, merge_launch
from online_softmax.cuda.host import sanitizers
from online_softmax.reference import parts as reference
from online_softmax.reference.parts import Merged, Parts
from rows_kit import GPU, gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
close = torch.testing.assert_close
pytestmark = needs_compiler


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Together it takes a part of the time that one by one would."""
    found = merge_launch.instances((0, 8), (3,), (F32, F16)) + merge_launch.instances(
        (8,), (2,), ()
    )
    host.build(merge_launch.FILE, [symbol for _, symbol in found])


# On the CPU each number of parts is compiled for itself: many of states alone.
COUNTS = [("cpu", count, kind) for count in (2, 3) for kind in KINDS] + [("cpu", 17, "states")]
COUNTS += [pytest.param("cuda", count, kind, marks=GPU) for count in (2, 3, 17) for kind in KINDS]


@pytest.mark.parametrize(("place", "count", "kind"), COUNTS)
def test_values_and_gradients(count: int, kind: str, place: str) -> None:
    """Against float64, among empty parts, empty rows, and large scores."""
    for dim in ((8, 5) if count == 3 else (8,)) if kind != "states_alone" else (0,):
        given = parts(kind, count, (7, 3), dim, F32, place, ties=True)
        got, want = mergekernels.forward(given), reference.forward(given.double())
        same(got, want, given, 4e-6)
        above = upstream(got)
        found = mergekernels.backward(*above, given)
        by = reference.backward(*(t if t is None else t.double() for t in above), given.double())
        same(found, by, given, 2e-5)
        for at, m in enumerate(given.ms):  # a part of nothing has no gradient
            for each in found:
                assert not each.numel() or not each[at][m == -INF].any()


DIMS = (1, 3, 32, 48, 65, 80, 96, 192, 512)  # S74
WORDS = [("cpu", 3, F32), ("cpu", 48, BF16), ("cpu", 65, F16), ("cpu", 512, F16)]
WORDS += [pytest.param("cuda", *each, marks=GPU) for each in itertools.product(DIMS, FLOATS)]


@pytest.mark.parametrize(("place", "dim", "dtype"), WORDS)
def test_pairs_of_any_dim(dim: int, dtype: torch.dtype, place: str) -> None:
    given = parts("pairs_e", 3, (13, 3), dim, dtype, place)
    bound = 4e-6 + (0 if dtype == F32 else torch.finfo(dtype).eps)
    got = mergekernels.forward(given)
    assert got.o.dtype == dtype
    same(got, reference.forward(given.double()), given, bound)
    above = upstream(got)
    by = reference.backward(*(t if t is None else t.double() for t in above), given.double())
    same(mergekernels.backward(*above, given), by, given, 2e-5 + bound)


# Parts that are more than the lanes of a row, or fewer; lanes without a vector (24, 40), or with
# several (192); elements one by one where a row does not fill its vectors.
MANY = [("cpu", 33, dim, F32, "states") for dim in (1, 7, 192)]
MANY += [("cpu", 64, 8, F32, "states"), ("cpu", 64, 3, F32, "pairs_2")]
MANY += [("cpu", 33, 4, F32, "pairs_e"), ("cpu", 33, 24, F16, "pairs_e")]
MANY += [("cpu", 5, 40, BF16, "pairs_2")]
MANY += [pytest.param("cuda", *each, marks=GPU)
         for count, dim in itertools.product((16, 33), (1, 2, 4, 7, 8, 24, 136, 320))
         for each in ((count, dim, F32, "states"), (count, dim, BF16, "pairs_e"))]  # fmt: skip


@pytest.mark.parametrize(("place", "count", "dim", "dtype", "kind"), MANY)
def test_parts_and_lanes(count: int, dim: int, dtype: torch.dtype, kind: str, place: str) -> None:
    """NaN in parts that are empty, and for each row the bits that it has alone."""
    given = parts(kind, count, (9,), dim, dtype, place, ties=True)
    empty = given.ms[count - 1] == -INF
    assert empty.any()
    assert given.os[count - 1][empty].isnan().all()
    bound = 4e-6 + (0 if dtype == F32 else torch.finfo(dtype).eps)
    got = mergekernels.forward(given)
    same(got, reference.forward(given.double()), given, bound)
    above = upstream(got)
    by = mergekernels.backward(*above, given)
    want = reference.backward(*(t if t is None else t.double() for t in above), given.double())
    same(by, want, given, 4e-5 + bound)
    one_by_one(given, got, by, (1, 8))


@kernels
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_part_leaves_the_other_bit_for_bit(kind: str, place: str) -> None:  # S04, S55
    """Whatever its d and o hold; three empty ones are empty."""
    dim = 0 if kind == "states_alone" else 8
    dtype = F16 if kind.startswith("pairs") else F32
    (m, _), ds, os, base = parts(kind, 2, (7, 3), dim, dtype, place, empties=False)
    none, holds = torch.full_like(m, -INF), [torch.full_like(t, NAN) for t in (*ds, *os)[1:]]
    for order in ((0, 1, 1), (1, 0, 1), (1, 1, 0, 1)):
        pick: Any = lambda full, other, order=order: [(full, other)[at] for at in order]  # noqa: E731
        given = Parts(
            pick(m, none),
            pick(ds[0], holds[0]) if ds else [],
            pick(os[0], torch.full_like(os[0], NAN)) if os else [],
            base,
        )
        got = mergekernels.forward(given)
        assert torch.equal(got.m, m)
        assert not ds or torch.equal(got.d, ds[0])
        assert not os or torch.equal(got.o, os[0])
    nothing = Parts([none] * 3, holds[:1] * 3 if ds else [], holds[-1:] * 3 if os else [], base)
    got = mergekernels.forward(nothing)
    assert torch.equal(got.m, none)
    assert not got.d.any()
    assert not got.o.any()


@kernels
@pytest.mark.parametrize("kind", ["pairs_e", "pairs_2"])
def test_infinite_and_missing_numbers_stay_in_their_row(kind: str, place: str) -> None:
    given = parts(kind, 3, (9,), 8, F32, place, empties=False)
    want = mergekernels.forward(given)
    given.ms[1][2], given.ms[0][4], given.ms[2][4] = INF, NAN, INF
    got = mergekernels.forward(given)
    assert got.m[2] == INF
    assert got.m[4].isnan()
    assert got.o[[2, 4]].isnan().all()
    rest = [0, 1, 3, 5, 6, 7, 8]
    for one, other in zip(got, want, strict=True):
        assert not one.numel() or torch.equal(one[rest], other[rest])
    found = mergekernels.backward(*upstream(got), given)
    assert found.m[:, rest].isfinite().all()
    assert found.o[:, rest].isfinite().all()


@kernels
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_layouts_have_the_same_bits(dtype: torch.dtype, place: str) -> None:
    """Rows that lie apart, at any address, transposed, or stacked: among NaN, nothing outside."""
    given = parts("pairs_e", 3, (5, 4), 24 if place == "cuda" else 8, dtype, place)
    dim = given.os[0].shape[-1]
    want = mergekernels.forward(given)
    above = upstream(want)
    by = mergekernels.backward(*above, given)
    stacked = [torch.stack(list(each)) for each in (given.ms, given.os)]
    views = [Parts(*(list(each) for each in (stacked[0], (), stacked[1])), "e")]
    apart = [torch.full((7, 4, dim + 7), NAN, dtype=dtype, device=o.device) for o in given.os]
    cut = [a[1:6, :, at : at + dim] for at, a in enumerate(apart)]
    os = [a.copy_(o) for a, o in zip(cut, given.os, strict=True)]
    views.append(given._replace(os=os))
    views.append(given._replace(ms=[m.t().contiguous().t() for m in given.ms],
                                os=[o.transpose(0, 1).contiguous().transpose(0, 1)
                                    for o in given.os]))  # fmt: skip
    for view in views:
        for one, other in zip(mergekernels.forward(view), want, strict=True):
            assert torch.equal(one, other)
        for one, other in zip(mergekernels.backward(*above, view), by, strict=True):
            assert torch.equal(one, other)


@kernels
@pytest.mark.parametrize("kind", ["states", "pairs_2"])
def test_a_row_has_the_same_bits_alone(kind: str, place: str) -> None:
    given = parts(kind, 4, (70,), 8, F32, place)
    got = mergekernels.forward(given)
    one_by_one(given, got, mergekernels.backward(*upstream(got), given), (0, 31, 69))


@kernels
@pytest.mark.parametrize("count", [2, 3])
def test_more_rows_of_a_thread_change_no_bit(
    count: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = parts("pairs_e", count, (5,), 24, F16, place)
    found = []
    for rows in (1, 2):
        monkeypatch.setattr(merge_launch, "ROWS", rows)
        m, o = torch.full_like(given.ms[0], NAN), torch.full_like(given.os[0], NAN)
        work = merge_launch.forward(given.ms, [], given.os, "e", m, m, o)
        assert work[0].symbol.endswith(f", {rows}>")
        launch.run(work, m.device)
        found.append((m, o))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    same(Merged(found[1][0], m.new_empty(0), found[1][1]), reference.forward(given.double()),
         given, 1e-3)  # fmt: skip


@kernels
def test_gradients_that_nobody_asked_for(place: str) -> None:
    given = parts("states", 3, (6,), 8, F32, place)
    dm, dd, do = upstream(mergekernels.forward(given))
    for above in ((dm, None, None), (None, dd, None), (None, None, do)):
        same(mergekernels.backward(*above, given), reference.backward(*above, given), given, 1e-5)


def test_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowkernels, "has_kernels", lambda x: True)
    given = parts("pairs_e", 2, (3,), 4, F16, "cpu")
    assert mergekernels.takes(given)
    assert mergekernels.takes(parts("states_alone", 64, (3,), 0, F32, "cpu"))
    assert not mergekernels.takes(parts("states_alone", 65, (3,), 0, F32, "cpu"))
    assert not mergekernels.takes(given.double())
    assert not mergekernels.takes(Parts(*([t[:0] for t in each] for each in given[:3]), "e"))
    assert not mergekernels.takes(Parts(*(each[:1] for each in given[:3]), "e"))
    monkeypatch.undo()
    assert not mergekernels.takes(given)  # on the CPU there is no kernel


@pytest.mark.parametrize(("count", "dim", "beyond"), [(3, 8, 0), (8, 48, 0), (33, 24, 29)])
def test_each_part_is_read_once(count: int, dim: int, beyond: int) -> None:
    """And written once: elements of out. A maximum and an exponential for each part of a row, not
    for each lane; for parts beyond those that its lanes hold, three and two."""
    rows = 256  # blocks are full: lanes without a row would look at the last one
    given = parts("pairs_e", count, (rows,), dim, F16, "cpu", empties=False)
    o, m = torch.empty(rows, dim, dtype=F16), torch.empty(rows)
    found = launch.run(merge_launch.forward(given.ms, [], given.os, "e", m, m, o), o.device)
    assert found.reads == rows * (count * (dim + 1) + 2 * beyond)
    assert found.exps == rows * (count + beyond)
    assert found.writes == rows * (dim + 1)


def test_nothing_outside_is_touched() -> None:
    given = parts("states", 3, (5,), 13, F32, "cpu")
    m, d, o = torch.empty(5), torch.empty(5), torch.empty(5, 13)
    to_m, to_d, to_o = (torch.empty(3, *t.shape) for t in (m, d, o))
    work = merge_launch.forward(*given, m, d, o)
    work += merge_launch.backward(m, d, o, *given, to_m, to_d, to_o)
    report = sanitizers.sanitize(work)
    assert report.ok, report.text


@gpu
def test_many_rows() -> None:  # S16, S74
    """More than a grid's second dimension would hold."""
    for dim, dtype in ((64, F16), (65, BF16), (512, F32)):
        given = parts("pairs_e", 2, (70_000, 4 if dim < 512 else 1), dim, dtype, "cuda")
        bound = 4e-6 + (0 if dtype == F32 else torch.finfo(dtype).eps)
        same(mergekernels.forward(given), reference.forward(given.double()), given, bound)


@gpu
def test_the_kernels_take_what_is_on_a_gpu() -> None:
    given = parts("states", 3, (5,), 16, F32, "cuda")
    assert mergekernels.takes(given)
    first = mergekernels.forward(given)
    for _ in range(3):  # kept, and started again
        for one, other in zip(mergekernels.forward(given), first, strict=True):
            assert torch.equal(one, other)
