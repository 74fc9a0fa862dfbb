"""A call of cross_entropy like one before starts its launches again, with the new addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import jit_kit
import jit_notes
from jit_notes import Built, Notes
from losses_kit import IGNORED
from online_softmax import batch_invariant, cross_entropy, jit

fresh_cache, nvrtc = jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
notes, built = jit_notes.notes, jit_notes.built


def logits(cols: int = 64, dtype: torch.dtype = torch.float32, rows: int = 4) -> Tensor:
    return torch.randn(rows, cols).to(dtype)


def target(rows: int = 4) -> Tensor:
    found = torch.arange(rows)
    found[1] = IGNORED
    return found


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets are not looked at, as on a GPU."""
    monkeypatch.setattr("online_softmax.ceops.check_if_asked", lambda *_: None)


LONG = 51_264  # columns of bfloat16 that are split
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": cross_entropy,
    "sum": lambda x, t: cross_entropy(x, t, reduction="sum"),
    "none": lambda x, t: cross_entropy(x, t, reduction="none"),
    "weighted": lambda x, t: cross_entropy(x, t, weight=WEIGHT[: x.shape[1]]),
    "smooth": lambda x, t: cross_entropy(x, t, label_smoothing=0.1, z_loss=0.1, softcap=9.0),
    "lse": lambda x, t: cross_entropy(x, t, return_lse=True)[1],
    "row": lambda x, t: cross_entropy(x[0], t[0]),
    "three dimensions": lambda x, t: cross_entropy(x.view(2, 2, -1), t.view(2, 2), dim=-1),
    "by name": lambda x, t: cross_entropy(x, t, kernel="split"),
    "in forward": lambda x, t: cross_entropy(x, t, grad_in_forward=True),
    "in forward, none": lambda x, t: cross_entropy(x, t, grad_in_forward=True, reduction="none"),
    "over": lambda x, t: cross_entropy(x, t, grad_in_forward=True, overwrite_logits=True),
}
WEIGHT = torch.rand(LONG)


def words(notes: Notes, count: int) -> list[tuple[int, ...]]:
    return [each.words for each in notes.launches[-count:]]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_third_call_starts_the_same_launches(
    name: str, recorded: bool, built: Built, notes: Notes
) -> None:
    """Forward and backward; what they work on is what they are given."""
    call, seen = CALLS[name], []
    for _ in range(4):
        leaf = logits().requires_grad_(recorded)
        x, before = leaf * 1.0, len(notes.launches)
        y = call(x, target())
        if recorded:
            dx = torch.autograd.grad(y, leaf, torch.ones_like(y))[0]
            assert dx.shape == leaf.shape
            assert dx.is_contiguous()
        seen.append((notes.launches[before:], built.count, y.shape, y.dtype, y.stride()))
    launches, counts, *about = zip(*seen, strict=True)
    assert counts[1] == counts[2] == counts[3] > counts[0]
    shapes = [[each._replace(words=()) for each in work] for work in launches]
    assert shapes[0] == shapes[1] == shapes[2] == shapes[3]
    assert all(len(set(each)) == 1 for each in about)


def test_addresses_are_those_of_the_call(built: Built, notes: Notes) -> None:
    for _ in range(3):
        x, t = logits().requires_grad_(), target()
        loss = cross_entropy(x, t)
        rows, total = notes.launches[-2:]
        assert rows.words[:2] == (x.data_ptr(), t.data_ptr())
        assert total.words[1] == t.data_ptr()
        loss.backward()
        (back,) = notes.launches[-1:]
        assert back.words[:2] == (x.data_ptr(), t.data_ptr())
    assert built.count == 6  # the rows, their sum and the backward, twice


def test_long_rows_have_their_workspaces(built: Built, notes: Notes) -> None:
    """Apart from what the call gives, and from what calls before have given."""
    x, t = logits(LONG, torch.bfloat16), target()
    given: set[int] = {x.data_ptr(), t.data_ptr()}
    results = []
    for _ in range(4):
        results += cross_entropy(x, t, reduction="none", return_lse=True)
        fold, merge = words(notes, 2)
        assert fold[:2] == merge[:2] == (x.data_ptr(), t.data_ptr())
        assert fold[3] not in given
        given |= {y.data_ptr() for y in results}
    assert built.count == 2


def different(x: Tensor, t: Tensor) -> dict[str, Callable[[], Any]]:
    """Calls that differ from cross_entropy(x, t) in one thing that the launches follow from."""
    return {
        "reduction": lambda: cross_entropy(x, t, reduction="sum"),
        "dtype": lambda: cross_entropy(x.half(), t),
        "rows": lambda: cross_entropy(logits(rows=5), target(5)),
        "cols": lambda: cross_entropy(logits(65), t),
        "stride": lambda: cross_entropy(logits(65)[:, :64], t),
        "phase": lambda: cross_entropy(torch.randn(257)[1:].view(4, 64), t),
        "ignore_index": lambda: cross_entropy(x, t, ignore_index=0),
        "label_smoothing": lambda: cross_entropy(x, t, label_smoothing=0.1),
        "z_loss": lambda: cross_entropy(x, t, z_loss=0.1),
        "softcap": lambda: cross_entropy(x, t, softcap=3.0),
        "scale": lambda: cross_entropy(x, t, scale=0.5),
        "weight": lambda: cross_entropy(x, t, weight=WEIGHT[:64]),
        "kernel": lambda: cross_entropy(x, t, kernel="split"),
        "in forward": lambda: cross_entropy(x.requires_grad_(), t, grad_in_forward=True),
        "dim": lambda: cross_entropy(logits(4), t, dim=0),
        "target": lambda: cross_entropy(x, torch.arange(8)[::2]),
        "invariance": lambda: _without_invariance(x, t),
    }


