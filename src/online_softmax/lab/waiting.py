"""What a person sees on standard error who waits: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from online_softmax.lab import fitting

Progress = Callable[[str, int, int], None]  # what comes next, steps done, steps in all
FIRST_SECONDS, EVERY_SECONDS = 3.0, 15.0  # until the first line, and from line to line


@contextmanager
def progress(is_shown: bool, has_left: bool = False) -> Iterator[Progress | None]:
    """A bar that goes away in the end; where standard error is no terminal, lines. None: neither.

    Args:
        is_shown: whether a command wants it.
        has_left: tell the time that is left too, of steps that take about as long as each other.
    """
    if not is_shown:
        yield None
        return
    with _bar(has_left) if sys.stderr.isatty() else _lines() as tell:
        yield tell


@contextmanager
def _bar(has_left: bool) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    console = Console(stderr=True)
    words = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    left = [TimeRemainingColumn(), TextColumn("left:")] if has_left else []
    bar = [BarColumn(24)] if console.width >= fitting.BAR_FROM else []
    columns = (*bar, TimeElapsedColumn(), *left, words)
    with Progress(*columns, console=console, transient=True, expand=True) as bars:
        task = bars.add_task("starting")
        yield lambda text, done, total: bars.update(
            task, description=text, completed=done, total=total
        )


@contextmanager
def _lines() -> Iterator[Progress]:
    """What is at work, said by a thread, since a step may take long; a short run says nothing."""
    now, started, ended = ["starting"], time.monotonic(), threading.Event()

    def speak() -> None:
        wait = FIRST_SECONDS
        while not ended.wait(wait):
            minutes, seconds = divmod(int(time.monotonic() - started), 60)
            sys.stderr.write(f"{minutes}:{seconds:02} {now[0]}\n")
            sys.stderr.flush()
            wait = EVERY_SECONDS

    def tell(text: str, done: int, total: int) -> None:
        now[0] = f"{text} (step {min(done + 1, total)} of {total})"

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()
