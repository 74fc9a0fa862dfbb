"""The command `online-softmax`: ladder, bench, profile, check, report, trace, explain, info.

Results go to standard output, all else to standard error. Exit codes: 0 all right, 1 a kernel gave
a wrong result, 2 the command or its input is wrong, results cannot be written, or nothing can run.
Imports that cost time stand in the commands.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from online_softmax.lab import (
    benchcli,
    benchoptions,
    checkcli,
    explaincli,
    fitting,
    options,
    outlets,
    profilecli,
    reportcli,
    tracecli,
)
from online_softmax.lab.usage import USAGE, Group

if TYPE_CHECKING:
    from rich.console import Console

    from online_softmax.lab.inputs import Matrix
    from online_softmax.lab.results import Run

WRONG = 1  # the exit code

app = typer.Typer(
    name="online-softmax",
    cls=Group,
    help=options.ABOUT,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: no markup to escape, and examples keep their lines
)

# ---- how they all speak


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


# ---- the commands


@app.callback(invoke_without_command=True, help=options.ABOUT)
def start(context: typer.Context, version: options.Version = False) -> None:
    """Say what there is, if no command is given."""
    if version:
        import online_softmax

        typer.echo(f"online-softmax {online_softmax.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(USAGE)


app.command(help=benchoptions.HELP, short_help="How fast, beside rivals and the card's limit?")(
    benchcli.bench
)

app.command(help=reportcli.HELP, short_help="One page of what was measured; no GPU needed.")(
    reportcli.report
)


app.command(help=checkcli.HELP, short_help="Is everything right here? A page to report with.")(
    checkcli.check
)
app.command(help=profilecli.HELP, short_help="What the GPU's own counters say of each kernel.")(
    profilecli.profile
)


@app.command(
    help=options.LADDER, short_help="Every kernel: is it right, what does it cost, how fast?"
)
def ladder(
    rows: options.Rows = None,
    cols: options.Cols = None,
    dtype: options.Dtype = None,
    file: options.Input = None,
    sample: options.Sample = False,
    arch: options.Arch = None,
    only: options.Only = None,
    block: options.Block = None,
    seconds: options.Seconds = None,
    as_json: options.Json = False,
    save: options.Save = None,
    plot: options.Plot = None,
    against: options.Against = None,
    stored: options.Stored = None,
) -> None:
    """Run, or read, a ladder; then show, save and draw it."""
    from online_softmax.lab import arguments, inputs, places, results, table, waiting
    from online_softmax.lab import plot as plots

    for option, path in (("--save", save), ("--plot", plot), ("--from", stored)):
        arguments.word(option, path, "a file")
    if stored:
        given: dict[str, object] = {"--rows": rows, "--cols": cols, "--dtype": dtype}
        given |= {"--input": file, "--sample": sample, "--arch": arch, "--only": only}
        given |= {"--block": block, "--seconds": seconds, "--against": against}
        arguments.nothing_beside("--from", given)
        runs = _read(Path(stored))
    else:
        with waiting.progress(not as_json) as progress:
            if progress and file:
                progress(f"reading {file}", 0, 1)
            matrix = arguments.matrix(rows, cols, dtype, file, sample)
        wanted = {
            "arches": arguments.arches(arch),
            "only": arguments.names(only),
            "block": arguments.block(block),
            "seconds": arguments.seconds("--seconds", seconds) or options.SECONDS,
            "rivals": arguments.rivals(against),
        }
    saved = places.place("--save", save) if save else None
    drawn = places.picture("--plot", plot) if plot else None
    reads = {
        "--from": Path(stored) if stored else None,
        "--input": inputs.split(file)[0] if file else None,
    }
    places.apart({**reads, "--save": saved, "--plot": drawn})
    if not stored:
        runs = [_climb(matrix, wanted, is_shown=not as_json)]
    run = runs[-1]
    if as_json:
        _print_json(run.to_json())
    if not stored and all(result.ok is None for result in run.results):
        reasons = dict.fromkeys(reason for result in run.results for reason in result.reasons)
        raise inputs.BadInput(f"nothing ran: {'; '.join(reasons)}")
    for each in () if as_json else runs:
        table.render(each, _console())
    if saved:
        places.kept("--save", saved, lambda: results.save(run, saved))
    if drawn:
        places.kept("--plot", drawn, lambda: plots.draw(run, drawn))
    if not all(each.is_right for each in runs):
        raise typer.Exit(WRONG)


app.command(
    help=options.TRACE,
    short_help="Watch the running pair (m, d) over a few numbers.",
    cls=tracecli.Command,
    context_settings={"ignore_unknown_options": True},  # -3 and -inf are numbers, not options
)(tracecli.trace)


app.command(
    help=options.EXPLAIN,
    short_help="Which kernel to choose, why, and why no other.",
    # So that -3 is refused as a number, not as an option.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)(explaincli.explain)


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
        fitting.say(f"{name:<{width}}  {text}".rstrip(), hang=width + 2)


# ---- what ladder does


def _climb(matrix: Matrix, wanted: dict[str, Any], is_shown: bool) -> Run:
    from online_softmax.lab import info, ladder, places, waiting

    with waiting.progress(is_shown) as progress:
        command = places.recorded(sys.argv[1:])
        run = ladder.climb(matrix, **wanted, command=command, progress=progress)
    if run.header.copy_gbs:
        info.remember_copy(run.header.device, run.header.copy_gbs)
    return run


def _read(path: Path) -> list[Run]:
    from online_softmax.lab import results
    from online_softmax.lab.inputs import BadInput

    try:
        return results.read(path)
    except OSError as error:
        raise BadInput(f"--from {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"--from {error}") from None


def main() -> None:
    """The entry point."""
    warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
    with outlets.watched():
        app(prog_name="online-softmax")


if __name__ == "__main__":
    main()
