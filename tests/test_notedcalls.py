"""Calls of several CUDA launches: one like a call before starts them again, with new addresses."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jit_kit
import jit_notes
from jit_notes import Built, Launched, Notes
from online_softmax import State, batch_invariant, cross_entropy, keptcalls, merge, notedcalls

fresh_cache, nvrtc = jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
notes, built = jit_notes.notes, jit_notes.built

ROWS, COLS = 6, 96
LEAST_ADDRESS = 1 << 32  # no size or option here is as large


def tensors() -> list[Tensor]:
    return [torch.randn(ROWS, COLS), torch.randint(COLS, (ROWS,))]


def weighted() -> list[Tensor]:
    return [*tensors(), torch.rand(COLS)]


def states() -> list[Tensor]:
    return [torch.randn(ROWS) for _ in range(4)]


def gradient(**options: Any) -> Callable[..., Any]:
    """The loss, and the gradient by logits that are no leaf, as a model gives them."""

    def call(logits: Tensor, target: Tensor) -> list[Tensor]:
        leaf = torch.zeros((), requires_grad=True)
        given = logits + leaf  # what is launched for autograd is torch's own
        loss = cross_entropy(given, target, **options)
        return [loss, *torch.autograd.grad(loss, given, torch.tensor(0.5))]

    return call


CALLS: dict[str, tuple[Callable[[], list[Tensor]], Callable[..., Any]]] = {
    "mean": (tensors, cross_entropy),
    "sum of half": (tensors, lambda x, t: cross_entropy(x.half(), t, reduction="sum")),
    "of each row": (tensors, lambda x, t: cross_entropy(x, t, reduction="none", return_lse=True)),
    "split": (tensors, lambda x, t: cross_entropy(x, t, kernel="split")),
    "weighted": (weighted, lambda x, t, w: cross_entropy(x, t, weight=w, z_loss=0.1, softcap=9.0)),
    "gradient": (tensors, gradient()),
    "gradient in the forward": (tensors, gradient(grad_in_forward=True)),
    "a merge": (states, lambda a, b, c, d: [*merge(State(a, b), State(c, d))]),
}


def results(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def described(work: list[Launched], known: list[Tensor]) -> list[Any]:
    """Launches; an address by which tensor it is, or as the call's own."""
    names = {t.data_ptr(): i for i, t in enumerate(known)}

    def word(value: int) -> Any:
        return names.get(value, "its own") if value > LEAST_ADDRESS else value

    return [each._replace(words=tuple(map(word, each.words))) for each in work]


@pytest.mark.parametrize("name", CALLS)
def test_the_third_call_starts_the_same_launches(name: str, built: Built, notes: Notes) -> None:
    make, call = CALLS[name]
    seen, held = [], []
    for _ in range(4):
        given = make()
        notes.launches.clear()
        before = built.count
        made = results(call(*given))
        held.append((given, made))  # so that no address comes again
        about = [(t.shape, t.dtype, t.stride()) for t in made]
        seen.append((described(notes.launches, [*given, *made]), about, built.count - before))
    launches, about, worked_out = zip(*seen, strict=True)
    assert min(worked_out[:2]) > 0
    assert worked_out[2:] == (0, 0)
    assert len(launches[0]) >= 1
    assert launches[0] == launches[1] == launches[2] == launches[3]
    assert about[0] == about[1] == about[2] == about[3]


def test_addresses_are_those_of_the_call(built: Built, notes: Notes) -> None:
    for _ in range(3):
        x, target = tensors()
        loss = cross_entropy(x, target)
    rows, reduce = notes.launches[-2:]
    assert rows.words[:2] == (x.data_ptr(), target.data_ptr())
    assert reduce.words[:2] == (rows.words[3], target.data_ptr())  # the losses of rows
    assert len({loss.data_ptr(), x.data_ptr(), target.data_ptr(), rows.words[3]}) == 4


