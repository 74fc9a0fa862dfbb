"""The files that a command names: can they be written, and what of their names is kept."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from online_softmax.lab import fitting, inputs
from online_softmax.lab.inputs import BadInput

FILE_OPTIONS = ("--input", "--save", "--plot", "--from", "--raw")


def place(option: str, given: str) -> Path:
    """Find out before a long run, not after it, that a file cannot be written; make its folder."""
    path = Path(given)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{option} {path}: its folder cannot be made: {error.strerror}") from None
    try:
        is_there = path.exists()
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if is_there and not path.is_file():  # a pipe or a device: to open it would be to use it
            return path
        path.open("ab").close()
        if not is_there:
            path.unlink()
    except OSError as error:
        raise BadInput(f"{option} {path} cannot be written: {error.strerror}") from None
    return path


def picture(option: str, given: str) -> Path:
    """The same for a picture: its ending says which kind."""
    from online_softmax.lab import plot

    try:
        plot.check(given)
    except (plot.Unavailable, ValueError) as error:
        raise BadInput(f"{option} {given}: {error}") from None
    return place(option, given)


def apart(given: Mapping[str, Path | None]) -> None:
    """Refuse to write over a file that another option reads or writes."""
    taken: dict[str, str] = {}
    for option, path in given.items():
        if path is None:
            continue
        real = os.path.realpath(path)
        if real in taken:
            raise BadInput(f"{taken[real]} and {option} both name {path}: give two files")
        taken[real] = option


def kept(option: str, path: Path, write: Callable[[], object]) -> None:
    """Write a file when all is done, and say so; a disk that is full is one line."""
    try:
        write()
    except (ValueError, OSError, RuntimeError) as error:  # matplotlib's: .pgf needs a TeX
        why = error.strerror if isinstance(error, OSError) else None
        raise BadInput(f"{option} {path}: {why or error}") from None
    fitting.say(f"{path} written", err=True)


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
    for each in words:
        option, equals, value = each.partition("=")
        if equals and option in FILE_OPTIONS:
            each = f"{option}={file_name(value)}"
        elif kept and kept[-1] in FILE_OPTIONS:
            each = file_name(each)
        kept.append(each)
    return shlex.join(["online-softmax", *kept])
