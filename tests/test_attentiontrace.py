"""trace --attention: float64, the law of each step, the merge, what it prints and refuses."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cli_kit import refusal, run
from online_softmax import attention
from online_softmax.lab.attentiontrace import Row, Sizes, Summary, to_json, walk
from online_softmax.lab.tracepage import render

ANY = st.builds(
    Sizes,
    queries=st.integers(1, 5),
    keys=st.integers(1, 9),
    dim=st.integers(1, 5),
    value_dim=st.integers(1, 3),
    block=st.integers(1, 10),
    is_causal=st.booleans(),
)


def shown(sizes: Sizes, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render(sizes, console)
    return console.export_text()


def expected(row: Row, v: torch.Tensor, keys: int) -> tuple[float, float, list[float]]:
    """m, d and o of a query over its first keys, in float64 and at once."""
    z = torch.tensor([score for step in row.steps for score in step.scores][:keys]).double()
    m = z.max()
    p = torch.exp(z - m) if m > -math.inf else torch.zeros_like(z)
    return m.item(), p.sum().item(), (p @ v[:keys]).tolist()


def close(state: Summary, want: tuple[float, float, list[float]]) -> None:
    assert state.m == want[0]
    assert (state.d, *state.o) == pytest.approx((want[1], *want[2]), rel=1e-5, abs=1e-5)


def test_the_default_rescales_one_query_twice():
    """Scores 1 0 | 1.5 -4.5 | 2 1: each tile has a larger maximum than the one before."""
    first, second = walk(Sizes()).rows
    assert [step.scores for step in first.steps] == [(1, 0), (1.5, -4.5), (2, 1)]
    assert [step.after.m for step in first.steps] == [1, 1.5, 2]
    assert [step.old_weight for step in first.steps] == pytest.approx(
        [0, math.exp(-0.5), math.exp(-0.5)]
    )
    assert [step.after.m for step in second.steps] == [1.5, 2, 2]
    assert second.steps[2].old_weight == 1
    assert second.steps[2].new_weight == pytest.approx(math.exp(-0.5))
    assert first.steps[0].before == Summary(-math.inf, 0, (0, 0))
    assert first.steps[0].after.o == pytest.approx((1 + 3 / math.e, -3 - 1 / math.e), rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(ANY)
def test_every_state_is_that_of_the_keys_so_far(sizes: Sizes):
    done = walk(sizes)
    v = torch.tensor(done.v).double()
    for row in done.rows:
        for step in row.steps:
            close(step.after, expected(row, v, step.last + 1))
            assert step.after.d == pytest.approx(
                step.before.d * step.old_weight
                + sum(math.exp(z - step.after.m) for z in step.scores if z > -math.inf),
                rel=1e-5,
            )
        assert [step.before for step in row.steps[1:]] == [step.after for step in row.steps[:-1]]
        close(row.merged, expected(row, v, sizes.keys))


@settings(max_examples=100, deadline=None)
@given(ANY)
def test_the_results_are_attentions(sizes: Sizes):
    done = walk(sizes)
    q, k, v = (torch.tensor(t)[None, None] for t in (done.q, done.k, done.v))
    assert q.shape[2:] == (sizes.queries, sizes.dim)
    assert k.shape[2:] == (sizes.keys, sizes.dim)
    assert v.shape[2:] == (sizes.keys, sizes.value_dim)
    z = (q @ k.mT / math.sqrt(sizes.dim)).double()[0, 0]
    if sizes.is_causal:
        z += torch.full_like(z, -math.inf).triu(sizes.keys - sizes.queries + 1)
    plain = torch.tensor([row.plain for row in done.rows], dtype=torch.float64)
    want = torch.softmax(z, 1) @ v[0, 0].double()
    torch.testing.assert_close(plain, want, equal_nan=True, rtol=1e-6, atol=1e-6)
    out, lse = attention(q, k, v, causal=sizes.is_causal, return_lse=True)
    for rows in ([row.output for row in done.rows], [row.merged_output for row in done.rows]):
        torch.testing.assert_close(torch.tensor(rows), out[0, 0], rtol=1e-5, atol=1e-5)
    assert [row.lse for row in done.rows] == pytest.approx(lse[0, 0].tolist(), rel=1e-5)
    assert done.largest_difference < 1e-5


def test_parts_are_cut_between_tiles():
    halves = [(half.first, half.last) for half in walk(Sizes(keys=7, block=2)).rows[0].halves]
    assert halves == [(0, 3), (4, 6)]
    row = walk(Sizes(keys=3, block=8)).rows[0]  # one tile: the other part has no key
    assert [(half.first, half.last) for half in row.halves] == [(0, 2), (8, 2)]
    assert row.halves[1].state == Summary(-math.inf, 0, (0, 0))
    assert [half.weight for half in row.halves] == [1, 0]
    assert row.merged == row.steps[-1].after


def test_causal_tiles_that_want_a_mask():
    assert walk(Sizes(is_causal=True)).masked == (4,)
    assert walk(Sizes(queries=5, is_causal=True)).masked == (2, 4)
    assert walk(Sizes(queries=1, is_causal=True)).masked == ()
    assert "causal: a mask for keys 4-5; other tiles" in shown(Sizes(is_causal=True))
    assert "none wants a mask" in shown(Sizes(queries=1, is_causal=True))


def test_a_query_without_keys():
    sizes = Sizes(queries=4, keys=2, is_causal=True)
    rows = walk(sizes).rows
    assert [row.lse == -math.inf for row in rows] == [True, True, False, False]
    assert rows[0].output == rows[0].merged_output == (0, 0)
    assert all(math.isnan(value) for value in rows[0].plain)
    assert "No key is seen by queries 0, 1: 0 here, nan by the formula." in shown(sizes)
    told = json.loads(to_json(sizes))["rows"][0]
    assert (told["plain"], told["lse"]) == (["nan", "nan"], "-inf")


@pytest.mark.parametrize("name", ["queries", "keys", "dim", "value_dim", "block"])
def test_sizes_are_at_least_one(name: str):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        walk(Sizes(**{name: 0}))


def test_the_page():
    page = shown(Sizes())
    assert max(map(len, page.splitlines())) <= 80
    for line in (
        "query 0: (m, d, o), 2 keys at a time",
        "│ 2-3  │ 1.5 -4.5 │  1.5 │  0.60653 │      1 │ 1.8321 │ -0.72408 -1.0353 │",
        "query 1: two parts merged",
        "│     0 │    0.18441 -1.06 │    0.18441 -1.06 │    0.18441 -1.06 │      2.9079 │",
        "scores held at once: 2 x 2; the whole matrix: 2 x 6",
        "largest difference from float64: ",
    ):
        assert line in page
    assert "1 key at a time" in shown(Sizes(block=1))
    large = shown(Sizes(queries=3, keys=40, dim=64, value_dim=16, block=32, is_causal=True))
    assert max(map(len, large.splitlines())) <= 80
    assert "\u2026" not in large, "a cell is cut off"


def test_the_command():
    assert json.loads(run("trace", "--attention", "--json")) == json.loads(to_json(Sizes()))
    words = ("--queries", 3, "--keys", 5, "--dim", 2, "--value-dim", 1, "--block", 4, "--causal")
    told = json.loads(run("trace", "--attention", *words, "--json"))
    assert told["sizes"] == {
        "queries": 3, "keys": 5, "dim": 2, "value_dim": 1, "block": 4, "is_causal": True
    }  # fmt: skip
    assert "query 1: two parts merged" in run("trace", "--attention")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--attention 1 2", "--attention takes no numbers, got 1: give --queries or --keys"),
        ("--attention -3", "--attention takes no numbers, got -3: give --queries or --keys"),
        ("--attention --bogus", "no such option: --bogus; see online-softmax trace --help"),
        ("--attention --keys 0", "--keys 0: give a whole number, at least 1"),
        ("--attention --keys two", "--keys two: give a whole number, at least 1"),
        ("--attention --queries 17", "--queries 17: give at most 16"),
        ("--attention --block 257", "--block 257: give at most 256"),
        ("1 2 --keys 4", "--keys is for --attention: give --attention too"),
        ("1 2 --causal", "--causal is for --attention: give --attention too"),
        ("--value-dim 1", "--value-dim is for --attention: give --attention too"),
    ],
)
def test_refusals_in_one_line(words: str, why: str):
    assert refusal("trace", *words.split()) == f"error: {why}"


@pytest.mark.parametrize("option", ["--queries", "--keys", "--dim", "--value-dim", "--block"])
def test_blank_is_no_default(option: str):
    assert "give a whole number" in refusal("trace", "--attention", option, "")
