"""trace: the worked example, agreement with float64 for any numbers and blocks, what it prints."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from online_softmax.lab.trace import render, to_json, trace

INF, NAN = math.inf, math.nan


def shown(values: list[float], block: int = 1) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render(values, block, console)
    return console.export_text()


def test_worked_example_by_blocks():
    walk = trace([1, 5, 3, 9, 2], block=3)
    first, second = walk.steps
    assert (first.values, second.values) == ((1, 5, 3), (9, 2))
    assert (first.m, first.d) == (5, pytest.approx(1.153651, abs=1e-6))
    assert (second.m, second.d) == (9, pytest.approx(1.022042, abs=1e-6))
    assert second.old_weight == pytest.approx(math.exp(-4))
    assert second.new_weight == 1
    assert [step.exponentials for step in walk.steps] == [5, 4]  # one an element, two a block
    assert walk.lse == pytest.approx(9.021802)


def test_worked_example_by_elements():
    walk = trace([1, 5, 3, 9, 2])
    assert [step.m for step in walk.steps] == [1, 5, 5, 9, 9]
    assert walk.steps[2].d == pytest.approx(1.153651, abs=1e-6)
    assert walk.steps[4].d == pytest.approx(1.022042, abs=1e-6)
    assert [step.exponentials for step in walk.steps] == [2] * 5
    assert walk.steps[4].new_weight == pytest.approx(math.exp(-7))


numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)
NUMBERS = st.one_of(numbers, st.floats(-30, 30, width=32), st.sampled_from([INF, -INF, NAN, 0.0]))


@settings(max_examples=200, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=12), st.integers(1, 13))
def test_agrees_with_float64(values: list[float], block: int):
    walk = trace(values, block)
    x = torch.tensor(values, dtype=torch.float32).double()
    got = torch.tensor(walk.probabilities, dtype=torch.float64)
    torch.testing.assert_close(got, torch.softmax(x, 0), rtol=1e-5, atol=1e-8, equal_nan=True)
    want = torch.logsumexp(x, 0).float().item()
    assert walk.lse == pytest.approx(want, rel=2e-6, abs=1e-6, nan_ok=True)
    assert [value for step in walk.steps for value in step.values] == pytest.approx(
        values, nan_ok=True
    )


def test_minus_infinity_first_leaves_the_identity():
    walk = trace([-INF, -INF, -2.5], block=2)
    assert walk.steps[0].m == -INF
    assert (walk.steps[1].m, walk.steps[1].d) == (-2.5, 1)
    assert walk.probabilities == (0, 0, 1)


def test_refusals():
    with pytest.raises(ValueError, match="at least one number"):
        trace([])
    with pytest.raises(ValueError, match="at least 1 element, not 0"):
        trace([1.0], block=0)


def test_json_holds_what_json_lacks():
    told = json.loads(to_json([-INF, NAN, 1e30], block=2))
    assert told["block"] == 2
    assert told["steps"][0]["values"] == ["-inf", "nan"]
    assert told["probabilities"] == ["nan"] * 3
    assert json.loads(to_json([1, 5, 3, 9, 2], 3))["steps"][1]["m"] == 9


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([1, 5, 3], "this row happens to work"),
        ([100, -1], "exp(100) overflows, as all past 88.72"),
        ([88.7, 88.7], "the sum overflows, and every result is 0"),
        ([-200, -INF], "0 / 0 is nan"),
        ([-INF, -INF], "m is -inf: d means nothing"),
        ([INF, 1], "m is inf: d means nothing"),
        ([INF, NAN], "m is nan: d means nothing"),
    ],
)
def test_says_what_naive_exponentials_would_do(values: list[float], sentence: str):
    assert sentence in shown(values)


def test_prints_the_walk_and_the_results():
    text = shown([1, 5, 3, 9, 2], 3)
    for expected in ("3 elements at a time", "1 5 3", "1.153651", "1.022042", "0.9784337"):
        assert expected in text
    assert "log-sum-exp 9.021802 (natural logarithm)" in text
    assert "exponentials: 9 to fold, 5 to write" in text
    assert "element by element" in shown([-1.5])
    assert "nan" in shown([NAN])
