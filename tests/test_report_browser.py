"""The report's page in a real Chromium: switches, tables, downloads, both themes, two widths.

browser_kit asserts at the end of each page that the console had no error and that nothing was
asked for elsewhere. A page takes a second to load, so a test looks at several things of one.
"""

from __future__ import annotations

import csv
import io
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browser_kit import OVERFLOWS, open_page, overflows, until
from online_softmax.lab import htmlreport, reportcells, reportread
from online_softmax.lab.grid import WHOLE, Cell
from online_softmax.lab.reportdata import Report
from online_softmax.lab.results import save
from report_kit import CELL, SCRIPT, STORED, bench_text, cell_row, climb, rows

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytest.importorskip("plotly", reason="the page needs plotly (the extra lab)")

# Text that stands out too little from what lies behind it, by WCAG 2 (4.5 to 1).
FAINT = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (text) => { context.fillStyle = text; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data]; };
  const light = (colour) => colour.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => { for (; node; node = node.parentElement) {
    const said = getComputedStyle(node).backgroundColor;
    if (said !== "rgba(0, 0, 0, 0)") return rgb(said); }
    return [255, 255, 255]; };
  const found = [];
  for (const node of document.querySelectorAll("body *:not(script):not(svg *)")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!own || !node.checkVisibility() || node.closest(".canvas, .unseen, .skip")) continue;
    const sides = [light(rgb(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(...sides) + 0.05) / (Math.min(...sides) + 0.05);
    if (ratio < 4.5) found.push(`${node.tagName} ${node.textContent.slice(0, 30)} ${ratio}`);
  }
  return found;
}"""
# Controls, pictures and regions of which a screen reader has no name.
NAMELESS = """() => [...document.querySelectorAll("button, select, input, summary, [role]")]
  .filter((each) => !each.getAttribute("aria-label") && !each.textContent.trim()
    && ![...(each.labels || [])].some((label) => label.textContent.trim()))
  .map((each) => each.outerHTML)"""
DRAWN = """(id) => document.getElementById(`plot-${id}`).data
  .filter((trace) => trace.hoverinfo !== "skip").map((trace) => trace.name)"""
LEVELS = """[...document.querySelectorAll("main :is(h1, h2, h3)")]
  .filter((each) => each.checkVisibility()).map((each) => Number(each.tagName[1]))"""
COLOURS = """[getComputedStyle(document.body).backgroundColor,
  document.getElementById("plot-ladder").layout.font.color]"""
OURS = """document.getElementById("plot-speed").data
  .filter((trace) => trace.name === "online-softmax").flatMap((trace) => trace.x)"""


def written(page: Path, *results: Path) -> Path:
    page.write_text(htmlreport.page(Report(reportread.read(results))))
    return page


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a few cells and a climb; one cell is impossible, one over its limit."""
    folder = tmp_path_factory.mktemp("report")
    odd = [Cell("softmax", "bfloat16", WHOLE // cols, cols) for cols in (512, 256)]
    given = [*rows(), cell_row(odd[0], 1.5), cell_row(odd[1], 1.04)]
    (folder / "bench.jsonl").write_text(bench_text(*given))
    save(climb(), folder / "ladder.jsonl")
    return written(folder / "report.html", folder)


def ready(page: Page) -> None:
    page.wait_for_selector("html[data-ready=yes]", state="attached")


def figure(page: Page, name: str) -> Locator:
    return page.locator(f"figure:has(#plot-{name})")


def table(page: Page, name: str) -> list[list[str]]:
    """The table behind a figure, opened if it is shut."""
    box = figure(page, name).locator(".more details")
    if box.get_attribute("open") is None:
        box.locator("summary").click()
    lines = box.locator("tbody").inner_text().splitlines()
    return [[cell.strip() for cell in line.split("\t")] for line in lines]


def downloaded(page: Page, button: Locator) -> tuple[str, bytes]:
    with page.expect_download() as waiting:
        button.click()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


def lines_of(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode("utf-8-sig"))))


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_stored_results_are_readable(width: int, scheme: str, tmp_path: Path):
    """Nothing scrolls sideways, text stands out, everything has a name, headings are in order."""
    with open_page(written(tmp_path / "report.html", STORED), width, scheme) as page:
        ready(page)
        assert page.locator("html").get_attribute("data-theme") == scheme
        assert page.locator("main > section[hidden]").count() == 0
        assert page.locator(".canvas > .plot-container").count() >= 11
        levels = page.evaluate(LEVELS)
        assert (levels[0], levels.count(1)) == (1, 1)
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        page.evaluate("for (const box of document.querySelectorAll('details')) box.open = true")
        until(page, "document.querySelectorAll('table').length > 20")
        assert overflows(page) == []
        assert page.evaluate(NAMELESS) == []
        assert page.evaluate(FAINT) == []


