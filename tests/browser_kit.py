"""Pages in a real Chromium for tests: opened at a width, watched, and closed with an assertion.

    with open_page(path, width=390, scheme="dark") as page:
        page.get_by_role("button", name="Next").click()
        assert overflows(page) == []

Each process, so each worker of xdist, starts one browser at its first page and keeps it.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
LOCAL = ("file", "data", "blob", "about")  # schemes that stay on this machine
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # What a page asks for elsewhere is seen, and gets nowhere.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
)
HEIGHT = 900
MILLISECONDS = 10_000  # that an element, or a state, may take to appear
STEP = 50  # of them, between two looks at a state

# The elements that reach past the right edge, if the page scrolls sideways.
OVERFLOWS = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  const past = [...document.querySelectorAll("body *")].filter(
    (each) => each.getBoundingClientRect().right > width + 0.5);
  return (past.length ? past : [document.body]).slice(0, 10).map((each) =>
    each.tagName.toLowerCase() + (each.id && "#" + each.id)
      + [...each.classList].map((name) => "." + name).join(""));
}"""


@contextmanager
def open_page(
    path_or_url: str | Path,
    width: int = 1440,
    scheme: Literal["light", "dark"] = "light",
    *,
    origin: str = "",
    **context: Any,
) -> Iterator[Page]:
    """A page in a fresh context; at the end it had no error and asked for nothing elsewhere.

    Skips without Chromium or Playwright; with CI=true it fails.

    Args:
        path_or_url: a file, or an address: file:, about:, http://localhost:...
        width: of the window in CSS pixels; its height is 900.
        scheme: what prefers-color-scheme says.
        origin: "http://localhost:8000", if the test serves the page: requests to it may be made.
        context: more for Playwright's `new_context`: locale, reduced_motion, accept_downloads...
    """
    size: Any = {"width": width, "height": HEIGHT}
    wrong: list[str] = []
    given = browser().new_context(viewport=size, color_scheme=scheme, **context)
    try:
        page = given.new_page()
        page.set_default_timeout(MILLISECONDS)
        page.on("console", lambda said: wrong.extend(_error(said)))
        page.on("pageerror", lambda error: wrong.append(f"page error: {error}"))
        given.on("request", lambda request: wrong.extend(_leaves(request.url, origin)))
        page.goto(_address(path_or_url))
        yield page
        page.evaluate("0")  # what was said until now has arrived after this round trip
    finally:
        given.close()
    assert wrong == [], wrong


def overflows(page: Page) -> list[str]:
    """What sticks out to the right, if the page scrolls sideways; [] if it does not."""
    return page.evaluate(OVERFLOWS)


def until(page: Page, expression: str) -> None:
    """Wait for a state of the page; by its own evaluations, which a page's policy cannot forbid."""
    for _ in range(MILLISECONDS // STEP):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(STEP)
    raise AssertionError(f"after {MILLISECONDS} ms it is still not so: {expression}")


@functools.cache
def browser() -> Browser:
    """The Chromium of this process."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        _lacking(f"no browser: none of {', '.join(NAMES)} is on PATH (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _lacking("Playwright is not installed (pip install playwright)")
    started = sync_playwright().start()
    atexit.register(started.stop)  # and with it its browser
    return started.chromium.launch(executable_path=found, args=list(ARGUMENTS))


def _lacking(what: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


def _address(path_or_url: str | Path) -> str:
    given = str(path_or_url)
    is_url = not isinstance(path_or_url, Path) and urlsplit(given).scheme
    return given if is_url else Path(given).resolve().as_uri()


def _error(said: ConsoleMessage) -> list[str]:
    return [f"console: {said.text}"] if said.type == "error" else []


def _leaves(url: str, origin: str) -> list[str]:
    is_here = urlsplit(url).scheme in LOCAL
    is_allowed = bool(origin) and url.startswith(f"{origin.rstrip('/')}/")
    return [] if is_here or is_allowed else [f"request: {url}"]
