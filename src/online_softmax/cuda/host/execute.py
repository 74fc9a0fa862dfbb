"""Running a launch: check it, find or compile its library, call it through ctypes."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from online_softmax.cuda.host import toolchain

MAX_BLOCK = 1024  # threads
MAX_CLUSTER = 16  # blocks
MAX_SHARED_BYTES = 227 << 10  # what the largest GPUs give one block
ERROR_BYTES = 1024

_libraries: dict[tuple[Path, str], _Library] = {}
_together: dict[Path, tuple[str, ...]] = {}  # symbols that build was asked for
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Fault(RuntimeError):  # noqa: N818  (the word CUDA uses)
    """A kernel did what a GPU does not define: the message names block, thread, file and line."""


@dataclass(frozen=True)
class Counts:
    """What kernels did, exactly: elements read, elements written, exponentials evaluated."""

    reads: int
    writes: int
    exps: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.reads + other.reads, self.writes + other.writes, self.exps + other.exps)


class Launchable(Protocol):
    """What a launch must say: the record of cuda/launch.py, or any like it."""

    @property
    def file(self) -> str: ...  # relative to the folder cuda, or absolute
    @property
    def symbol(self) -> str: ...  # "v1_warp_shuffle<float>"
    @property
    def args(self) -> tuple[Any, ...]: ...  # tensors on the CPU, int, float: in the kernel's order
    @property
    def grid(self) -> int: ...  # blocks
    @property
    def block(self) -> int: ...  # threads
    @property
    def cluster(self) -> int: ...  # blocks a cluster
    @property
    def shared_bytes(self) -> int: ...  # dynamic shared memory
    @property
    def cooperative(self) -> bool: ...  # all blocks live at once


def launch(launch: Launchable, order: int = 0, workers: int | None = None) -> Counts:
    """Run one kernel on the CPU and return when it has ended.

    Args:
        launch: which kernel, its arguments, and the numbers of the launch.
        order: in which order threads take turns. 0: first to last; 1: last to first; any other
            number is the seed of a mixed order. A correct kernel gives the same result in each.
        workers: OS threads, by default one for each processor that this process may use.

    Returns:
        The exact counts.

    Raises:
        CompilerMissing: there is no C++ compiler; the message says what to install.
        CompileError: the compiler refused the source.
        Fault: the kernel deadlocked, or misused a barrier, a shuffle or shared memory.
        TypeError, ValueError: the launch itself is wrong, or a tensor is not on the CPU.

    Example:
        >>> launch(Launch("ladder/safe.cu", "safe<float>", (x, y, 2, 40, 40), grid=2, block=64))
        Counts(reads=240, writes=80, exps=160)
    """
    check(launch)
    library = _library(source_path(launch.file), launch.symbol)
    values = slots(launch, library.kinds(launch.symbol))
    packed = struct.pack(f"{len(values)}Q", *values)
    request = _Request(
        launch.grid,
        launch.block,
        launch.cluster,
        launch.shared_bytes,
        launch.cooperative,
        order,
        workers or processors(),
        ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p),
        _Library.stacks,
    )
    library.run(launch.symbol, request)
    if request.error:
        raise Fault(f"{launch.symbol}: {request.error.decode(errors='replace')}")
    return Counts(request.reads, request.writes, request.exps)


def build(file: str, symbols: Iterable[str]) -> None:
    """Compile several instances of one file together, which is faster than one by one.

    Args:
        file: as in a launch.
        symbols: C++ name expressions of its kernels.

    Raises:
        CompilerMissing, CompileError: as for :func:`launch`.
    """
    path, wanted = source_path(file), tuple(dict.fromkeys(symbols))
    with _lock:
        if all((path, symbol) in _libraries for symbol in wanted):
            return
        library = _Library(path, wanted)
        _together[path] = wanted
        _libraries.update({(path, symbol): library for symbol in wanted})


# ---- checks and conversions


def check(launch: Launchable) -> None:
    """Raise ValueError where CUDA would refuse the launch."""
    if not 1 <= launch.block <= MAX_BLOCK:
        raise ValueError(f"a block has 1 to {MAX_BLOCK} threads, got block={launch.block}")
    if not 1 <= launch.grid < 2**31:
        raise ValueError(f"a grid has 1 to 2^31 - 1 blocks, got grid={launch.grid}")
    if not 1 <= launch.cluster <= MAX_CLUSTER or launch.grid % launch.cluster:
        raise ValueError(
            f"a cluster has 1 to {MAX_CLUSTER} blocks and divides the grid, "
            f"got cluster={launch.cluster}, grid={launch.grid}"
        )
    if not 0 <= launch.shared_bytes <= MAX_SHARED_BYTES:
        raise ValueError(
            f"a block has at most {MAX_SHARED_BYTES} bytes of shared memory, "
            f"got shared_bytes={launch.shared_bytes}"
        )
    for place, value in enumerate(launch.args):
        if isinstance(value, Tensor) and value.device.type != "cpu":
            raise ValueError(
                f"host execution takes tensors on the CPU; argument {place} is on {value.device}"
            )


def slots(launch: Launchable, kinds: str) -> list[int]:
    """Return the arguments as 64-bit words, checked against the kernel's parameters.

    Args:
        launch: its args are looked at.
        kinds: the kernel's parameters, a letter each: p pointer, i integer, f float.
    """
    if len(launch.args) != len(kinds):
        raise TypeError(f"{launch.symbol} takes {len(kinds)} arguments, got {len(launch.args)}")
    return [
        _slot(launch.symbol, place, value, kind)
        for place, (value, kind) in enumerate(zip(launch.args, kinds, strict=True))
    ]


def _slot(symbol: str, place: int, value: Any, kind: str) -> int:
    if kind == "p" and isinstance(value, Tensor):
        return value.data_ptr()
    if kind == "i" and isinstance(value, int):
        return value & 0xFFFFFFFFFFFFFFFF
    if kind == "f" and isinstance(value, float):
        narrow = ctypes.c_float(value).value  # infinite beyond float32, where pack would refuse
        return int.from_bytes(struct.pack("<f", narrow), "little")
    wanted = {"p": "a tensor", "i": "an int", "f": "a float"}[kind]
    raise TypeError(f"argument {place} of {symbol} is {wanted}, got {type(value).__name__}")


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def source_path(file: str) -> Path:
    """Return where a launch's file is."""
    return Path(os.path.normpath(toolchain.CUDA_DIR / file))


