"""CUDA source to running kernel: compile (NVRTC), keep on disk, load, launch. No toolkit, no nvcc.

The first two work without a GPU: jit_compile and jit_cache. Importing this module imports nothing
of CUDA: the first compile loads NVRTC, the first launch the driver.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from online_softmax import jit_cache, jit_compile, jit_load
from online_softmax.jit_cache import Image, Resources, cache_dir, cache_stats
from online_softmax.jit_compile import (
    BindingError,
    CompileError,
    Unavailable,
    checked,
    compile,  # noqa: A004 read as jit.compile
    nvrtc_version,
    occupancy,
    resources,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["CompileError", "Image", "Resources", "Unavailable", "cache_dir", "cache_stats"]
__all__ += ["clear_cache", "compile", "device_arch", "launch", "missing", "nvrtc_version"]
__all__ += ["occupancy", "resources"]

REMEMBERED = 4096  # launch shapes and streams; then all are dropped: rows may vary for ever

# The one private name of torch in this file: 0.1 us where the public call takes 4.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)


class Launchable(Protocol):
    """What :func:`launch` reads: the record of cuda/launch.py, or any like it."""

    @property
    def file(self) -> str: ...
    @property
    def symbol(self) -> str: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def grid(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def cooperative(self) -> bool: ...
    @property
    def dependent(self) -> bool: ...


_loaded: dict[tuple[int, str, str], jit_load.Loaded] = {}  # by device, file, symbol
_locks: dict[tuple[int, str, str], threading.Lock] = {}  # one for each kernel that is being loaded
# By device and all of a launch but its arguments: cuda.core's launch, LaunchConfig and Kernel.
_ready: dict[tuple[Any, ...], tuple[Callable[..., None], Any, Any]] = {}
_held: dict[tuple[Any, ...], int] = {}  # what max_clusters has found
_streams: dict[int, Any] = {}  # raw handle -> cuda.core's Stream
_thread = threading.local()  # .has_context, once this thread has a CUDA context


def device_arch(device: torch.device | int | None = None) -> str:
    """Return the architecture to compile for on a CUDA device: ``"sm_90a"`` on an H200."""
    major, minor = torch.cuda.get_device_capability(device)
    # Hopper and the first Blackwell have instructions that only their own "a" target may use.
    return f"sm_{major}{minor}" + ("a" if (major, minor) in ((9, 0), (10, 0)) else "")


@functools.cache
def missing() -> str | None:
    """Return a sentence on which library CUDA kernels lack here, or None. Asks for no GPU."""
    try:
        jit_compile.compiler()
        _cuda()
    except Unavailable as error:
        return str(error)
    return None


def clear_cache() -> int:
    """Forget all compiled kernels, here and on disk; return how many files were removed.

    What is on a GPU stays there, since a CUDA graph may hold it; the next launch loads anew.
    """
    jit_compile.forget_images()
    _ready.clear()
    _loaded.clear()
    return jit_cache.clear()


def launch(work: Launchable, device: torch.device | int, stream: int | None = None) -> None:
    """Start one kernel; compile and load it at its first launch on a device.

    It synchronises and allocates nothing, so it may stand in a CUDA graph capture. The current
    device is left as it was.

    Args:
        work: file, symbol, arguments and numbers. The arguments stand in the kernel's order: a
            tensor on ``device`` is passed as its data pointer, an int as int64_t, a float as
            float. ``grid`` counts blocks, also with clusters; with 0 blocks nothing happens.
        device: a CUDA device or its index.
        stream: a raw stream handle of that device; None is torch's current one.

    Raises:
        Unavailable: a library is missing, or the driver refuses what NVRTC makes.
        CompileError: the kernel does not compile.
        ValueError: a tensor of another device, or a grid that is not a number of clusters.
        TypeError: an argument of another type.

    Example:
        >>> launch(Launch("ladder/safe.cu", "safe<float>", (x, y, rows, cols), rows, 256), x.device)
    """
    current = torch.cuda.current_device()  # raises torch's own message in a forked child
    named = device if isinstance(device, int) else device.index
    index = current if named is None else named
    numbers = (work.grid, work.block, work.cluster, work.shared_bytes)
    key = (index, work.file, work.symbol, *numbers, work.cooperative, work.dependent)
    if work.grid == 0:
        return
    ready = _ready.get(key)
    if ready is None or index != current or not hasattr(_thread, "has_context"):
        with torch.cuda.device(index):
            _enter(index)
            if ready is None:
                _prepare(key, work)
            launch(work, index, stream)  # now that all of it is there
        return
    start, config, kernel = ready
    if stream is None:
        stream = _raw_stream(index)
    start(
        _streams.get(stream) or _stream(stream),
        config,
        kernel,
        *[value if type(value) is int else _argument(value, index) for value in work.args],
    )


def max_clusters(work: Launchable, device: torch.device | int) -> int:
    """How many clusters (of one block: blocks) of a launch's kind a CUDA device holds at once."""
    index = device if isinstance(device, int) else device.index
    key = (index, work.file, work.symbol, work.block, work.cluster, work.shared_bytes)
    if key not in _held:
        with torch.cuda.device(index):
            _enter(index)
            core, driver = _cuda()
            loaded = _load(index, work.file, work.symbol)
            jit_load.lift_limits(driver, loaded, index, work.shared_bytes, work.cluster)
            _held[key] = jit_load.max_clusters(
                core, loaded, work.block, work.cluster, work.shared_bytes
            )
    return _held[key]


