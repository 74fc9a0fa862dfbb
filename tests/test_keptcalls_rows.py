"""A call like one before starts its launch again: the same launch, with the new addresses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jit_kit
import jit_notes
from jit_notes import Built, Notes
from online_softmax import jit, keptcalls, log_softmax, softmax
from online_softmax import logsumexp as logsumexp_

fresh_cache, nvrtc = jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
notes, built = jit_notes.notes, jit_notes.built


def x_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def addresses(notes: Notes) -> tuple[int, int]:
    words = notes.launches[-1].words
    return words[0], words[1]


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": softmax,
    "log_softmax": lambda x: log_softmax(x, scale=0.5, empty="zero"),
    "float32 of half": lambda x: softmax(x.half(), dtype=torch.float32),
    "another dim": lambda x: softmax(x, 0),
    "a kernel by name": lambda x: softmax(x, kernel="landed"),
    "logsumexp": logsumexp_,
    "logsumexp over both": lambda x: logsumexp_(x, (0, 1), True),
    "rows apart": lambda x: softmax(x[:, :32]),
    "in place": lambda x: softmax(x, out=x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_third_call_starts_the_same_launch(call, built: Built, notes: Notes) -> None:
    xs = [x_of(4, 64) for _ in range(3)]
    ys = [call(x) for x in xs]
    assert built.count == 2
    one, _, other = notes.launches
    assert one._replace(words=()) == other._replace(words=())
    assert one.words[2:] == other.words[2:]
    assert addresses(notes)[1] == ys[2].data_ptr()
    assert ys[0].shape == ys[2].shape
    assert ys[0].stride() == ys[2].stride()
    assert ys[0].dtype == ys[2].dtype


def test_in_place_and_apart_do_not_meet(built: Built, notes: Notes) -> None:
    x, other, out = x_of(4, 64), x_of(4, 64), x_of(4, 64)
    softmax(x, out=x)
    softmax(x, out=x)
    softmax(other, out=out)
    assert addresses(notes) == (other.data_ptr(), out.data_ptr())
    softmax(other, out=other)
    assert addresses(notes) == (other.data_ptr(), other.data_ptr())
    assert built.count == 2


def different(x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Calls that differ from softmax(x) in one thing that the launch follows from."""
    wide = x_of(4, 65)
    return {
        "operation": lambda: log_softmax(x),
        "dtype": lambda: softmax(x.half()),
        "result": lambda: softmax(x.half(), dtype=torch.float32),
        "shape": lambda: softmax(x_of(5, 64)),
        "rank": lambda: softmax(x_of(2, 2, 64)),
        "stride": lambda: softmax(wide[:, :64]),
        "phase": lambda: softmax(x_of(257)[1:].view(4, 64)),
        "phase of the result": lambda: softmax(x, out=x_of(257)[1:].view(4, 64)),
        "scale": lambda: softmax(x, scale=0.5),
        "empty": lambda: softmax(x, empty="zero"),
        "kernel": lambda: softmax(x, kernel="split"),
        "dim": lambda: softmax(x, 0),
    }


@pytest.mark.parametrize("what", different(torch.empty(4, 64)))
def test_what_the_launch_follows_from_is_told_apart(what: str, built: Built, notes: Notes) -> None:
    x = x_of(4, 64)
    softmax(x)
    softmax(x)
    before = notes.launches[-1]
    different(x)[what]()
    assert built.count == 3
    softmax(x)
    assert notes.launches[-1]._replace(words=()) == before._replace(words=())
    assert notes.launches[-1].words[2:] == before.words[2:]


def test_copies_and_workspaces_are_not_kept(built: Built, notes: Notes) -> None:
    for call in (lambda: softmax(x_of(64, 4).t()), lambda: softmax(x_of(4, 64), kernel="split")):
        before = len(keptcalls.kept)
        for _ in range(3):
            call()
        assert len(keptcalls.kept) == before


def test_backward(built: Built, notes: Notes) -> None:
    for leaf in (x_of(4, 64), x_of(4, 64), other := x_of(4, 64)):
        y = softmax(leaf.requires_grad_())
        dy = x_of(4, 64)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        assert notes.launches[-1].words[:3] == (dy.data_ptr(), y.data_ptr(), dx.data_ptr())
    assert built.count == 4
    for count in (5, 6, 7):
        softmax(other).backward(torch.ones(()).expand(4, 64))  # copied for its strides: not kept
        assert built.count == count


def test_a_result_has_no_strides_of_an_out_before_it(built: Built, notes: Notes) -> None:
    for out in (torch.empty(3, 99)[:1, :64], torch.empty(3, 99)[:1, :64]):
        softmax(x_of(1, 64), dtype=torch.float32, out=out)
    y = softmax(x_of(1, 64), dtype=torch.float32)
    assert built.count == 2
    assert addresses(notes)[1] == y.data_ptr()
    assert y.stride() == (64, 1)


def test_results_are_tensors_of_their_own(built: Built) -> None:
    x = x_of(4, 64)
    ys = [softmax(x) for _ in range(5)]
    assert len({y.data_ptr() for y in ys}) == 5
    assert not any(y.requires_grad for y in ys)
    with torch.inference_mode():
        assert softmax(x).is_inference()


def test_without_kernels_nothing_is_kept() -> None:
    keptcalls.kept.clear()
    for _ in range(3):
        softmax(torch.zeros(2, 3))
        logsumexp_(torch.zeros(2, 3))
    assert not keptcalls.kept


def test_shapes_that_come_once_push_nothing_out(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "REMEMBERED", 4)
    x = x_of(4, 64)
    softmax(x)
    softmax(x)
    for rows in range(5, 17):
        softmax(x_of(rows, 64))
    assert built.count == 14
    assert len(keptcalls.came_once) <= 4
    softmax(x)
    assert built.count == 14
