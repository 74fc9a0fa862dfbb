"""Pages that are one file: what is put in stays data, and no script runs but their own."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from browser_kit import open_page
from online_softmax.lab import htmlreport, tracehtml, webpage
from report_kit import CELL, bench_text, cell_row, report_of

INJECTED = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"


class Scripts(HTMLParser):
    """The texts of a page's script elements that a browser runs, as it takes them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.is_open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.is_open = tag == "script" and not attrs
        if self.is_open:
            self.found.append("")

    def handle_endtag(self, tag: str) -> None:
        self.is_open = False

    def handle_data(self, data: str) -> None:
        if self.is_open:
            self.found[-1] += data


def trace_page() -> str:
    return tracehtml.html({"x": "1 5 3 9 2", "block": 3})


def test_the_policy_has_each_script_s_digest_and_lets_nothing_else_run(tmp_path: Path):
    report = report_of(tmp_path, bench_text(cell_row(CELL)))
    for page, count in ((trace_page(), 2), (htmlreport.page(report), 2)):
        parser = Scripts()
        parser.feed(page)
        assert len(parser.found) == count
        policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)[1]
        allowed = re.search(r"script-src ([^;]*);", policy)[1].split()
        digests = [hashlib.sha256(text.encode()).digest() for text in parser.found]
        assert allowed == [f"'sha256-{base64.b64encode(each).decode()}'" for each in digests]
        assert "default-src 'none'" in policy


def test_markup_that_got_in_runs_nothing(tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text(trace_page().replace("</body>", f"{INJECTED}</body>"), encoding="utf-8")
    refused = pytest.raises(AssertionError, match="Content Security Policy")
    with refused, open_page(path) as page:
        assert page.evaluate("typeof window.onlineSoftmax") == "object"
        assert page.evaluate("typeof window.ran") == "undefined"


@pytest.mark.parametrize("value", ["</script><!--", "\u2028", "{{css}}", "\ud800", {"a": [None]}])
def test_data_comes_back_as_it_was(value: object):
    text = webpage.embedded(value)
    assert "<" not in text
    assert json.loads(text) == value
    assert text.isascii()


def test_half_a_character_is_written(tmp_path: Path):
    given = bench_text(cell_row(CELL)).replace("NVIDIA H200", "NVIDIA \\ud800")
    (tmp_path / "page.html").write_text(htmlreport.page(report_of(tmp_path, given)), "utf-8")
    assert "<title>Softmax on NVIDIA ?</title>" in (tmp_path / "page.html").read_text("utf-8")


def test_line_ends_are_those_that_a_browser_digests():
    assert webpage.script("a\r\nb\rc</SCRIPT>") == "a\nb\nc<\\/SCRIPT>"
