"""CUDA source to machine code through NVRTC, and what each kernel takes. Needs no GPU.

The first compile loads NVRTC; importing this module loads nothing of CUDA.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from online_softmax import jit_cache
from online_softmax.jit_cache import Image, Resources

if TYPE_CHECKING:
    from types import ModuleType

CUDA_DIR = Path(__file__).parent / "cuda"
# -lineinfo shows a profiler the source lines and costs no speed; -v puts registers in the log.
OPTIONS = ("--std=c++17", "-lineinfo", "--ptxas-options=-v")
# NVRTC's own cache gives code without a log; older ones have neither the cache nor the option.
NO_CACHE = "--no-cache"

_images: dict[str, Image] = {}
_locks: dict[str, threading.Lock] = {}  # one for each key that is being compiled


class Unavailable(RuntimeError):  # noqa: N818 what callers ask is whether it is there
    """CUDA kernels cannot be had here; the message says why, and what to install or do."""


class CompileError(RuntimeError):
    """NVRTC refused a source; the message has the file, the symbol, the target and the log."""


class BindingError(RuntimeError):
    """A call into a CUDA library failed; the message is the status that it returned."""


class ArchFacts(Protocol):
    """What :func:`occupancy` reads: the limits of one multiprocessor."""

    @property
    def max_warps(self) -> int: ...
    @property
    def max_blocks(self) -> int: ...
    @property
    def registers(self) -> int: ...
    @property
    def shared_bytes_sm(self) -> int: ...


class Compiler(NamedTuple):
    nvrtc: ModuleType  # its bindings
    version: str  # "13.0"
    known: tuple[int, ...]  # numbers of the architectures that it compiles for, ascending


def nvrtc_version() -> str:
    """Return the version of the NVRTC in use, such as ``"13.0"``.

    Raises:
        Unavailable: there is no NVRTC that can be loaded.
    """
    return compiler().version


def compile(file: str | Path, symbol: str, arch: str) -> Image:  # noqa: A001 read as jit.compile
    """Compile one kernel, or take it from memory or disk. Needs no GPU.

    Args:
        file: a ``.cu`` file, relative to the package's ``cuda`` folder, or an absolute path.
        symbol: the kernel as C++ names it; a template instance with its arguments.
        arch: ``"sm_90a"`` and the like. If this NVRTC does not know the number, it compiles for
            the highest virtual architecture below, and the driver does the rest.

    Returns:
        The image; an equal one for the same sources, symbol, architecture and compiler.

    Raises:
        Unavailable: no NVRTC, or none that can compile for this architecture.
        CompileError: the source is wrong, or has no such kernel.
        OSError: the file cannot be read.
        ValueError: ``arch`` is no architecture's name.

    Example:
        >>> image = compile("ladder/v1_warp_shuffle.cu", "v1_warp_shuffle<float>", "sm_90a")
    """
    return image_of(CUDA_DIR / file, symbol, target_of(arch))


def resources(file: str | Path, symbol: str, arch: str) -> Resources:
    """Return registers, stack, spills and static shared memory of one kernel. Needs no GPU.

    Args:
        file: as for :func:`compile`.
        symbol: as for :func:`compile`.
        arch: an architecture that this NVRTC knows: another one's figures would mislead.

    Raises:
        Unavailable: no NVRTC, or it does not know ``arch``.
        CompileError: as for :func:`compile`; or the compiler's log lacks the figures.

    Example:
        >>> resources("ladder/v1_warp_shuffle.cu", "v1_warp_shuffle<float>", "sm_80").stack_bytes
        0
    """
    if not target_of(arch).startswith("sm_"):
        _, version, known = compiler()
        names = ", ".join(f"sm_{number}" for number in known)
        raise Unavailable(f"NVRTC {version} makes no machine code for {arch}, only for {names}.")
    image = compile(file, symbol, arch)
    if image.resources is None:
        raise CompileError(f"{file}: no figures for {symbol} in the log of NVRTC:\n{image.log}")
    return image.resources


def occupancy(used: Resources, arch: ArchFacts, block: int, shared_bytes: int = 0) -> float:
    """Return the share of a multiprocessor's warps that can be resident at once, 0 to 1.

    The rules are the driver's: a warp takes registers in units of 256 out of one quarter of the
    multiprocessor, and a block takes shared memory in small units with some for the driver.

    Args:
        used: what the kernel takes.
        arch: the multiprocessor's limits.
        block: threads a block, 1 to 1024.
        shared_bytes: dynamic shared memory a block.

    Returns:
        Resident warps over the most possible; 0.0 where not even one block fits.

    Example:
        >>> occupancy(resources("ladder/safe.cu", "safe<float>", "sm_80"), ARCHES["sm_80"], 256)
    """
    warps = -(-block // 32)
    registers_warp = max(-(-used.registers * 32 // 256), 1) * 256
    # sm_75 counts shared memory in 256 bytes; later ones, which have more than its 64 KB, in 128,
    # and there the driver keeps 1 KB of each block.
    unit, kept = (128, 1024) if arch.shared_bytes_sm > 65536 else (256, 0)
    shared_block = max(-(-(used.shared_bytes + shared_bytes + kept) // unit), 1) * unit
    # One block's warps, spread over the four quarters, may not take more than all registers.
    if block > 1024 or registers_warp * -(-warps // 4) * 4 > arch.registers:
        return 0.0
    blocks = min(
        arch.max_blocks,
        arch.max_warps // warps,
        arch.registers // 4 // registers_warp * 4 // warps,
        arch.shared_bytes_sm // shared_block,
    )
    return blocks * warps / arch.max_warps


def forget_images() -> None:
    """Drop what this process holds in memory; the next compile looks on disk."""
    _images.clear()


@functools.cache
def compiler() -> Compiler:
    """Load NVRTC, once; raise Unavailable where it, or its bindings, are missing."""
    try:
        from cuda.bindings import nvrtc

        major, minor = checked(nvrtc.nvrtcVersion())
        known = checked(nvrtc.nvrtcGetSupportedArchs())
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(remedy("NVRTC, the CUDA compiler", error)) from error
    return Compiler(nvrtc, f"{major}.{minor}", tuple(sorted(known)))


def remedy(what: str, error: Exception) -> str:
    """Say that a CUDA library is missing, which extra brings it, and where it was looked for."""
    extra = "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda13"
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (
        f"{what}, cannot be loaded ({' '.join(str(error).split())}). "
        f"Install it: pip install 'online-softmax[{extra}]' (the number is that of "
        f"torch.version.cuda; [cuda12] and [cuda13] exist). "
        f"Looked in {sysconfig.get_path('purelib')}, in {toolkit or 'CUDA_HOME (not set)'} "
        f"and where the system keeps libraries."
    )


def checked(result: tuple[Any, ...]) -> Any:
    """Return what a binding gives after its status (all of it, if several); raise a bad status."""
    status, *values = result
    if status != 0:
        raise BindingError(getattr(status, "name", str(status)))
    return values[0] if len(values) == 1 else values


def target_of(arch: str) -> str:
    """Return the architecture itself if NVRTC knows it, else the highest virtual one below it."""
    _, version, known = compiler()
    parts = re.fullmatch(r"(?:sm|compute)_(\d+)[af]?", arch)
    if parts is None:
        raise ValueError(f"arch is {arch!r}; wanted a name such as 'sm_80' or 'sm_90a'")
    if int(parts[1]) in known:
        return arch
    # Without a suffix: what only one architecture has, no later one need run.
    below = [number for number in known if number < int(parts[1])]
    if not below:
        raise Unavailable(
            f"NVRTC {version} compiles for sm_{known[0]} and newer, not for {arch}. An older CUDA "
            "may: pip install 'online-softmax[cuda12]', with a torch of CUDA 12."
        )
    return f"compute_{below[-1]}"


def image_of(source: Path, symbol: str, target: str, *, rebuild: bool = False) -> Image:
    """Find or build the image; ``rebuild`` passes over what is stored, and replaces it."""
    key = _key(source, symbol, target)
    with _locks.setdefault(key, threading.Lock()):
        image = None if rebuild else _images.get(key) or jit_cache.read(key)
        if image is None:
            image = _build(source, symbol, target)
            if _key(source, symbol, target) != key:  # a file changed meanwhile: whose image is it?
                return image
            jit_cache.write(key, image)
        _images[key] = image
    return image


def _key(source: Path, symbol: str, target: str) -> str:
    """Digest all that decides the code: sources, symbol, target, options, compiler, package."""
    from online_softmax import __version__  # stands in the package, which imports us

    sources = jit_cache.source_digest(source, (CUDA_DIR,))
    parts = (sources, symbol, target, *OPTIONS, nvrtc_version(), __version__)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _build(source: Path, symbol: str, target: str) -> Image:
    nvrtc, version, _ = compiler()
    options = [f"--gpu-architecture={target}", *OPTIONS, f"--include-path={CUDA_DIR}"]
    flags = [os.fsencode(option) for option in (*options, NO_CACHE)]
    # The file's path as the program's name: includes start from its folder, profilers find it.
    text, name = source.read_bytes(), os.fsencode(source)
    program = checked(nvrtc.nvrtcCreateProgram(text, name, 0, [], []))
    try:
        checked(nvrtc.nvrtcAddNameExpression(program, symbol.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if status.name == "NVRTC_ERROR_INVALID_OPTION":
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), flags[:-1])
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        said = log.rstrip(b"\0 \n").decode(errors="replace")
        if status != 0:
            raise CompileError(
                f"{source}: NVRTC {version} does not compile {symbol} for {target} "
                f"({status.name}):\n{said}"
            )
        entry = checked(nvrtc.nvrtcGetLoweredName(program, symbol.encode())).decode()
        if target.startswith("compute_"):
            code = _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        else:
            code = _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Image(code, entry, target, _figures(said, entry), said)


def _text(program: Any, size: Any, fill: Any) -> bytes:
    """Fetch one of a program's results; NVRTC writes into a buffer of the size that it names."""
    buffer = b" " * checked(size(program))
    checked(fill(program, buffer))
    return buffer


def _figures(log: str, entry: str) -> Resources | None:
    """Read the assembler's report on one kernel; None where the log has none."""
    report = log.partition(f"Compiling entry function '{entry}'")[2]
    report = report.partition("Compiling entry function")[0]

    def figure(unit: str) -> int | None:
        found = re.search(rf"(\d+) {unit}", report)
        return int(found[1]) if found else None

    registers, stack = figure("registers"), figure("bytes stack frame")
    stores, loads = figure("bytes spill stores"), figure("bytes spill loads")
    if registers is None or stack is None or stores is None or loads is None:
        return None
    return Resources(registers, stack, stores, loads, figure("bytes smem") or 0)


def _after_fork() -> None:
    _locks.clear()  # a thread that the child does not have may hold one


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
