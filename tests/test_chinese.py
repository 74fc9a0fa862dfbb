"""Chinese pages keep up with the English: parts, code, figures, links, drawn tables."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from online_softmax.lab import chinese, report
from pages_kit import (
    ROOT,
    anchors,
    blocks,
    counterpart,
    links,
    numbers_of,
    sections,
    tables,
    without_blocks,
)

LESSONS = sorted(p for p in (ROOT / "docs" / "lessons").glob("*.md") if ".zh" not in p.name)
STEMS = ("choosing", "guide", "index", "limits", "performance", "semantics")
LINKED = {"below", "slower", "accuracy", "large", "small", "refusals"}  # tables on English pages
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{stem}.md" for stem in STEMS), *LESSONS]
EVERY = [
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if counterpart(page).is_file()
]
of_each_page = pytest.mark.parametrize(
    "page", PAGES, ids=[p.relative_to(ROOT).as_posix() for p in PAGES]
)


def both(page: Path) -> tuple[str, str]:
    return page.read_text(encoding="utf-8"), counterpart(page).read_text(encoding="utf-8")


def test_every_lesson_is_there_in_chinese():
    assert len(LESSONS) >= 11
    assert [page.name for page in PAGES if not counterpart(page).is_file()] == []
    names = [p.name for p in (ROOT / "docs" / "lessons").glob("*.zh.md")]
    assert len(names) == len(LESSONS), "a Chinese lesson without its English one"


@of_each_page
def test_a_chinese_page_has_the_same_parts(page: Path):
    english, said = both(page)
    assert [s.level for s in sections(said)] == [s.level for s in sections(english)]
    shape = [(len(table), len(table[0])) for table in tables(english)]
    assert [(len(table), len(table[0])) for table in tables(said)] == shape
    drawn = [re.findall(r"<!-- (\w+:\w+) -->", text) for text in (english, said)]
    there = {name.partition(":")[0] for name in drawn[1]}
    assert [n for n in drawn[0] if n.partition(":")[0] in there] == drawn[1]
    gone = {name.partition(":")[0] for name in drawn[0]} - there
    assert gone == (LINKED if page.name == "performance.md" else set())


@of_each_page
def test_a_chinese_page_has_the_same_code(page: Path):
    english, said = map(blocks, both(page))
    assert [language for language, _ in said] == [language for language, _ in english]
    for (_, one), (_, other) in zip(english, said, strict=True):
        assert other == one


@of_each_page
def test_a_chinese_page_has_the_same_figures(page: Path):
    """In each section as often as there, and the same code in the text."""
    for number, (one, other) in enumerate(zip(*map(sections, both(page)), strict=True)):
        gone, new = one.numbers - other.numbers, other.numbers - one.numbers
        assert (dict(gone), dict(new)) == ({}, {}), f"section {number}"
        assert set(other.code) == set(one.code), f"section {number}"


@of_each_page
def test_a_chinese_page_has_the_same_links(page: Path):
    """To Chinese pages where there are any."""
    english, said = both(page)
    wanted = Counter()
    for target, often in links(english).items():
        path, at, anchor = target.partition("#")
        near = path.endswith(".md") and counterpart(page.parent / path)
        if near and near.is_file():
            path = counterpart(Path(path)).as_posix()
        wanted[f"{path}{at}{anchor}"] = often
    if wanted.pop(counterpart(page).name, 0):  # each names the other
        wanted[page.name] += 1
    parts = {target for target in links(said) if target.startswith(f"{page.name}#")}
    assert len(parts) == (len(LINKED) if page.name == "performance.md" else 0)
    found = Counter({t: often for t, often in links(said).items() if t not in parts})
    assert (dict(wanted - found), dict(found - wanted)) == ({}, {})


def test_links_find_their_anchors_in_both_languages():
    """What names a part of a page finds it in the page's Chinese too."""
    lost = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in links(page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            if not anchor or "//" in path:
                continue
            there = (page.parent / path).resolve() if path else page
            for each in {there, counterpart(there)} if there in EVERY else {there}:
                if anchor not in anchors(each.read_text(encoding="utf-8")):
                    lost.append(f"{page.name}: {target} in {each.name}")
    assert lost == []


@of_each_page
def test_a_chinese_page_is_chinese(page: Path):
    """No paragraph was left in English: where there are words, some are Chinese."""
    text = without_blocks(counterpart(page).read_text(encoding="utf-8"))
    for paragraph in text.splitlines():
        bare = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]+>", "", paragraph)
        if len(re.findall(r"[A-Za-z]{2,}", bare)) > 8 and not paragraph.startswith("- "):
            assert re.search(r"[\u4e00-\u9fff]", bare), paragraph
        assert not re.search(r"[\u4e00-\u9fff][,;?!]|[\u4e00-\u9fff]\.(?:\s|$)", bare), paragraph
        assert not unclosed(paragraph), paragraph


def test_a_kernel_has_one_name():
    """`kernel`, as in code and most of what is written about it, and no translation beside it."""
    pages = [*ROOT.glob("*.zh.md"), *(ROOT / "docs").rglob("*.zh.md"), ROOT / "mkdocs.yml"]
    assert len(pages) > 20
    for page in pages:
        assert not re.search("核函数|内核", page.read_text(encoding="utf-8")), page


