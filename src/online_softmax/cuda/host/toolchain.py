"""The C++ compiler: which one, how it is called, and the folder where its results are kept."""

from __future__ import annotations

import atexit
import contextlib
import functools
import glob
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from online_softmax import jit_cache

CUDA_DIR = Path(__file__).resolve().parent.parent
COMPILERS = ("g++", "clang++", "c++")
KEPT_FILES = 1200  # what all tests take: libraries some 50 KB each, sanitized programs 1 MB
# No contraction: results shall not depend on whether this CPU has fused multiply-adds. No strict
# aliasing: device code reads rows of floats as 16-byte vectors.
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-Wno-unknown-pragmas",
    "-DONLINE_SOFTMAX_HOST",
)
NO_SANITIZER = re.compile(
    r"(cannot find|no such file)[^\n]*(lib|-l)(asan|tsan|ubsan|clang_rt)", re.IGNORECASE
)
# Most kernels run once or twice on a few rows, so that compiling is nearly all of the time: beside
# -O2, -Og compiles 2.8 times as fast and its code runs 1.6 times as long.
LIBRARY_FLAGS = ("-Og", "-g0", "-shared")
PROGRAM_FLAGS = (
    "-Og",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fno-sanitize-recover=all",
    "-DONLINE_SOFTMAX_DRIVER",
)


class CompilerMissing(RuntimeError):  # noqa: N818  (a state of the machine, like jit.Unavailable)
    """There is no C++ compiler, or not all of it; the message says what to install."""


class CompileError(RuntimeError):
    """The compiler refused a source; the message has the file, the kernels and what it said."""


def compiler() -> str | None:
    """Return the command of the C++ compiler: ``$CXX``, else g++, clang++ or c++; None without one.

    Example:
        >>> compiler()
        '/usr/bin/g++'
    """
    named = os.environ.get("CXX")
    if named:
        return named if shutil.which(shlex.split(named)[0]) else None
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build(path: Path, symbols: tuple[str, ...], sanitizer: str = "") -> Path:
    """Compile kernels of one file, or find them compiled.

    Args:
        path: the .cu file.
        symbols: C++ name expressions of the kernels; their places number them.
        sanitizer: "" makes a library for ctypes, otherwise a program, with -fsanitize=...

    Returns:
        Where the library or program stands.

    Raises:
        CompilerMissing, CompileError, OSError (the source cannot be read).
    """
    command = _command()
    unit = _unit(path, symbols)
    flags = [*FLAGS, f"-I{CUDA_DIR}"]
    flags += [f"-fsanitize={sanitizer}", *PROGRAM_FLAGS] if sanitizer else LIBRARY_FLAGS
    key = _key(path, unit, command, flags)
    name, suffix = f"{path.stem}-{key}", _suffix(sanitizer)
    kept = _folder()
    if found := _stored(kept, name, suffix):
        return found
    with (
        _locked(kept / f"{key[:2]}.lock"),  # few files, and others' compiles seldom wait
        tempfile.TemporaryDirectory(dir=kept, prefix="build-") as folder,
    ):
        if found := _stored(kept, name, suffix):  # another process was faster
            return found
        source, result = Path(folder, "unit.cpp"), Path(folder, "result")
        source.write_text(unit)
        _compile([*command, *flags, str(source), "-o", str(result)], path, symbols)
        target = kept / f"{name}-{_digest(result)}.{suffix}"
        os.replace(result, target)
    _trim(kept)
    return target


# ---- the compiler


def _command() -> tuple[str, ...]:
    found = compiler()
    if found is None:
        named = os.environ.get("CXX")
        where = f"CXX names {named!r}, which is not there" if named else "none is on the PATH"
        raise CompilerMissing(
            f"Running CUDA kernels on the CPU takes a C++17 compiler (g++ 11 or clang++ 14, or "
            f"newer), and {where}. Install one, for instance: apt-get install g++"
        )
    return tuple(shlex.split(found))


def _compile(command: list[str], path: Path, symbols: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    said = done.stderr.strip()
    if NO_SANITIZER.search(said):
        raise CompilerMissing(
            f"{command[0]} has no sanitizer libraries (for g++ they come with libgcc-dev, for "
            f"clang++ with libclang-rt-dev): {said[:500]}"
        )
    raise CompileError(f"{path} ({', '.join(symbols)}): {command[0]} says\n{said[:8000]}")


@functools.cache
def _identity(command: tuple[str, ...], changed: float) -> str:
    """What tells this compiler from others; `changed` makes an update of it be noticed."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return f"{done.stdout}{platform.machine()}{platform.libc_ver()}{changed}"


def _key(path: Path, unit: str, command: tuple[str, ...], flags: list[str]) -> str:
    program = Path(shutil.which(command[0]) or command[0])
    host = Path(__file__).parent
    digests = [
        jit_cache.source_digest(source, (CUDA_DIR,))
        for source in (path, host / "launch.h", host / "driver.h")
    ]
    parts = [unit, *digests, _identity(command, program.stat().st_mtime), *command, *flags]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _unit(path: Path, symbols: tuple[str, ...]) -> str:
    kernels = ",\n    ".join(f"HOST_KERNEL({symbol})" for symbol in symbols)
    return (
        f'#include "{path}"\n#include "host/launch.h"\nHOST_KERNELS({kernels})\n'
        '#ifdef ONLINE_SOFTMAX_DRIVER\n#include "host/driver.h"\n#endif\n'
    )


def _suffix(sanitizer: str) -> str:
    return sanitizer.replace(",", "-") if sanitizer else "so"


# ---- the folder


def _folder() -> Path:
    folder = jit_cache.cache_dir() / "host"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        reason = "no permission to write"
    except OSError as error:
        reason = error.strerror or str(error)
    return _private_folder(str(folder), reason)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _stored(folder: Path, name: str, suffix: str) -> Path | None:
    """The result of that name whose bytes are those its own name tells.

    To load or start a file that was cut short would end the process, not raise.
    """
    for file in folder.glob(f"{glob.escape(name)}-*.{suffix}"):
        with contextlib.suppress(FileNotFoundError):  # trimmed by another process
            if file.stem == f"{name}-{_digest(file)}":
                return file
            warnings.warn(
                f"online-softmax: the compiled host kernel {file} is damaged and is compiled "
                "again.",
                RuntimeWarning,
                stacklevel=2,
            )
            file.unlink()
    return None


@functools.cache
def _private_folder(refused: str, reason: str) -> Path:
    warnings.warn(
        f"online-softmax: compiled host kernels cannot be kept in {refused} ({reason}); this "
        f"process compiles its own. Set {jit_cache.FOLDER_VARIABLE} to a folder that can be "
        "written.",
        RuntimeWarning,
        stacklevel=2,
    )
    folder = tempfile.mkdtemp(prefix="online-softmax-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep two processes from compiling the same unit at once, where the folder can lock.

    Without the lock they both compile, which costs time and nothing else.
    """
    with open(path, "w") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _trim(folder: Path) -> None:
    """Remove the oldest results once there are too many."""
    with contextlib.suppress(OSError):
        files = [file for file in folder.iterdir() if file.is_file() and file.suffix != ".lock"]
        files.sort(key=lambda file: file.stat().st_mtime)
        for file in files[:-KEPT_FILES]:
            file.unlink(missing_ok=True)
