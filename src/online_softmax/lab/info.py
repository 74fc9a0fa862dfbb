"""What is here: versions, GPU, ceilings, cache; and what is missing, with how to get it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import online_softmax
from online_softmax import catalogue, jit, plan
from online_softmax.jit_cache import FOLDER_VARIABLE

MEASURED_FILE = "measured_copy.json"  # in the cache folder: device -> GB/s of a copy kernel
KERNEL_SOURCES = ("cuda/**/*.cu", "cuda/**/*.cuh", "triton/*.py")
TITLES = {
    "online_softmax": "online-softmax",
    "python": "Python",
    "torch": "torch",
    "triton": "Triton",
    "cuda_bindings": "cuda-bindings",
    "nvrtc": "NVRTC",
    "compiler": "C++ compiler",
    "sources": "kernel sources",
    "commit": "commit",
}
NO_COMPILER = (
    "no C++ compiler here, and without a GPU the CUDA kernels run through one: "
    "install g++ or clang++ (Debian, Ubuntu: sudo apt install g++)"
)
NO_GPU = "torch sees no CUDA device: kernels run on the CPU, to be checked and counted, not timed"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_writable(folder: Path) -> bool:
    """Whether a folder is there, or could be made, and takes files."""
    try:
        there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
        return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except (OSError, StopIteration):
        return False


def no_cache() -> str | None:
    """Why compiled CUDA kernels cannot be kept, a sentence; None: they can."""
    folder = jit.cache_dir() / "cubin"
    if _is_writable(folder):
        return None
    return (
        f"compiled CUDA kernels cannot be kept in {folder}, each process compiles its own: set "
        f"{FOLDER_VARIABLE} to a folder that can be written"
    )


def no_triton_cache() -> str | None:
    """Why Triton cannot compile for want of a folder, a sentence; None: it can, or is not here."""
    if catalogue.lacks("triton") or os.environ.get("TRITON_CACHE_MANAGER"):  # one without a folder
        return None
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    if _is_writable(folder):
        return None
    return (
        f"Triton compiles into {folder}, which cannot be written: set TRITON_CACHE_DIR to a "
        "folder that can"
    )


def no_compiler() -> str | None:
    """Why host execution cannot be had here, a sentence; None: it can."""
    from online_softmax.cuda import host

    return None if host.compiler() else NO_COMPILER


def compiler() -> str | None:
    """The C++ compiler of host execution, as it names itself; None: there is none."""
    from online_softmax.cuda import host

    path = host.compiler()
    if path is None:
        return None
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=True
        )
        return answer.stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return path


def sources() -> str:
    """A digest of all kernels, CUDA and Triton: the same for the same sources, wherever they lie.

    Twelve hexadecimal digits, by which a stored result finds the code that made it.
    """
    package, digest = Path(online_softmax.__file__).parent, hashlib.sha256()
    for path in sorted(each for glob in KERNEL_SOURCES for each in package.glob(glob)):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def commit() -> str | None:
    """The checkout's commit, "+changes" behind it if files differ; None: no checkout, or no git."""
    root = Path(online_softmax.__file__).parents[2]
    if not (root / ".git").exists() or not (root / "src" / "online_softmax").is_dir():
        return None  # installed; a repository around it is another's
    describe = ["describe", "--always", "--exclude=*", "--dirty=+changes"]
    try:
        answer = subprocess.run(
            ["git", "-C", root, *describe], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def versions() -> dict[str, str | None]:
    """What decides a result's bits and speed; None: not here."""
    try:
        nvrtc = jit.nvrtc_version()
    except jit.Unavailable:
        nvrtc = None
    return {
        "online_softmax": online_softmax.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda_bindings": _version("cuda-bindings"),
        "nvrtc": nvrtc,
        "compiler": compiler(),
        "sources": sources(),
        "commit": commit(),
    }


def bandwidth(index: int) -> tuple[float | None, str]:
    """A device's memory bandwidth in GB/s, and whose figure that is."""
    properties = torch.cuda.get_device_properties(index)
    facts = plan.ARCHES.get(jit.device_arch(index))
    if facts and set(facts.card.split()) <= set(re.split(r"\W+", properties.name)):
        return facts.bandwidth_gbs, f"datasheet of the {facts.card}"
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    if clock_khz and bus_bits:  # two transfers a clock
        return 2 * clock_khz * 1e3 * bus_bits / 8 / 1e9, "2 x memory clock x bus width"
    return None, "unknown"


def remember_copy(device: str, gbs: float) -> None:
    """Keep the most a copy kernel reached on a device, for `info`; no matter if that fails."""
    path = jit.cache_dir() / MEASURED_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = _measured(path)
        if gbs > known.get(device, 0.0):
            whole = path.with_name(f"{path.name}.{secrets.token_hex(8)}")  # appears by one rename
            whole.write_text(json.dumps({**known, device: round(gbs, 1)}))
            whole.replace(path)
    except OSError:
        return


def _measured(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: float(gbs) for name, gbs in found.items() if isinstance(gbs, (int, float))}


def gather() -> dict[str, Any]:
    """Everything that `online-softmax info` shows, as plain values; `missing` is sentences."""
    entries, size_bytes = jit.cache_stats()
    found: dict[str, Any] = {
        "versions": versions(),
        "cuda_of_torch": torch.version.cuda,
        "gpus": _gpus(),
        "cache": {"folder": str(jit.cache_dir()), "entries": entries, "bytes": size_bytes},
    }
    lacking = {
        "gpu": None if found["gpus"] else NO_GPU,
        "cuda": jit.missing(),
        "triton": catalogue.lacks("triton"),
        "compiler": no_compiler(),
        "cache": no_cache(),
        "triton_cache": no_triton_cache(),
    }
    return {**found, "missing": {name: why for name, why in lacking.items() if why}}


def lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What `gather` found, as (name, text) pairs for a person."""
    absent = {"commit": "none: not run from a git checkout"}
    said = [
        (TITLES[name], version or absent.get(name, "not here"))
        for name, version in found["versions"].items()
    ]
    said.append(("torch's CUDA", found["cuda_of_torch"] or "none: a CPU build"))
    for gpu in found["gpus"]:
        l2, memory = gpu["l2_bytes"] / 2**20, gpu["memory_bytes"] / 2**30
        said += [
            ("GPU", f"{gpu['name']} ({gpu['arch']}), driver {gpu['driver'] or 'unknown'}"),
            ("", f"{gpu['multiprocessors']} SMs, {l2:.0f} MiB L2, {memory:.0f} GiB memory"),
            ("bandwidth", f"{_gbs(gpu['bandwidth_gbs'])}, {gpu['bandwidth_of']}"),
            ("a copy reaches", _gbs(gpu["copy_gbs"], "not measured yet: run `ladder`")),
        ]
    cache = found["cache"]
    said.append(("cache", cache["folder"]))
    said.append(("", f"{cache['entries']} compiled kernels, {cache['bytes'] / 1e6:.1f} MB"))
    return said + [("missing", why) for why in found["missing"].values()]


def _gbs(value: float | None, otherwise: str = "unknown") -> str:
    return f"{value:,.0f} GB/s" if value else otherwise


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    from online_softmax.lab import bench

    driver = bench.machine().get("driver_version")
    measured = _measured(jit.cache_dir() / MEASURED_FILE)
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gbs, whose = bandwidth(index)
        found.append(
            {
                "name": properties.name,
                "arch": jit.device_arch(index),
                "driver": driver,
                "multiprocessors": properties.multi_processor_count,
                "l2_bytes": properties.L2_cache_size,
                "memory_bytes": properties.total_memory,
                "bandwidth_gbs": gbs,
                "bandwidth_of": whose,
                "copy_gbs": measured.get(properties.name),
            }
        )
    return found
