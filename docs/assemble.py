"""Puts build/docs together, which MkDocs makes the site of; mkdocs.yml runs this file as a hook.

build/docs is docs/, contributing.md and changelog.md, and under source/ the files of the repository
that pages link to: a link is written once, relative, as it works in the repository, and here turned
to the copy.
"""

from __future__ import annotations

import logging
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = "docs"
RENAMED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = ("zh",)  # beside English
FENCE = {
    ".cu": "cuda", ".cuh": "cuda", ".cpp": "cpp", ".h": "cpp", ".py": "python", ".sh": "bash",
    ".toml": "toml", ".yml": "yaml",
}  # fmt: skip
RAW = (".json", ".jsonl", ".log", ".npy", ".png", ".svg")  # offered as they are
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
ALONE = "---\nhide: [navigation]\n---\n\n"  # a page whose section is itself
ALONE_STEMS = ("docs/index", "docs/guide")
TRACE = "lessons/trace.html"  # pages that commands write, and what they are asked
REPORT = "report.html"
COMMANDS = {
    TRACE: ("trace", "1", "5", "3", "9", "2", "--block", "3", "--html"),
    REPORT: ("report", "-o"),
}
TRACE_MARK = "<!-- trace -->"
REPORT_MARK = "<!-- report -->"
HOME_MARK = "<!-- home -->"  # in the report, where it is part of the site
HOME = (
    '<a href="index.html">Documentation</a><a href="zh/index.html" hreflang="zh" lang="zh">文档</a>'
)
REPORT_WORDS = {"": "All that was measured, as one page", "zh": "全部测量结果，一个网页"}
TRACE_WORDS = {"": "Open it in a window of its own", "zh": "在单独的窗口中打开"}

# What a translated reference takes of an English docstring: its examples, below its own words.
EXAMPLES_ONLY = (
    "show_root_heading", "show_root_toc_entry", "show_docstring_description",
    "show_docstring_parameters", "show_docstring_attributes", "show_docstring_returns",
    "show_docstring_raises",
)  # fmt: skip
EXAMPLES = {"zh": "例子："}
OBJECT = re.compile(r"^::: \S+\n    options:\n(?:      .*\n?)+", re.MULTILINE)

LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?(?:src|data)=[\"']?"
    r"((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?=[^>]*rel=[\"']?(?:stylesheet|preconnect|preload|icon|manifest))"
    r"[^>]*?href=[\"']?((?:https?:)?//[^\"'\s>]+)"
)
IMPORTED = re.compile(r"(?:@import\s*|url\()\s*[\"']?((?:https?:)?//[^\"'\s)]+)")


# ---- the text of one page


def prose(text: str, change: Callable[[str], str]) -> str:
    """The text with `change` applied to each line outside fenced code."""
    out, fence = [], ""
    for line in text.split("\n"):
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
        elif not fence:
            line = change(line)
        out.append(line)
    return "\n".join(out)


def targets(text: str) -> list[str]:
    """Where the links of a page lead, those of other sites left out."""
    found: list[str] = []

    def keep(line: str) -> str:
        found.extend(match[2] for match in LINK.finditer(line))
        return line

    prose(text, keep)
    return [target for target in found if not re.match(r"[a-z]+:|#|//", target)]


def without_switch(text: str, path: str) -> str:
    """A page without the line that leads to itself in the other language: the site has a switch."""
    stem = re.sub(r"\.(?:zh\.)?md$", "", posixpath.basename(path))
    own = {f"{stem}.md", *(f"{stem}.{language}.md" for language in LANGUAGES)}
    other = own - {posixpath.basename(path)}

    def change(line: str) -> str:
        links = {match[2] for match in LINK.finditer(line)}
        return "" if links and links <= other and len(line) < 200 else line

    return prose(text, change)


def with_details(text: str) -> str:
    """A page whose shut parts are Markdown to the site's parser, as they are to GitHub's."""
    return prose(text, lambda line: '<details markdown="1">' if line == "<details>" else line)


