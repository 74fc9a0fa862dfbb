"""The site: docs/assemble.py puts it together; it stands alone, and is found through."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from browser_kit import open_page, overflows
from house import ROOT
from pages_kit import anchors

_spec = importlib.util.spec_from_file_location("assemble", ROOT / "docs" / "assemble.py")
assemble = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(assemble)

# ---- how the site is put together


def test_links_are_turned_to_the_copies():
    text = "[a](../src/online_softmax/plan.py) [b](guide.zh.md#x) ![c](ladder.png) [d](#e)\n"
    text += "[f](../CONTRIBUTING.md#style) [g](https://example.org) [h](../benchmarks/results/h200)"
    assert assemble.relink(text, "docs/api.md") == (
        "[a](source/src/online_softmax/plan-py.md) [b](guide.md#x) ![c](ladder.png) [d](#e)\n"
        "[f](contributing.md#style) [g](https://example.org) "
        "[h](source/benchmarks/results/h200/README.md)"
    )
    assert assemble.relink("[a](docs/guide.md)", "CHANGELOG.md") == "[a](guide.md)"
    assert assemble.relink("[a](../choosing.md)", "docs/lessons/safe.md") == "[a](../choosing.md)"
    said = "[a](b.md) [c](safe.md#what) [d](safe.md)"
    assert assemble.relink(said, "docs/lessons/safe.zh.md") == (
        '[a](b.md) <a href="../../lessons/safe.html#what">c</a> [d](safe.md)'
    )
    code = "```\n[a](../README.md)\n```"
    assert assemble.relink(code, "docs/api.md") == code


def test_the_line_that_switches_the_language_is_left_out():
    text = "# A\n\n[中文](a.zh.md)\n\nSee [b](b.md) and [中文](a.zh.md).\n"
    assert assemble.without_switch(text, "docs/a.md") == text.replace("[中文](a.zh.md)\n", "\n", 1)
    assert assemble.without_switch("[English](a.md)", "docs/a.zh.md") == ""
    assert assemble.without_switch("[a](a.md#b)", "docs/a.md") == "[a](a.md#b)"


def test_anchors_are_those_of_the_site():
    slugs = pytest.importorskip("pymdownx.slugs")
    for heading in ("A result of your own: out=", "Which kernel, and why", "空行 1 · a_b-c"):
        assert slugs.slugify(case="lower")(heading, "-") in anchors(f"# {heading}")


def test_pages_that_commands_write_are_shown():
    text, page = "a\n\n<!-- trace -->\n", "docs/lessons/recurrence.md"
    assert 'src="trace.html#lang=en"' in assemble.with_pages(text, page)
    assert "](report.html)" in assemble.with_pages("<!-- report -->", "docs/performance.md")
    said = assemble.with_pages(text, page.replace(".md", ".zh.md"))
    assert 'src="../../lessons/trace.html#lang=zh"' in said
    assert "](trace.html#lang=zh)" in said


def test_the_report_leads_back_to_the_site():
    """Where it is part of it; a page that a person writes has no such link."""
    template = (ROOT / "src/online_softmax/lab/web/report.html").read_text()
    assert "index.html" not in template
    found = assemble.with_home(template)
    assert '<span>report</span><a href="index.html">Documentation</a>' in found
    assert assemble.HOME_MARK not in found


def test_a_translated_reference_has_the_examples_alone():
    text = "::: online_softmax.softmax\n    options:\n      heading_level: 3\n\n## b\n"
    found = assemble.OBJECT.sub(assemble.with_examples, text)
    assert found.startswith(text.partition("\n\n")[0] + "\n      show_root_heading: false\n")
    assert found.endswith("      members: []\n\n## b\n")
    assert "_examples" not in found
    for uri, word in (("zh/reference/rows.html", "例子："), ("reference/rows.html", "Examples:")):
        page = types.SimpleNamespace(file=types.SimpleNamespace(dest_uri=uri))
        assert assemble.on_post_page("<b>Examples:</b>", page) == f"<b>{word}</b>"


def test_what_is_shut_is_markdown_too():
    text = "<details>\n<summary>a</summary>\n\n| a |\n| --- |\n\n</details>\n```\n<details>\n```"
    assert assemble.with_details(text) == text.replace("<details>", '<details markdown="1">', 1)
    assert assemble.unparsed("<p>\n| a | b |\n| --- | ---: |\n") == ["| --- | ---: |"]
    assert assemble.unparsed("<table><tr><td>---</td></tr></table>\n<code>| --- |</code>") == []


def test_what_a_page_loads_from_elsewhere_is_seen():
    page = '<script src="https://a/x.js"></script><link rel="stylesheet" href="//b/c.css">'
    page += (
        '<a href="https://fine">x</a><img src="here.png"><link rel="canonical" href="https://f">'
    )
    assert assemble.foreign("x.html", page) == ["https://a/x.js", "//b/c.css"]
    style = '@import "https://d/e.css"; a { background: url(//f/g.png) url(h.png) }'
    assert assemble.foreign("x.css", style) == ["https://d/e.css", "//f/g.png"]


# ---- the site

BUILT, STAMP = ROOT / "build" / "site", ROOT / "build" / "site.built"  # by `make docs`
MADE_OF = ("docs", "src/online_softmax", "benchmarks", "README.md", "README.zh.md",
           "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml")  # fmt: skip


def is_fresh(stamp: Path, made_of: Iterable[Path]) -> bool:
    """Whether a build that ended well began after the last change of what it is made of."""
    if not stamp.is_file():
        return False
    every = [path for each in made_of for path in (each, *each.rglob("*")) if path.is_file()]
    times = [path.stat().st_mtime for path in every if "__pycache__" not in path.parts]
    return max(times) <= stamp.stat().st_mtime


def site(folder: Path) -> Path:
    """The site: what `make docs` built, if it is fresh, else built strictly into a folder."""
    if is_fresh(STAMP, (ROOT / each for each in MADE_OF)):
        return BUILT
    (ROOT / "build" / "docs").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_a_build_is_used_while_nothing_is_newer(tmp_path: Path):
    page, cache, stamp = (tmp_path / name for name in ("docs/a.md", "docs/__pycache__/x", "built"))
    cache.parent.mkdir(parents=True)
    for path in (page, cache):
        path.write_text("")
    assert not is_fresh(stamp, [page.parent])
    stamp.write_text("")
    os.utime(stamp, (2e9, 2e9))
    os.utime(cache, (3e9, 3e9))
    assert is_fresh(stamp, [page.parent])
    os.utime(page, (2e9 + 1, 2e9 + 1))
    assert not is_fresh(stamp, [page.parent])


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def searched_as_files(folder: Path) -> None:
    """Pages opened from the disk, without a server: found through in both languages."""
    for name, words, heading in (("zh/guide", "合并状态", "解码"), ("index", "ragged", "Limits")):
        with open_page(folder / f"{name}.html") as page:
            search = page.locator("input.md-search__input")
            search.click()
            search.fill(words)
            search.press("End")  # the theme waits for a key
            page.locator(".md-search-result__link", has_text=heading).first.wait_for()


def test_the_site_stands_alone_and_is_found_through(tmp_path: Path):
    """Built strictly; no error in the console, no request elsewhere, no page wider than a phone."""
    pytest.importorskip("mkdocs", reason="mkdocs is missing: the extra docs brings it")
    folder = site(tmp_path)
    searched_as_files(folder)
    for page in (folder / "zh" / "reference").glob("*.html"):
        assert not re.search(r"Raises:|Returns:|Args:|Examples:", page.read_text()), page
    with served(folder) as base:
        pages = ("index", "lessons/index", "reference/rows", "performance", "zh/guide")
        for page in pages:
            with open_page(f"{base}/{page}.html", 390, "dark", origin=base) as shown:
                assert overflows(shown) == [], page
        with open_page(f"{base}/report.html", 390, origin=base) as page:
            assert overflows(page) == []
            page.get_by_role("link", name="Documentation").click()
            page.wait_for_url(f"{base}/index.html")
            page.go_back()
            page.get_by_role("link", name="文档").click()
            page.wait_for_url(f"{base}/zh/index.html")
        with open_page(f"{base}/guide.html", origin=base) as page:
            page.locator(".md-header .md-select__link[hreflang=zh]").evaluate("e => e.click()")
            page.wait_for_url(f"{base}/zh/guide.html")
            page.get_by_role("heading", name="掩码与空行").wait_for()
            search = page.locator("input.md-search__input")
            search.click()
            search.fill("合并状态")
            search.press("End")  # the theme waits for a key
            found = page.locator(".md-search-result__link", has_text="解码")
            found.first.wait_for()
