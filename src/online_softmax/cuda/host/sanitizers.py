"""Kernels under the sanitizers of g++ or clang++: out of bounds, undefined behaviour, races.

Python cannot load a library that carries a sanitizer, so the launches go to a program (driver.h)
through a file, and the arrays come back through another.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from online_softmax.cuda.host import execute, toolchain
from online_softmax.cuda.host.execute import Counts, Launchable

PHASE = 256  # as in driver.h: an array keeps its address modulo this
DRIVER_REFUSED = 2  # exit code
OPTIONS = {
    # A launch that failed leaves its stacks behind, and a leak says nothing about a kernel.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0",
}


@dataclass(frozen=True)
class Report:
    """What a sanitizer found."""

    exit_code: int  # 0: nothing
    text: str  # the sanitizer's report, or "fault: " and the message of a Fault
    counts: Counts

    @property
    def ok(self) -> bool:
        """True if nothing was found."""
        return self.exit_code == 0


@dataclass(frozen=True)
class _Array:
    """Bytes of this process that one or several overlapping tensors lie in."""

    start: int
    stop: int


def sanitize(
    launches: Launchable | Sequence[Launchable],
    sanitizer: str = "address,undefined",
    order: int = 0,
    timeout_s: float = 600,
) -> Report:
    """Run launches, one after the other, in a program built with sanitizers.

    Each tensor becomes an allocation of exactly its size at the same address modulo 256, so that
    one element past its end is noticed; tensors that overlap share one. If nothing is found, the
    tensors hold the results afterwards. With ``sanitizer="thread"`` accesses to shared and global
    memory that no barrier orders are reported, whichever order the threads ran in; it takes a
    third of a millisecond for each CUDA thread.

    Args:
        launches: one or several, with tensors on the CPU.
        sanitizer: what goes behind ``-fsanitize=``.
        order: of the threads, as for :func:`launch`.
        timeout_s: seconds for each program.

    Returns:
        The report; it stops at the first finding.

    Raises:
        CompilerMissing, CompileError, TypeError, ValueError: as for :func:`launch`.
        subprocess.TimeoutExpired: a program ran too long.

    Example:
        >>> sanitize(launch).ok
        True
    """
    if not isinstance(launches, Sequence):
        launches = (launches,)
    for launch in launches:
        execute.check(launch)
    total = Counts(0, 0, 0)
    for file, group in itertools.groupby(launches, key=lambda launch: launch.file):
        report = _run(execute.source_path(file), list(group), sanitizer, order, timeout_s)
        total = total + report.counts
        if not report.ok:
            return Report(report.exit_code, report.text, total)
    return Report(0, "", total)


def _run(
    path: Path, launches: list[Launchable], sanitizer: str, order: int, timeout_s: float
) -> Report:
    symbols = execute.symbols_beside(path, [launch.symbol for launch in launches])
    program = toolchain.build(path, symbols, sanitizer)
    arrays = _arrays([x for launch in launches for x in launch.args if isinstance(x, Tensor)])
    with tempfile.TemporaryDirectory(prefix="online-softmax-") as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        before.write_bytes(_written(launches, symbols, arrays, order))
        code, text = _execute([str(program), str(before), str(after)], timeout_s)
        if code == DRIVER_REFUSED:
            raise TypeError(f"{path.name}: {text.strip()}")
        if code:
            return Report(code, text, Counts(0, 0, 0))
        data = after.read_bytes()
    reads, writes, exps = struct.unpack_from("3Q", data)
    offset = 24
    for array in arrays:
        size = array.stop - array.start
        ctypes.memmove(array.start, data[offset : offset + size], size)
        offset += size + -size % 8
    return Report(0, text, Counts(reads, writes, exps))


def _execute(command: list[str], timeout_s: float) -> tuple[int, str]:
    environment = {**os.environ, **OPTIONS}
    run = subprocess.run
    done = run(command, capture_output=True, env=environment, timeout=timeout_s, check=False)
    text = done.stderr.decode(errors="replace")
    if "unexpected memory mapping" in text and shutil.which("setarch"):
        # A kernel that randomises addresses more than this sanitizer expects.
        command = ["setarch", platform.machine(), "-R", *command]
        done = run(command, capture_output=True, env=environment, timeout=timeout_s, check=False)
        text = done.stderr.decode(errors="replace")
    return done.returncode, text


# ---- the launch file


def _arrays(tensors: list[Tensor]) -> list[_Array]:
    """Return the bytes of all tensors, those that overlap joined, by address."""
    joined: list[_Array] = []
    for start, stop in sorted(map(_extent, tensors)):
        if joined and (start < joined[-1].stop or start == joined[-1].start):
            joined[-1] = _Array(joined[-1].start, max(stop, joined[-1].stop))
        else:
            joined.append(_Array(start, stop))
    return joined


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the one after its last."""
    start = x.data_ptr()
    if x.numel() == 0:
        return start, start
    steps = zip(x.shape, x.stride(), strict=True)
    return start, start + (sum((n - 1) * step for n, step in steps) + 1) * x.element_size()


def _written(
    launches: list[Launchable], symbols: tuple[str, ...], arrays: list[_Array], order: int
) -> bytes:
    parts = [_words(len(arrays))]
    for array in arrays:
        size = array.stop - array.start
        parts += [_words(size, array.start % PHASE), ctypes.string_at(array.start, size)]
        parts.append(bytes(-size % 8))
    parts.append(_words(len(launches)))
    for launch in launches:
        numbers = (launch.grid, launch.block, launch.cluster, launch.shared_bytes)
        parts.append(_words(symbols.index(launch.symbol), *numbers, launch.cooperative, order))
        parts.append(_words(execute.processors(), len(launch.args)))
        for value in launch.args:
            parts.append(_words(*_argument(value, arrays)))
    return b"".join(parts)


def _argument(value: Tensor | float, arrays: list[_Array]) -> tuple[int, int, int]:
    """Return the kind of parameter it fits, the array or 0, and the offset or the value's bits."""
    if isinstance(value, Tensor):
        start, stop = _extent(value)
        for place, array in enumerate(arrays):
            if array.start <= start and stop <= array.stop:
                return ord("p"), place, start - array.start
    if isinstance(value, float):
        return ord("f"), 0, int.from_bytes(struct.pack("<f", value), "little")
    return ord("i"), 0, int(value)


def _words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