# ---- where a file of the repository is in the site


def place(path: str) -> str:
    """Where a file of the repository goes below build/docs; both relative, with slashes."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if path in RENAMED:
        return RENAMED[path]
    if path.endswith((".md", *RAW)):
        return f"source/{path}"
    folder, name = posixpath.split(path)
    return posixpath.join("source", folder, name.replace(".", "-") + ".md")  # .py is no language


def resolve(target: str, page: str) -> str:
    """The file of the repository that a link of a page leads to: "" if there is none."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target.partition("#")[0]))
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    return path if (ROOT / path).is_file() and not path.startswith("..") else ""


def english_of(page: str) -> str:
    """The page that one is the translation of."""
    return re.sub(rf"\.({'|'.join(LANGUAGES)})\.md$", ".md", page)


def aside(page: str, english: str) -> str:
    """From a translation to a part of its English page: MkDocs would stay in the language."""
    up = "../" * (place(page).count("/") + 1)
    return f"{up}{place(english).removesuffix('.md')}.html"


def relink(text: str, page: str) -> str:
    """The text of a page of the repository with its links as they are in the site."""
    here = posixpath.dirname(place(page)) or "."

    def turn(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:|#|//", match[2]) or not (path := resolve(match[2], page)):
            return match[0]
        _, mark, name = match[2].partition("#")
        if mark and path != page and path == english_of(page):
            return f'<a href="{aside(page, path)}#{name}">{match[1][1:-2]}</a>'
        to = posixpath.relpath(place(path), here)
        for language in LANGUAGES:  # MkDocs takes the page of the language that is read
            to = to.replace(f".{language}.md", ".md")
        return f"{match[1]}{to}{mark}{name}{match[3]}"

    return prose(text, lambda line: LINK.sub(turn, line))


def page_of(path: str) -> str:
    """The page that a file of the repository becomes."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".md"):
        fence = "`" * max(3, *(len(run) + 1 for run in ["", *re.findall(r"`+", text)]))
        language = FENCE.get(posixpath.splitext(path)[1], "text")
        name = posixpath.basename(path)
        return f"{UNSEARCHED}# `{name}`\n\n`{path}`\n\n{fence}{language}\n{text}{fence}\n"
    text = with_details(with_pages(relink(without_switch(text, path), path), path))
    if english_of(path) != path:
        text = OBJECT.sub(with_examples, text)
    is_alone = re.sub(r"(\.zh)?\.md$", "", path) in ALONE_STEMS
    return (UNSEARCHED if place(path).startswith("source/") else ALONE if is_alone else "") + text


def with_examples(found: re.Match[str]) -> str:
    """An object of a translated reference: its docstring's examples and nothing in English."""
    options = "".join(f"      {name}: false\n" for name in EXAMPLES_ONLY)
    return f"{found[0].rstrip()}\n{options}      members: []\n"


# ---- all of it


def files() -> list[str]:
    """The repository's files that are in the site: docs/, and all that is linked from there on."""
    shown = sorted(
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / DOCS).rglob("*")
        if p.is_file() and p.suffix in (".md", ".css", ".js", *RAW)
    )
    todo = [*shown, *RENAMED]
    found = dict.fromkeys(todo)
    while todo:
        page = todo.pop()
        if not page.endswith(".md"):
            continue
        for target in targets((ROOT / page).read_text(encoding="utf-8")):
            path = resolve(target, page)
            if path and path not in found:
                found[path] = None
                todo.append(path)
    return list(found)


