"""The judge of every operation: passes what is right in each type, sees one wrong element."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bench_kit import RIGHT
from online_softmax.lab import opjudge
from online_softmax.lab.contenders import _torch
from online_softmax.lab.grid import OPS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def given(op: str, dtype: torch.dtype, rows: int = 7, cols: int = 333) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, cols, generator=generator).mul(3).to(dtype)
    if not op.endswith("_backward"):
        return [x]
    forward = torch.log_softmax if op.startswith("log") else torch.softmax
    return [
        torch.randn(rows, cols, generator=generator).to(dtype),
        forward(x.float(), -1).to(dtype),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_right_results_pass_and_one_wrong_element_does_not(op: str, dtype: torch.dtype):
    inputs = given(op, dtype)
    result = RIGHT[op](*inputs).to(dtype)
    assert opjudge.check(op, inputs, result).ok
    flat = result.clone().view(-1)
    spacing = torch.finfo(dtype).eps * max(flat[-1].abs().item(), 1e-3)
    flat[-1] += 3 * max(spacing, 1e-4)
    found = opjudge.check(op, inputs, flat.view(result.shape))
    assert not found.ok
    assert "[6" in found.why
    assert f"1 of {result.numel()}" in found.why


@pytest.mark.parametrize("op", OPS)
def test_torch_in_float32_passes(op: str):
    """The bound is no tighter than a right float32 computation; other orders of summation too."""
    inputs = given(op, torch.float32, 5, 4099)
    out = torch.empty(5) if op == "logsumexp" else torch.empty_like(inputs[0])
    _torch(op)(*inputs, out)
    assert opjudge.check(op, inputs, out).ok


def test_shares_of_errors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(opjudge, "CHUNK", 2 * 333)  # four chunks
    inputs = given("softmax", torch.float16)
    result = RIGHT["softmax"](*inputs)
    off = (result.half().double() - result).abs()
    share = off / result.amax(-1, keepdim=True)
    found = opjudge.check("softmax", inputs, result.half())
    assert found.max_error == float(off.max())
    assert found.share_max == float(share.max())
    assert found.share_mean == pytest.approx(float(share.mean()))
    lse = RIGHT["logsumexp"](*inputs)
    judged = opjudge.check("logsumexp", inputs, lse.half())
    off = (lse.half().double() - lse).abs()
    assert judged.max_error == float(off.max())
    assert judged.share_max == float((off / lse.abs().clamp(min=1)).max())


@pytest.mark.parametrize("op", OPS)
def test_nothing_written_is_wrong(op: str):
    inputs = given(op, torch.bfloat16)
    result = torch.full_like(RIGHT[op](*inputs), math.nan).to(torch.bfloat16)
    assert "is nan" in opjudge.check(op, inputs, result).why


def test_later_chunks_are_compared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(opjudge, "CHUNK", 2 * 333)
    inputs = given("softmax", torch.float32)
    result = RIGHT["softmax"](*inputs).float()
    assert opjudge.check("softmax", inputs, result).ok
    result[6, 5] = 0.9
    assert opjudge.check("softmax", inputs, result).why.startswith("[6, 5] is 0.8999")


def test_a_sample_of_rows_has_the_first_and_the_last():
    inputs = given("logsumexp", torch.float32)
    result = RIGHT["logsumexp"](*inputs).float()
    for row in (0, 6):
        off = result.clone()
        off[row] += 1
        found = opjudge.check("logsumexp", inputs, off, rows=3)
        assert found.why.startswith(f"[{row}] is")
    off = result.clone()
    off[1] += 1  # between two of the sample
    assert opjudge.check("logsumexp", inputs, off, rows=3).ok
    assert not opjudge.check("logsumexp", inputs, off).ok


def test_rivals_may_round_more_often():
    inputs = given("logsumexp", torch.bfloat16)
    result = RIGHT["logsumexp"](*inputs).to(torch.bfloat16)
    result += torch.finfo(torch.bfloat16).eps * 8  # one unit in the last place, from 8 to 16
    assert not opjudge.check("logsumexp", inputs, result).ok
    assert opjudge.check("logsumexp", inputs, result, opjudge.RIVAL_ULPS).ok


def test_another_shape_or_type_is_wrong():
    inputs = given("softmax", torch.float16)
    assert "should be" in opjudge.check("softmax", inputs, torch.zeros(7, 332)).why
    assert "should be" in opjudge.check("softmax", inputs, torch.zeros(7, 333).bfloat16()).why


def test_infinities_are_equal_to_themselves():
    x = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]])
    lse = torch.tensor([-math.inf, 0.0])
    assert opjudge.check("logsumexp", [x], lse).ok
    assert not opjudge.check("logsumexp", [x], torch.zeros(2)).ok


def test_what_is_wrong_has_its_errors_all_the_same():
    inputs = given("softmax", torch.float32)
    result = RIGHT["softmax"](*inputs).float()
    result[2, 3] += 0.5
    found = opjudge.check("softmax", inputs, result)
    largest = float(RIGHT["softmax"](*inputs)[2].max())
    assert not found.ok
    assert found.share_max == pytest.approx(0.5 / largest, rel=1e-5)


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp", "log_softmax_backward"])
def test_rows_without_a_number_have_no_error(op: str):
    inputs = [torch.randn(3, 8) for _ in given(op, torch.float32)]
    inputs[0][1] = torch.nan
    found = opjudge.check(op, inputs, RIGHT[op](*inputs).float())
    assert found.ok
    assert 0 <= found.share_max < 1e-6


def test_a_gradient_s_error_is_a_share_that_does_not_grow_with_dy():
    dy, y = given("softmax_backward", torch.float32)
    shares = []
    for scale in (1.0, 1024.0):
        inputs = (dy * scale, y)
        result = RIGHT["softmax_backward"](*inputs).float()
        shares.append(opjudge.check("softmax_backward", inputs, result).share_max)
    assert shares[0] == pytest.approx(shares[1], rel=1e-6)
    assert shares[0] > 0
