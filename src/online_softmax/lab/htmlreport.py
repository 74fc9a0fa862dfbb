"""The page of a report: one file that asks the network for nothing, Plotly in it once.

Its sources are in web/: a template, a style sheet, scripts.
"""

from __future__ import annotations

import html
from importlib import import_module

from online_softmax.lab import results, webpage
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.reportdata import Report

SCRIPTS = (  # in this order
    "report-kit", "report-words", "report-labels", "report-ladder", "report-bench", "report-more",
    "report",
)  # fmt: skip
MISSING = "the page needs plotly: pip install 'online-softmax[lab]'; or give --format md"


def page(report: Report) -> str:
    """The whole page.

    Raises:
        BadInput: plotly is not installed.
    """
    scripts = [webpage.source(f"{name}.js") for name in SCRIPTS]
    parts = {
        "title": html.escape(report.title),
        "css": webpage.source("report.css"),
        "data": webpage.embedded(results.plain(report.plain())),  # a ratio past all numbers: none
        "plotly": webpage.script(_plotly()),
        "js": webpage.script("\n".join(scripts)),
    }
    return webpage.filled("report.html", parts)


def _plotly() -> str:
    try:
        return str(import_module("plotly.offline").get_plotlyjs())
    except ImportError:
        raise BadInput(MISSING) from None
