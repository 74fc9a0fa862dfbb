"""A driver that only takes notes: jit and what stands on it launch without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from online_softmax import jit, keptcalls, rowkernels
from online_softmax.cuda import launch as launches

SCALE = "scale<float>"
FOUR = (1, 2, 3, 4)  # arguments where they do not matter


class Launched(NamedTuple):
    """What the driver was given, read from memory as the driver reads it."""

    stream: int
    kernel: int
    blocks: int
    threads: int
    shared_bytes: int
    attributes: dict[int, tuple[int, ...]]  # by number: the first three words of each
    words: tuple[int, ...]  # the first arguments, 8 bytes each


class Notes:
    """The driver's bindings, as far as jit uses them; every call is noted."""

    READ = 4  # arguments of a launch that has as many

    def __init__(self) -> None:
        self.launches: list[Launched] = []
        self.limits: list[tuple[str, int]] = []
        self.loads: list[bytes] = []
        self.modes: list[str] = []
        self.refusals = 0  # loads still to be refused
        self.status = 0  # of a launch
        self.current, self.capability, self.context = 0, (9, 0), 0

    def driver(self) -> SimpleNamespace:
        real = pytest.importorskip("cuda.bindings.driver")

        def start(config: Any, function: Any, address: int, extra: int) -> tuple[int]:
            assert extra == 0
            raw = ctypes.string_at(config.getPtr(), 52)  # cuda.h's CUlaunchConfig
            *grid, _, _, shared_bytes, stream, attributes, count = struct.unpack("=7I4xQQI", raw)
            assert grid[1:3] == [1, 1]
            found = {}
            for each in range(count):  # cuda.h's CUlaunchAttribute, of 72 bytes
                number, *value = struct.unpack(
                    "=I4x3I", ctypes.string_at(attributes + 72 * each, 20)
                )
                found[number] = tuple(value)
            values = ()
            if address:
                pointers = struct.unpack("=4Q", ctypes.string_at(address, 32))
                values = tuple(ctypes.c_int64.from_address(each).value for each in pointers)
            if not self.status:
                self.launches.append(
                    Launched(stream, int(function), grid[0], grid[3], shared_bytes, found, values)
                )
            return (self.status,)

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
        names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID", "CUfunction")
        return SimpleNamespace(
            **{name: getattr(real, name) for name in (*names, "CUstream", "CU_STREAM_LEGACY")},
            cuLaunchKernelEx=start,
            cuOccupancyMaxActiveBlocksPerMultiprocessor=lambda *_: (0, 2),
            CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="count"),
            cuDeviceGetAttribute=lambda _name, _device: (0, 5),
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
    driver = notes.driver()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, notes.current = notes.current, index
        yield
        notes.current = before

    monkeypatch.setattr(jit, "_driver", lambda: driver)
    monkeypatch.setattr(jit, "current_device", lambda: notes.current)
    monkeypatch.setattr(jit, "raw_stream", lambda index: 40 + index)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: notes.current)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: notes.capability)
    jit._after_fork()
    yield notes
    jit._after_fork()


class Built:
    """How often launches were worked out."""

    count = 0


@pytest.fixture
def built(notes: Notes, fresh_cache: object, nvrtc: str, monkeypatch: pytest.MonkeyPatch) -> Built:
    """CPU tensors count as those of device 0: kernels compile, and their launches are noted."""
    found = Built()

    def run(work: list[launches.Launch], _: torch.device) -> None:
        found.count += 1
        for each in work:
            jit.launch(each, 0)

    monkeypatch.setattr(rowkernels, "has_kernels", lambda x: x.device.type == "cpu")
    monkeypatch.setattr(keptcalls, "came_once", {})
    monkeypatch.setattr(keptcalls, "is_cuda", lambda x: True)
    monkeypatch.setattr(keptcalls, "empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(Tensor, "get_device", lambda x: 0)
    monkeypatch.setattr(launches, "run", run)
    return found
