"""jit.launch, with a driver that only takes notes. What a GPU must show stands in test_jit_gpu."""

from __future__ import annotations

import dataclasses
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import jit_kit
import jit_notes
from jit_kit import Work
from jit_notes import FOUR, SCALE, Notes
from online_softmax import jit, jit_compile

cu_file, fresh_cache, nvrtc = jit_kit.cu_file, jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
notes = jit_notes.notes


CLUSTER, COOPERATIVE, DEPENDENT = 4, 2, 6  # numbers of cuda.h's launch attributes


def test_arguments_stream_and_kernel_reach_the_driver(notes: Notes, cu_file: str):
    jit.launch(Work(cu_file, SCALE, (1 << 40, -1, True, 2.5), 3, 64), torch.device("cuda", 0))
    (launched,) = notes.launches
    assert launched[:5] == (40, 1001, 3, 64, 0)
    assert launched.attributes == {}
    assert launched.words[:3] == (1 << 40, -1, 1)
    assert struct.pack("=q", launched.words[3])[:4] == struct.pack("=f", 2.5)
    jit.launch(Work(cu_file, SCALE, FOUR, 3, 64), torch.device("cuda"), stream=0)
    jit.launch(Work(cu_file, SCALE, FOUR, 3, 64), 0, stream=7)
    default = 1  # CU_STREAM_LEGACY, whichever kind of default stream 0 stands for
    assert [launch.stream for launch in notes.launches] == [40, default, 7]
    assert len(notes.loads) == 1
    assert notes.context == 100
    assert notes.modes == ["relaxed", "global"]  # a capture under way sees no load


def test_each_device_has_its_kernel_and_the_current_one_stays(notes: Notes, cu_file: str):
    for index in (1, 0, 1):
        jit.launch(Work(cu_file, SCALE, FOUR), index)
        assert notes.current == 0
    assert [launch.stream for launch in notes.launches] == [41, 40, 41]
    assert [launch.kernel for launch in notes.launches] == [1001, 1002, 1001]
    assert len(notes.loads) == 2
    assert notes.loads[0] == notes.loads[1]


def test_grid_counts_blocks_also_with_clusters(notes: Notes, cu_file: str):
    jit.launch(Work(cu_file, SCALE, FOUR, 32, 64, cluster=4), 0)
    assert (notes.launches[0].blocks, notes.launches[0].attributes) == (32, {CLUSTER: (4, 1, 1)})
    with pytest.raises(ValueError, match=r"33 blocks .* clusters of 4"):
        jit.launch(Work(cu_file, SCALE, FOUR, 33, 64, cluster=4), 0)
    with pytest.raises(ValueError, match="-1 blocks"):
        jit.launch(Work(cu_file, SCALE, FOUR, -1), 0)
    jit.launch(Work("no/such/file.cu", SCALE, FOUR, 0), 0)
    assert len(notes.launches) == 1


def test_limits_are_lifted_once(notes: Notes, cu_file: str):
    for shared_bytes in (0, 50_000, 50_000, 20_000, 200_000):
        jit.launch(Work(cu_file, SCALE, FOUR, shared_bytes=shared_bytes), 0)
    assert notes.limits == [("shared", 50_000), ("shared", 200_000)]
    for cluster in (8, 16, 16):
        jit.launch(Work(cu_file, SCALE, FOUR, 16, cluster=cluster), 0)
    assert notes.limits[2:] == [("wide", 1)]


def test_cooperative_and_dependent_launches(notes: Notes, cu_file: str):
    jit.launch(Work(cu_file, SCALE, FOUR, cooperative=True), 0)
    jit.launch(Work(cu_file, SCALE, FOUR, dependent=True), 0)
    assert [list(launch.attributes) for launch in notes.launches] == [[COOPERATIVE], [DEPENDENT]]
    assert all(value[0] == 1 for each in notes.launches for value in each.attributes.values())
    notes.capability = (8, 0)  # no dependent launch there: one after the other
    jit.launch(Work(cu_file, SCALE, FOUR, dependent=True), 1)
    assert notes.launches[2].attributes == {}
    jit.launch(Work(cu_file, SCALE, FOUR, 10, cooperative=True), 0)
    with pytest.raises(ValueError, match=r"11 blocks .* exceeds 10"):  # 5 multiprocessors of 2
        jit.launch(Work(cu_file, SCALE, FOUR, 11, cooperative=True), 0)


def test_arguments_that_no_kernel_takes(notes: Notes, cu_file: str):
    with pytest.raises(ValueError, match=r"a tensor on cpu .* cuda:0"):
        jit.launch(Work(cu_file, SCALE, (torch.ones(3),)), 0)
    with pytest.raises(TypeError, match="not str"):
        jit.launch(Work(cu_file, SCALE, ("3",)), 0)
    assert notes.launches == []


def test_a_refused_image_is_built_once_more(notes: Notes, cu_file: str, monkeypatch):
    built = jit.compile(cu_file, SCALE, "sm_90a")
    stale = dataclasses.replace(built, code=b"of another machine")
    key = jit_compile._key(Path(cu_file), SCALE, "sm_90a")
    monkeypatch.setitem(jit_compile._images, key, stale)
    notes.refusals = 1
    jit.launch(Work(cu_file, SCALE, FOUR), 0)
    assert notes.loads == [stale.code, built.code]
    assert len(notes.launches) == 1
    assert jit.compile(cu_file, SCALE, "sm_90a").code == built.code
    notes.refusals = 2
    with pytest.raises(jit.Unavailable) as caught:
        jit.launch(Work(cu_file, "plain", FOUR), 0)
    for part in ("NO_BINARY_FOR_GPU", "CUDA 13.0", "NVRTC", "plain", cu_file, built.target):
        assert part in str(caught.value)
    assert notes.modes[-1] == "global"


def test_threads_load_a_kernel_once(notes: Notes, cu_file: str):
    work = Work(cu_file, SCALE, FOUR)
    threads = [threading.Thread(target=jit.launch, args=(work, 0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(notes.launches) == 8
    assert len(notes.loads) == 1


def test_shapes_and_streams_do_not_pile_up(notes: Notes, cu_file: str, monkeypatch):
    monkeypatch.setattr(jit, "REMEMBERED", 5)
    for grid in range(1, 20):
        jit.launch(Work(cu_file, SCALE, FOUR, grid), 0, stream=grid)
    assert len(jit._ready) <= 5
    assert len(notes.loads) == 1
    jit.clear_cache()
    jit.launch(Work(cu_file, SCALE, FOUR), 0)
    assert len(notes.loads) == 2


def test_what_the_driver_says_is_raised(notes: Notes, cu_file: str):
    notes.status = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        jit.launch(Work(cu_file, SCALE, FOUR), 0)
    start = jit.starter(Work(cu_file, SCALE, FOUR), 0, ((0, 0), (1, 1)))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        start(40, (5, 6))
