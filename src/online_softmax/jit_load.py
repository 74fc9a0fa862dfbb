"""Machine code onto a GPU, the limits that have to be asked for, and what a GPU holds at once."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from online_softmax import jit_compile, jit_launch
from online_softmax.jit_cache import Image
from online_softmax.jit_compile import BindingError, Unavailable, checked
from online_softmax.jit_launch import Shape

PORTABLE_CLUSTER = 8  # blocks: what every GPU with clusters runs; more has to be asked for
_limits = threading.Lock()  # a limit only ever rises


@dataclass
class Loaded:
    """A kernel on one device, and the limits raised for it so far."""

    handle: Any  # the driver's
    may_depend: bool  # whether the device has dependent launches
    shared_bytes: int = 0  # dynamic, a block
    cluster: int = PORTABLE_CLUSTER


def to_device(driver: ModuleType, image: Image, refusal: str = "") -> Any:
    """Load machine code, fully, unseen by a capture under way, and never unload it: a CUDA graph
    or a forked child may still refer to it. ``refusal`` names it where the failure is final."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    version = checked(driver.cuDriverGetVersion())
    try:
        library = checked(driver.cuLibraryLoadData(image.code, [], [], 0, [], [], 0))
        handle = checked(driver.cuLibraryGetKernel(library, image.entry.encode()))
        function = checked(driver.cuKernelGetFunction(handle))
        if version >= 12040:  # an older driver does it at the first launch
            checked(driver.cuFuncLoad(function))
    except BindingError as error:
        if not refusal:
            raise
        raise Unavailable(
            f"{error}: the driver (CUDA {version // 1000}.{version % 1000 // 10}) does not load "
            f"what NVRTC {jit_compile.nvrtc_version()} makes of {refusal}. An older driver may "
            "need updating."
        ) from error
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(before))
    return handle


def lift_limits(
    driver: ModuleType, loaded: Loaded, index: int, shared_bytes: int, cluster: int
) -> None:
    """Ask for dynamic shared memory, and clusters, beyond what every kernel may have."""
    device, attribute = checked(driver.cuDeviceGet(index)), driver.CUfunction_attribute
    with _limits:
        if shared_bytes > loaded.shared_bytes:
            name = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuKernelSetAttribute(name, shared_bytes, loaded.handle, device))
            loaded.shared_bytes = shared_bytes
        if cluster > loaded.cluster:
            name = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            checked(driver.cuKernelSetAttribute(name, 1, loaded.handle, device))
            loaded.cluster = cluster


def max_clusters(driver: ModuleType, loaded: Loaded, shape: Shape) -> int:
    """How many clusters of a kernel a device holds at once; of blocks, where cluster is 1."""
    config = jit_launch.config(driver, shape, is_cluster=True)
    function = driver.CUfunction(int(loaded.handle))
    return max(int(checked(driver.cuOccupancyMaxActiveClusters(function, config))), 1)


def check_cooperative(driver: ModuleType, loaded: Loaded, index: int, shape: Shape) -> None:
    """ValueError if a device does not hold all blocks of a launch at once."""
    function = driver.CUfunction(int(loaded.handle))
    held = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        function, shape.block, shape.shared_bytes
    )
    name = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    count = checked(driver.cuDeviceGetAttribute(name, checked(driver.cuDeviceGet(index))))
    most = int(checked(held)) * int(count)
    if shape.grid > most:
        raise ValueError(f"a grid of {shape.grid} blocks that wait for each other exceeds {most}")
