"""The laws of the recurrence, in three languages: PyTorch, Triton and CUDA C++.

languages.py speaks them. Two states are equal if m is, NaN equal to NaN, and, where m is finite,
d agrees within rounding.
"""

import itertools
import math
import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from languages import Speaker, in_every_language

INF, NAN = math.inf, math.nan
ROUNDING = 4e-6  # of d, relative, after any number of merges here
LARGEST = 3.4028234663852886e38
NASTY = (-INF, -LARGEST, -1e30, -245000.0, -1.0, -0.0, 0.0, 1e-40, 3.0, 300.0, 1e30, LARGEST)
NASTY += (INF, NAN)

# ---- float64


def truth(elements: list[float]) -> tuple[float, float]:
    """(m, d) of what float32 makes of the elements."""
    x = torch.tensor([-INF, *elements], dtype=torch.float32).double()
    m = x.amax()
    return float(m), float(torch.exp(x - m).sum())


def assert_same(got: list[Tensor], want: list[Tensor], about: object = "") -> None:
    m, d = (t.double() for t in got)
    m_want, d_want = (t.double() for t in want)
    same_m = (m == m_want) | (m.isnan() & m_want.isnan())
    close_d = (d - d_want).abs() <= ROUNDING * d_want
    wrong = (~(same_m & (close_d | ~m_want.isfinite()))).nonzero().flatten().tolist()
    assert not wrong, [
        (about, i, [float(t[i]) for t in (m, d)], [float(t[i]) for t in (m_want, d_want)])
        for i in wrong[:5]
    ]


def states(say: Speaker) -> list[Tensor]:
    """Empty, single elements, blocks of every pair of nasty values, and sums over a hundred."""
    pairs = list(itertools.product(NASTY, repeat=2))
    parts = [
        say("empty", [0.0]),
        say("lift", list(NASTY)),
        say("of", *zip(*[(a, b, -INF, -INF) for a, b in pairs], strict=True)),
        [torch.tensor([2.0, -40.0]), torch.tensor([100.5, 1.25])],
    ]
    return [torch.cat(piece) for piece in zip(*parts, strict=True)]


# ---- the laws


@in_every_language
def test_worked_example(say: Speaker):
    """[1, 5, 3 | 9, 2] in blocks, then element by element."""
    first = say("absorb", *say("empty", [0.0]), [1.0], [5.0], [3.0], [-INF])
    assert_same(first, [torch.tensor([5.0]), torch.tensor([1.153651])])
    both = say("absorb", *first, [9.0], [2.0], [-INF], [-INF])
    assert_same(both, [torch.tensor([9.0]), torch.tensor([1.022042])])
    state = say("empty", [0.0])
    for x in (1.0, 5.0, 3.0, 9.0, 2.0):
        state = say("merge", *state, *say("lift", [x]))
    assert_same(state, both)
    assert [float(t) for t in say("lse", *both)] == pytest.approx([9.021803], rel=1e-6)
    assert [float(t) for t in say("prob", [5.0], *both)] == pytest.approx([0.0179207], rel=1e-5)


@in_every_language
def test_empty_and_lift(say: Speaker):
    assert [t.tolist() for t in say("empty", [0.0] * 3)] == [[-INF] * 3, [0.0] * 3]
    m, d = say("lift", list(NASTY))
    torch.testing.assert_close(m, torch.tensor(NASTY), rtol=0, atol=0, equal_nan=True)
    assert d.tolist() == [1.0] * len(NASTY)


@in_every_language
def test_join_weighs_both_parts(say: Speaker):
    a, b = (torch.tensor(side) for side in zip(*itertools.product(NASTY, repeat=2), strict=True))
    m, w_a, w_b = say("join", a, b)
    torch.testing.assert_close(m, torch.maximum(a, b), rtol=0, atol=0, equal_nan=True)
    for part, w in ((a, w_a), (b, w_b)):
        want = torch.where(part == m, 1.0, torch.exp(part.double() - m.double()))
        known = ~m.isnan()
        assert (w[part == m] == 1.0).all()  # exactly, for infinities too
        torch.testing.assert_close(w[known].double(), want[known], rtol=1e-5, atol=1e-37)


