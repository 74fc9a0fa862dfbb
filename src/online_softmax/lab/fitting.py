"""What a terminal shows is no wider than it: sentences are wrapped, tables parted, and columns of a
Markdown page left out with a word about it. What is piped stays as it is."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

INDENT = 2  # of tables, and of what a sentence goes on with
GAP = 2  # between columns
BAR_FROM = 100  # columns of a terminal that has room for a bar of progress beside its words
WORDS = 24  # columns that a column of words has at least, if it has so many
RULE = re.compile(r"\|( *:?-+:? *\|)+ *")  # below a Markdown table's headings
ITEM = re.compile(r"\s*(- )?")  # before a line's first word


# ---- sentences


def columns(err: bool = False) -> int | None:
    """Of the terminal that standard output, or error, is; None: it is none."""
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # a stream that stands for one
        return None


def wrapped(text: str, width: int, hang: int | None = None) -> str:
    """Lines of at most so many columns, but for a word that is longer; what a line goes on with
    stands `hang` columns in, by default a little further than its begin.

    >>> print(wrapped("  not this: it is too long", 16))
      not this: it
        is too long
    """
    found = []
    for line in text.split("\n"):
        start = ITEM.match(line)
        begun = start.end() if start else 0
        further = hang
        if further is None:
            further = begun if line[:begun].strip() else begun + INDENT
        kept = textwrap.wrap(
            line, width, subsequent_indent=" " * further, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
        found += kept or [line]
    return "\n".join(found)


def say(text: str, err: bool = False, hang: int | None = None) -> None:
    """Print a sentence, or several lines of them."""
    width = columns(err)
    typer.echo(wrapped(text, width, hang) if width else text, err=err)


def examples(text: str, width: int) -> str:
    """Help whose lines are wrapped but for commands: those that are too long go on behind a
    backslash, so that they can be copied, and what is said of a command goes on below itself.

    >>> print(examples("  a-command --of several", 20))
      a-command --of \\
          several
    """
    found = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        said = re.search(r"\S {2,}(?=\S)", line)
        if len(line) <= width:
            found.append(line)
        elif said:
            found.append(wrapped(line, width, said.end()))
        else:
            parts = wrapped(line, width - 2, indent + 2 * INDENT).split("\n")
            found.append(" \\\n".join(parts))
    return "\n".join(found)


# ---- Markdown


def markdown(page: str, width: int) -> str:
    """A page for a terminal: sentences wrapped; of a table that is too wide the last columns are
    left out, and it is said which."""
    found: list[str] = []
    lines = page.split("\n")
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        if end > at + 1 and RULE.fullmatch(lines[at + 1]):
            found += _table(lines[at:end], width)
            at = end
        else:
            found.append(wrapped(lines[at], width))
            at += 1
    return "\n".join(found)


def _table(lines: Sequence[str], width: int) -> list[str]:
    rows = [line.strip().strip("|").split(" | ") for line in lines]
    rows = [[cell.strip() for cell in row] for row in rows]
    rows[1] = [cell.strip() for cell in lines[1].strip().strip("|").split("|")]
    count = len(rows[0])
    while count > 1 and any(len(_line(row[:count])) > width for row in rows):
        count -= 1
    kept = [_line(row[:count]) for row in rows]
    if left := rows[0][count:]:
        kept += ["", wrapped(f"Too narrow here for: {', '.join(left)}.", width)]
    return kept


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---- tables


@dataclass(frozen=True)
class Field:
    """A column of a table."""

    heading: str
    justify: Literal["left", "right"] = "right"
    is_words: bool = False  # its cells may be broken between words
    style: str = ""  # of the heading


def console(narrowest: int) -> Console:
    """A terminal as wide as it is; what is piped is no narrower than that, or COLUMNS."""
    from rich.console import Console

    found = Console(highlight=False)
    widen(found, narrowest)
    return found


def widen(console: Console, narrowest: int) -> None:
    """The same of a console that is there."""
    if not console.is_terminal:
        console.width = max(console.width, narrowest)


def show(
    console: Console, fields: Sequence[Field], rows: Iterable[Sequence[Text]], keys: int = 1
) -> None:
    """Print a table; on a terminal that is too narrow, in parts one below the other, each with the
    first `keys` columns again."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table

    rows = list(rows)
    every = list(range(len(fields)))
    parts = [every]
    if console.is_terminal:
        cells = [[fields[i].heading, *(row[i].plain for row in rows)] for i in every]
        needs = [_needs(field, found) for field, found in zip(fields, cells, strict=True)]
        parts = parted(needs, keys, console.width - INDENT)
    for place, part in enumerate(parts):
        drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        for i in part:
            drawn.add_column(
                fields[i].heading, justify=fields[i].justify, header_style=fields[i].style or None,
                no_wrap=not fields[i].is_words, overflow="fold",
            )  # fmt: skip
        for row in rows:
            drawn.add_row(*(row[i] for i in part))
        if place:
            console.print()
        console.print(Padding(drawn, (0, 0, 0, INDENT), expand=False))


def _needs(field: Field, cells: Sequence[str]) -> int:
    widest = max(map(len, cells))
    if not field.is_words:
        return widest
    longest = max((len(word) for cell in cells for word in cell.split()), default=0)
    return min(widest, max(longest, WORDS))


def parted(needs: Sequence[int], keys: int, room: int) -> list[list[int]]:
    """The columns of each part of a table: as many as fit beside the keys, one at the least.

    >>> parted([5, 4, 4, 4], 1, 15)
    [[0, 1], [0, 2], [0, 3]]
    >>> parted([5, 4, 4, 4], 1, 17)
    [[0, 1, 2], [0, 3]]
    """
    keys = min(keys, len(needs))
    found: list[list[int]] = []
    at = keys
    while at < len(needs) or not found:
        part = list(range(keys))
        while at < len(needs) and (
            len(part) == keys or sum(needs[i] + GAP for i in [*part, at]) - GAP <= room
        ):
            part.append(at)
            at += 1
        found.append(part)
    return found
