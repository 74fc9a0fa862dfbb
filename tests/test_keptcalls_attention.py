"""A call of attention like one before starts its launches again, with the new addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import keptattention_kit
from keptattention_kit import (
    BF16,
    CALLS,
    Notes,
    addresses,
    described,
    is_kept,
    results,
    tokens,
    written,
)
from online_softmax import attention, attention_state, keptcalls

notes = keptattention_kit.notes  # a fixture


@pytest.mark.parametrize("name", CALLS)
def test_the_third_call_starts_the_same_launches(name: str, notes: Notes) -> None:
    make, call = CALLS[name]
    seen, held = [], []
    for _ in range(4):
        tensors = make()
        notes.started.clear()
        made = call(*tensors)
        held.append((tensors, made))  # so that no address comes again
        work = notes.started.copy()
        about = [(t.shape, t.dtype, t.stride()) for t in results(made)]
        seen.append((described(work, [*tensors, *written(made)]), about, is_kept(work)))
    launches, about, kept = zip(*seen, strict=True)
    assert kept == (False, False, True, True)
    assert launches[0] == launches[1] == launches[2] == launches[3]
    assert about[0] == about[1] == about[2] == about[3]


@pytest.mark.parametrize("name", ["causal", "everything", "packed", "parts", "rows copied"])
def test_gradients(name: str, notes: Notes) -> None:
    make, call = CALLS[name]
    seen, held = [], []
    for _ in range(4):
        tensors = [t.requires_grad_(t.is_floating_point()) for t in make()]
        leaves = [t for t in tensors if t.requires_grad]
        notes.started.clear()
        made = results(call(*tensors))
        forward = notes.started.copy()
        above = [torch.randn_like(t) for t in made]
        notes.started.clear()
        by = torch.autograd.grad(made, leaves, above)
        assert [(t.shape, t.dtype) for t in by] == [(t.shape, t.dtype) for t in leaves]
        assert type(made[0].grad_fn).__name__ == "OnlineSoftmax_attentionBackward"
        back, before, every = notes.started, [*tensors, *made], [*tensors, *made, *above, *by]
        held.append(every)
        seen.append(
            (described(forward, before), described(back, every), is_kept(forward), is_kept(back))
        )
    *launches, kept_forward, kept_back = zip(*seen, strict=True)
    assert kept_forward == kept_back == (False, False, True, True)
    for each in launches:
        assert each[0] == each[1] == each[2] == each[3]


def test_addresses_are_those_of_the_call(notes: Notes) -> None:
    for _ in range(3):
        q, k, v = tokens(1, 600)
        out, lse = attention(q, k, v, return_lse=True)
    fold, merge = map(addresses, notes.started[-2:])
    assert (fold["q_ptr"], fold["k_ptr"], fold["v_ptr"]) == tuple(t.data_ptr() for t in (q, k, v))
    assert (merge["out_ptr"], merge["lse_ptr"]) == (out.data_ptr(), lse.data_ptr())
    assert merge["o_ptr"] == fold["out_ptr"]
    assert (merge["m_parts_ptr"], merge["d_parts_ptr"]) == (fold["m_ptr"], fold["d_ptr"])
    rows, parts, dim = 8, 2, 32
    assert fold["m_ptr"] - fold["out_ptr"] >= 4 * rows * parts * dim
    assert fold["d_ptr"] - fold["m_ptr"] >= 4 * rows * parts
    _, fresh, *_ = next(iter(keptcalls.kept.values()))
    assert len(fresh) == 3  # out, lse, and all that parts need in one


def different(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """Calls that differ from attention(q, k, v) in one thing that the launches follow from."""
    shifted = torch.empty(k.numel() + 8, dtype=BF16)
    wide = torch.randn(2, 2, 40, 48).to(BF16)
    return {
        "an address off by an element": lambda: attention(q, shifted[1:-7].view_as(k), v),
        "an address off by 8 bytes": lambda: attention(q, shifted[4:-4].view_as(k), v),
        "strides": lambda: attention(q, wide[..., :32], v),
        "strides of v": lambda: attention(q, k, wide[..., :32]),
        "dtype": lambda: attention(*(t.half() for t in (q, k, v))),
        "k_len": lambda: attention(q, k[:, :, :33], v[:, :, :33]),
        "batch": lambda: attention(q[:1], k[:1], v[:1]),
        "causal": lambda: attention(q, k, v, causal=True),
        "top left": lambda: attention(q, k, v, causal="top_left"),
        "scale": lambda: attention(q, k, v, scale=0.5),
        "window": lambda: attention(q, k, v, window=(3, 3)),
        "softcap": lambda: attention(q, k, v, softcap=3.0),
        "empty": lambda: attention(q, k, v, empty="nan"),
        "bias": lambda: attention(q, k, v, bias=torch.randn(1, 1, 24, 40)),
        "mask": lambda: attention(q, k, v, mask=torch.ones(24, 40, dtype=torch.bool)),
        "sinks": lambda: attention(q, k, v, sinks=torch.randn(4)),
        "kernel": lambda: attention(q, k, v, kernel="triton"),
        "state": lambda: attention_state(q, k, v),
    }


@pytest.mark.parametrize("what", different(*tokens()))
def test_what_the_launches_follow_from_is_told_apart(what: str, notes: Notes) -> None:
    q, k, v = tokens()
    for _ in range(3):
        attention(q, k, v)
    (before,) = notes.started[-1:]
    assert is_kept([before])
    notes.started.clear()
    different(q, k, v)[what]()
    (other,) = notes.started
    assert not is_kept([other])
    if "address" in what:
        assert other.built_for != before.built_for
    attention(q, k, v)
    after = notes.started[-1]
    assert (after.built_for, after.grid) == (before.built_for, before.grid)
    assert is_kept([after])


@pytest.mark.parametrize("phase", [0, 1, 4, 8])
def test_what_a_kernel_was_built_for_holds(phase: int, notes: Notes) -> None:
    """For the tensors of a kept call, Triton's binder finds the kernels that were started."""
    for make, call in CALLS.values():
        for _ in range(3):
            tensors = []
            for t in make():
                room = torch.empty(t.numel() + 16, dtype=t.dtype)
                tensors.append(room[phase : phase + t.numel()].view_as(t).copy_(t))
            notes.started.clear()
            call(*tensors)
        kept, _ = notes.started.copy(), notes.started.clear()
        keptcalls.kept.clear()
        call(*tensors)
        assert is_kept(kept)
        assert not is_kept(notes.started)
        assert [each.built_for for each in kept] == [each.built_for for each in notes.started]


def test_one_tensor_for_two_says_nothing_of_two(notes: Notes) -> None:
    x, y, z = (torch.randn(2, 2, 40, 32).to(BF16) for _ in range(3))
    for _ in range(3):
        attention(x, x, x)
    attention(x, y, z)
    attention(y, x, z)
    found = [[addresses(each)[f"{n}_ptr"] for n in "qkv"] for each in notes.started[-2:]]
    assert found == [[t.data_ptr() for t in each] for each in ((x, y, z), (y, x, z))]
    attention(x, x, x)
    assert [addresses(notes.started[-1])[f"{n}_ptr"] for n in "qkv"] == [x.data_ptr()] * 3
