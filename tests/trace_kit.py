"""The page of trace --html for tests: written once, its address, its tables, numbers compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from online_softmax.lab import tracehtml

if TYPE_CHECKING:
    from playwright.sync_api import Page


def written(folder: Path) -> Path:
    """The page of the worked example."""
    file = folder / "trace.html"
    file.write_text(tracehtml.html({"x": "1 5 3 9 2", "block": 3}), encoding="utf-8")
    return file


def address(path: Path, link: str = "") -> str:
    return f"{path.as_uri()}#{link}"


def shown(page: Page, selector: str) -> list[list[str]]:
    """A table's body."""
    return page.eval_on_selector_all(
        f"{selector} tbody tr",
        "rows => rows.map((row) => [...row.cells].map((cell) => cell.innerText.trim()))",
    )


def alike(got: Any, want: Any, rel: float = 3e-6, least: float = 1e-44) -> None:
    """Nested numbers: the same special values, finite ones within rounding."""
    if isinstance(want, dict):
        for key, inner in want.items():
            alike(got[key], inner, rel, least)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            alike(one, other, rel, least)
    else:
        assert got == pytest.approx(want, rel=rel, abs=least, nan_ok=True)
