"""What the command `bench` prints: the results, where the time went, how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from online_softmax.lab import benchoptions as options
from online_softmax.lab import fitting

if TYPE_CHECKING:
    from online_softmax.lab.benchfile import Part, Row
    from online_softmax.lab.benchrun import Progress
    from online_softmax.lab.benchtable import Table


def emit(text: str) -> None:
    """Print whole lines as they are."""
    typer.echo(text, nl=False)


def show(parts: Sequence[Part], as_json: bool = False) -> None:
    """Everything that was kept, as tables or as the lines of a file."""
    from online_softmax.lab import benchfile, benchpage

    if not as_json:
        benchpage.render(parts, fitting.console(options.NARROWEST))
        return
    for part in parts:
        emit(benchfile.header_line(part.header))
        for row in part.rows:
            emit(benchfile.line("cell", row))
        for other in part.others:
            emit(benchfile.line(other["kind"], other))


def tables(found: Sequence[Table], narrowest: int = options.NARROWEST) -> None:
    """Tables, one below the other, as wide as the terminal but no narrower than that."""
    from online_softmax.lab import benchpage

    benchpage.render_tables(found, fitting.console(narrowest))


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 1:
        return ", less than a second left"
    return (
        f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"
    )


@contextmanager
def progress() -> Iterator[Progress]:
    """On standard error: a bar that goes away on a terminal, else a line a cell."""
    if not sys.stderr.isatty():
        yield lambda text, done, total, left: typer.echo(
            f"[{done + 1}/{total}] {text}{_left(left)}", err=True
        )
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    console = Console(stderr=True)
    words = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    bar = [BarColumn(24)] if console.width >= fitting.BAR_FROM else []
    columns = (*bar, TimeElapsedColumn(), words)
    with Progress(*columns, console=console, transient=True, expand=True) as bars:
        task = bars.add_task("starting")
        update: Callable[..., None] = bars.update
        yield lambda text, done, total, left: update(
            task,
            description=f"{done + 1} of {total}: {text}{_left(left)}",
            completed=done,
            total=total,
        )


def spent(rows: Sequence[Row], seconds: float) -> str:
    """Where a run's time went, a sentence; "" without cells.

    Args:
        rows: the cells that it measured.
        seconds: that it took in all.
    """
    if not rows:
        return ""
    found: dict[str, float] = {}
    for row in rows:
        for name, each in row.spent.items():
            found[name] = found.get(name, 0.0) + each
    found["the rest"] = max(seconds - sum(found.values()), 0.0)
    said = ", ".join(f"{name} {each:.1f} s" for name, each in found.items())
    cells = f"{len(rows)} cells" if len(rows) > 1 else "1 cell"
    return f"{cells} in {seconds:.1f} s, {seconds / len(rows):.3f} s a cell: {said}"