def _without_invariance(x: Tensor, t: Tensor) -> None:
    with batch_invariant(False):
        cross_entropy(x, t)


@pytest.mark.parametrize("what", different(torch.empty(4, 64), torch.empty(4)))
def test_what_the_launches_follow_from_is_told_apart(what: str, built: Built, notes: Notes) -> None:
    x, t = logits(), target()
    cross_entropy(x, t)
    cross_entropy(x, t)
    before, count = notes.launches[-2:], built.count
    different(x, t)[what]()
    assert built.count > count
    count = built.count
    cross_entropy(x.detach(), t)
    assert built.count == count
    assert [each._replace(words=()) for each in notes.launches[-2:]] == [
        each._replace(words=()) for each in before
    ]


def test_copies_are_not_kept(built: Built, notes: Notes) -> None:
    """Of logits, targets, weights; nor what torch has computed between."""
    strided = torch.arange(8)[::2]
    calls = (
        lambda: cross_entropy(logits(4).t().contiguous().t(), target()),
        lambda: cross_entropy(logits(), strided),
        lambda: cross_entropy(logits(), target(), weight=WEIGHT[:64], label_smoothing=0.1),
        lambda: cross_entropy(logits().to(torch.float8_e4m3fn), target()),
    )
    for call in calls:
        call()
        call()
        before = built.count
        call()
        assert built.count > before


def test_what_is_no_plain_memory_is_not_started(built: Built, notes: Notes) -> None:
    x, t = logits(), target()
    cross_entropy(x, t)
    cross_entropy(x, t)
    before = built.count
    cross_entropy(torch._neg_view(x), t)
    assert built.count > before
    leaf = x.requires_grad_()
    for _ in range(3):
        cross_entropy(leaf, t).backward()
    before = built.count
    loss = cross_entropy(leaf, t, reduction="none")
    zeros = torch._efficientzerotensor(4)
    torch.autograd.grad(loss, leaf, zeros)
    assert built.count > before


def test_results_are_tensors_of_their_own(built: Built) -> None:
    x, t = logits(), target()
    found = [cross_entropy(x, t, return_lse=True) for _ in range(5)]
    assert len({y.data_ptr() for pair in found for y in pair}) == 10
    with torch.inference_mode():
        assert cross_entropy(x, t).is_inference()


def test_clearing_the_cache_forgets_calls(built: Built) -> None:
    x, t = logits(), target()
    for _ in range(3):
        cross_entropy(x, t)
    count = built.count
    jit.clear_cache()
    cross_entropy(x, t)
    assert built.count > count


FREE = ("empty", "empty_strided", "expand", "as_strided", "view", "detach", "slice", "to")


def torch_operations(call: Callable[[], Any]) -> list[str]:
    """The operations of torch that a call runs, but for memory, views and `to` without a copy.

    What an operation runs inside counts as its own: on the CPU some convert first.
    """
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return [
        each.name.removeprefix("aten::")
        for each in found.events()
        if each.name.startswith("aten::")
        and not (each.cpu_parent is not None and each.cpu_parent.name.startswith("aten::"))
        and (each.name.removeprefix("aten::") not in FREE or _copies(each))
    ]


def _copies(event: Any) -> bool:
    return any(each.name == "aten::_to_copy" for each in event.cpu_children)


@pytest.mark.parametrize(
    ("name", "dtype", "backward"),
    [
        ("mean", torch.float32, ["div"]),
        ("mean", torch.bfloat16, ["div"]),
        ("sum", torch.float32, []),
        ("weighted", torch.float32, ["div"]),
        ("in forward", torch.bfloat16, []),
        ("over", torch.bfloat16, []),
    ],
)
def test_operations_of_torch(
    name: str, dtype: torch.dtype, backward: list[str], built: Built
) -> None:
    """None in a forward, one division at most in a backward: each costs a launch."""
    leaf, t = logits(dtype=dtype).requires_grad_(), target()
    for _ in range(3):
        CALLS[name](Same.apply(leaf), t).backward()
    x, loss = Same.apply(leaf), []
    assert torch_operations(lambda: loss.append(CALLS[name](x, t))) == []
    upstream = torch.ones_like(loss[0])
    assert torch_operations(lambda: torch.autograd.grad(loss, leaf, upstream)) == backward


class Same(torch.autograd.Function):
    """Logits that are no leaf, at the price of nothing in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g