def different(x: Tensor, target: Tensor) -> dict[str, Callable[[], Any]]:
    """Calls that differ from cross_entropy(x, target) in one thing that launches follow from."""
    wide = torch.randn(ROWS, COLS + 4)
    return {
        "dtype": lambda: cross_entropy(x.half(), target),
        "rows": lambda: cross_entropy(x[1:].clone(), target[1:].clone()),
        "strides": lambda: cross_entropy(wide[:, :COLS], target),
        "phase": lambda: cross_entropy(torch.randn(ROWS * COLS + 1)[1:].view(ROWS, COLS), target),
        "phase of target": lambda: cross_entropy(x, torch.zeros(ROWS + 1).long()[1:]),
        "weight": lambda: cross_entropy(x, target, weight=torch.rand(COLS)),
        "reduction": lambda: cross_entropy(x, target, reduction="sum"),
        "ignore_index": lambda: cross_entropy(x, target, ignore_index=3),
        "scale": lambda: cross_entropy(x, target, scale=0.5),
        "kernel": lambda: cross_entropy(x, target, kernel="split"),
    }


@pytest.mark.parametrize("what", different(*tensors()))
def test_what_the_launches_follow_from_is_told_apart(what: str, built: Built) -> None:
    x, target = tensors()
    for _ in range(2):
        cross_entropy(x, target)
    before = built.count
    different(x, target)[what]()
    assert built.count > before
    before = built.count
    cross_entropy(x, target)
    assert built.count == before


def test_the_setting_of_batch_invariance_is_told_apart(built: Built) -> None:
    x, target = tensors()
    for _ in range(2):
        cross_entropy(x, target)
    before = built.count
    with batch_invariant(False):
        cross_entropy(x, target)
    assert built.count > before


def test_copies_are_not_kept(built: Built) -> None:
    for _ in range(4):
        before = built.count
        cross_entropy(torch.randn(COLS, ROWS).t(), tensors()[1])
        assert built.count > before
    assert not keptcalls.kept


def test_values_that_memory_does_not_hold_go_the_whole_way(built: Built, notes: Notes) -> None:
    x, target = tensors()
    for _ in range(3):
        cross_entropy(x, target)
    for odd in (torch._neg_view(x), torch._efficientzerotensor((ROWS, COLS))):
        before = built.count
        for _ in range(3):
            notes.launches.clear()
            cross_entropy(odd, target)
            assert notes.launches[0].words[0] not in (0, x.data_ptr())  # a copy of the values
        assert built.count == before + 3 * 2


def test_nothing_is_held(built: Built) -> None:
    for _ in range(3):
        given = weighted()
        loss = cross_entropy(given[0], given[1], weight=given[2])
    watched = [weakref.ref(t) for t in (*given, loss)]
    del given, loss
    assert [each() for each in watched] == [None] * len(watched)


def test_memory_is_filled_where_torch_fills_it(built: Built) -> None:
    x, target = tensors()
    for _ in range(2):
        cross_entropy(x, target)
    before = built.count
    torch.use_deterministic_algorithms(True)
    try:
        assert cross_entropy(x, target).isnan()  # the launches are only noted
    finally:
        torch.use_deterministic_algorithms(False)
    assert built.count == before


def test_another_current_device(built: Built, notes: Notes, monkeypatch) -> None:
    x, target = tensors()
    for _ in range(2):
        cross_entropy(x, target)
    before = built.count
    monkeypatch.setattr(notes, "current", 1)
    cross_entropy(x, target)
    assert (built.count, notes.current) == (before, 1)
    assert [each.stream for each in notes.launches[-2:]] == [40, 40]


def test_threads_note_each_their_own(built: Built, notes: Notes) -> None:
    """Two calls that are worked out at the same moment."""
    together, made = threading.Barrier(2, timeout=20), {}

    def work(number: int) -> None:
        def call() -> tuple[Tensor, ...]:
            together.wait()
            result = notedcalls.empty((number,), torch.float32, torch.device("cpu"))
            together.wait()
            return (result,)

        made[number] = notedcalls.repeated("nothing", number, (torch.zeros(1),), call)
        assert notedcalls._notes.current is None

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: len(t) for number, (t,) in made.items()} == {1: 1, 2: 2}


def test_a_call_that_fails_leaves_no_notes(built: Built) -> None:
    def fail() -> tuple[Tensor, ...]:
        raise ValueError("no such launch")

    with pytest.raises(ValueError, match="no such launch"):
        notedcalls.repeated("nothing", (), (torch.zeros(1),), fail)
    assert notedcalls._notes.current is None
