"""jit.launch, with a driver that only takes notes. What a GPU must show stands in test_jit_gpu."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jit_kit
from jit_kit import Work
from online_softmax import jit, jit_compile

cu_file, fresh_cache, nvrtc = jit_kit.cu_file, jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
SCALE = "scale<float>"


class Notes:
    """cuda.core and the driver's bindings, as far as jit uses them; every call is noted."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, Any, Any, tuple[Any, ...]]] = []
        self.configs: list[dict[str, Any]] = []
        self.limits: list[tuple[str, int]] = []
        self.loads: list[bytes] = []
        self.modes: list[str] = []
        self.refusals = 0  # loads still to be refused
        self.current, self.capability, self.context = 0, (9, 0), 0

    def core(self) -> SimpleNamespace:
        def config(**numbers: Any) -> str:
            self.configs.append(numbers)
            return f"config {len(self.configs)}"

        return SimpleNamespace(
            LaunchConfig=config,
            LEGACY_DEFAULT_STREAM="default",
            Stream=SimpleNamespace(from_handle=lambda handle: f"stream {handle}"),
            Kernel=SimpleNamespace(from_handle=lambda handle: f"kernel {handle}"),
            launch=lambda *what: self.launches.append((*what[:3], what[3:])),
        )

    def driver(self) -> SimpleNamespace:
        def load(code: bytes, *_options: object) -> tuple[Any, ...]:
            self.loads.append(code)
            if self.refusals:
                self.refusals -= 1
                return (SimpleNamespace(name="CUDA_ERROR_NO_BINARY_FOR_GPU"), None)
            return (0, "library")

        def exchange(mode: str) -> tuple[int, str]:
            self.modes.append(mode)
            return (0, "global")

        def limit(name: str, value: int, *_where: object) -> tuple[int]:
            self.limits.append((name, value))
            return (0,)

        def set_context(context: int) -> tuple[int]:
            self.context = context
            return (0,)

        attributes = {
            "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": "shared",
            "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED": "wide",
        }
        return SimpleNamespace(
            CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed"),
            CUfunction_attribute=SimpleNamespace(**attributes),
            cuInit=lambda _flags: (0,),
            cuCtxGetCurrent=lambda: (0, self.context),
            cuCtxSetCurrent=set_context,
            cuDevicePrimaryCtxRetain=lambda device: (0, 100 + device),
            cuDeviceGet=lambda index: (0, index),
            cuDriverGetVersion=lambda: (0, 13000),
            cuThreadExchangeStreamCaptureMode=exchange,
            cuLibraryLoadData=load,
            cuLibraryGetKernel=lambda _library, _entry: (0, 1000 + len(self.loads)),
            cuKernelGetFunction=lambda handle: (0, handle),
            cuFuncLoad=lambda _function: (0,),
            cuKernelSetAttribute=limit,
        )


@pytest.fixture
def notes(monkeypatch) -> Iterator[Notes]:
    notes = Notes()
    core, driver = notes.core(), notes.driver()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, notes.current = notes.current, index
        yield
        notes.current = before

    monkeypatch.setattr(jit, "_cuda", lambda: (core, driver))
    monkeypatch.setattr(jit, "_raw_stream", lambda index: 40 + index)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: notes.current)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: notes.capability)
    jit._after_fork()
    yield notes
    jit._after_fork()


def test_arguments_stream_and_kernel_reach_cuda_core(notes: Notes, cu_file: str):
    jit.launch(Work(cu_file, SCALE, (1 << 40, -1, True, 2.5), 3, 64), torch.device("cuda", 0))
    ((stream, config, kernel, args),) = notes.launches
    assert (stream, config, kernel) == ("stream 40", "config 1", "kernel 1001")
    assert args[:2] == (1 << 40, -1)
    assert type(args[2]) is int  # cuda.core passes a bool as one byte, a float as a double
    assert isinstance(args[3], ctypes.c_float)
    assert args[3].value == 2.5
    assert notes.configs == [{"grid": 3, "block": 64, "shmem_size": 0, "is_cooperative": False}]
    jit.launch(Work(cu_file, SCALE, (), 3, 64), torch.device("cuda"), stream=0)
    jit.launch(Work(cu_file, SCALE, (), 3, 64), 0, stream=7)
    assert [launch[0] for launch in notes.launches] == ["stream 40", "default", "stream 7"]
    assert len(notes.configs) == len(notes.loads) == 1
    assert notes.context == 100
    assert notes.modes == ["relaxed", "global"]  # a capture under way sees no load


