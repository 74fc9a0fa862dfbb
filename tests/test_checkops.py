"""check's operations: their judges see what is wrong, and every case passes on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import online_softmax
from online_softmax.lab import checkattention, checkmerges, checkops, opjudge
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


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("softmax", "softmax"),
        ("logsumexp", "logsumexp"),
        ("cross_entropy", "cross_entropy"),
        ("linear_cross_entropy", "linear_cross_entropy"),
        ("token_stats", "token_stats"),
        *((name, name) for name in (*checkattention.OF, *checkmerges.OPERATIONS)),
    ],
)
def test_a_wrong_operation_is_found(monkeypatch, op: str, name: str):
    right = getattr(online_softmax, name)

    def wrong(*given: Any, **options: Any) -> Any:
        made = right(*given, **options)
        if hasattr(made, "_replace"):  # a state, or a token's numbers
            field = next(name for name in ("o", "entropy", "d") if hasattr(made, name))
            return made._replace(**{field: getattr(made, field) * 1.01})
        if isinstance(made, tuple):
            return made[0] * 1.01, made[1]
        return made * 1.01

    one = checkops.runs(op, torch.float32, "cpu")
    cases = [c for c in checkops.cases_of(op, "cpu", is_quick=True) if "1x1" not in c.name]
    assert not any(one(case).why for case in cases)
    monkeypatch.setattr(online_softmax, name, wrong)
    found = {case.is_gradient: one(case).why for case in cases if "zeros" not in case.name}
    assert all(found.values()), found


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
