"""A bar on standard error while a person waits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

    columns = [BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}")]
    if has_left:
        columns[2:2] = [TimeRemainingColumn(), TextColumn("left:")]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting")
        yield lambda text, done, total: bars.update(
            task, description=text, completed=done, total=total
        )
