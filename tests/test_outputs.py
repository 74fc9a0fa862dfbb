"""States with an output, and pairs (out, lse): any tree gives the whole, empty parts count nothing.

K10: merging where nothing was summed, the base of a logarithm, odd numbers of heads and dims.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from online_softmax.reference.online import State
from online_softmax.reference.outputs import OutputState, merge, merge_outputs

INF, NAN = math.inf, math.nan
close = torch.testing.assert_close


def attend(x: Tensor, v: Tensor) -> Tensor:
    """softmax(x) v in float64, 0 in a row of -inf."""
    p = torch.softmax(x.double(), -1)
    return torch.where((x == -INF).all(-1, keepdim=True), 0.0, p).nan_to_num(0.0) @ v.double()


def same(got: OutputState, want: OutputState) -> None:
    close(got.m, want.m, rtol=0, atol=0, equal_nan=True)
    finite = want.m.isfinite()
    close(got.d[finite], want.d[finite], rtol=4e-6, atol=0)
    close(got.o[finite], want.o[finite], rtol=4e-6, atol=1e-5)


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    """Scores among them masked, huge and missing ones; vectors."""
    x, v = torch.randn(7, 24) * 4, torch.randn(24, 5)
    x[1, 3:] = -INF
    x[2] = -INF
    x[3, :8] = -INF
    x[4] += 1e4
    x[5, 20] = 3e4
    x[6] = -245000.0
    return x, v


def test_parts_in_any_order_and_grouping(rows) -> None:
    x, v = rows
    cuts = [slice(0, 8), slice(8, 9), slice(9, 9), slice(9, 24)]
    parts = [OutputState.of(x[:, cut], v[cut]) for cut in cuts]
    whole = OutputState.of(x, v)
    for order in itertools.permutations(parts):
        same(merge(*order), whole)
        same(order[0].merge(order[1]).merge(order[2].merge(order[3])), whole)
    close(whole.output().double(), attend(x, v), rtol=1e-5, atol=1e-6)
    close(merge(*parts).lse(), torch.logsumexp(x, -1), rtol=1e-6, atol=1e-6)
    assert whole.lse()[2] == -INF


def test_the_output_is_that_of_the_scores_below_minus_5e4() -> None:  # S30
    x = torch.tensor([[-245000.0, -245010.0]])
    state = OutputState.of(x[:, :1], torch.eye(2)[:1]).merge(
        OutputState.of(x[:, 1:], torch.eye(2)[1:])
    )
    close(state.output(), torch.tensor([[0.9999546, 0.0000454]]), rtol=1e-6, atol=1e-7)


def test_empty_is_the_identity_bit_for_bit(rows) -> None:  # S04, S55
    x, v = rows
    whole, empty = OutputState.of(x, v), OutputState.empty(7, 5)
    garbage = OutputState(empty.m, torch.full_like(empty.d, 3.0), torch.full_like(empty.o, NAN))
    for other in (empty, garbage):
        for merged in (merge(whole, other), merge(other, whole), merge(other, whole, other)):
            assert torch.equal(merged.m, whole.m)
            finite = whole.m.isfinite()
            assert torch.equal(merged.d[finite], whole.d[finite])
            assert torch.equal(merged.o[finite], whole.o[finite])
            assert torch.equal(merged.output(), whole.output())
    nothing = merge(empty, garbage, empty)
    assert (nothing.m == -INF).all()
    assert torch.equal(nothing.output(), torch.zeros(7, 5))
    assert nothing.output("nan").isnan().all()
    assert torch.equal(OutputState.of(x[:, :0], v[:0]).output(), torch.zeros(7, 5))


def test_infinite_and_missing_scores() -> None:
    x = torch.tensor([[INF, 0.0], [NAN, 0.0], [NAN, INF], [0.0, 0.0]])
    v = torch.ones(2, 3)
    halves = [OutputState.of(x[:, i : i + 1], v[i : i + 1]) for i in range(2)]
    for state in (OutputState.of(x, v), merge(*halves), merge(*halves[::-1])):
        close(state.lse(), torch.tensor([INF, NAN, NAN, math.log(2)]), equal_nan=True)
        assert state.output()[:3].isnan().all()
        close(state.output()[3], torch.ones(3))


def test_states_without_outputs_merge_by_the_same_name() -> None:
    x = torch.randn(3, 10)
    state = merge(State.of(x[:, :4]), State.of(x[:, 4:]), State.empty(3))
    assert type(state) is State
    close(state.lse(), x.logsumexp(-1))


def test_gradients_through_a_merge() -> None:
    x = torch.randn(3, 9, dtype=torch.double)
    x[1] = -INF  # a row of nothing
    x[2, :6] = -INF  # a part of nothing
    kept = (x != -INF).double()
    v = torch.randn(9, 2, dtype=torch.double, requires_grad=True)
    y = torch.where(kept.bool(), x, 0.0).requires_grad_()

    def call(y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.where(kept.bool(), y, -INF)
        state = merge(*(OutputState.of(z[:, i : i + 3], v[i : i + 3]) for i in (0, 3, 6)))
        return state.output(), state.lse()[[0, 2]]

    assert gradcheck(call, (y, v))
    assert gradgradcheck(call, (y, v))


# ---- pairs


def pair(x: Tensor, v: Tensor, base: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = attend(x, v).to(dtype)
    lse = torch.logsumexp(x.double(), -1) / (math.log(2) if base == "2" else 1)
    return out, lse.float()


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 3, 32, 48, 65, 80, 96, 192, 512])  # S74
def test_pairs_of_any_dim(dim: int, dtype: torch.dtype, base: str) -> None:
    x, v = torch.randn(613 if dim < 64 else 13, 3, 11) * 3, torch.randn(11, dim)
    x[::4, :, :6] = -INF
    x[1::8] = -INF
    parts = [pair(x[..., cut], v[cut], base, dtype) for cut in (slice(0, 6), slice(6, 11))]
    out, lse = merge_outputs(*parts, base=base)
    want, want_lse = pair(x, v, base, torch.float64)
    assert out.dtype == dtype
    half = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    close(out.double(), want, rtol=half, atol=2e-6 + 2 * half)
    close(lse, want_lse, rtol=1e-6, atol=1e-6)


def test_the_base_is_what_was_said() -> None:  # S29
    first = torch.tensor([1.0]), torch.tensor(8.0)
    second = torch.tensor([-1.0]), torch.tensor(4.1)
    out, lse = merge_outputs(first, second, base="e")
    assert float(out) == pytest.approx(0.9603194, rel=1e-6)
    assert float(lse) == pytest.approx(8.0200398, rel=1e-7)
    ratio = 2.0**-3.9
    out, lse = merge_outputs(first, second, base="2")
    assert float(out) == pytest.approx((1 - ratio) / (1 + ratio), rel=1e-6)
    assert float(lse) == pytest.approx(8 + math.log2(1 + ratio), rel=1e-7)


@pytest.mark.parametrize("base", ["e", "2"])
def test_pairs_without_keys_leave_others_bit_for_bit(base: str) -> None:  # S04, S55
    out, lse = torch.randn(7, 3, 64).half(), torch.randn(7, 3) * 300
    empty = torch.zeros_like(out), torch.full_like(lse, -INF)
    garbage = torch.full_like(out, NAN), empty[1]
    for other in (empty, garbage):
        for pairs in (((out, lse), other), (other, (out, lse)), (other, (out, lse), other)):
            merged = merge_outputs(*pairs, base=base)
            assert torch.equal(merged[0], out)
            assert torch.equal(merged[1], lse)
    nothing = merge_outputs(empty, garbage, empty, base=base)
    assert torch.equal(nothing[0], empty[0])
    assert torch.equal(nothing[1], empty[1])


def test_some_positions_without_keys() -> None:  # S04
    out, lse = torch.randn(64, 3, 8), torch.randn(64, 3)
    other = torch.randn(64, 3, 8), torch.randn(64, 3)
    is_gone = torch.rand(64, 3) < 0.25
    cut = torch.where(is_gone, -INF, lse)
    got = merge_outputs((torch.where(is_gone[..., None], 0.0, out), cut), other, base="e")
    want = merge_outputs((out, lse), other, base="e")
    for merged, whole, alone in zip(got, want, other, strict=True):
        assert torch.equal(merged[is_gone], alone[is_gone])
        assert torch.equal(merged[~is_gone], whole[~is_gone])


def test_gradients_through_pairs() -> None:
    lse = torch.randn(2, 4, dtype=torch.double)
    lse[1, 0] = lse[0, 1] = lse[1, 1] = -INF
    outs = torch.randn(2, 4, 3, dtype=torch.double, requires_grad=True)
    level = torch.where(lse.isfinite(), lse, 0.0).requires_grad_()

    def call(outs: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.where(lse.isfinite(), level, -INF)
        out, total = merge_outputs((outs[0], z[0]), (outs[1], z[1]), base="2")
        return out, total[[0, 2, 3]]

    assert gradcheck(call, (outs, level))
    out, _ = merge_outputs((outs[0], lse[0]), (outs[1], lse[1]), base="e")
    (got,) = torch.autograd.grad(out.sum(), outs)
    assert not got.isnan().any()


def test_vectors_with_dimensions_that_the_scores_have_not() -> None:
    """The state has the rows of both, so that it merges."""
    x, v = torch.randn(4, 5), torch.randn(3, 5, 2)
    for scores in (x, x[0]):
        whole = OutputState.of(scores, v)
        assert whole.m.shape == whole.d.shape == whole.o.shape[:-1] == (3, *scores.shape[:-1])
        parts = [OutputState.of(scores[..., at], v[:, at]) for at in (slice(2), slice(2, 5))]
        close(merge(*parts).output(), whole.output())
        close(whole.output(), torch.softmax(scores, -1) @ v)


# ---- what is wrong

STATE, OUT = State.empty(3), OutputState.empty(3, 2)
PAIR = torch.zeros(3, 2), torch.zeros(3)
WRONG = {
    "nothing": (TypeError, "at least one", merge),
    "tensor": (TypeError, "argument 2 must be a State or an", lambda: merge(STATE, torch.zeros(3))),
    "kinds": (TypeError, "1 is State, argument 2 is OutputState", lambda: merge(STATE, OUT)),
    "shape": (RuntimeError, "argument 2 has", lambda: merge(OUT, OutputState.empty(4, 2))),
    "dim": (RuntimeError, r"o of argument 2 must have shape \(3, 2\)",
            lambda: merge(OUT, OutputState.empty(3, 5))),
    "dtype": (RuntimeError, "dtype", lambda: merge(OUT, OutputState.empty(3, 2, torch.float64))),
    "half": (NotImplementedError, "float32 or float64",
             lambda: OutputState.empty(3, 2, torch.float16)),
    "word": (ValueError, 'empty must be "zero" or "nan"', lambda: OUT.output("none")),
    "base": (ValueError, 'base must be "e" or "2", got 2', lambda: merge_outputs(PAIR, base=2)),
    "keys": (RuntimeError, r"as many keys, .* got \(3, 5\) and \(4, 2\)$",
             lambda: OutputState.of(torch.zeros(3, 5), torch.zeros(4, 2))),
    "one vector": (RuntimeError, r"as many keys, .* got \(3, 5\) and \(5,\)$",
                   lambda: OutputState.of(torch.zeros(3, 5), torch.zeros(5))),
    "one score": (RuntimeError, r"as many keys, .* got \(\) and \(1, 2\)$",
                  lambda: OutputState.of(torch.tensor(1.0), torch.zeros(1, 2))),
    "leading": (RuntimeError, r"that broadcast, got \(2, 3, 5\) and \(4, 5, 2\)$",
                lambda: OutputState.of(torch.zeros(2, 3, 5), torch.zeros(4, 5, 2))),
    "v": (TypeError, "v must be a Tensor, got list", lambda: OutputState.of(torch.zeros(1), [1])),
    "v of integers": (NotImplementedError, "v must be one of float16, .* got torch.int64",
                      lambda: OutputState.of(torch.zeros(5), torch.zeros(5, 2).long())),
    "v elsewhere": (RuntimeError, "v must be on cpu like x, got meta",
                    lambda: OutputState.of(torch.zeros(5), torch.zeros(5, 2, device="meta"))),
    "unsaid": (TypeError, "base", lambda: merge_outputs(PAIR)),
    "no pair": (TypeError, "at least one pair", lambda: merge_outputs(base="e")),
    "not a pair": (ValueError, "pair 1 must be", lambda: merge_outputs(PAIR[0], base="e")),
    "not tensors": (TypeError, "two Tensors", lambda: merge_outputs((PAIR[0], 1.0), base="e")),
    "half lse": (RuntimeError, "lse float32",
                 lambda: merge_outputs((PAIR[0], PAIR[1].half()), base="e")),
    "transposed": (RuntimeError, "without its last dimension",
                   lambda: merge_outputs((torch.zeros(3, 4, 2), torch.zeros(4, 3)), base="e")),
    "other": (RuntimeError, "of the first",
              lambda: merge_outputs(PAIR, (torch.zeros(5, 2), torch.zeros(5)), base="e")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call()
