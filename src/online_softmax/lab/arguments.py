"""What a person types, as what the lab takes. Whatever is wrong is `BadInput`, one line."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from online_softmax import plan
from online_softmax.lab import inputs, ladder
from online_softmax.lab.inputs import BadInput, Matrix

ROWS, COLS = 4096, 4096  # of a random matrix
FILE_OPTIONS = ("--input", "--save", "--plot")
DOUBLE = ("float64", "fp64", "f64", "double")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def arches(text: str) -> list[str]:
    """Architectures that the planner knows, by any of their names.

    >>> arches("sm_80,90")
    ['sm_80', 'sm_90a']
    """
    found = []
    for name in _listed(text):
        full = f"sm_{name.lower().removeprefix('sm_').removeprefix('sm')}"
        known = [arch for arch in (full, f"{full}a") if arch in plan.ARCHES]
        if not known:
            raise BadInput(f"--arch {name}: known are {', '.join(plan.ARCHES)}")
        found.append(known[0])
    return list(dict.fromkeys(found))


def names(text: str) -> list[str]:
    """Lines of the ladder, by how their names start.

    >>> names("v3,triton")
    ['v3_register_cache', 'triton_two_pass', 'triton_online']
    """
    found: list[str] = []
    for start in _listed(text):
        matching = [name for name in ladder.NAMES if name.startswith(start.lower())]
        if not matching:
            raise BadInput(f"no rung starts with {start!r}; there are {', '.join(ladder.NAMES)}")
        found += matching
    return found


def nothing_beside(option: str, given: Mapping[str, object]) -> None:
    """Refuse options that would say nothing beside another."""
    ignored = [name for name, value in given.items() if value]
    if ignored:
        raise BadInput(f"{option} shows a run that was kept: {ignored[0]} cannot change it")


def rivals(text: str) -> tuple[str, ...]:
    """Rivals that the clock knows.

    >>> rivals("torch,compile")
    ('torch', 'compile')
    """
    from online_softmax.lab.bench import RIVALS

    unknown = [name for name in _listed(text) if name not in RIVALS]
    if unknown:
        raise BadInput(f"--against {unknown[0]}: there are {', '.join(RIVALS)}")
    return tuple(dict.fromkeys(_listed(text)))


def block(threads: int) -> int:
    """Threads a block that every kernel takes; 0 leaves the choice to the planner."""
    if threads and threads not in plan.BLOCKS:
        raise BadInput(f"--block {threads}: give one of {', '.join(map(str, plan.BLOCKS))}")
    return threads


def dtype_name(text: str) -> str:
    """A dtype's full name, float64 among them, for which there is no kernel but an explanation."""
    is_double = text.lower().removeprefix("torch.") in DOUBLE
    return "float64" if is_double else inputs.short_name(inputs.dtype_of(text))


def matrix(rows: int, cols: int, dtype: str, file: str, sample: bool) -> Matrix:
    """The input that the options of `ladder` describe; 0 and "" are options not given."""
    if file and sample:
        raise BadInput("give --input or --sample, not both")
    if cols and (file or sample):
        raise BadInput("--cols is for random input: a tensor's columns are its last dimension")
    wanted = inputs.dtype_of(dtype) if dtype else None
    if not file and not sample:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return inputs.random(rows or ROWS, cols or COLS, wanted or torch.float32, device)
    found = inputs.load(file, wanted) if file else inputs.sample(wanted)
    if file:
        found = replace(found, source=file_name(file))
    if rows > found.rows:
        note = f"{rows:,} rows were asked for; the tensor has {found.rows:,}, and all of them run"
        found = replace(found, notes=(*found.notes, note))
    if rows and rows < found.rows:
        note = f"the first {rows:,} of {found.rows:,} rows, as asked"
        found = replace(found, rows=rows, notes=(*found.notes, note))
    return found


def file_name(given: str) -> str:
    """A path without its folders, which are nobody else's business; FILE:NAME keeps its name.

    >>> file_name("/home/me/x.npz:layers/3")
    'x.npz:layers/3'
    """
    head, colon, name = given.rpartition(":")
    if colon and Path(head).suffix.lower() in inputs.SUFFIXES:
        return f"{Path(head).name}:{name}"
    return Path(given).name


def recorded(words: Sequence[str]) -> str:
    """The command as a stored result keeps it: files by their names alone.

    >>> recorded(["ladder", "--save", "/tmp/run.jsonl", "--plot=a/b.png"])
    'online-softmax ladder --save run.jsonl --plot=b.png'
    """
    kept: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        if equals and option in FILE_OPTIONS:
            word = f"{option}={file_name(value)}"
        elif kept and kept[-1] in FILE_OPTIONS:
            word = file_name(word)
        kept.append(word)
    return shlex.join(["online-softmax", *kept])


def place(path: Path) -> None:
    """Find out before a long run, not after it, that a file cannot be written; make its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{path}: its folder cannot be made: {error.strerror}") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"{path} cannot be written")


def numbers(texts: Sequence[str]) -> list[float]:
    """Numbers, also several in one word: "1 5 3" or "1,5,3"."""
    found = []
    for text in texts:
        for word in text.strip("[]()").replace(",", " ").split():
            try:
                found.append(float(word))
            except ValueError:
                raise BadInput(f"{word!r} is not a number") from None
    if not found:
        raise BadInput("trace needs at least one number")
    return found
