"""Calls of several CUDA launches: one like a call before starts them again, with new addresses."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import Tensor

import jit_kit
import jit_notes
from jit_notes import Built, Notes
from online_softmax import State, cross_entropy, merge, notedcalls

fresh_cache, nvrtc = jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
notes, built = jit_notes.notes, jit_notes.built

ROWS, COLS = 6, 96


def tensors() -> list[Tensor]:
    return [torch.randn(ROWS, COLS), torch.randint(COLS, (ROWS,))]


def weighted() -> list[Tensor]:
    return [*tensors(), torch.rand(COLS)]


def test_the_third_merge_starts_the_same_launch(built: Built, notes: Notes) -> None:
    seen, held = [], []
    for _ in range(3):
        ms, ds = ([torch.randn(ROWS) for _ in range(2)] for _ in "md")
        merged = merge(*map(State, ms, ds))
        held.append((ms, ds, merged))  # so that no address comes again
        (launch,) = notes.launches[len(seen) :]
        addresses = {t.data_ptr() for t in (*ms, *ds, *merged)}
        assert addresses >= {each for each in launch.words if each > ROWS}
        seen.append(launch._replace(words=()))
    assert seen[0] == seen[1] == seen[2]
    assert built.count == 2


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


def test_a_call_within_a_call_notes_its_own(built: Built) -> None:
    """As a finalizer or a signal handler makes it."""
    given, cpu = (torch.zeros(1),), torch.device("cpu")

    def inner() -> tuple[Tensor, ...]:
        return (notedcalls.empty((2,), torch.float32, cpu),)

    def outer() -> tuple[Tensor, ...]:
        first = notedcalls.empty((1,), torch.float32, cpu)
        notedcalls.repeated("within", (), given, inner)
        second = notedcalls.empty((3,), torch.float32, cpu)
        assert notedcalls._notes.current is not None
        assert [t.shape for t, _ in notedcalls._notes.current[1]] == [(1,), (3,)]
        return first, second

    notedcalls.repeated("around", (), given, outer)
    assert notedcalls._notes.current is None


def test_a_call_that_fails_leaves_no_notes(built: Built) -> None:
    def fail() -> tuple[Tensor, ...]:
        raise ValueError("no such launch")

    with pytest.raises(ValueError, match="no such launch"):
        notedcalls.repeated("nothing", (), (torch.zeros(1),), fail)
    assert notedcalls._notes.current is None
