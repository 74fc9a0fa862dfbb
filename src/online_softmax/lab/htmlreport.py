"""The page of a report: one file that asks the network for nothing, Plotly in it once.

Its sources are in web/: a template, a style sheet, scripts. Data is JSON that no reader of HTML can
mistake for markup; the page's own policy lets it load nothing from elsewhere.
"""

from __future__ import annotations

import html
import json
import re
from importlib import import_module
from pathlib import Path

import online_softmax
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.reportdata import Report

WEB = Path(__file__).resolve().parent / "web"
SCRIPTS = ("report-kit", "report-ladder", "report-bench", "report-more", "report")  # in this order
MISSING = "the page needs plotly: pip install 'online-softmax[lab]'; or give --format md"


def page(report: Report) -> str:
    """The whole page.

    Raises:
        BadInput: plotly is not installed.
    """
    parts = {
        "title": html.escape(report.title),
        "generator": f"online-softmax {online_softmax.__version__}",
        "css": _source("report.css"),
        "data": embedded(report.plain()),
        "plotly": _script(_plotly()),
        "js": _script("\n".join(_source(f"{name}.js") for name in SCRIPTS)),
    }
    # In one pass, so that what is put in is not read for places to put something.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _source("report.html"))


def embedded(value: object) -> str:
    """A value as JSON within a script element: no `<` in it, so nothing ends the element.

    >>> embedded("</script>")
    '"\\\\u003c/script>"'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _script(text: str) -> str:
    if re.search(r"</script|<!--", text, re.IGNORECASE):
        text = re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE).replace(
            "<!--", "\\x3c!--"
        )
    return text


def _source(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8").strip()


def _plotly() -> str:
    try:
        return str(import_module("plotly.offline").get_plotlyjs())
    except ImportError:
        raise BadInput(MISSING) from None
