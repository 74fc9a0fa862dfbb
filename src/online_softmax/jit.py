"""CUDA source to running kernel: compile (NVRTC), keep on disk, load, launch. No toolkit, no nvcc.

The first two work without a GPU: jit_compile and jit_cache. Importing this module imports nothing
of CUDA: the first compile loads NVRTC, the first launch the driver.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch

from online_softmax import jit_cache, jit_compile, jit_launch, jit_load
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
from online_softmax.jit_launch import Kind, Laid, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from types import ModuleType

__all__ = ["CompileError", "Image", "Resources", "Unavailable", "cache_dir", "cache_stats"]
__all__ += ["clear_cache", "compile", "device_arch", "launch", "missing", "nvrtc_version"]
__all__ += ["occupancy", "resources"]

REMEMBERED = 4096  # launch shapes, and calls; then all are dropped: rows may vary for ever

# The two private names of torch in this file: 0.1 us where the public call of the first takes 4.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)
current_device: Callable[[], int] = (
    getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
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
_ready: dict[tuple[Any, ...], Kind] = {}  # by device and all of a launch but its arguments
_kept: list[dict[Any, Any]] = []  # memories of calls: what was given to `keep`
_held: dict[tuple[Any, ...], int] = {}  # what max_clusters has found
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
        _driver()
    except Unavailable as error:
        return str(error)
    return None


def clear_cache() -> int:
    """Forget all compiled kernels, here and on disk; return how many files were removed.

    What is on a GPU stays there, since a CUDA graph may hold it; the next launch loads anew.
    """
    jit_compile.forget_images()
    memories: list[dict[Any, Any]] = [_ready, _loaded, *_kept]
    for memory in memories:
        memory.clear()
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
        RuntimeError: the driver refuses the launch; the message is its status.

    Example:
        >>> launch(Launch("ladder/safe.cu", "safe<float>", (x, y, rows, cols), rows, 256), x.device)
    """
    current = torch.cuda.current_device()  # raises torch's own message in a forked child
    named = device if isinstance(device, int) else device.index
    index = current if named is None else named
    if work.grid == 0:
        return
    key = _key(work, index)
    kind = _ready.get(key)
    if kind is None or index != current or not hasattr(_thread, "has_context"):
        with torch.cuda.device(index):
            _enter(index)
            if kind is None:
                _prepare(key, work)
            launch(work, index, stream)  # now that all of it is there
        return
    kind.start(jit_launch.words(work.args, index), raw_stream(index) if stream is None else stream)


def _key(work: Launchable, index: int) -> tuple[Any, ...]:
    shape = (work.grid, work.block, work.cluster, work.shared_bytes)
    return (index, work.file, work.symbol, *shape, work.cooperative, work.dependent)


def kind_of(work: Launchable, index: int) -> Kind | None:
    """How a launch is started that has run on a CUDA device; None: its kernel is forgotten."""
    return _ready.get(_key(work, index))


def starter(
    work: Launchable, index: int, pairs: Sequence[tuple[int, int]]
) -> Callable[[int, Sequence[int]], None] | None:
    """What starts a launch that has run on a CUDA device again, with other addresses.

    A function of a raw stream of that device, which is current then, and of addresses; any number
    of threads may call it at once. None: the kernel is forgotten.

    Args:
        work: the launch, as :func:`launch` took it.
        index: the device.
        pairs: of each argument that takes an address, two at least: (which it is, which of the
            addresses). All other arguments stay; no tensor may be among these.
    """
    kind = kind_of(work, index)
    if kind is None:
        return None
    values = jit_launch.words(work.args, index)
    launch, function, driver = kind.driver.cuLaunchKernelEx, kind.function, kind.driver
    spare: list[Laid] = []
    take, give, turn = spare.pop, spare.append, jit_launch.turn
    (place, number), (other_place, other), *more = pairs  # two at once: half of a loop's time

    def start(stream: int, addresses: Sequence[int]) -> None:
        if not hasattr(_thread, "has_context"):
            _enter(index)
        try:
            laid = take()
        except IndexError:
            laid = kind.lay(values)
        words = laid.words
        words[place] = addresses[number]
        words[other_place] = addresses[other]
        if more:
            for at, which in more:
                words[at] = addresses[which]
        if laid.stream != stream:
            turn(driver, laid, stream)
        (status,) = launch(laid.config, function, laid.address, 0)
        if status:
            checked((status,))
        give(laid)

    return start


def keep(memory: dict[Any, Any], name: Hashable, value: Any) -> None:
    """Keep what starts launches, or what is known of them, in a memory of the caller's.

    It is dropped as kernels are: by :func:`clear_cache`, in a forked child, and all of it once it
    has `REMEMBERED` things.
    """
    if not any(memory is each for each in _kept):
        _kept.append(memory)
    _remember(memory, name, value)


def max_clusters(work: Launchable, device: torch.device | int) -> int:
    """How many clusters (of one block: blocks) of a launch's kind a CUDA device holds at once."""
    index = device if isinstance(device, int) else device.index
    key = (index, work.file, work.symbol, work.block, work.cluster, work.shared_bytes)
    if key not in _held:
        with torch.cuda.device(index):
            _enter(index)
            loaded = _load(index, work.file, work.symbol)
            jit_load.lift_limits(_driver(), loaded, index, work.shared_bytes, work.cluster)
            shape = Shape(work.cluster, work.block, work.cluster, work.shared_bytes)
            _held[key] = jit_load.max_clusters(_driver(), loaded, shape)
    return _held[key]


def _prepare(key: tuple[Any, ...], work: Launchable) -> None:
    """Load the kernel, lift its limits and keep how it is launched, all but the arguments."""
    index, grid, cluster = key[0], work.grid, work.cluster
    if grid < 0 or grid % cluster:
        raise ValueError(f"a grid of {grid} blocks is not a number of clusters of {cluster}")
    loaded, driver = _load(index, work.file, work.symbol), _driver()
    jit_load.lift_limits(driver, loaded, index, work.shared_bytes, cluster)
    depends = work.dependent and loaded.may_depend  # else an ordinary launch, which waits
    shape = Shape(grid, work.block, cluster, work.shared_bytes, work.cooperative, depends)
    if work.cooperative:
        jit_load.check_cooperative(driver, loaded, index, shape)
    _remember(_ready, key, Kind(driver, loaded.handle, shape))


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(memory) >= REMEMBERED:
        memory.clear()
    memory[key] = value
    return value


@functools.cache
def _driver() -> ModuleType:
    """Load the driver's bindings; no GPU is touched yet."""
    try:
        from cuda.bindings import driver
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(jit_compile.remedy("cuda.bindings, which launches", error)) from error
    return driver


def _enter(index: int) -> None:
    """Give this thread the device's primary context, the one torch uses, if it has none."""
    driver = _driver()
    checked(driver.cuInit(0))
    if int(checked(driver.cuCtxGetCurrent())) == 0:
        context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(index))))
        checked(driver.cuCtxSetCurrent(context))
    _thread.has_context = True


def _load(index: int, file: str, symbol: str) -> jit_load.Loaded:
    """Compile a kernel for a device and load it there; once, whichever thread comes first."""
    key = (index, file, symbol)
    driver = _driver()
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
            _loaded[key] = loaded = jit_load.Loaded(handle, may_depend)
    return loaded


def _after_fork() -> None:
    memories: list[dict[Any, Any]] = [_ready, _loaded, _locks, _held, _thread.__dict__, *_kept]
    for memory in memories:
        memory.clear()  # a child has none of our threads, and our context is of no use to it


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
