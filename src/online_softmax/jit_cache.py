"""Compiled kernels on disk: one file an entry, named by the digest of all that went into it.

Many processes and hosts share the folder without locks. An entry appears by one rename, with code
and figures in the same file under one checksum, so a reader finds a whole entry, none, or one that
it can tell is damaged. Nothing here fails a caller: without a folder to write to, one warning is
given and the compiled kernels live as long as the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import socket
import struct
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

FOLDER_VARIABLE = "ONLINE_SOFTMAX_CACHE_DIR"
LIMIT_BYTES = 256 << 20  # a kernel takes 10 to 80 KB: thousands of them; past it the oldest go
STALE_SECONDS = 3600  # a temporary file this old belongs to a process that died while writing

_MAGIC = b"online-softmax kernel 1\n"  # goes up when the layout changes
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("<I")  # of the JSON header
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_TOLD: set[str] = set()  # folders that cannot be written, of which the user knows


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor, as the assembler reports it."""

    registers: int  # a thread
    stack_bytes: int  # a thread; above 0 an array lives in local memory, even with no spills
    spill_store_bytes: int  # a thread
    spill_load_bytes: int  # a thread
    shared_bytes: int  # a block, static

    @property
    def has_local_memory(self) -> bool:
        """True if anything that belongs in registers is in memory."""
        return bool(self.stack_bytes or self.spill_store_bytes or self.spill_load_bytes)


@dataclass(frozen=True)
class Image:
    """One compiled kernel."""

    code: bytes
    entry: str  # the kernel's name in the code (mangled)
    target: str  # "sm_90a": machine code; "compute_120": PTX, which the driver compiles
    resources: Resources | None  # None for PTX: no registers are given out yet
    log: str  # what the compiler said, warnings included


class _File(NamedTuple):
    path: str
    size_bytes: int
    modified: float  # seconds since the epoch


def cache_dir() -> Path:
    """Return the folder that holds this package's compiled files; it need not exist yet.

    It is ``$ONLINE_SOFTMAX_CACHE_DIR``, else ``$XDG_CACHE_HOME/online_softmax``, else
    ``~/.cache/online_softmax``. Compiled CUDA kernels stand in its folder ``cubin``.

    Returns:
        The path. Where there is no home folder at all it is one that cannot be made, so that the
        first write gives the usual warning.

    Example:
        >>> cache_dir().name
        'online_softmax'
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).expanduser() if named == "~" or named.startswith("~/") else Path(named)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # the XDG rules: a relative path is to be ignored
        return Path(shared, "online_softmax")
    home = os.path.expanduser("~")
    return Path(home if os.path.isabs(home) else os.devnull, ".cache", "online_softmax")


def cache_stats() -> tuple[int, int]:
    """Return how many compiled CUDA kernels are on disk, and their bytes together.

    Example:
        >>> entries, size_bytes = cache_stats()
    """
    sizes = [file.size_bytes for file in _files() if file.path.endswith(".bin")]
    return len(sizes), sum(sizes)


def source_digest(source: Path, folders: tuple[Path, ...]) -> str:
    """Digest a source file and every file that it includes by ``#include "..."``, at any depth.

    Paths of this machine stay out of it: the same sources give the same digest anywhere.

    Args:
        source: the file to start from.
        folders: where else a file may be, when it is not beside the one that includes it.

    Returns:
        64 hexadecimal digits.

    Raises:
        OSError: ``source`` cannot be read. A missing include is part of the digest instead: it
            may stand in a branch that this compiler does not take.
    """
    digest, seen, waiting = hashlib.sha256(), {str(source)}, [(source, source.read_bytes())]
    while waiting:
        path, text = waiting.pop()
        digest.update(hashlib.sha256(text).digest())
        for name in _INCLUDE.findall(text):
            digest.update(b'"' + name + b'"')
            places = [folder / os.fsdecode(name) for folder in (path.parent, *folders)]
            included = next((place for place in places if place.is_file()), None)
            if included is None:
                digest.update(b" missing")
            elif (plain := os.path.normpath(included)) not in seen:
                seen.add(plain)
                waiting.append((Path(plain), included.read_bytes()))
    return digest.hexdigest()


def read(key: str) -> Image | None:
    """Return what is stored under a key; None if nothing is, or if it is damaged.

    A damaged entry gives one warning; the :func:`write` that follows a compile replaces it.
    """
    path = _path(key)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if data[:start] != _MAGIC + hashlib.sha256(body).digest():
        warnings.warn(
            f"online-softmax: the compiled kernel {path} is damaged and is compiled again.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    (length,) = _LENGTH.unpack_from(body)
    header = json.loads(body[_LENGTH.size : _LENGTH.size + length])
    if header.pop("key") != key:  # somebody renamed the file
        return None
    figures = header.pop("resources")
    return Image(
        code=body[_LENGTH.size + length :],
        resources=Resources(**figures) if figures else None,
        **header,
    )


def write(key: str, image: Image) -> None:
    """Store an image under a key, in one step; where that is refused, warn once a folder."""
    header = {"key": key, **asdict(image)}
    code = header.pop("code")
    text = json.dumps(header).encode()
    body = _LENGTH.pack(len(text)) + text + code
    path = _path(key)
    # Two containers may share the folder and both be process 7: host and chance make it unique.
    unique = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
    temporary = path.with_name(f"{key[:16]}-{unique}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # it is gone unless something failed
                temporary.unlink()
    except OSError as error:
        folder = str(path.parent)
        if folder not in _TOLD:
            _TOLD.add(folder)
            warnings.warn(
                f"online-softmax: compiled kernels cannot be kept in {folder} "
                f"({error.strerror or error}); each process compiles its own. Set "
                f"{FOLDER_VARIABLE} to a folder that can be written.",
                RuntimeWarning,
                stacklevel=2,
            )
        return
    _trim()


def clear() -> int:
    """Remove every entry and temporary file; return how many files went."""
    removed = 0
    for file in _files():
        with contextlib.suppress(OSError):
            os.unlink(file.path)
            removed += 1
    return removed


def _path(key: str) -> Path:
    return cache_dir() / "cubin" / f"{key}.bin"


def _files() -> list[_File]:
    """List our files; one that another process removes meanwhile is left out."""
    files = []
    with contextlib.suppress(OSError), os.scandir(cache_dir() / "cubin") as found:
        for file in found:
            if file.name.endswith((".bin", ".tmp")):
                with contextlib.suppress(OSError):
                    stat = file.stat()
                    files.append(_File(file.path, stat.st_size, stat.st_mtime))
    return files


def _trim() -> None:
    """Remove what dead processes left, and the oldest entries once the folder is too large."""
    files = sorted(_files(), key=lambda file: file.modified)
    total = sum(file.size_bytes for file in files)
    excess = total - LIMIT_BYTES * 3 // 4 if total > LIMIT_BYTES else 0
    now = time.time()
    for file in files:
        is_stale = file.path.endswith(".tmp") and now - file.modified > STALE_SECONDS
        if is_stale or (excess > 0 and file.path.endswith(".bin")):
            with contextlib.suppress(OSError):
                os.unlink(file.path)
            excess -= file.size_bytes
