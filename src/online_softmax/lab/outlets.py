"""Standard output and error of the command. Output that cannot be written, since a disk is full or
the stream is closed, is one line and exit code 2, never 1, which says that a result is wrong or
slower. What reads a pipe may stop reading: that ends the command in silence, as others end. Without
a standard error the words are lost and the run goes on.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from online_softmax.lab import usage

PIPE_CLOSED = 141  # the exit code that a shell has for whoever wrote into a pipe without a reader


class OutputError(Exception):
    """Standard output cannot be written; no OSError, so that nobody takes it for one of a file."""

    def __init__(self, error: OSError) -> None:
        why = "it is closed" if error.errno == errno.EBADF else error.strerror
        super().__init__(f"standard output cannot be written: {why}")
        self.is_pipe = isinstance(error, BrokenPipeError)


class _Results(io.FileIO):
    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error) from None


class _Words(io.FileIO):
    def write(self, data: Any) -> int | None:  # type: ignore[override]
        with suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


def _text(stream: TextIO | None, kind: type[io.FileIO], mode: int) -> TextIO:
    """A stream that writes where another does; of one that is closed, onto what can be opened so.

    An ASCII terminal shows ? for what it lacks, and the run goes on.
    """
    if stream is None:  # its number is taken, so that no file of ours is opened under it
        number, encoding, by_line = os.open(os.devnull, mode), "utf-8", False
    elif isinstance(stream, io.TextIOWrapper):
        try:
            number = stream.fileno()
        except OSError:  # it stands for one, in memory
            return stream
        stream.flush()
        encoding, by_line = stream.encoding, stream.line_buffering
    else:
        return stream
    raw = kind(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors="replace", line_buffering=by_line
    )


@contextmanager
def watched() -> Iterator[None]:
    """Run a command with both streams watched, and leave with the exit code that is due."""
    # Nothing can be written to what is open for reading: a closed output fails as a full one does.
    sys.stdout = _text(sys.stdout, _Results, os.O_RDONLY)
    sys.stderr = _text(sys.stderr, _Words, os.O_WRONLY)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError as error:
        _drop(sys.stdout)
        if not error.is_pipe:
            usage.tell(str(error))
        sys.exit(PIPE_CLOSED if error.is_pipe else usage.USAGE)


def _drop(stream: TextIO) -> None:
    """Let what is left in a stream go nowhere, or Python would try again to write it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    stream.flush()