def test_each_device_has_its_kernel_and_the_current_one_stays(notes: Notes, cu_file: str):
    for index in (1, 0, 1):
        jit.launch(Work(cu_file, SCALE, ()), index)
        assert notes.current == 0
    assert [launch[0] for launch in notes.launches] == ["stream 41", "stream 40", "stream 41"]
    assert len(notes.loads) == 2
    assert notes.loads[0] == notes.loads[1]


def test_grid_counts_blocks_also_with_clusters(notes: Notes, cu_file: str):
    jit.launch(Work(cu_file, SCALE, (), 32, 64, cluster=4), 0)
    assert (notes.configs[0]["grid"], notes.configs[0]["cluster"]) == (8, 4)
    with pytest.raises(ValueError, match=r"33 blocks .* clusters of 4"):
        jit.launch(Work(cu_file, SCALE, (), 33, 64, cluster=4), 0)
    with pytest.raises(ValueError, match="-1 blocks"):
        jit.launch(Work(cu_file, SCALE, (), -1), 0)
    jit.launch(Work("no/such/file.cu", SCALE, (), 0), 0)
    assert len(notes.launches) == 1


def test_limits_are_lifted_once(notes: Notes, cu_file: str):
    for shared_bytes in (0, 50_000, 50_000, 20_000, 200_000):
        jit.launch(Work(cu_file, SCALE, (), shared_bytes=shared_bytes), 0)
    assert notes.limits == [("shared", 50_000), ("shared", 200_000)]
    for cluster in (8, 16, 16):
        jit.launch(Work(cu_file, SCALE, (), 16, cluster=cluster), 0)
    assert notes.limits[2:] == [("wide", 1)]


def test_cooperative_and_dependent_launches(notes: Notes, cu_file: str):
    jit.launch(Work(cu_file, SCALE, (), cooperative=True), 0)
    jit.launch(Work(cu_file, SCALE, (), dependent=True), 0)
    assert notes.configs[0]["is_cooperative"]
    assert notes.configs[1]["programmatic_stream_serialization"]
    notes.capability = (8, 0)  # no dependent launch there: one after the other
    jit.launch(Work(cu_file, SCALE, (), dependent=True), 1)
    assert "programmatic_stream_serialization" not in notes.configs[2]


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
    jit.launch(Work(cu_file, SCALE, ()), 0)
    assert notes.loads == [stale.code, built.code]
    assert len(notes.launches) == 1
    assert jit.compile(cu_file, SCALE, "sm_90a").code == built.code
    notes.refusals = 2
    with pytest.raises(jit.Unavailable) as caught:
        jit.launch(Work(cu_file, "plain", ()), 0)
    for part in ("NO_BINARY_FOR_GPU", "CUDA 13.0", "NVRTC", "plain", cu_file, built.target):
        assert part in str(caught.value)
    assert notes.modes[-1] == "global"


def test_threads_load_a_kernel_once(notes: Notes, cu_file: str):
    work = Work(cu_file, SCALE, ())
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
        jit.launch(Work(cu_file, SCALE, (), grid), 0, stream=grid)
    assert len(jit._ready) <= 5
    assert len(jit._streams) <= 5
    assert len(notes.loads) == 1
    jit.clear_cache()
    jit.launch(Work(cu_file, SCALE, ()), 0)
    assert len(notes.loads) == 2
