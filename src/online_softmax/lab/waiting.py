"""A bar on standard error while a person waits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from online_softmax.lab import fitting

Progress = Callable[[str, int, int], None]  # what comes next, steps done, steps in all


@contextmanager
def progress(is_shown: bool, has_left: bool = False) -> Iterator[Progress | None]:
    """A bar that goes away in the end; None where it is not shown or nobody looks.

    Args:
        is_shown: whether a command wants it.
        has_left: tell the time that is left too, of steps that take about as long as each other.
    """
    if not is_shown or not sys.stderr.isatty():
        yield None
        return
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
