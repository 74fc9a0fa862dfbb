"""`trace --html`: one page for a browser, with all that it needs inside, that steps through a walk.

Its sources are in lab/web/: the texts, the drawing, and the recurrence once more, in JavaScript,
under the names of reference/online.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from online_softmax.lab import arguments, places, webpage
from online_softmax.lab.inputs import BadInput

if TYPE_CHECKING:
    from online_softmax.lab.attentiontrace import Sizes

OPTION = "--html"
# In this order: each uses what stands before it.
SCRIPTS = ("online", "walks", "words", "parts", "tree", "row", "attention")
# What the page has room for. Names are those of Sizes, and `numbers` of a row.
LIMITS = {"numbers": 64, "queries": 8, "keys": 32, "dim": 16, "value_dim": 8}


@dataclass(frozen=True)
class Page:
    """A page to be written, and where."""

    path: Path
    given: Mapping[str, object]  # what it shows first

    @classmethod
    def of_numbers(cls, file: str | None, values: Sequence[float], block: int) -> Page | None:
        """The page of a row; None where none was asked for."""
        return cls._of(file, {"numbers": len(values)}, {"x": _text(values), "block": block})

    @classmethod
    def of_sizes(cls, file: str | None, sizes: Sizes) -> Page | None:
        """The page of an attention; its other tab has the worked example."""
        counts = {name: getattr(sizes, name) for name in LIMITS if name != "numbers"}
        return cls._of(file, counts, {"sizes": asdict(sizes), "x": "1 5 3 9 2", "block": 3})

    @classmethod
    def _of(
        cls, file: str | None, counts: Mapping[str, int], given: Mapping[str, object]
    ) -> Page | None:
        if file is None:
            return None
        arguments.word(OPTION, file, "a file")
        for name, count in counts.items():
            if count > LIMITS[name]:
                raise BadInput(f"{OPTION}: a page has room for {LIMITS[name]} {name}, not {count}")
        return cls(places.place(OPTION, file), given)

    def write(self) -> None:
        """Write the page; raises OSError."""
        self.path.write_text(html(self.given), encoding="utf-8")


def html(given: Mapping[str, object]) -> str:
    """The page as text.

    Args:
        given: `x` (numbers between spaces) and `block`; for attention `sizes`, a Sizes as a dict.
    """
    files = [*(f"trace_{name}.js" for name in SCRIPTS), "trace.js"]
    parts = {
        "css": webpage.source("trace.css"),
        "given": webpage.embedded({**given, "limits": LIMITS}),
        "js": webpage.script("\n".join(map(webpage.source, files))),
    }
    return webpage.filled("trace.html", parts)


def _text(values: Sequence[float]) -> str:
    return " ".join(repr(value).removesuffix(".0") for value in values)
