"""The command `report`: what was stored as one page, as pictures or as tables."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from online_softmax.lab import fitting
from online_softmax.lab.options import option

if TYPE_CHECKING:
    from online_softmax.lab.reportdata import Report

FORMATS = {"html": "report.html", "png": "report", "md": "report.md"}  # and what each writes

HELP = """Show what was measured: one page with every figure and the table behind it. No GPU needed.

RESULTS: files that `bench --save`, `ladder --save` and `profile --save` kept, or folders of them. \
Default: the stored results of this checkout, an H200's. The page is one file and asks the network \
for nothing; png draws pictures into a folder, md writes the tables.

\b
Examples:
  online-softmax report --open
  online-softmax report run.jsonl ladder.jsonl -o mine.html
  online-softmax report benchmarks/results/h200 --format png -o pictures
  online-softmax report run.jsonl --format md -o run.md"""

Results = Annotated[
    list[str] | None, typer.Argument(metavar="RESULTS", show_default=False, hidden=True)
]
Output = Annotated[
    str | None,
    option(
        "Where to. Default: report.html, report.md, or the folder report.", "FILE", "-o", "--output"
    ),
]
Format = Annotated[str, option("html, png or md. Default: html.", "NAME", "--format")]
Open = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]


def report(
    results: Results = None, output: Output = None, kind: Format = "html", shown: Open = False
) -> None:
    """Read, write, open."""
    from online_softmax.lab import arguments, places, reportdata, reportread
    from online_softmax.lab.inputs import BadInput

    arguments.word("-o", output, "a file")
    if kind not in FORMATS:
        raise BadInput(f"--format {kind}: give {', '.join(FORMATS)}")
    if shown and kind != "html":
        raise BadInput(f"--open shows a page, and --format {kind} writes none: give one of the two")
    target = Path(output or FORMATS[kind])
    if kind != "png":
        target = places.place("-o", str(target))
    given = list(map(Path, results or [])) or [reportread.default()]
    found = reportread.read(given)
    places.apart({**{str(path): path for path in given}, "-o": target})
    said = ", ".join(map(reportread.shown, given))
    first = reportread.places()[0]
    none = f"; none in {first}" if not results and given[0] != first else ""
    count = len(found.files)
    fitting.say(f"results: {said}, {count} file{'' if count == 1 else 's'}{none}", err=True)
    for line in found.passed:
        fitting.say(line, err=True)
    _write(reportdata.Report(found), kind, target)
    if shown and not webbrowser.open(target.resolve().as_uri()):
        fitting.say(f"no browser was found: open {target} in one", err=True)


def _write(report: Report, kind: str, target: Path) -> None:
    from online_softmax.lab import htmlreport, reportmd, reportpng
    from online_softmax.lab.inputs import BadInput

    try:
        if kind == "png":
            for path in reportpng.draw(report, target):
                fitting.say(f"{path} written", err=True)
            return
        text = htmlreport.page(report) if kind == "html" else reportmd.page(report)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"-o {target} cannot be written: {error.strerror}") from None
    kilobytes = target.stat().st_size / 1e3
    said = f"{kilobytes / 1e3:.1f} MB" if kilobytes > 1e3 else f"{kilobytes:.0f} kB"
    fitting.say(f"{target} written, {said}", err=True)
