"""The matrix a ladder runs on: random, the shipped sample, or a tensor from a person's own file.

Whatever is wrong with a file is one line, `BadInput`; nothing here prints.
"""

from __future__ import annotations

import math
import os
import pickle
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

COPIES = 5  # of the matrix, that are held at a time
SEED = 20180508  # of random input: the same values on every machine of a kind
MAX_DIMS = 4
SUFFIXES = (".npy", ".npz", ".pt", ".pth", ".safetensors")
DTYPES = {
    "float32": ("fp32", "f32", "float"),
    "float16": ("fp16", "f16", "half"),
    "bfloat16": ("bf16",),
}
KERNEL_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
# What numpy's and torch's readers raise at bytes that are not theirs.
_UNREADABLE = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, SyntaxError,
    TypeError, ValueError, pickle.UnpicklingError, struct.error, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class BadInput(ValueError):  # noqa: N818 a state of the input, told to a person
    """An input that no kernel can take; the message is one line for the person who gave it."""


@dataclass(frozen=True)
class Matrix:
    """rows x cols values, softmax along cols; `take(n)` makes the first n rows."""

    rows: int
    cols: int
    dtype: torch.dtype
    source: str  # where the values come from, in words
    take: Callable[[int], Tensor]  # -> (n, cols), cols contiguous
    notes: tuple[str, ...] = ()  # what was done to the values, each a sentence


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name: "float32", "fp32", "bf16"...

    >>> dtype_of("half")
    torch.float16
    """
    for dtype, aliases in DTYPES.items():
        if name.lower().removeprefix("torch.") in (dtype, *aliases):
            return getattr(torch, dtype)
    raise BadInput(f"no kernel takes dtype {name!r}: give float32, float16 or bfloat16")


def short_name(dtype: torch.dtype) -> str:
    """A dtype as people write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _must_fit(rows: int, cols: int, device: torch.device | str) -> None:
    """Refuse before an allocation fails: input, output, copies to time and judge, in float32."""
    wanted = COPIES * 4 * rows * cols
    if torch.device(device).type == "cuda":
        there = torch.cuda.mem_get_info(device)[0]
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > there:
        raise BadInput(
            f"{rows:,} x {cols:,} would take {wanted / 2**30:,.0f} GiB with what it takes to judge "
            f"it; there are {there / 2**30:,.0f} GiB: ask for fewer rows or columns"
        )


def random(rows: int, cols: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Matrix:
    """Normal random numbers from a fixed seed, made on the device."""

    def take(count: int) -> Tensor:
        _must_fit(count, cols, device)
        generator = torch.Generator(device).manual_seed(SEED)
        return torch.randn(count, cols, generator=generator, device=device).to(dtype)

    return Matrix(rows, cols, dtype, "random normal numbers", take)


def sample(dtype: torch.dtype | None = None) -> Matrix:
    """Real attention scores that come with the package: 1,920 rows of 40, padding -inf."""
    from online_softmax.lab import cases

    source = "real attention scores (all-MiniLM-L6-v2, layer 3), padding -inf"
    return from_tensor(cases.sample(), source, dtype)


def load(given: str, dtype: torch.dtype | None = None) -> Matrix:
    """Read a file; softmax runs along its tensor's last dimension.

    Args:
        given: a path to .npy, .npz, .pt or .safetensors. Where a file holds several tensors,
            "path:name" says which.
        dtype: convert to this; None keeps the file's, except that float64 becomes float32.

    Raises:
        BadInput: the file is missing, empty or not what its name says, or its tensor is not of
            1 to 4 dimensions of floating-point numbers.
    """
    path = Path(given)
    try:
        path, name = split(given)
        suffix = path.suffix.lower()
        if suffix not in SUFFIXES:
            raise BadInput(f"{path}: the name must end in one of {', '.join(SUFFIXES)}")
        if path.is_dir():
            raise BadInput(f"{path} is a folder; give a file")
        if path.stat().st_size == 0:
            raise BadInput(f"{path} is empty (0 bytes)")
        found = _one_of(_READ[suffix](path), name, path)
    except BadInput:
        raise
    except FileNotFoundError:
        raise BadInput(f"{path}: there is no such file") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or _first_line(error)}") from None
    except _UNREADABLE as error:
        raise _no_tensor(path, _first_line(error)) from None
    return from_tensor(found, str(given), dtype)


