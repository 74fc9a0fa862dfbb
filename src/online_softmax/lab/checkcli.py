"""The command `check`: is everything right on this machine? A page to paste into a report."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from online_softmax.lab import fitting
from online_softmax.lab.options import Json, option

WRONG = 1  # the exit code: a result disagrees with float64
HELP = """Compare every kernel, on every awkward input, and every operation with float64, here.

On a GPU the real kernels run, on every case. Without one they run on the CPU, on the cases that \
it can afford. It ends in a page, Markdown, to paste into a bug report: versions, device, what \
passed, what is wrong and on which input, what did not run and why. A terminal shows it in its \
width; piped, or in the file of --save, it is whole. Exit code 1: something is \
wrong; 2: nothing ran.

\b
Examples:
  online-softmax check --quick
  online-softmax check --save check.md
  online-softmax check --only registers,split,attention
  online-softmax check --quick --json"""

Quick = Annotated[
    bool, typer.Option("--quick", help="Some cases of each, for an answer in seconds.")
]
Only = Annotated[
    str | None,
    option("Kernels and operations by how their names start, such as v3,softmax.", "NAME,NAME"),
]
Save = Annotated[str | None, option("Write the page to a file too.", "FILE")]


def check(
    quick: Quick = False, only: Only = None, as_json: Json = False, save: Save = None
) -> None:
    """Check, and print the page."""
    from online_softmax.lab import arguments, checkpage, inputs, places, waiting
    from online_softmax.lab import check as checking

    arguments.word("--save", save, "a file")
    names = arguments.starts("--only", only, checking.NAMES)
    kept = places.place("--save", save) if save else None
    with waiting.progress(not as_json, has_left=True) as progress:
        report = checking.run(names, quick, progress)
    page = checkpage.page(report, places.recorded(sys.argv[1:]))
    if as_json:
        typer.echo(json.dumps(checkpage.to_json(report), indent=2, allow_nan=False))
    else:
        width = fitting.columns()
        shown = fitting.markdown(page, width) if width else page
        typer.echo(shown, nl=False)
    if kept:
        places.kept("--save", kept, lambda: kept.write_text(page, encoding="utf-8"))
    if not as_json and shown != page:
        whole = f"it is whole in {kept}" if kept else "add `> check.md`, or --save check.md"
        fitting.say(f"This page is cut to the width of the terminal. To paste it: {whole}.", True)
    if not report.is_right:
        raise typer.Exit(WRONG)
    if not report.has_run:
        raise inputs.BadInput("nothing ran: the page says why")