def write(path: Path, data: bytes) -> None:
    """Write a file that is not so already: `mkdocs serve` watches the folder."""
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def with_pages(text: str, path: str) -> str:
    """The page of the recurrence with the interactive one in it, that of speed with the report."""
    language = next((name for name in LANGUAGES if path.endswith(f".{name}.md")), "")
    report = f"[{REPORT_WORDS[language]}]({REPORT}){{ .md-button }}"
    text = text.replace(REPORT_MARK, report)
    if TRACE_MARK not in text:
        return text
    name = posixpath.basename(TRACE)
    # MkDocs turns the link to where the file is; an iframe it leaves alone.
    source = f"../../{TRACE}" if language else name
    spoken = f"#lang={language or 'en'}"
    frame = f'<iframe class="trace" src="{source}{spoken}" title="trace" loading="lazy"></iframe>'
    link = f"[{TRACE_WORDS[language]}]({name}{spoken}){{ .md-button }}"
    return text.replace(TRACE_MARK, f"{frame}\n\n{link}")


def with_home(text: str) -> str:
    """A page that a command wrote, with a link back to the site where it has a place for one."""
    return text.replace(HOME_MARK, HOME, 1)


def write_by_command(path: Path, arguments: Sequence[str]) -> None:
    """Write a page by the command that makes it; its name comes last."""
    fresh = path.with_suffix(".new.html")
    fresh.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "online_softmax", *arguments, str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    write(path, with_home(fresh.read_text(encoding="utf-8")).encode())
    fresh.unlink()


def assemble(to: Path) -> None:
    """Write the whole folder, and remove what no longer belongs there."""
    kept = set()
    for path in files():
        is_page = path.endswith(".md") or place(path).startswith("source/")
        is_raw = path.endswith(RAW)
        data = page_of(path).encode() if is_page and not is_raw else (ROOT / path).read_bytes()
        write(to / place(path), data)
        kept.add(to / place(path))
    for name, arguments in COMMANDS.items():
        write_by_command(to / name, arguments)
        kept.add(to / name)
    for path in to.rglob("*"):
        if path.is_file() and path not in kept:
            path.unlink()


# ---- what MkDocs calls


def on_startup(**_: Any) -> None:
    """Without the plugin's wish for absolute links: ours are relative, to work from a folder."""
    said = logging.getLogger("mkdocs.plugins.mkdocs_static_i18n.reconfigure")
    said.addFilter(lambda record: "extra.alternate" not in record.getMessage())


def on_config(config: Any) -> None:
    assemble(Path(config.docs_dir))


def foreign(name: str, text: str) -> list[str]:
    """What a page or style sheet would load from elsewhere, without a click."""
    pattern = IMPORTED if name.endswith(".css") else LOADED
    return [next(filter(None, match.groups())) for match in pattern.finditer(text)]


def on_post_page(output: str, page: Any = None, **_: Any) -> str:
    """A page without the head's links to its translations: the theme looks for a sitemap at each,
    beside every page; the switch of languages has links of its own. And with the one word that a
    translated reference has from its docstrings in its own language."""
    language = page.file.dest_uri.partition("/")[0] if page else ""
    if language in EXAMPLES:
        output = output.replace(">Examples:<", f">{EXAMPLES[language]}<")
    return re.sub(r"<link\b[^>]*\brel=\"?alternate\b[^>]*>", "", output)


def unparsed(text: str) -> list[str]:
    """Tables that stayed Markdown."""
    return re.findall(r"^\|[ :]*---.*$", text, re.MULTILINE)


def on_post_build(config: Any) -> None:
    """Refuse a site that needs a network, or shows Markdown. Give the index of the search as a
    script too: a page opened as a file may read no JSON."""
    index = Path(config.site_dir, "search", "search_index.json")
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}")
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix not in (".html", ".css"):
            continue
        text = path.read_text(encoding="utf-8")
        if found := foreign(path.name, text):
            raise SystemExit(f"{path}: loads {', '.join(found)}; the site must need no network")
        if path.suffix == ".html" and (found := unparsed(text)):
            raise SystemExit(f"{path}: a table that is none: {found[0]}")


# What mkdocs.plugins.event_priority sets: after each language's part of the index is in it.
on_post_build.mkdocs_priority = -200  # type: ignore[attr-defined]