def symbols_beside(path: Path, symbols: Iterable[str]) -> tuple[str, ...]:
    """Return these symbols and all that are compiled along with them."""
    return tuple(dict.fromkeys((*_together.get(path, ()), *symbols)))


# ---- the compiled library


class _Request(ctypes.Structure):
    """host::Request of runtime.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("grid", "block", "cluster", "shared_bytes")),
        *((name, ctypes.c_int64) for name in ("cooperative", "order", "workers")),
        ("slots", ctypes.c_void_p),
        ("stacks", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("reads", "writes", "exps")),
        ("error", ctypes.c_char * ERROR_BYTES),
    )


class _Library:
    """A loaded library with the kernels of one file."""

    stacks: ClassVar[int | None] = None  # the first library's StackPool, which all of them use

    def __init__(self, path: Path, symbols: tuple[str, ...]) -> None:
        self._places = {symbol: place for place, symbol in enumerate(symbols)}
        file = toolchain.build(path, symbols)
        try:
            self._code = ctypes.CDLL(str(file))
        except OSError:  # damaged, or trimmed by another process at this moment
            file.unlink(missing_ok=True)
            self._code = ctypes.CDLL(str(toolchain.build(path, symbols)))
        self._code.online_softmax_kinds.restype = ctypes.c_char_p
        self._code.online_softmax_kinds.argtypes = [ctypes.c_int64]
        self._code.online_softmax_stacks.restype = ctypes.c_void_p
        self._code.online_softmax_stacks.argtypes = []
        if _Library.stacks is None:  # whoever makes a library holds the lock
            _Library.stacks = self._code.online_softmax_stacks()
        self._code.online_softmax_run.restype = None
        self._code.online_softmax_run.argtypes = [ctypes.c_int64, ctypes.POINTER(_Request)]

    def kinds(self, symbol: str) -> str:
        return bytes(self._code.online_softmax_kinds(self._places[symbol])).decode()

    def run(self, symbol: str, request: _Request) -> None:
        self._code.online_softmax_run(self._places[symbol], ctypes.byref(request))


def _library(path: Path, symbol: str) -> _Library:
    with _lock:
        library = _libraries.get((path, symbol))
        if library is None:
            library = _libraries[path, symbol] = _Library(path, (symbol,))
        return library
