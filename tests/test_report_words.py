"""The report's fixed words: one language at a time, and the same figures in both."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from browser_kit import open_page, overflows
from online_softmax.lab import htmlreport, reportread
from online_softmax.lab.reportdata import Report
from online_softmax.lab.results import save
from report_kit import H200, bench_text, climb, rows

pytest.importorskip("plotly", reason="the page needs plotly (the extra lab)")

READY = "html[data-ready=yes]"
GIVEN = "[...document.querySelectorAll('[data-said]')].map((each) => each.dataset.said)"
LACKING = f"{GIVEN}.filter((each) => !Object.hasOwn(CHINESE, each))"
BARS = "document.getElementById('plot-speed').data.map((trace) => trace.name)"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "bench.jsonl").write_text(bench_text(*rows()))
    save(climb(), folder / "ladder.jsonl")
    page = folder / "report.html"
    page.write_text(htmlreport.page(Report(reportread.read([folder]))))
    return page


def test_each_fixed_word_has_both_languages(path: Path):
    with open_page(path, locale="en-US") as page:
        page.wait_for_selector(READY, state="attached")
        assert len(page.evaluate(GIVEN)) > 30
        assert page.evaluate(LACKING) == []
        english, bars = page.locator("main").inner_text(), page.evaluate(BARS)
        assert not re.search("[\u4e00-\u9fff]", english)
        page.get_by_label("中文", exact=True).check()
        headings = page.locator("main > section:not(.hero):not([hidden]) > h2").all_inner_texts()
        assert headings[:2] == ["机器", "阶梯"]
        assert page.locator("#contents a").all_inner_texts() == headings
        assert page.locator("h2[lang=zh-CN]").count() == page.locator("h2").count()
        assert page.locator("#documentation").inner_text().startswith("文档在")
        assert page.evaluate(BARS) == bars
        page.reload()  # what was chosen is kept
        page.wait_for_selector(READY, state="attached")
        assert page.locator("#machine h2").inner_text() == "机器"
        page.get_by_label("English", exact=True).check()
        assert page.locator("main").inner_text() == english


def test_no_fixed_title_is_without_a_translation():
    """Each sentence of the scripts that goes to the page as a title, or by way of `worded`."""
    web = Path(htmlreport.__file__).parent / "web"
    scripts = {each.name: each.read_text(encoding="utf-8") for each in web.glob("report*.js")}
    words = re.sub(r"\s+", " ", scripts.pop("report-words.js"))
    place = r'(?:title: (?:id === "losses" \? "[^"]+" : )?|title = |titled\(|worded\(.*?\), )'
    found = [re.findall(f'{place}"([^"]+)"', script) for script in scripts.values()]
    there = {text for each in found for text in each}
    assert len(there) > 15
    lacking = {text for text in there if f'"{text}": ' not in words and f" {text}: " not in words}
    assert lacking == {"All cells"}  # of a file that is downloaded


def test_a_cpus_page_speaks_of_no_gpu(tmp_path: Path):
    header = replace(H200, device="cpu", machine={"cpu": "A processor"})
    (tmp_path / "bench.jsonl").write_text(bench_text(*rows(), header=header))
    path = tmp_path / "report.html"
    path.write_text(htmlreport.page(Report(reportread.read([tmp_path]))))
    with open_page(path, locale="en-US") as page:
        page.wait_for_selector(READY, state="attached")
        said = page.locator("#reading").inner_text()
        assert "All of it was timed on a CPU" in said
        assert "Throttled" not in said
        assert "medians" not in said
        assert page.evaluate(LACKING) == []


def test_the_language_of_the_browser_comes_first(path: Path):
    with open_page(path, 390, locale="zh-CN") as page:
        page.wait_for_selector(READY, state="attached")
        assert page.locator("#machine h2").inner_text() == "机器"
        assert overflows(page) == []
