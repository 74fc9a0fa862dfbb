"""The case list is sharp, affordable and laid out as it says; the judge knows right from wrong."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from online_softmax.lab import judge
from online_softmax.lab.cases import CASES, CPU_ELEMENTS, KINDS, REPORTS, VIEWS, sample
from online_softmax.lab.judge import DTYPES, Case, check, lay_out, lay_out_view, oracle, output

CPU_CASES = [case for case in CASES if case.size == "cpu"]
BUDGET = 1_500_000  # elements of all cpu cases: what nine kernels in three dtypes can walk in CI


def test_list_is_affordable_and_well_formed():
    assert max(Counter(case.name for case in CASES).values()) == 1
    assert max(Counter(view.name for view in VIEWS).values()) == 1
    assert {case.size for case in CASES} == {"cpu", "gpu"}
    assert max(case.elements for case in CPU_CASES) <= CPU_ELEMENTS
    assert sum(case.elements for case in CPU_CASES) <= BUDGET


def test_every_report_is_restated():
    named = {name for record in (*CASES, *VIEWS) for name in record.source.split()}
    assert named == set(REPORTS)


def test_shapes_that_must_be_there():
    cols = {case.cols for case in CPU_CASES}
    assert cols >= {0, 1, 31, 32, 33, 1531, 1023, 1024, 1025, 50257, 65536} | set(range(71))
    assert {case.layout for case in CPU_CASES} == {"contiguous", "row_stride", "sliced"}
    assert {case.phase % 8 for case in CPU_CASES} == set(range(8))
    assert max(case.elements for case in CASES) > 2**31
    assert max((case.rows - 1) * (case.cols + case.gap) for case in CASES if case.rows == 2) > 2**31
    assert {kind for kind in KINDS if f"{kind}-5x1030" in {case.name for case in CPU_CASES}} == set(
        KINDS
    )


# ---- layout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("phase", [0, 1, 3, 7])
@pytest.mark.parametrize("gap", [0, 5])
def test_layout(dtype: torch.dtype, phase: int, gap: int):
    values = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    case = Case("made", 3, 4, lambda _: values, phase, gap)
    x = lay_out(case, dtype)
    assert x.dtype == dtype
    assert torch.equal(x.double(), values)
    assert x.stride() == (4 + gap, 1)
    assert x.data_ptr() % 16 == phase * dtype.itemsize % 16
    storage = torch.empty(0, dtype=dtype).set_(x.untyped_storage())
    assert int((~storage.isnan()).sum()) == 12
    assert storage[: judge.GUARD].isnan().all()
    assert storage[-judge.GUARD :].isnan().all()


def test_rows_repeat_where_fewer_are_built():
    case = Case("made", 7, 2, lambda _: torch.arange(6.0, dtype=torch.float64).view(3, 2), gap=1)
    assert lay_out(case, torch.float32)[:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]
    picked = Case("made", 7, 2, case.build, checked=(0, 6))
    assert judge.checked_rows(picked, lay_out(picked, torch.float32)).tolist() == [[0, 1], [0, 1]]


def test_a_case_is_the_same_every_time():
    case = CPU_CASES[40]
    assert torch.equal(lay_out(case, torch.float32), lay_out(case, torch.float32))
    assert not torch.equal(lay_out(case, torch.float32)[0], lay_out(case, torch.float32)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_is_poisoned_and_notices_spills(dtype: torch.dtype):
    y = output(3, 5, dtype)
    assert y.isnan().all()
    assert y.data_ptr() % 16 == 0
    y.fill_(0)
    assert judge.spilled(y) == 0
    torch.empty(0, dtype=dtype).set_(y.untyped_storage())[judge.GUARD + 15] = math.nan
    assert judge.spilled(y) == 1  # a NaN too, if it is not the poison


def test_views_are_cut_as_they_say():
    for view in VIEWS:
        x = lay_out_view(view, torch.float32)
        assert not x.isnan().any(), view.name
        for dim in view.dims:
            assert check(torch.softmax(x, dim), x, dim).ok, (view.name, dim)
    strides = {view.name: lay_out_view(view, torch.float32).stride() for view in VIEWS}
    assert strides["padded_batch"] == (32, 4, 2, 1)
    assert strides["expanded_columns"] == (1, 0)


def test_sample_is_real_attention():
    scores = sample()
    assert scores.shape == (4, 12, 40, 40)
    assert scores.dtype == torch.float16
    assert 0.4 < scores.isneginf().float().mean() < 0.5
    assert not oracle(scores).isnan().any()


# ---- the judge


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_pytorch_in_the_same_dtype_meets_the_bound(dtype: torch.dtype):
    """So the bound asks for no more than PyTorch gives."""
    for case in CPU_CASES:
        x = lay_out(case, dtype)
        verdict = check(torch.softmax(x, -1), x)
        assert verdict.ok, (case.name, verdict.why)


def test_bound_is_one_rounding_of_the_output():
    assert judge.bound(torch.float32) == (1e-5, 1e-8)
    assert judge.bound(torch.float16)[0] == pytest.approx(2**-11, rel=0.03)
    assert judge.bound(torch.bfloat16)[0] == pytest.approx(2**-8, rel=0.03)
    assert judge.bound(torch.bfloat16, ulps=1)[0] == pytest.approx(2**-7, rel=0.03)


def _spoil(y: torch.Tensor, row: int, col: int, value: float) -> torch.Tensor:
    y = y.clone()
    y[row, col] = value
    return y


def test_the_judge_names_the_first_wrong_element():
    x = torch.randn(3, 5, generator=judge.generator("made"))
    y = torch.softmax(x, -1)
    verdict = check(_spoil(_spoil(y, 1, 2, 0.75), 2, 4, math.nan), x)
    assert not verdict.ok
    assert verdict.why.startswith("y[1, 2] is 0.75, should be ")
    assert "2 of 15" in verdict.why
    assert "float16" in check(y.half(), x).why
    assert "(2, 5)" in check(y[:2], x).why


def test_the_judge_is_exact_where_the_value_is_given():
    x = torch.tensor([[0.0, -math.inf, 0.0], [1.0, math.nan, 2.0]])
    y = torch.tensor([[0.5, 0.0, 0.5], [math.nan] * 3])
    assert check(y, x).ok
    assert not check(_spoil(y, 0, 1, 1e-30), x).ok  # not 0 where x is -inf
    assert not check(_spoil(y, 0, 1, math.nan), x).ok
    assert not check(_spoil(y, 1, 0, 0.3), x).ok  # a number in a NaN row


def test_the_judge_sums_rows():
    """Errors too small to show in one element of a wide row, all to one side."""
    x = torch.zeros(1, 40000)
    y = torch.softmax(x, -1)
    assert check(y, x).ok
    verdict = check(y * (1 + 1.5e-5), x)
    assert not verdict.ok
    verdict = check(y * (1 + 9e-6), x)
    assert verdict.ok
    spread = torch.randn(1, 40000, generator=judge.generator("spread")) * 5
    tail = torch.softmax(spread, -1)
    tail[tail < 1e-7] += 1e-9  # under the bound of each element
    assert "sums to" in check(tail, spread).why


# ---- faults that textbook kernels have: each must fail on some case


def _blocks(x: torch.Tensor, guard: bool = True, sentinel: float = -math.inf) -> torch.Tensor:
    """Online softmax by blocks of 32 or more, written down carelessly on request."""
    m = torch.full((x.shape[0], 1), sentinel)
    d = torch.zeros_like(m)
    for block in x.float().split(max(32, x.shape[-1] // 256), -1):  # few sums, one after another
        new = torch.maximum(m, block.amax(-1, keepdim=True))
        shift = torch.where(new == -math.inf, 0.0, new) if guard else new
        d = d * (m - shift).exp() + (block - shift).exp().sum(-1, keepdim=True)
        m = new
    return (x.float() - m).exp() / d


def _dropped_nan(x: torch.Tensor) -> torch.Tensor:
    m = x.float().nan_to_num(-math.inf, math.inf, -math.inf).amax(-1, keepdim=True)
    e = (x.float() - m).exp().nan_to_num(0.0)
    return e / e.sum(-1, keepdim=True)


def _sums_without_rescaling(x: torch.Tensor) -> torch.Tensor:
    blocks = x.float().split(32, -1)
    d = sum((b - b.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True) for b in blocks)
    return (x.float() - x.float().amax(-1, keepdim=True)).exp() / d


def _half_sum(x: torch.Tensor) -> torch.Tensor:
    e = (x.float() - x.float().amax(-1, keepdim=True)).exp()
    d = torch.zeros(x.shape[0], dtype=x.dtype)
    for column in e.to(x.dtype).unbind(-1):
        d = d + column
    return e / d.unsqueeze(-1)


def _uneven_scaling(x: torch.Tensor) -> torch.Tensor:
    """The sum from products rounded once, the written exponentials from fused ones."""
    log2_e = math.log2(math.e)
    scaled_max = x.float().amax(-1, keepdim=True) * log2_e
    d = torch.exp2(x.float() * log2_e - scaled_max).sum(-1, keepdim=True)
    return torch.exp2((x.double() * log2_e - scaled_max.double()).float()) / d


def _ignores_stride(x: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return torch.softmax(storage[x.storage_offset() :][: x.numel()].view(x.shape).float(), -1)


def _forgets_the_tail(x: torch.Tensor) -> torch.Tensor:
    y = torch.full(x.shape, math.nan)
    whole = x.shape[1] // 8 * 8
    y[:, :whole] = torch.softmax(x.float(), -1)[:, :whole]
    return y


def _zeros_for_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.float(), -1).nan_to_num(0.0)


FAULTS = {
    "no maximum": lambda x: x.float().exp() / x.float().exp().sum(-1, keepdim=True),
    "unguarded merge": lambda x: _blocks(x, guard=False),
    "sentinel -5e4": lambda x: _blocks(x, sentinel=-5e4),
    "sentinel -1e4": lambda x: _blocks(x, sentinel=-1e4),
    "NaN dropped by the maximum": _dropped_nan,
    "sums added without rescaling": _sums_without_rescaling,
    "sum in half": _half_sum,
    "maximum scaled apart": _uneven_scaling,
    "strides ignored": _ignores_stride,
    "tail forgotten": _forgets_the_tail,
    "zeros where NaN is due": _zeros_for_nan,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_some_case_catches(fault: str):
    for dtype, case in itertools.product(reversed(DTYPES), CPU_CASES):
        x = lay_out(case, dtype)
        if case.elements and not check(FAULTS[fault](x).to(dtype), x).ok:
            return
    pytest.fail(f"no case notices: {fault}")


def test_a_guarded_merge_passes():
    """The same code without its fault meets the bound, so it is the fault that is caught."""
    for case in CPU_CASES:
        if case.cols:
            x = lay_out(case, torch.float32)
            assert check(_blocks(x), x).ok, case.name
