"""The command `online-softmax`: ladder, trace, explain, info.

Results go to standard output, all else to standard error. Exit codes: 0 all right, 1 a kernel gave
a wrong result, 2 the command or its input is wrong, or nothing can run. Imports that cost time
stand in the commands.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from online_softmax.lab import options

if TYPE_CHECKING:
    from rich.console import Console

    from online_softmax.lab.inputs import Matrix
    from online_softmax.lab.results import Run

WRONG, USAGE = 1, 2  # exit codes

app = typer.Typer(
    help=options.ABOUT,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: no markup to escape, and examples keep their lines
)

# ---- how they all speak


@contextmanager
def _said_plainly() -> Iterator[None]:
    """What a person can mend becomes one line and exit code 2; other errors stay what they are."""
    from online_softmax import jit
    from online_softmax.cuda import host
    from online_softmax.lab.inputs import BadInput

    try:
        yield
    except (BadInput, jit.Unavailable, host.CompilerMissing) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(USAGE) from None


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


# ---- the commands


@app.command(
    help=options.LADDER, short_help="Every kernel: is it right, what does it cost, how fast?"
)
def ladder(
    rows: options.Rows = None,
    cols: options.Cols = None,
    dtype: options.Dtype = "",
    file: options.Input = "",
    sample: options.Sample = False,
    arch: options.Arch = "",
    only: options.Only = "",
    block: options.Block = 0,
    seconds: options.Seconds = None,
    as_json: options.Json = False,
    save: options.Save = None,
    plot: options.Plot = None,
    against: options.Against = "torch",
    stored: options.Stored = None,
) -> None:
    """Run, or read, a ladder; then show, save and draw it."""
    from online_softmax.lab import arguments, results, table

    with _said_plainly():
        for path in filter(None, (save, plot)):
            arguments.place(path)
        if stored:
            given = {"--rows": rows, "--cols": cols, "--dtype": dtype, "--input": file}
            given |= {"--sample": sample, "--only": only, "--block": block}
            arguments.nothing_beside("--from", given)
            runs = _read(stored)
        else:
            matrix = arguments.matrix(rows or 0, cols or 0, dtype, file, sample)
            allowed = seconds or (options.SAMPLE_SECONDS if sample else options.SECONDS)
            runs = [_climb(matrix, arch, only, block, allowed, against, is_shown=not as_json)]
        run = runs[-1]
        if save:
            results.save(run, save)
        if plot:
            _draw(run, plot)
    if as_json:
        _print_json(run.to_json())
    else:
        for each in runs:
            table.render(each, _console())
    for path in filter(None, (save, plot)):
        typer.echo(f"{path} written", err=True)
    if not all(each.is_right for each in runs):
        raise typer.Exit(WRONG)


@app.command(
    help=options.TRACE,
    short_help="Watch the running pair (m, d) over a few numbers.",
    context_settings={"ignore_unknown_options": True},  # -3 and -inf are numbers, not options
)
def trace(
    values: options.Values,
    block: options.Step = 1,
    as_json: options.Json = False,
) -> None:
    """Print a walk over numbers."""
    from online_softmax.lab import arguments, trace

    with _said_plainly():
        numbers = arguments.numbers(values)
    if as_json:
        typer.echo(trace.to_json(numbers, block))
    else:
        trace.render(numbers, block, _console())


@app.command(help=options.EXPLAIN, short_help="Which kernel to choose, why, and why no other.")
def explain(
    rows: options.ExplainedRows,
    cols: options.ExplainedCols,
    dtype: options.ExplainedType = "float32",
    arch: options.ExplainedArch = "",
) -> None:
    """Print the planner's choice and its reasons."""
    import torch

    from online_softmax import catalogue, jit, plan
    from online_softmax.lab import arguments
    from online_softmax.lab.inputs import BadInput

    with _said_plainly():
        found = arguments.arches(arch)
        if not found:
            found = [jit.device_arch() if torch.cuda.is_available() else plan.DEFAULT_ARCH]
        try:
            said = catalogue.explain(rows, cols, arguments.dtype_name(dtype), found[0])
        except ValueError as error:  # an architecture that came out after the planner's facts
            raise BadInput(str(error).removeprefix("explain(): ")) from None
    typer.echo(said)


@app.command(help=options.INFO, short_help="Versions, GPU, ceilings, cache; what is missing.")
def info(as_json: options.Json = False) -> None:
    """Print what is here."""
    from online_softmax.lab import info

    found = info.gather()
    if as_json:
        _print_json(found)
        return
    said = info.lines(found)
    width = max(len(name) for name, _ in said)
    for name, text in said:
        typer.echo(f"{name:<{width}}  {text}".rstrip())


# ---- what ladder does


def _climb(
    matrix: Matrix, arch: str, only: str, block: int, seconds: float, against: str, is_shown: bool
) -> Run:
    from online_softmax.lab import arguments, info, ladder
    from online_softmax.lab.inputs import BadInput

    arches, names, threads = arguments.arches(arch), arguments.names(only), arguments.block(block)
    rivals = arguments.rivals(against)
    with _progress(is_shown) as progress:
        run = ladder.climb(
            matrix,
            arches=arches,
            only=names,
            block=threads,
            seconds=seconds,
            rivals=rivals,
            command=arguments.recorded(sys.argv[1:]),
            progress=progress,
        )
    if all(result.ok is None for result in run.results):
        reasons = dict.fromkeys(reason for result in run.results for reason in result.reasons)
        raise BadInput(f"nothing ran: {'; '.join(reasons)}")
    if run.header.copy_gbs:
        info.remember_copy(run.header.device, run.header.copy_gbs)
    return run


@contextmanager
def _progress(is_shown: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on standard error while a person waits; it leaves nothing behind."""
    if not is_shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting")
        yield lambda text, done, total: bars.update(
            task, description=text, completed=done, total=total
        )


def _read(path: Path) -> list[Run]:
    from online_softmax.lab import results
    from online_softmax.lab.inputs import BadInput

    try:
        return results.read(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(str(error)) from None


def _draw(run: Run, path: Path) -> None:
    from online_softmax.lab import plot
    from online_softmax.lab.inputs import BadInput

    try:
        plot.draw(run, path)
    except (plot.Unavailable, ValueError, OSError) as error:
        raise BadInput(f"--plot {path}: {error}") from None


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows ?, the run goes on
    warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
    app(prog_name="online-softmax")


if __name__ == "__main__":
    main()
