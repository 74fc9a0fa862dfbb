"""The kit for pages sees what it must: errors, requests that leave, a page that is too wide."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import browser_kit
from browser_kit import open_page, overflows, until


def page_file(folder: Path, body: str) -> Path:
    path = folder / "x y.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><title>x</title>{body}")
    return path


def test_a_quiet_page(tmp_path: Path):
    path = page_file(
        tmp_path, "<p id=p>é</p><img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>"
    )
    with open_page(path, 390, "dark") as page:
        assert page.locator("#p").inner_text() == "é"
        assert page.evaluate("innerWidth") == 390
        assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        assert overflows(page) == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("<script>console.error('no', 3)</script>", "console: no 3"),
        ("<script>nowhere()</script>", "nowhere is not defined"),
        ("<script>setTimeout(() => { throw new Error('late') })</script>", "page error: late"),
        ("<img src='https://example.invalid/x.png'>", "request: https://example.invalid/x.png"),
        ("<script>fetch('http://localhost:9/')</script>", "request: http://localhost:9/"),
    ],
)
def test_what_is_wrong_is_seen(tmp_path: Path, body: str, why: str):
    with pytest.raises(AssertionError, match=why), open_page(page_file(tmp_path, body)) as page:
        # What a page begins at once is done before a timer that begins now.
        page.evaluate("new Promise((done) => setTimeout(done, 10))")


def test_a_state_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    late = "<script>setTimeout(() => { document.title = 'there' }, 200)</script>"
    with open_page(page_file(tmp_path, late)) as page:
        until(page, "document.title === 'there'")
        monkeypatch.setattr(browser_kit, "MILLISECONDS", 100)
        with pytest.raises(AssertionError, match=r"after 100 ms .*: document.title === 'gone'"):
            until(page, "document.title === 'gone'")


def test_too_wide(tmp_path: Path):
    path = page_file(tmp_path, "<div style='width: 500px' class=wide id=box>x</div>")
    with open_page(path, 390) as page:
        assert overflows(page) == ["div#box.wide"]
    with open_page(path, 1440) as page:
        assert overflows(page) == []


def test_an_origin_that_the_test_serves():
    assert browser_kit._leaves("http://localhost:80/x", "http://localhost:80") == []
    assert browser_kit._leaves("http://localhost:801/x", "http://localhost:80")


@pytest.mark.parametrize(
    ("environment", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
def test_without_a_browser(
    monkeypatch: pytest.MonkeyPatch, environment: str, outcome: type[Exception]
):
    monkeypatch.setenv("CI", environment)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(outcome, match="no browser: none of chromium, "):
        browser_kit.browser.__wrapped__()
