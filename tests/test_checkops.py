"""check's operations: their judges see what is wrong, and every case passes on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import online_softmax
from online_softmax.lab import checkattention, checkmerges, checkops, judge, opjudge
from online_softmax.lab.checkcase import Case, near


def test_attention_is_judged_by_the_whole_matrix():
    for name, given in checkattention.ATTENTIONS.items():
        case = Case(name, given)
        batch, heads, kv_heads, q_len, k_len, dim = given["shape"]
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(batch, h, n, dim, generator=generator, dtype=torch.double)
            for h, n in ((heads, q_len), (kv_heads, k_len), (kv_heads, k_len))
        )
        options = checkattention._options(case, heads, torch.float64, "cpu")
        want, want_lse = online_softmax.attention(q, k, v, return_lse=True, **options)
        out, lse = checkattention.written_out(q, k, v, **options)
        torch.testing.assert_close(out, want, msg=name)
        torch.testing.assert_close(lse, want_lse, msg=name)


# By which a wrong result is multiplied: past the widest bound of the type.
TIMES = {torch.float32: 1.01, torch.float16: 1.03, torch.bfloat16: 1.1}


def asked(op: str, dtype: torch.dtype) -> list[Case]:
    """Cases in which a result that is multiplied differs: of awkward values float32's, whose range
    holds them."""
    cases = checkops.cases_of(op, "cpu", is_quick=False)
    alike = ("1x1", "zeros", "minus_inf_but_one")
    return [
        case
        for case in cases
        if not any(name in case.name for name in alike)
        and (dtype == torch.float32 or not isinstance(case.given, judge.Case))
    ]


@pytest.mark.parametrize("dtype", checkops.DTYPES)
@pytest.mark.parametrize("op", checkops.OPERATIONS)
def test_a_wrong_operation_is_found(monkeypatch, op: str, dtype: torch.dtype):
    """In every case, if it is off by a little more than attention may be in that type."""
    right, times = getattr(online_softmax, op), TIMES[dtype]

    def wrong(*given: Any, **options: Any) -> Any:
        made = right(*given, **options)
        if hasattr(made, "entropy"):
            return made._replace(entropy=made.entropy * times)
        if hasattr(made, "o"):
            return made._replace(o=made.o * times)
        if hasattr(made, "d"):  # a state, whose lse is m + log d
            return made._replace(m=made.m * times, d=made.d**times)
        if isinstance(made, tuple):
            return made[0] * times, made[1]
        return made * times

    one, cases = checkops.runs(op, dtype, "cpu"), asked(op, dtype)
    assert [case.name for case in cases if one(case).why] == []
    monkeypatch.setattr(online_softmax, op, wrong)
    assert [case.name for case in cases if not one(case).why] == []


@pytest.mark.parametrize("dtype", checkops.DTYPES)
@pytest.mark.parametrize("field", ["lse", "entropy", "target_log_prob"])
def test_a_term_that_a_gradient_lacks_is_found(monkeypatch, field: str, dtype: torch.dtype):
    """In rows of any width, of which the elements of a gradient are small."""
    right = online_softmax.token_stats

    def without(*given: Any, **options: Any) -> Any:
        made = right(*given, **options)
        return made._replace(**{field: getattr(made, field).detach()})

    monkeypatch.setattr(online_softmax, "token_stats", without)
    one = checkops.runs("token_stats", dtype, "cpu")
    cases = [case for case in asked("token_stats", dtype) if case.is_gradient]
    assert len(cases) > 3
    assert [case.name for case in cases if not one(case).why] == []


def test_every_case_passes_on_the_cpu_and_says_what_is_off():
    """Of the operations whose cases quick runs take in part; and a fault has its place."""
    for op in (*checkattention.OF, *checkmerges.OPERATIONS):
        for dtype in checkops.DTYPES:
            one = checkops.runs(op, dtype, "cpu")
            assert [one(case).why for case in checkops.cases_of(op, "cpu", False)] == [""] * len(
                checkops.cases_of(op, "cpu", False)
            )
    given = {name for case in checkattention.ATTENTIONS.values() for name in case}
    assert given >= {"bias", "mask", "sinks", "window", "softcap", "scale", "causal"}
    want = torch.tensor([1.0, 2.0], dtype=torch.float64)
    said = near([("out", torch.tensor([1.0, 2.5]), want, 0.1)]).why
    assert said == "out[1] is 2.5, should be 2 (allowed error 0.2)"
    assert "should be (2,)" in near([("out", torch.zeros(3), want, 0.1)]).why


def test_past_the_type_s_range_infinity_is_right():
    x = torch.tensor([[65504.0, -65504.0]], dtype=torch.float16)
    right = torch.tensor([[0.0, -math.inf]], dtype=torch.float16)
    assert opjudge.check("log_softmax", [x], right).ok
    assert not opjudge.check("log_softmax", [x], right.float()).ok  # float32 holds -131008