def from_tensor(tensor: Any, source: str, dtype: torch.dtype | None = None) -> Matrix:
    """View a tensor of 1 to 4 dimensions as rows x cols along its last one."""
    tensor = _as_torch(tensor, source)
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else "sparse"
        raise BadInput(f"{source} holds a {kind} tensor: save a dense one, as x.to_dense() gives")
    shape = " x ".join(str(n) for n in tensor.shape) or "a single number"
    if tensor.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise BadInput(
            f"{source} holds {short_name(tensor.dtype)}: softmax wants float16, bfloat16, float32 "
            "or float64"
        )
    if not 1 <= tensor.dim() <= MAX_DIMS:
        raise BadInput(f"{source} has {tensor.dim()} dimensions ({shape}): give 1 to {MAX_DIMS}")
    if tensor.numel() == 0:
        raise BadInput(f"{source} has no elements: its shape is {shape}")
    notes = [] if tensor.dim() == 2 else [f"{shape}, viewed as rows along the last dimension"]
    wanted = dtype or (torch.float32 if tensor.dtype == torch.float64 else tensor.dtype)
    if wanted != tensor.dtype:
        notes.append(
            f"converted from {short_name(tensor.dtype)} to {short_name(wanted)}"
            + (": the kernels take no float64" if dtype is None else "")
        )
    view = tensor.detach().reshape(-1, tensor.shape[-1])
    rows, cols = view.shape
    if overflown := _overflown(view, wanted):
        notes.append(
            f"{overflown:,} of {view.numel():,} values are finite in {short_name(tensor.dtype)} "
            f"and past the largest {short_name(wanted)}, {torch.finfo(wanted).max:.3g}: they run "
            "as +inf or -inf"
        )
    return Matrix(
        rows, cols, wanted, source, lambda n: view[:n].to(wanted).contiguous(), tuple(notes)
    )


def _overflown(view: Tensor, dtype: torch.dtype) -> int:
    """How many finite values a conversion makes infinite; a part of the rows at a time."""
    if torch.finfo(dtype).max >= torch.finfo(view.dtype).max:
        return 0
    parts = view.split(max(2**24 // view.shape[1], 1))
    return sum(int((part.isfinite() & part.to(dtype).isinf()).sum()) for part in parts)


# ---- reading: each gives an array, a tensor, or several by name


def split(given: str) -> tuple[Path, str | None]:
    """The file, and which of its tensors: FILE or FILE:NAME."""
    path = Path(given)
    if not path.exists() and ":" in given:
        head, _, name = given.rpartition(":")
        if Path(head).suffix.lower() in SUFFIXES:
            return Path(head), name
    return path, None


def _read_numpy(path: Path) -> Any:
    # Mapped, not read: only the rows that run are paid for. "c": writes, if any, stay in memory.
    try:
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except ValueError as error:
        if "pickle" not in str(error):  # numpy's words advise to run the code in it
            raise
        raise _no_tensor(path, "it holds objects, or is something else") from None


def _read_npz(path: Path) -> Any:
    found = np.load(path, allow_pickle=False)
    if not isinstance(found, Mapping):
        raise BadInput(f"{path} holds one array: rename it to .npy")
    return found


def _read_torch(path: Path) -> Any:
    # Mapped too, which files of torch before 1.6 cannot be.
    is_zip = zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (pickle.UnpicklingError, KeyError):  # torch's words advise to run the code in it
        why = "it holds more than tensors, or is something else; save a tensor or a dict of them"
        raise _no_tensor(path, why) from None


def _no_tensor(path: Path, why: str) -> BadInput:
    return BadInput(f"{path} is no {path.suffix.lower()} file that holds a tensor: {why}")


def _read_safetensors(path: Path) -> Any:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise BadInput(
            f"{path}: reading it needs the package safetensors: pip install safetensors"
        ) from None
    try:
        return load_file(path)
    except SafetensorError as error:
        raise BadInput(f"{path} is not a .safetensors file: {_first_line(error)}") from None


_READ: dict[str, Callable[[Path], Any]] = {
    ".npy": _read_numpy,
    ".npz": _read_npz,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".safetensors": _read_safetensors,
}


def _one_of(found: Any, name: str | None, path: Path) -> Any:
    """The one tensor of a file, or the one that was named."""
    if not isinstance(found, Mapping):
        if name is not None:
            raise BadInput(f"{path} holds one tensor without a name: leave :{name} away")
        return found
    names = [str(key) for key in found]
    if not names:
        raise BadInput(f"{path} holds no tensors")
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        asked = f"none is {name!r}" if name else f"say which, for example {path}:{names[0]}"
        raise BadInput(f"{path} holds {len(names)} tensors ({listed}): {asked}")
    return next(value for key, value in found.items() if str(key) == name)


def _as_torch(value: Any, source: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        raise BadInput(f"{source} holds no tensor: it is of type {type(value).__name__}")
    if value.dtype.kind != "f" or value.dtype.itemsize not in (2, 4, 8):
        hint = "; save bfloat16 as .pt or .safetensors" if value.dtype.kind == "V" else ""
        raise BadInput(
            f"{source} holds {value.dtype}: softmax wants float16, float32 or float64{hint}"
        )
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    return torch.from_numpy(value)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


def specials(x: Tensor) -> str:
    """How many of a matrix's values are not finite, in words; "" if all are."""
    counts = {
        "-inf": int((x == -math.inf).sum()),
        "+inf": int((x == math.inf).sum()),
        "NaN": int(x.isnan().sum()),
    }
    return ", ".join(f"{100 * n / x.numel():.3g} % {name}" for name, n in counts.items() if n)
