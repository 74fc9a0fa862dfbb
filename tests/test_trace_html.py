"""trace --html: where the page goes, what stands in it, what is refused; no browser is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import online_softmax
from cli_kit import process, refusal, run
from house import PACKAGE, hits, subtractions_c
from online_softmax.lab import tracecli, tracehtml
from online_softmax.lab.attentiontrace import Sizes

WEB = PACKAGE / "lab" / "web"
SOURCES = sorted(WEB.glob("trace*"))


def given(page: str) -> dict[str, object]:
    """What the page is told to show."""
    (found,) = re.findall(r'<script id="given" type="application/json">(.*?)</script>', page)
    return json.loads(found)


def test_the_page_is_written_beside_the_usual_output(tmp_path: Path):
    path = tmp_path / "new" / "x y.html"
    words = ("trace", "1", "5", "-inf", "--block", "2")
    done = process(*words, "--html", str(path))
    assert (done.returncode, done.stderr) == (0, f"{path} written\n")
    assert done.stdout == run(*words)
    page = path.read_text(encoding="utf-8")
    assert given(page) == {"x": "1 5 -inf", "block": 2, "limits": tracehtml.LIMITS}
    before = path.read_bytes()
    assert json.loads(run(*words, "--json", "--html", path))["block"] == 2
    assert path.read_bytes() == before  # the same page for the same words


def test_attention(tmp_path: Path):
    path = tmp_path / "x.html"
    run("trace", "--attention", "--keys", 8, "--causal", "--html", path)
    sizes = given(path.read_text(encoding="utf-8"))["sizes"]
    assert sizes == {
        "queries": 2, "keys": 8, "dim": 4, "value_dim": 2, "block": 2, "is_causal": True
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["1", "5", "--html"], "trace.html"),
        (["--html", "1", "5"], "trace.html"),
        (["--html", "-3", "5"], "trace.html"),
        (["--html", "1,5"], "trace.html"),
        (["1", "5", "--html", "--json"], "trace.html"),
        (["--html", "a.html", "1", "5"], "a.html"),
        (["--html=1", "5"], "1"),
        (["--attention", "--html"], "trace.html"),
    ],
)
def test_the_file_may_be_left_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], name: str
):
    monkeypatch.chdir(tmp_path)
    run("trace", *words)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_words_behind_two_dashes_stay():
    assert tracecli.with_file(["--", "--html"]) == ["--", "--html"]
    assert tracecli.with_file([]) == []


MANY = " ".join(["1"] * 65)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("1 --html /", "--html / cannot be written: it is a folder"),
        ("1 --html /proc/x", "--html /proc/x cannot be written: No such file or directory"),
        (f"{MANY} --html", "--html: a page has room for 64 numbers, not 65"),
        ("--attention --queries 9 --html", "--html: a page has room for 8 queries, not 9"),
        ("--attention --keys 33 --html", "--html: a page has room for 32 keys, not 33"),
        ("--attention --dim 17 --html", "--html: a page has room for 16 dim, not 17"),
        ("--attention --value-dim 9 --html", "--html: a page has room for 8 value_dim, not 9"),
        ("two --html", "'two' is not a number"),
    ],
)
def test_refusals_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, why: str
):
    monkeypatch.chdir(tmp_path)
    assert refusal("trace", *words.split()) == f"error: {why}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blank", ["", " "])
def test_blank_is_no_file(blank: str):
    assert refusal("trace", "1", "--html", blank).endswith(": give a file")


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No room")

    path = tmp_path / "x.html"
    monkeypatch.setattr(Path, "write_text", fail)
    done = run("trace", 1, "--html", path, exit_code=2)
    assert "log-sum-exp 1" in done


def test_no_text_ends_the_script():
    page = tracehtml.html({"x": "</script><script>alert(1)</script><!--", "block": 1})
    assert "alert(1)</script>" not in page
    assert given(page)["x"] == "</script><script>alert(1)</script><!--"
    # Its own, and no other: the theme, what is given, the page.
    assert len(re.findall(r"<script", page)) == 3
    assert tracehtml.html({"x": "{{css}}", "block": 1}).count("color-scheme: light;") == 1


def test_the_page_asks_for_nothing():
    """No address but the one that names SVG; a policy that lets nothing in."""
    page = tracehtml.html({"x": "1", "block": 1})
    assert set(re.findall(r"https?://[^\s\"'<>]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert not re.search(r"\{\{|@import|url\(|<link rel=\"stylesheet", page)
    assert f"online-softmax {online_softmax.__version__}" in page
    assert len(page.encode()) < 150_000


def test_numbers_are_read_back_as_they_were():
    values = [1.0, -0.0, 0.1, 1e30, 1e-45, float("inf"), float("-inf"), 1 / 3]
    page = tracehtml.Page.of_numbers("x.html", values, 3)
    assert page is not None
    text = str(page.given["x"])
    assert text == "1 -0 0.1 1e+30 1e-45 inf -inf 0.3333333333333333"
    assert [float(each) for each in text.split()] == values
    assert tracehtml.Page.of_numbers(None, values, 3) is None
    assert tracehtml.Page.of_sizes(None, Sizes()) is None


# ---- the sources keep the house's rules


def test_maxima_are_subtracted_once_in_javascript_too():
    sites = hits(subtractions_c, ".js", root=WEB)
    assert {path: len(found) for path, found in sites.items()} == {"trace_online.js": 1}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_sources_are_short(path: Path):
    assert path.read_text().count("\n") <= 300


def test_every_source_is_in_the_page():
    named = {f"trace_{name}.js" for name in tracehtml.SCRIPTS}
    assert {path.name for path in SOURCES} == named | {"trace.js", "trace.css", "trace.html"}