def test_switches(small: Path):
    """Lines, what is shown, types and rows; by mouse and by keyboard; the table follows."""
    with open_page(small) as page:
        ready(page)
        speed = figure(page, "speed")
        assert page.evaluate(DRAWN, "speed") == [
            "online-softmax",
            "online-softmax",
            "torch",
            "torch",
        ]
        speed.get_by_label("torch", exact=True).uncheck()
        assert set(page.evaluate(DRAWN, "speed")) == {"online-softmax"}
        speed.get_by_label("Share of the limit").focus()
        page.keyboard.press("ArrowRight")
        assert speed.get_by_label("GB/s", exact=True).is_checked()
        assert set(page.evaluate(DRAWN, "speed")) == {"online-softmax", "ceiling"}
        page.keyboard.press("Tab")  # to the first line, the ceiling's
        focused = "getComputedStyle(document.activeElement.nextElementSibling).outlineStyle"
        assert page.evaluate(focused) == "solid"
        page.keyboard.press("Space")
        assert set(page.evaluate(DRAWN, "speed")) == {"online-softmax"}
        assert [line[1] for line in table(page, "speed")] == [
            "256",
            "512",
            "1,024",
            "4,096",
            "50,257",
        ]
        speed.get_by_label("float32", exact=True).check()
        assert [line[1] for line in table(page, "speed")] == ["1,024", "4,096", "50,257"]
        speed.get_by_label("Rows").select_option("16")
        assert [line[:2] for line in table(page, "speed")] == [["16", "32,000"]]
        dark = page.evaluate(COLOURS)
        page.get_by_label("Dark", exact=True).check()
        assert all(a != b for a, b in zip(dark, page.evaluate(COLOURS), strict=True))
        page.get_by_label("Auto", exact=True).check()
        assert page.evaluate(COLOURS) == dark
        page.emulate_media(color_scheme="dark")
        page.wait_for_selector("html[data-theme=dark]")


def test_marks_and_tables(small: Path):
    """What is impossible is said and not drawn; numbers are shown as reportsheet.py shows them;
    sections without results go away."""
    report = Report(reportread.read([small.parent / "bench.jsonl", small.parent / "ladder.jsonl"]))
    with open_page(small) as page:
        ready(page)
        assert sorted(set(page.evaluate(OURS))) == [256, 1024, 4096, 50257]
        marked = figure(page, "speed").get_by_text("Marked: 2")
        marked.click()
        said = figure(page, "speed").locator(".marks li").all_inner_texts()
        assert said[0].startswith("524,288 x 256: over the limit: 104.0 % of the limit")
        assert said[1].startswith("262,144 x 512: impossible: ours: 6,000 GB/s")
        assert "1 impossible" in page.locator("#refusals").inner_text()
        (sheet, *_) = report.ladder_sheets()
        assert table(page, "ladder") == sheet.shown()
        large = [row for row in report.rows if row.cell.is_large]
        wanted = reportcells.cells_sheet(large, "softmax", "bfloat16").shown()
        shown = table(page, "speed")  # with two columns more, p20 and p80
        assert [line[:4] + line[6:8] for line in shown] == [line[:6] for line in wanted]
        hidden = "[...document.querySelectorAll('section[hidden]')].map((each) => each.id)"
        assert page.evaluate(hidden) == ["accuracy", "memory", "attention", "host"]
        assert "Memory" not in page.locator("#contents").inner_text()