def _argument(value: object, index: int) -> object:
    """Make of an argument what cuda.core passes as 8 bytes (int) or as a float."""
    if isinstance(value, Tensor):
        if value.get_device() != index:
            raise ValueError(f"a tensor on {value.device} is given to a kernel on cuda:{index}")
        return value.data_ptr()
    if isinstance(value, float):
        return ctypes.c_float(value)  # cuda.core takes a plain one for a double
    if isinstance(value, int):
        return int(value)  # a bool, which cuda.core passes as one byte
    raise TypeError(f"a kernel takes tensors, ints and floats, not {type(value).__name__}")


def _prepare(key: tuple[Any, ...], work: Launchable) -> None:
    """Load the kernel, lift its limits and make the launch record, all but the arguments."""
    index, grid, cluster = key[0], work.grid, work.cluster
    if grid < 0 or grid % cluster:
        raise ValueError(f"a grid of {grid} blocks is not a number of clusters of {cluster}")
    loaded = _load(index, work.file, work.symbol)
    jit_load.lift_limits(_cuda()[1], loaded, index, work.shared_bytes, cluster)
    extra: dict[str, Any] = {"cluster": cluster} if cluster > 1 else {}
    if work.dependent and loaded.may_depend:  # else an ordinary launch, which waits
        extra["programmatic_stream_serialization"] = True
    core = _cuda()[0]
    config = core.LaunchConfig(
        grid=grid // cluster,  # cuda.core counts clusters where there are any
        block=work.block,
        shmem_size=work.shared_bytes,
        is_cooperative=work.cooperative,
        **extra,
    )
    _remember(_ready, key, (core.launch, config, loaded.kernel))


def _stream(handle: int) -> Any:
    core = _cuda()[0]
    own = core.Stream.from_handle(handle) if handle else core.LEGACY_DEFAULT_STREAM
    return _remember(_streams, handle, own)


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(memory) >= REMEMBERED:
        memory.clear()
    memory[key] = value
    return value


@functools.cache
def _cuda() -> tuple[ModuleType, ModuleType]:
    """Load cuda.core, and the driver's bindings for what it leaves out; no GPU is touched yet."""
    try:
        import cuda.core
        from cuda.bindings import driver
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(jit_compile.remedy("cuda.core, which launches", error)) from error
    return cuda.core, driver


def _enter(index: int) -> None:
    """Give this thread the device's primary context, the one torch uses, if it has none."""
    _, driver = _cuda()
    checked(driver.cuInit(0))
    if int(checked(driver.cuCtxGetCurrent())) == 0:
        context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(index))))
        checked(driver.cuCtxSetCurrent(context))
    _thread.has_context = True


def _load(index: int, file: str, symbol: str) -> jit_load.Loaded:
    """Compile a kernel for a device and load it there; once, whichever thread comes first."""
    key = (index, file, symbol)
    core, driver = _cuda()
    with _locks.setdefault(key, threading.Lock()):
        if (loaded := _loaded.get(key)) is None:
            source, target = jit_compile.CUDA_DIR / file, jit_compile.target_of(device_arch(index))
            try:
                handle = jit_load.to_device(driver, jit_compile.image_of(source, symbol, target))
            except BindingError:  # what is stored may be of no use here: build it, once
                image = jit_compile.image_of(source, symbol, target, rebuild=True)
                handle = jit_load.to_device(
                    driver, image, refusal=f"{symbol} of {file} for {target}"
                )
            may_depend = torch.cuda.get_device_capability(index) >= (9, 0)
            kernel = core.Kernel.from_handle(int(handle))
            _loaded[key] = loaded = jit_load.Loaded(kernel, handle, may_depend)
    return loaded


def _after_fork() -> None:
    for memory in (_ready, _loaded, _locks, _held, _streams, _thread.__dict__):
        memory.clear()  # a child has none of our threads, and our context is of no use to it


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
