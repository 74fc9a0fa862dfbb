"""Launches that are started again with other addresses, over a driver that only takes notes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import jit_kit
import jit_notes
from jit_kit import Work
from jit_notes import FOUR, SCALE, Notes
from online_softmax import jit

cu_file, fresh_cache, nvrtc = jit_kit.cu_file, jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
notes = jit_notes.notes


def kept_launch(cu_file: str, index: int = 0, **numbers: Any) -> Any:
    work = Work(cu_file, SCALE, (10, 20, 30, 40), 6, **numbers)
    jit.launch(work, index)
    return jit.starter(work, index, ((2, 0), (0, 1)))


def test_a_kept_launch_has_other_addresses_alone(notes: Notes, cu_file: str):
    start = kept_launch(cu_file, cluster=2, shared_bytes=64)
    start(40, (1 << 50, 7))
    start(40, [8, 9])
    first, second, third = notes.launches
    assert first.words == (10, 20, 30, 40)
    assert second == first._replace(words=(7, 20, 1 << 50, 40))
    assert third == first._replace(words=(9, 20, 8, 40))


def test_any_number_of_addresses_in_any_order(notes: Notes, cu_file: str):
    work = Work(cu_file, SCALE, (10, 20, 30, 40), 6)
    jit.launch(work, 0)
    jit.starter(work, 0, ((0, 2), (3, 0), (1, 2), (2, 1)))(40, (5, 6, 7))
    assert notes.launches[-1].words == (7, 7, 6, 5)


def test_streams_of_a_kept_launch_change(notes: Notes, cu_file: str):
    start = kept_launch(cu_file)
    for stream in (9, 9, 0, 5):
        start(stream, (1, 2))
    assert [launch.stream for launch in notes.launches] == [40, 9, 9, 1, 5]


def test_a_thread_s_first_launch_may_be_a_kept_one(notes: Notes, cu_file: str):
    start = kept_launch(cu_file)
    notes.context = 0  # as a new thread's
    thread = threading.Thread(target=start, args=(40, (1, 2)))
    thread.start()
    thread.join()
    assert notes.context == 100
    assert len(notes.launches) == 2


class Within(list[int]):
    """Addresses; as they are read, a finalizer or a signal handler makes a call."""

    inner: Callable[[], None] | None = None

    def __getitem__(self, at: int) -> int:  # type: ignore[override]
        if self.inner is not None:
            inner, self.inner = self.inner, None
            inner()
        return super().__getitem__(at)


def test_a_call_within_a_call_has_arguments_of_its_own(notes: Notes, cu_file: str):
    start = kept_launch(cu_file)
    for _ in range(2):
        addresses = Within([1, 2])
        addresses.inner = lambda: start(40, (3, 4))
        start(40, addresses)
    words = [(launch.words[2], launch.words[0]) for launch in notes.launches[1:]]
    assert words == [(3, 4), (1, 2)] * 2


def test_kept_launches_from_many_threads(notes: Notes, cu_file: str):
    start = kept_launch(cu_file)
    threads = [
        threading.Thread(target=lambda i=i: [start(40, (i, i)) for _ in range(200)])
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [launch.words for launch in notes.launches[1:]]
    assert len(found) == 1600
    assert all(words[0] == words[2] and words[1::2] == (20, 40) for words in found)
    assert {words[0] for words in found} == set(range(8))


def test_what_is_kept_is_forgotten_as_kernels_are(notes: Notes, cu_file: str, monkeypatch):
    memory: dict[object, object] = {}
    work = Work(cu_file, SCALE, FOUR)
    for forget in (jit.clear_cache, jit._after_fork):
        jit.launch(work, 0)
        jit.keep(memory, "call", jit.starter(work, 0, ((0, 0), (1, 1))))
        assert callable(memory["call"])
        assert jit.kind_of(work, 0) is not None
        forget()
        assert memory == {}
        assert jit.kind_of(work, 0) is None
        assert jit.starter(work, 0, ((0, 0), (1, 1))) is None  # as one that has not run
    monkeypatch.setattr(jit, "REMEMBERED", 3)
    for name in range(10):
        jit.keep(memory, name, name)
    assert memory == {9: 9}


def test_a_kept_launch_stays_whole_without_its_work(notes: Notes, cu_file: str):
    start = kept_launch(cu_file)
    gc.collect()
    start(40, (5, 6))
    assert notes.launches[-1].words == (6, 20, 5, 40)