def unclosed(line: str) -> list[str]:
    """Bold words that Markdown leaves as asterisks: a sign inside `**` and a letter outside."""
    parts = line.split("**")
    found = []
    for before, bold, after in zip(parts[::2], parts[1::2], parts[2::2], strict=False):
        ends = ((before[-1:], bold[:1]), (after[:1], bold[-1:]))
        if any(outside.isalnum() and not inside.isalnum() for outside, inside in ends):
            found.append(bold)
    return found


CUTS = {
    "columns, float32": "列数，float32",
    "columns, 16 bits": "列数，16 位",
    "ragged columns, float32": "不齐的列数，float32",
    "ragged columns, 16 bits": "不齐的列数，16 位",
    "classes, float32": "类别数，float32",
    "ragged classes, float32": "不齐的类别数，float32",
    "classes, 16 bits, ragged too": "类别数，16 位，不齐的也一样",
    "to so many columns, float32 / 16 bits": "列数上限，float32 / 16 位",
    "columns of few rows, 16 bits": "行少时的列数，16 位",
    "rows, at most": "至多几行",
    "none": "无",
    "softmax, log_softmax": "softmax、log_softmax",
    "their backwards": "二者的反向",
    "loss": "只算损失",
    "with gradient": "连同梯度",
    "several rows a warp": "一个 warp 多行",
    "a warp": "一个 warp",
    "a block": "一个块",
    "more": "更多",
    "`landed`, a block": "`landed`，一个块",
    "as planned": "照旧",
}


def cut(cell: str) -> str:
    """A cell of docs/choosing.md's tables of cuts in Chinese."""
    said = CUTS.get(cell, cell)
    said = re.sub(r"^to ([\d,]+)$", r"至 \1", said)
    said = re.sub(r"up to (\d+) blocks$", r"至多 \1 个块", said)
    said = re.sub(r"(\d+) blocks", r"\1 个块", said)
    said = re.sub(r"(\d+) vectors", r"\1 个向量", said)
    return said.replace(", ", "，") if "个" in said else said


def test_cuts_are_the_same_in_chinese():
    """The English ones are what the planner answers: tests/test_choosing.py."""
    english, said = map(tables, both(ROOT / "docs" / "choosing.md"))
    kept = [(one, other) for one, other in zip(english, said, strict=True) if one[0][0] in CUTS]
    assert len(kept) == 9
    for one, other in kept:
        assert other == [[cut(cell) for cell in line] for line in one]


# ---- drawn tables


def test_drawn_tables_have_the_same_figures():
    """The generator writes those that are kept: tests/test_house.py."""
    found = 0
    for page in PAGES:
        drawn = (
            re.findall(r"<!-- (\w+):begin -->(.*?)<!-- \1:end -->", text, re.S)
            for text in both(page)
        )
        english, said = map(dict, drawn)
        for name, other in said.items():
            assert (name, numbers_of(other)) == (name, numbers_of(english[name]))
            found += len(numbers_of(other)) > 0
    assert found >= 14


def test_chinese_pages_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A figure that a page has otherwise is put right, in Chinese."""
    documents = report.documents(report.stored())
    assert {counterpart(page) for page in LESSONS} <= set(documents)
    changed = tmp_path / "safe.zh.md"
    text = counterpart(LESSONS[0].with_name("safe.md")).read_text(encoding="utf-8")
    changed.write_text(text.replace("2,106", "2,107"), encoding="utf-8")
    monkeypatch.setattr(report, "LESSONS", tmp_path)
    assert report.documents(report.stored())[changed] == text


def test_words_of_tables():
    table = ["| rung | µs | of copy |", "| --- | ---: | ---: |"]
    table.append("| [`v2`](docs/lessons/v2.md) | 1,234.5 | 92 % |")
    assert chinese.said("\n".join(table)).splitlines() == [
        "| 台阶 | µs | 相对拷贝 |",
        "| --- | ---: | ---: |",
        "| [`v2`](docs/lessons/v2.zh.md) | 1,234.5 | 92 % |",
    ]
    assert chinese.said("a card, cold L2; GB/s counts one read and one write.").startswith(
        "a card，"
    )


@pytest.mark.parametrize("new", ["| a new word |", "A new note.", "| 5 apples |"])
def test_a_word_that_nobody_has_is_an_error(new: str):
    with pytest.raises(ValueError, match=r"no Chinese for .*lab/chinese\.py"):
        chinese.said(new)


# ---- the checks themselves


def test_numbers_are_found():
    line = "At 4,096 × 4,096 float32 on sm_90a (`32`, [v2](v2.md)), 33.6 million or 3,360 万: 10⁻⁵."
    assert numbers_of(line) == ["4096", "4096", "33600000", "33600000", "10⁻⁵"]


def test_bold_words_that_do_not_close_are_seen():
    assert unclosed("甲，**乙**。**丙。** 丁，戊**己**庚") == []
    assert unclosed("**甲，**乙") == ["甲，"]
    assert unclosed("甲**`乙`**，丙") == ["`乙`"]


def test_a_page_that_lags_is_seen():
    one, other = sections("# a\n5 µs, `x`\n## b\n7"), sections("# 甲\n6 µs, `x`\n## 乙\n7")
    assert one[1].numbers - other[1].numbers == Counter("5")
    assert one[2] == other[2]
    assert blocks("```cpp\nf(); // why\n```") == blocks("```cpp\nf();  // 原因\n```")
    assert anchors('## 一句 `a` <a id="one"></a>\n') == {"one", "一句-a"}
