"""The page of trace --html: both languages, contrast, width, names and order of its controls."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from browser_kit import open_page, overflows
from house import PACKAGE
from online_softmax.lab import tracehtml
from online_softmax.lab.attentiontrace import Sizes
from trace_kit import address, shown, written


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("page"))


def test_languages(path: Path):
    """All texts in both, at the start by the browser's language, and switched in place."""
    with open_page(address(path, "x=1,5,inf&step=1&block=2"), locale="zh-CN") as page:
        words = page.evaluate(
            "Object.entries(onlineSoftmax.words).map(([lang, all]) => [lang, "
            "Object.fromEntries(Object.entries(all).map(([key, text]) => "
            "[key, typeof text === 'string' ? text : 'f' + text.length]))])"
        )
        english, chinese = (dict(words)[lang] for lang in ("en", "zh"))
        assert english.keys() == chinese.keys()
        sources = "".join(path.read_text() for path in (PACKAGE / "lab" / "web").glob("trace*"))
        for key, text in english.items():
            assert text.startswith("f") == chinese[key].startswith("f") or len(text) > 2
            assert text.strip()
            assert chinese[key].strip()
            is_asked = rf'"{key}"|\b{key.split("_")[0]}_\$'
            assert re.search(is_asked, sources), f"nobody asks for {key}"
        assert page.evaluate("document.documentElement.lang") == "zh-CN"
        for tab in ("row", "attention"):
            page.click(f"#{tab}-tab")
            for n in (0, 1, 2):
                page.locator("#slider").fill(str(n))
                assert "undefined" not in page.locator("body").inner_text()
        page.click("#row-tab")
        assert "当前这一步" in page.locator("h2").first.inner_text()
        page.get_by_role("button", name="English").click()
        assert page.locator("h2").first.inner_text() == "This step"
        assert page.locator("#place").inner_text() == "step 2 of 2"
        assert "undefined" not in page.locator("body").inner_text()
        page.wait_for_url(re.compile("lang=en"))
        assert page.title() == "Online softmax, step by step"


CONTRAST = """() => {
  const parse = (text) => {
    const all = text.match(/[\\d.]+/g).map(Number);
    const scale = text.startsWith("color") ? 255 : 1;
    return [...all.slice(0, 3).map((x) => x * scale), all[3] ?? 1];
  };
  const bright = ([r, g, b]) => [r, g, b].map((x) => x / 255)
    .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour[3] > 0.5) return colour;
    }
    return parse(getComputedStyle(document.body).backgroundColor);
  };
  const faint = [];
  for (const each of document.querySelectorAll("body *")) {
    const text = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!text || !each.checkVisibility() || ["SCRIPT", "OPTION"].includes(each.tagName)) continue;
    const [a, b] = [bright(parse(getComputedStyle(each).color)), bright(behind(each))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push(`${each.className || each.tagName} ${each.innerText} ${ratio}`);
  }
  return faint;
}"""
LINKS = {
    "row": "x=1,5,3,9,2,1e30,-inf,7&block=2&step=2",
    "many": f"x={','.join(str(i * 37 % 64) for i in range(64))}&block=1&step=30",
    "nan": "x=1,nan,3&block=1&step=2",
    "large": "x=1000,1001&block=1&step=2&lang=zh",
    "attention": "tab=attention&causal=1&mask=111110.011110&step=2&query=1",
    "attention-zh": "tab=attention&step=3&lang=zh",
}


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable(path: Path, width: int, scheme: str):
    with open_page(path, width, scheme, locale="en-US", reduced_motion="reduce") as page:
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        for name, link in LINKS.items():
            page.goto("about:blank")
            page.goto(address(path, link))
            assert overflows(page) == [], name
            assert page.evaluate(CONTRAST) == [], name
        page.locator("#theme").click()
        other = "light" if scheme == "dark" else "dark"
        assert page.evaluate("document.documentElement.dataset.theme") == other


def test_every_control_has_a_name_and_tab_goes_through_in_order(path: Path):
    with open_page(path, locale="en-US") as page:
        for tab in ("row", "attention"):
            page.click(f"#{tab}-tab")
            nameless = page.evaluate(
                """() => [...document.querySelectorAll("button, input, textarea, [tabindex='0']")]
                  .filter((each) => each.checkVisibility() && !(each.labels?.length
                    || each.innerText?.trim() || each.ariaLabel
                    || each.getAttribute("aria-labelledby"))).map((each) => each.outerHTML)"""
            )
            assert nameless == []
        page.click("#row-tab")
        seen = []
        while not seen or seen[-1] != "copy":
            assert len(seen) < 60
            page.keyboard.press("Tab")
            each = page.evaluate("document.activeElement.id || document.activeElement.className")
            seen.append(each)
        order = [each for each in seen if each in ("numbers", "block", "steps", "results")]
        assert order[:4] == ["numbers", "block", "steps", "results"]
        later = [each.split()[0] for each in seen[seen.index("results") :]]
        assert later[:6] == ["results", "node", "start", "back", "next", "play"]


def test_the_page_that_the_command_writes(path: Path, tmp_path: Path):
    """It opens where the words said; a text in it ends no script."""
    file = tmp_path / "x.html"
    given = {"sizes": asdict(Sizes(queries=3, keys=4, is_causal=True)), "x": "1", "block": 1}
    file.write_text(tracehtml.html(given), encoding="utf-8")
    with open_page(file) as page:
        assert page.locator("#attention-panel").is_visible()
        assert page.get_by_label("causal").is_checked()
        assert len(shown(page, "#outputs")) == 3
    file.write_text(tracehtml.html({"x": "</script><b>1", "block": 1}), encoding="utf-8")
    with open_page(file) as page:
        assert page.locator("#numbers").input_value() == "</script><b>1"
        assert page.locator("b").count() == 0


def test_copy_link(path: Path):
    with open_page(path, locale="en-US", permissions=["clipboard-write", "clipboard-read"]) as page:
        page.get_by_role("button", name="Copy link").click()
        page.get_by_text("Copied.").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == page.url