@in_every_language
def test_empty_changes_nothing(say: Speaker):
    s = states(say)
    none = say("empty", s[0])
    for merged in (say("merge", *none, *s), say("merge", *s, *none)):
        finite = s[0].isfinite()
        torch.testing.assert_close(merged[0], s[0], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(merged[1][finite], s[1][finite], rtol=0, atol=0)


@in_every_language
def test_merge_is_commutative_and_associative(say: Speaker):
    s = states(say)
    some = torch.cat([torch.arange(1 + len(NASTY)), torch.arange(1, len(s[0]), 7)])
    i, j, k = torch.cartesian_prod(some, some, some).T
    a, b, c = ([t[index] for t in s] for index in (i, j, k))
    ab = say("merge", *a, *b)
    assert_same(ab, say("merge", *b, *a))
    assert_same(say("merge", *ab, *c), say("merge", *a, *say("merge", *b, *c)))


@in_every_language
def test_blocks_agree_with_float64(say: Speaker):
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(512, 4, generator=generator) * 10
    blocks = [
        *itertools.product(NASTY, repeat=3),
        *itertools.product((1e30, -1e30, -INF), repeat=3),
    ]
    x = torch.cat([torch.tensor([(*block, -INF) for block in blocks]), random])
    want = [torch.tensor(t, dtype=torch.float64) for t in zip(*map(truth, x.tolist()), strict=True)]
    assert_same(say("of", *x.T), want)
    # Absorbed behind a state of their own values in another order, all counts double.
    twice = [want[0], torch.where(want[0].isfinite(), 2 * want[1], want[1])]
    assert_same(say("absorb", *say("of", *x.flip(1).T), *x.T), twice)


@in_every_language
def test_long_rows_agree_with_float64(say: Speaker):
    """Rows of 512, a block at a time: random, ascending, equal, spiked, mostly -inf, shifted."""
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(64, 512, generator=generator) * 3
    spiked, sparse = base.clone(), torch.full_like(base, -INF)
    spiked[:, 317] = 60.0
    sparse[torch.arange(64), torch.arange(64) * 8] = base[:, 0]
    kinds = [base, base.sort(1).values, 0 * base, spiked, sparse, base + 1e4, base * 1e29]
    x = torch.cat(kinds)
    state = say("empty", x[:, 0])
    for block in x.split(4, dim=1):
        state = say("absorb", *state, *block.T)
    want = [torch.tensor(t, dtype=torch.float64) for t in zip(*map(truth, x.tolist()), strict=True)]
    assert_same(state, want)
    (lse,) = say("lse", *state)
    torch.testing.assert_close(lse.double(), x.double().logsumexp(1), rtol=2e-6, atol=1e-6)


# ---- any tree: a leaf is a block of at most four elements, none of them is `empty`

Tree = tuple
values = st.sampled_from(NASTY) | st.floats(-30, 30, width=32)
leaves = st.lists(values, max_size=4)
trees = st.recursive(leaves, lambda branch: st.tuples(branch, branch), max_leaves=16)


def flat(tree: Tree | list) -> list[float]:
    return tree if isinstance(tree, list) else flat(tree[0]) + flat(tree[1])


def folded(say: Speaker, forest: list[Tree | list]) -> list[Tensor]:
    """The states of all trees; the merges of one height in one call."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    levels: list[list[Tree | list]] = []

    def height(tree: Tree | list) -> int:
        own = 0 if isinstance(tree, list) else 1 + max(map(height, tree))
        levels.extend([] for _ in range(own + 1 - len(levels)))
        levels[own].append(tree)
        return own

    for tree in forest:
        height(tree)
    blocks = [(leaf + [-INF] * 4)[:4] for leaf in levels[0]]
    m, d = say("of", *torch.tensor(blocks).T)
    none = say("empty", [0.0])
    for i, leaf in enumerate(levels[0]):
        found[id(leaf)] = (m[i], d[i]) if leaf else (none[0][0], none[1][0])
    for level in levels[1:]:
        left, right = zip(*level, strict=True)
        sides = [
            torch.stack(t)
            for side in (left, right)
            for t in zip(*[found[id(s)] for s in side], strict=True)
        ]
        m, d = say("merge", *sides)
        found |= {id(tree): (m[i], d[i]) for i, tree in enumerate(level)}
    return [torch.stack(t) for t in zip(*[found[id(tree)] for tree in forest], strict=True)]


@in_every_language
@settings(max_examples=40, deadline=None, derandomize=bool(os.environ.get("CI")))
@given(forest=st.lists(trees, min_size=1, max_size=16))
@example(forest=[([], []), (([], []), [1.0]), ([1.0], ([], [-INF])), ([INF], ([], [NAN]))])
def test_any_tree_gives_the_row(say: Speaker, forest: list):
    want = [
        torch.tensor(t, dtype=torch.float64)
        for t in zip(*map(truth, map(flat, forest)), strict=True)
    ]
    assert_same(folded(say, forest), want, forest)


# ---- what a state says


@in_every_language
def test_emits_agree_with_torch(say: Speaker):
    """Every row of three nasty values: each element's probability, its logarithm, the row's lse."""
    x = torch.tensor(list(itertools.product(NASTY, repeat=3)))
    m, d = (torch.tensor(t) for t in zip(*map(truth, x.tolist()), strict=True))
    wide = x.double()
    # Beyond float32 the difference of two finite maxima is -inf, as exp sees it: 0 either way.
    for column in range(3):
        (p,) = say("prob", x[:, column], m, d)
        want = torch.softmax(wide, 1)[:, column]
        torch.testing.assert_close(p.double(), want, rtol=1e-5, atol=1e-37, equal_nan=True)
        (log_p,) = say("log_prob", x[:, column], m, d)
        want = torch.log_softmax(wide, 1)[:, column].float().double()
        torch.testing.assert_close(log_p.double(), want, rtol=2e-6, atol=1e-7, equal_nan=True)
    (lse,) = say("lse", m, d)
    want = torch.logsumexp(wide, 1).float()
    torch.testing.assert_close(lse, want, rtol=2e-6, atol=1e-7, equal_nan=True)


@in_every_language
def test_a_large_maximum_does_not_swallow_log_d(say: Speaker):
    x = torch.tensor([0.0, 1.0, -1.0, 0.0]) - 1e7
    (log_p,) = say("log_prob", x, *([t] * 4 for t in truth(x.tolist())))
    assert log_p.tolist() == pytest.approx(
        [-1.6265234, -0.6265234, -2.6265234, -1.6265234], rel=1e-6
    )


@in_every_language
@pytest.mark.parametrize("row", [[], [-INF, -INF], [1.0, INF], [INF, INF], [NAN, INF], [1.0, NAN]])
def test_rows_without_a_finite_maximum(say: Speaker, row: list[float]):
    m, d = (torch.tensor([t]) for t in truth(row))
    for useless in (d, torch.tensor([NAN]), torch.tensor([0.0]), torch.tensor([INF])):
        assert say("prob", [1.0], m, useless)[0].isnan().all()
        assert say("log_prob", [1.0], m, useless)[0].isnan().all()
        torch.testing.assert_close(say("lse", m, useless)[0], m, rtol=0, atol=0, equal_nan=True)
