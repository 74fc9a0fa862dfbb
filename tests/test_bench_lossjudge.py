"""The judge of losses: passes what is right in each type, sees one wrong row, rank or index."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import online_softmax
from online_softmax.lab import lossjudge, opjudge
from online_softmax.lab.grid import TOP_K

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS, COLS = 7, 333


def given(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, COLS, generator=generator).to(dtype)
    return x, torch.randint(COLS, (rows,), generator=generator)


def gradient(x: Tensor, target: Tensor) -> Tensor:
    leaf = x.double().requires_grad_()
    return torch.autograd.grad(functional.cross_entropy(leaf, target), leaf)[0]


def stats(x: Tensor, target: Tensor) -> dict[str, Tensor]:
    return online_softmax.token_stats(x, target, top_k=TOP_K)._asdict()


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_losses_pass_and_one_wrong_row_does_not(dtype: torch.dtype):
    x, target = given(dtype)
    loss = functional.cross_entropy(x.double(), target)
    assert lossjudge.check("cross_entropy", x, target, loss.to(dtype)).ok
    less = functional.cross_entropy(x[1:].double(), target[1:], reduction="sum") / ROWS
    found = lossjudge.check("cross_entropy", x, target, less.to(dtype))
    assert found.why.startswith("the loss is ")
    assert found.max_error == pytest.approx(float(loss - less), rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_gradients_pass_and_one_wrong_element_does_not(dtype: torch.dtype):
    x, target = given(dtype)
    dx = gradient(x, target)
    assert lossjudge.check("cross_entropy_both", x, target, dx.to(dtype)).ok
    for place in ((6, 332), (3, int(target[3]))):
        off = dx.clone()
        off[place] *= 1 + 4 * torch.finfo(dtype).eps + 1e-4
        found = lossjudge.check("cross_entropy_in_forward", x, target, off.to(dtype))
        assert f"from row 0 on [{place[0]}, {place[1]}] is" in found.why
        assert f"1 of {dx.numel()} compared" in found.why
    assert "should be" in lossjudge.check("cross_entropy_both", x, target, dx * ROWS).why


def test_a_gradient_of_the_sum_is_wrong_and_what_is_not_written_too():
    x, target = given()
    dx = gradient(x, target).float()
    assert not lossjudge.check("cross_entropy_both", x, target, dx * ROWS).ok
    assert not lossjudge.check("cross_entropy_both", x, target, torch.full_like(x, math.nan)).ok


def test_later_chunks_and_a_sample_of_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lossjudge, "CHUNK", 2 * COLS)  # four chunks
    x, target = given()
    dx = gradient(x, target).float()
    off = dx.clone()
    off[6, 5] += 1e-3
    found = lossjudge.check("cross_entropy_both", x, target, off, rows=3)  # rows 0, 3 and 6
    assert found.why.startswith("from row 6 on [0, 5] is") or "[1, 5]" in found.why
    off = dx.clone()
    off[1] += 1
    assert lossjudge.check("cross_entropy_both", x, target, off, rows=3).ok
    loss = functional.cross_entropy(x, target)
    assert lossjudge.check("cross_entropy", x, target, loss).ok


def test_rivals_may_round_log_p_and_ours_not():
    """As torch's eager function does in 16-bit types, where its gradient is off by that much."""
    x, target = given(torch.bfloat16, 64)
    log_p = torch.log_softmax(x.float(), -1).bfloat16().float()
    dx = log_p.exp()
    dx[torch.arange(64), target] -= 1
    dx = (dx / 64).bfloat16()
    rival = lossjudge.check("cross_entropy_both", x, target, dx, opjudge.RIVAL_ULPS)
    assert rival.ok, rival.why
    assert not lossjudge.check("cross_entropy_both", x, target, dx).ok
    assert rival.share_max > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_statistics_pass(dtype: torch.dtype):
    x, target = given(dtype)
    found = lossjudge.check("token_stats", x, target, stats(x, target))
    assert found.ok, found.why
    named = online_softmax.token_stats(x, target, top_k=TOP_K)
    assert lossjudge.check("token_stats", x, target, named).ok


@pytest.mark.parametrize("name", lossjudge.FIELDS)
def test_one_wrong_statistic_is_seen(name: str):
    x, target = given()
    found = stats(x, target)
    value = found[name].clone()
    value.view(-1)[-1] += 1
    wrong = lossjudge.check("token_stats", x, target, {**found, name: value})
    assert wrong.why.startswith(name)
    without = {each: value for each, value in found.items() if each != name}
    lacking = lossjudge.check("token_stats", x, target, without)
    assert lacking.why.startswith(f"{name} is NoneType, should be (7,")
    is_asked = name in lossjudge.RIVALS_FIELDS
    assert lossjudge.check("token_stats", x, target, without, opjudge.RIVAL_ULPS).ok is not is_asked


def test_equal_logits_are_in_order_for_ours_and_in_any_for_rivals():
    x, target = given()
    x[2] = 0.0
    found = stats(x, target)
    swapped = found["top_indices"].clone()
    swapped[2] = swapped[2].flip(0)
    other = {**found, "top_indices": swapped}
    assert lossjudge.check("token_stats", x, target, found).ok
    ours = lossjudge.check("token_stats", x, target, other)
    assert ours.why == "top_indices of 1 of 7 rows is wrong"
    assert lossjudge.check("token_stats", x, target, other, opjudge.RIVAL_ULPS).ok
    swapped[2] = 0  # one of them twenty times
    assert not lossjudge.check("token_stats", x, target, other, opjudge.RIVAL_ULPS).ok


def test_another_shape_or_type_is_wrong():
    x, target = given(torch.float16)
    for op, got in (("cross_entropy", torch.zeros(7)), ("cross_entropy", 1.0),
                    ("cross_entropy_both", torch.zeros(7, 332).half()),
                    ("cross_entropy_both", torch.zeros(7, 333))):  # fmt: skip
        found = lossjudge.check(op, x, target, got)
        assert not found.ok
        assert "should be (" in found.why
