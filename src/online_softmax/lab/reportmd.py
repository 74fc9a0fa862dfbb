"""A report's tables in Markdown, in the order of the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from online_softmax.lab import reportcells, reportfused
from online_softmax.lab.reportdata import Report, tiles
from online_softmax.lab.reportsheet import Sheet, markdown


def page(report: Report) -> str:
    """Every table under its section; a section without one is left out."""
    sheets, texts = report.sheets, report.texts

    def named(*names: str) -> list[Sheet]:
        return [sheets[name] for name in names if name in sheets]

    sections: dict[str, Iterable[Sheet]] = {
        "Machine": named("machine"),
        "The ladder": report.ladder_sheets(),
        "Speed by columns": report.cell_sheets(),
        "Few rows": [reportcells.few_sheet(report.rows), *texts.get("few", ())],
        "Accuracy": named("accuracy"),
        "Memory": named("memory", "attention_memory"),
        "Attention and merges": named(*reportfused.TITLES),
        "Losses": texts.get("losses", ()),
        "Host and fusion": [*named("host"), *texts.get("host", ())],
        "Where it stands": texts.get("verdicts", ()),
        "Refusals and marks": [*named("marks"), *texts.get("refusals", ())],
    }
    parts = [
        f"# {report.title}",
        *(f"- **{t['value']}** {t['of']}: {t['note']}" for t in tiles(report)),
    ]
    head = "\n".join([parts[0], "", *parts[1:]])
    return "\n\n".join([head, *_sections(sections)]) + "\n"


def _sections(found: Mapping[str, Iterable[Sheet]]) -> Iterable[str]:
    for name, sheets in found.items():
        tables = [markdown(sheet) for sheet in sheets if sheet.rows]
        if tables:
            yield "\n\n".join([f"## {name}", *tables])
