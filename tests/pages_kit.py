"""What a page in Markdown is made of, so that the same page in two languages can be compared."""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DRAWN = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
CODE = re.compile(r"``.+?``|`[^`\n]+`")
LINK = re.compile(r"!?\[(?:`[^`]*`|[^\]`])*\]\(([^)\s]+)\)")
ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
RAISED = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"
NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_.])(\d+(?:,\d{{3}})*(?:\.\d+)?)([{RAISED}]*)( million| ?[万亿])?"
)
POWERS = "2 的幂"  # powers of two, where English has no digit
TIMES = {"million": 10**6, "万": 10**4, "亿": 10**8}


class Section(NamedTuple):
    """A heading's level, and how often each number and each piece of code stands beneath it."""

    level: int
    numbers: Counter[str]
    code: Counter[str]


def without_blocks(text: str) -> str:
    """The page without code blocks and drawn tables."""
    return FENCE.sub("", DRAWN.sub("", text))


def sections(text: str) -> list[Section]:
    found = [Section(0, Counter(), Counter())]
    for line in without_blocks(text).splitlines():
        if heading := re.match(r"(#+) ", line):
            found.append(Section(len(heading[1]), Counter(), Counter()))
        _, numbers, code = found[-1]
        code.update(CODE.findall(line))
        numbers.update(numbers_of(line))
    return found


def numbers_of(line: str) -> list[str]:
    """Numbers outside code, links' targets and names (float32, sm_90a): 1.5 million is 1500000."""
    line = CODE.sub("", ANCHOR.sub("", re.sub(r"\]\([^)\s]+\)", "]", line)))
    line = re.sub(rf"https?://\S+|{POWERS}", "", line)
    found = []
    for digits, raised, times in NUMBER.findall(line):
        value = Decimal(digits.replace(",", "")) * TIMES.get(times.strip(), 1)
        found.append(f"{value.normalize():f}{raised}")
    return found


def blocks(text: str) -> list[tuple[str, str]]:
    """Code blocks: language, and text without comments."""
    found = []
    for language, body in FENCE.findall(DRAWN.sub("", text)):
        comment = r"[ \t]*//.*" if language == "cpp" else r"[ \t]*(?<!\S)#.*"
        found.append((language, re.sub(comment, "", body)))
    return found


def links(text: str) -> Counter[str]:
    """Where the page's links lead, those of drawn tables too."""
    return Counter(LINK.findall(FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """What a link may name after `#`: headings as GitHub and the site write them, and <a id>."""
    bare = without_blocks(text)
    found = set(ANCHOR.findall(bare))
    for heading in re.findall(r"^#+ (.+)$", bare, flags=re.MULTILINE):
        said = re.sub(r"\]\([^)]*\)", "]", ANCHOR.sub("", heading)).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", said).replace(" ", "-"))
    return found


def tables(text: str) -> list[list[list[str]]]:
    """Every table that nobody draws: its lines, each a list of cells, without the rule."""
    found: list[list[list[str]]] = [[]]
    for line in without_blocks(text).splitlines():
        if not line.startswith("|"):
            found.append([])
        elif not set(line) <= set("|-: "):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return [table for table in found if table]


def counterpart(page: Path) -> Path:
    """The Chinese page of an English one."""
    return page.with_suffix(".zh.md")
