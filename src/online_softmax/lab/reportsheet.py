"""A table of a report: raw values by column, and how each kind of value is shown.

web/report.js shows the same values by the same rules; tests/test_report_browser.py compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from online_softmax.lab.benchtable import NONE, Table, us

WORDS = ("text", "code")  # kinds of columns that are words; the others are numbers
Value = str | float | int | None


@dataclass(frozen=True)
class Sheet:
    """Columns are (name, kind); a value is None where nothing is known."""

    title: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        rows = [[compact(value) for value in row] for row in self.rows]
        return {"title": self.title, "columns": self.columns, "rows": rows, "note": self.note}

    def shown(self) -> list[list[str]]:
        """Every value as text."""
        kinds = [kind for _, kind in self.columns]
        return [[shown(k, v) for k, v in zip(kinds, row, strict=True)] for row in self.rows]


def compact(value: Value, digits: int = 7) -> Value:
    """A number without digits that nobody measured.

    >>> compact(251.90401077270508), compact(0.953829, 4), compact("a"), compact(32768)
    (251.904, 0.9538, 'a', 32768)
    """
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def shown(kind: str, value: Value) -> str:
    """A value as a table has it.

    >>> shown("us", 1234.5), shown("share", 0.0958), shown("times", 1.606), shown("count", 4096)
    ('1,234', '9.6 %', '1.61', '4,096')
    """
    if value is None or value == "":
        return NONE
    if isinstance(value, str):
        return value
    if kind == "us":
        return us(value)
    if kind == "share":
        return f"{100 * value:.1f} %"
    if kind == "error":
        return f"{value:.2e}"
    if kind in ("times", "ms"):
        return f"{value:,.2f}"
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "gigabytes":
        return f"{value / 1e9:.2f}"
    return trimmed(value)


def trimmed(value: float) -> str:
    """At most two decimals, and none that are zero.

    >>> trimmed(2.0), trimmed(2.623), trimmed(3.1)
    ('2', '2.62', '3.1')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def of_table(table: Table, title: str) -> Sheet:
    """A table of text as it is, under a title."""
    kinds = ["text" if place < table.text else "figure" for place in range(len(table.head))]
    return Sheet(title, tuple(zip(table.head, kinds, strict=True)), table.rows)


def markdown(sheet: Sheet) -> str:
    """A table in Markdown under its title."""
    kinds = [kind for _, kind in sheet.columns]
    head = [name for name, _ in sheet.columns]
    rule = ["---" if kind in WORDS else "---:" for kind in kinds]
    lines: Iterable[Sequence[str]] = [head, rule, *([_cell(c) for c in r] for r in sheet.shown())]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    note = f"\n\n{sheet.note}" if sheet.note else ""
    return f"**{sheet.title}**\n\n{body}{note}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