def test_downloads(small: Path):
    """A figure's table, all cells, and a figure as a picture; then a narrow window."""
    with open_page(small, accept_downloads=True) as page:
        ready(page)
        speed = figure(page, "speed")
        speed.get_by_label("float32", exact=True).check()
        name, data = downloaded(page, speed.get_by_role("button", name="CSV"))
        assert name == "online-softmax-speed.csv"
        head, *lines = lines_of(data)
        assert head[:4] == ["rows", "columns", "limit µs", "µs"]
        assert [x[:2] for x in lines] == [["131072", "1024"], ["32768", "4096"], ["2670", "50257"]]
        _, data = downloaded(page, page.get_by_role("button", name="All cells as CSV"))
        head, *lines = lines_of(data)
        assert head[:6] == ["operation", "type", "rows", "columns", "values", "contender"]
        mine = [x for x in lines if x[:2] == ["softmax", "float32"] and x[3] == "4096"]
        assert [x[5] for x in mine] == ["ceiling", "ours", "torch", "quack"]
        assert float(mine[1][6]) == pytest.approx(CELL.ideal_bytes / 4e6 / 0.9, rel=1e-6)
        assert mine[3][-1] == SCRIPT
        given = '{columns: [["a", "text"]], rows: [["=1+1"], ["-1.5 %"], [-2], ["-x"], ["@a,b"]]}'
        said = page.evaluate(f"csv({given})").split("\r\n")
        assert said == ["a", "'=1+1", "-1.5 %", "-2", "'-x", '"\'@a,b"', ""]
        name, data = downloaded(page, figure(page, "ladder").get_by_role("button", name="PNG"))
        assert name == "online-softmax-ladder.png"
        assert data.startswith(b"\x89PNG")
        down = "document.getElementById('plot-few-rows').layout.yaxis.title.text"
        assert page.evaluate(down) == "rows"
        page.set_viewport_size({"width": 390, "height": 800})
        until(page, f"{down} === 'columns'")
        until(page, f"!({OVERFLOWS})().length")  # each figure takes its new width by and by


NAMED = """[...document.querySelectorAll("#plot-roofline .annotation-text-g")].map((each) => {
  const box = each.getBoundingClientRect();
  return [each.textContent.trim(), box.left, box.top, box.right, box.bottom]; })"""
HEIGHTS = """[...document.querySelectorAll(".canvas")].map((each) =>
  [each.id, each.clientHeight, each._fullLayout.height])"""
FRAME = """[...document.querySelectorAll("#plot-roofline .nsewdrag")].map((each) => {
  const box = each.getBoundingClientRect();
  return [box.left, box.top, box.right, box.bottom]; })[0]"""


@pytest.mark.parametrize("width", [390, 1440])
def test_no_name_of_the_roofline_covers_another(width: int, tmp_path: Path):
    """Of each matrix, also after the window was made narrower; and nearly all have room."""
    with open_page(written(tmp_path / "report.html", *STORED.glob("ladder-*")), width) as page:
        ready(page)
        sizes = figure(page, "roofline").get_by_label("Matrix")
        matrices = page.evaluate("data.ladder.filter((run) => run.roof).map((run) => run.size)")
        for i, matrix in enumerate(dict.fromkeys(each.rpartition(" ")[0] for each in matrices)):
            if width < 640:
                sizes.select_option(matrix)
            else:
                figure(page, "roofline").get_by_label(matrix, exact=True).check()
            if width > 640 and i == 1:
                high = page.evaluate(HEIGHTS)
                page.set_viewport_size({"width": 900, "height": 900})
                until(page, "document.getElementById('plot-roofline')._fullLayout.width < 900")
                assert page.evaluate(HEIGHTS) == high
            named, (left, top, right, bottom) = page.evaluate(NAMED), page.evaluate(FRAME)
            assert len([name for name, *_ in named if name in ("v0", "safe", "t_online")]) == 6
            assert len(named) >= 15
            for name, *box in named:
                assert left - 1 <= box[0] <= box[2] <= right + 1, (matrix, name)
                assert top - 1 <= box[1] <= box[3] <= bottom + 1, (matrix, name)
            for (one, *a), (other, *b) in itertools.combinations(named, 2):
                apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
                assert apart, f"{matrix}: {one} covers {other}"


def test_counts_without_times_are_drawn(tmp_path: Path):
    save(climb(is_timed=False), tmp_path / "run.jsonl")
    with open_page(written(tmp_path / "report.html", tmp_path / "run.jsonl"), 390) as page:
        ready(page)
        assert page.evaluate(DRAWN, "ladder") == ["reads", "writes", "exponentials"]
        shown = page.locator("main > section:not([hidden]) h2").all_inner_texts()
        assert shown == ["Machine", "The ladder", "Refusals and marks", "How to read this"]
        assert overflows(page) == []
