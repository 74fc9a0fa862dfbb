"""Launches that are started again with other addresses, over a driver that only takes notes."""

from __future__ import annotations

import gc
import threading
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
    jit.keep("call", work, index, (2, 0), "beside it")
    start, about = jit.kept("call")
    assert about == "beside it"
    return start


def test_a_kept_launch_has_other_addresses_alone(notes: Notes, cu_file: str):
    start = kept_launch(cu_file, cluster=2, shared_bytes=64)
    start(1 << 50, 7)
    start(8, 9)
    first, second, third = notes.launches
    assert first.words == (10, 20, 30, 40)
    assert second == first._replace(words=(7, 20, 1 << 50, 40))
    assert third == first._replace(words=(9, 20, 8, 40))


def test_a_kept_launch_goes_to_the_current_stream_of_its_device(
    notes: Notes, cu_file: str, monkeypatch
):
    start = kept_launch(cu_file, index=1)
    start(1, 2)
    assert notes.current == 0
    monkeypatch.setattr(notes, "current", 1)
    start(3, 4)
    assert [launch.stream for launch in notes.launches] == [41, 41, 41]


def test_streams_of_a_kept_launch_change(notes: Notes, cu_file: str, monkeypatch):
    streams = iter((5, 9, 9, 0, 5))
    monkeypatch.setattr(jit, "_raw_stream", lambda _: next(streams))
    start = kept_launch(cu_file)
    for _ in range(4):
        start(1, 2)
    assert [launch.stream for launch in notes.launches] == [5, 9, 9, 1, 5]


def test_a_thread_s_first_launch_may_be_a_kept_one(notes: Notes, cu_file: str):
    start = kept_launch(cu_file)
    notes.context = 0  # as a new thread's
    thread = threading.Thread(target=start, args=(1, 2))
    thread.start()
    thread.join()
    assert notes.context == 100
    assert len(notes.launches) == 2


def test_a_call_within_a_call_has_arguments_of_its_own(notes: Notes, cu_file: str, monkeypatch):
    """As a finalizer or a signal handler makes it, between the arguments and the launch."""
    inner: list[Any] = []
    monkeypatch.setattr(jit, "_raw_stream", lambda _: inner.pop()() if inner else 40)
    start = kept_launch(cu_file)

    def within() -> int:
        start(3, 4)
        return 40

    for _ in range(2):
        inner.append(within)
        start(1, 2)
    words = [(launch.words[2], launch.words[0]) for launch in notes.launches[1:]]
    assert words == [(3, 4), (1, 2)] * 2


def test_kept_launches_from_many_threads(notes: Notes, cu_file: str):
    start = kept_launch(cu_file)
    threads = [
        threading.Thread(target=lambda i=i: [start(i, i) for _ in range(200)]) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [launch.words for launch in notes.launches[1:]]
    assert len(found) == 1600
    assert all(words[0] == words[2] and words[1::2] == (20, 40) for words in found)
    assert {words[0] for words in found} == set(range(8))


def test_kept_launches_are_forgotten_as_kernels_are(notes: Notes, cu_file: str, monkeypatch):
    kept_launch(cu_file)
    jit.clear_cache()
    assert jit.kept("call") is None
    kept_launch(cu_file)
    jit._after_fork()
    assert jit.kept("call") is None
    work = Work(cu_file, SCALE, FOUR)
    jit.keep("call", work, 0, (0, 1))  # it has not run, or its kernel is forgotten
    assert jit.kept("call") is None
    monkeypatch.setattr(jit, "REMEMBERED", 3)
    jit.launch(work, 0)
    for name in range(10):
        jit.keep(name, work, 0, (0, 1))
    assert len(jit._kept) <= 3


def test_a_kept_launch_stays_whole_without_its_work(notes: Notes, cu_file: str):
    start = kept_launch(cu_file)
    gc.collect()
    start(5, 6)
    assert notes.launches[-1].words == (6, 20, 5, 40)
