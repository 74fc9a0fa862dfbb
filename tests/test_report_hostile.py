"""Results that somebody made up: words that are markup, lines that are not of their kind. A report
shows the ones as they are, and refuses the others in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser_kit import open_page
from cli_kit import refusal
from cli_kit import run as command
from online_softmax.lab import (
    benchcompare,
    benchfile,
    htmlreport,
    reportmd,
    reportread,
    storedlines,
)
from online_softmax.lab.reportdata import Report
from online_softmax.lab.results import save
from online_softmax.lab.storedlines import text_of
from report_kit import (
    CELL,
    FORMER,
    bench_text,
    cell_row,
    climb,
    entry,
    put,
    report_of,
    rows,
    stored,
    written,
)

pytest.importorskip("plotly", reason="the page needs plotly (the extra lab)")

LINK = '<a href="https://elsewhere.example/">a &amp; link</a> %{x}'
WORDS = (LINK, "constructor", "__proto__", "toString")


def hostile(folder: Path) -> Path:
    """A page on which every word that a file may choose is one of these."""
    us = CELL.ideal_bytes / 4e6
    said = replace(entry("quack", us / 9), doubt=LINK)
    row = cell_row(CELL)
    more = tuple(entry(name, us * 2) for name in WORDS)
    calls = [{"name": w, "recorded": False, "median_us": 5.0, "p20_us": 4.0, "p80_us": 6.0}
             for w in WORDS]  # fmt: skip
    host = {"kind": "host", "op": LINK, "dtype": LINK, "rows": 8, "cols": 8, "calls": calls,
            "pieces": [], "fresh": {}}  # fmt: skip
    linear = {"kind": "linear", "tokens": 8, "features": 8, "classes": 8, "dtype": LINK,
              "device": "cuda", "entries": [{"name": w, "why": "", "median_us": 5.0,
                                             "memory_bytes": 10**6} for w in WORDS]}  # fmt: skip
    errors = {"ok": True, "why": "", "max": 1e-7, "mean": 1e-8}
    exact = {"kind": "accuracy", "op": LINK, "dtype": "float32", "rows": 8, "cols": 8,
             "values": LINK, "device": "cuda", "ours": errors, "torch": errors}  # fmt: skip
    rates = {"kind": "attention", "what": "decode", "batch": 1, "keys": 4096, "unit": "GB/s",
             "rates": dict.fromkeys(WORDS, 66.0), "rounds_ms": {}}  # fmt: skip
    memory = [{"kind": "attention_memory", "contender": w, "tokens": 8, "head_dim": 8,
               "dtype": LINK, "forward_bytes": 10**6, "with_backward_bytes": 10**7,
               "inputs_bytes": 10**6, "matrix_bytes_computed": 256} for w in WORDS]  # fmt: skip
    text = bench_text(
        replace(row, entries=(*row.entries[:3], said, *more)),
        others=(host, linear, exact, rates, *memory),
    )
    (folder / "bench.jsonl").write_text(text)
    run = climb()
    rungs = [replace(run.results[0], name=w, backend=w, idea=LINK) for w in WORDS]
    save(replace(run, results=(*run.results, *rungs)), folder / "ladder.jsonl")
    out = folder / "report.html"
    out.write_text(htmlreport.page(Report(reportread.read([folder]))))
    return out


def test_no_word_of_a_file_is_markup(tmp_path: Path):
    with open_page(hostile(tmp_path)) as page:
        page.wait_for_selector("html[data-ready=yes]")
        plots = page.eval_on_selector_all(".canvas", "all => all.map((each) => each.id)")
        assert {"plot-ladder", "plot-speed", "plot-accuracy", "plot-memory", "plot-host",
                "plot-attention-decode", "plot-attention-memory"} <= set(plots)  # fmt: skip
        assert page.locator("svg a").count() == 0
        ticks = page.locator("#plot-ladder .ytick text").all_text_contents()
        assert {each.strip() for each in ticks} >= set(WORDS)
        assert page.locator("#plot-host .ytick text").first.text_content().strip() == LINK
        page.locator("#plot-ladder .points path").nth(3).hover(force=True)  # of LINK
        hover = page.locator("#plot-ladder .hovertext").text_content()
        assert hover.startswith(f"{LINK}{LINK}")
        assert page.locator("svg a").count() == 0


# ---- lines that are not of their kind


@pytest.mark.parametrize(
    ("kind", "place", "said"),
    [
        ("accuracy", ("ours", "max", "x"), "ours.max is 'x' there, where a number from 0"),
        ("accuracy", ("rows", None), "rows is None there, where a whole number from 0"),
        ("accuracy", ("torch", []), "torch is [] there, where an object"),
        ("attention", ("rates", None), "rates is None there, where an object"),
        ("attention", ("rounds_ms", {"ours": [[]]}), "rounds_ms.ours[0] is [] there"),
        ("fusion", ("entries", 0, "median_us", -1), "entries[0].median_us is -1 there"),
        (
            "fusion",
            ("entries", 0, "median_us", 0),
            "entries[0].median_us is 0 there, where a number a",
        ),
        ("host", ("calls", 1, "median_us", 0.0), "calls[1].median_us is 0.0 there"),
        ("linear", ("entries", 0, "median_us", 0.0), "entries[0].median_us is 0.0 there"),
        ("linear", ("kind", 5), "kind is 5 there, where text"),
        ("host", ("calls", 1, "recorded", 1), "calls[1].recorded is 1 there, where true or false"),
        ("host", ("fresh", "x"), "fresh is 'x' there, where an object"),
        ("linear", ("entries", {}), "entries is {} there, where a list"),
        ("linear", ("entries", 0, {}), "entries[0].name is missing there"),
        ("linear", ("tokens", True), "tokens is True there"),
        ("linear", ("tokens", 10**400), "is no number in JSON"),
        ("linear", ("tokens", float("nan")), "NaN is no number in JSON"),
        ("linear", ("tokens", float("inf")), "Infinity is no number in JSON"),
    ],
)
def test_a_line_of_another_shape_is_refused(
    kind: str, place: tuple[Any, ...], said: str, tmp_path: Path
):
    head, line = stored(kind)
    path = written(tmp_path / "given.jsonl", head, put(line, *place))
    for words in (
        ("report", path),
        ("bench", "--from", path),
        ("bench", "--compare", path, path),
    ):
        assert said in refusal(*words)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("rows", 0), "a cell is 0 x 1024 there, where both are above 0"),
        (("cols", -5), "cols is -5 there"),
        (("dtype", "int8"), "dtype is 'int8' there, where bfloat16, float16, float32 are known"),
        (("sizes", "parts=x"), "sizes is 'parts=x' there, where names and whole"),
        (("entries", 0, "median_us", -1.0), "median_us is -1.0 there"),
        (("entries", 0, "rounds_us", ["x"]), "rounds_us is ['x'] there"),
        (("entries", 0, "median_us", True), "median_us is True there"),
        (("entries", 0, "median_us", 0.0), "median_us is 0.0 there, where a number above 0"),
        (("entries", None), "entries is None there, where a list"),
        (("entries", [None]), "entries[0] is None there, where an object"),
        (("entries", [{}]), "name is missing there"),
        (("clocks", {"reasons": [1]}), "clocks.reasons[0] is 1 there, where text"),
        (("spent", {"a": "x"}), "spent is {'a': 'x'} there"),
    ],
)
def test_a_cell_of_another_shape_is_refused(place: tuple[Any, ...], said: str, tmp_path: Path):
    head, cell = map(json.loads, bench_text(*rows()[:1]).splitlines())
    path = written(tmp_path / "given.jsonl", head, put(cell, *place))
    assert said in refusal("report", path)
    assert said in refusal("bench", "--from", path)


def test_sizes_of_another_operation_are_refused(tmp_path: Path):
    head, cell = map(json.loads, bench_text(*rows()[:1]).splitlines())
    for sizes in ("batch=2", "parts=0", ""):
        wrong = {**cell, "op": "merge", "sizes": sizes}
        path = written(tmp_path / "given.jsonl", head, wrong)
        assert f"sizes is '{sizes}' there, where merge has parts" in refusal("report", path)


def test_a_machine_of_another_shape_is_refused(tmp_path: Path):
    head, cell = map(json.loads, bench_text(*rows()[:1]).splitlines())
    path = written(tmp_path / "given.jsonl", put(head, "machine", "l2_bytes", None), cell)
    assert "machine.l2_bytes is None there" in refusal("report", path)
    lines = [json.loads(line) for line in text_of(climb().to_json()).splitlines()]
    written(path, put(lines[0], "machine", {"multiprocessors": "x"}), *lines[1:])
    assert "machine.multiprocessors is 'x' there" in refusal("report", path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda of: of.pop("machine"), "machine is missing there"),
        (lambda of: of.update(date=5), "date is 5 there, where text"),
        (lambda of: of["rungs"].update(safe=[1]), "rungs.safe is [1] there, where an object"),
        (lambda of: of["rungs"]["safe"].update(time="x"), "rungs.safe.time is 'x' there"),
        (
            lambda of: of["rungs"]["safe"].update(time=0),
            "time of safe is 0 there, where a number a",
        ),
    ],
    ids=["machine", "date", "rung", "time", "none"],
)
def test_counters_of_another_shape_are_refused(
    change: Callable[[Any], Any], said: str, tmp_path: Path
):
    found = json.loads((FORMER / "former-ncu-4096x4096-float32.json").read_text())
    change(found)
    path = tmp_path / "ncu.json"
    path.write_text(json.dumps(found))
    assert said in refusal("report", path)
    assert said in refusal("profile", "--from", path)


def test_figures_that_lack_their_other_half(tmp_path: Path):
    head, *rungs = (json.loads(line) for line in text_of(climb().to_json()).splitlines())
    path = written(tmp_path / "ladder.jsonl", {**head, "copy_us": None}, *rungs)
    assert "a copy reaches" not in command("ladder", "--from", path)
    found = json.loads((FORMER / "former-ncu-4096x4096-float32.json").read_text())
    path.write_text(json.dumps({**found, "dtype": "int8"}))
    assert "dtype is 'int8' there, where float32" in refusal("profile", "--from", path)


def test_a_time_of_0_that_is_doubted_is_no_time_to_compare(tmp_path: Path):
    row = cell_row(CELL)
    why = "its time is not above 0: nothing waited for it"
    entries = tuple(replace(e, median_us=0.0, doubt=why) for e in row.entries[:2])
    none = replace(row, entries=entries)
    paths = [tmp_path / "old.jsonl", tmp_path / "new.jsonl"]
    for path, text in zip(paths, (bench_text(row), bench_text(none)), strict=True):
        path.write_text(text)
    found = benchcompare.compare(*(benchcompare.times(benchfile.read([p])) for p in paths))
    assert {c.name: c.verdict for c in found.changes} == dict.fromkeys(
        ("ceiling", "ours"), benchcompare.LOST
    )
    assert {c.why for c in found.changes} == {why}
    back = benchcompare.compare(*(benchcompare.times(benchfile.read([p])) for p in paths[::-1]))
    assert {c.verdict for c in back.changes} == {benchcompare.SAME}


def test_numbers_are_those_of_json():
    assert storedlines.loads('{"a": [1, -2.5, 1e-320, 9000000000000000]}') == {
        "a": [1, -2.5, 1e-320, 9 * 10**15]
    }
    for text in ("NaN", "-Infinity", "1e400", "9" * 19):
        with pytest.raises(ValueError, match="is no number in JSON"):
            storedlines.loads(text)


def test_a_ratio_past_all_numbers_is_none(tmp_path: Path):
    cell = cell_row(CELL)
    tiny = replace(cell.entries[1], median_us=1e-320)
    text = bench_text(replace(cell, entries=(cell.entries[0], tiny, *cell.entries[2:])))
    report = report_of(tmp_path, text)
    assert "NaN" not in json.dumps(json.loads(json.dumps(htmlreport.results.plain(report.plain()))))
    assert htmlreport.page(report)
    assert reportmd.page(report)


# ---- a wrong result is not exact, whatever error it is said to have


def test_a_wrong_result_is_no_exact_one(tmp_path: Path):
    """A NaN where a number should be has no error: its largest is that of the others, or 0."""
    head, line = stored("accuracy")
    wrong = {"ok": False, "why": "[0, 0] is nan", "max": 0.0, "mean": 0.0}
    nothing = {"ok": False, "why": "the result is (2,)", "max": None, "mean": None}
    for given in (wrong, nothing):
        text = "".join(json.dumps(each) + "\n" for each in (head, {**line, "ours": given}))
        (row,) = report_of(tmp_path, text).sheets["accuracy"].rows
        assert row[-1] == f"WRONG: {given['why']}"
        benchfile.parse(text, "text")
    row = cell_row(CELL)
    errors = {"share_max": 0.0, "share_mean": 0.0}
    by_name = {"ours": {"ok": False, "median_us": None, **errors}, "torch": errors}
    marked = replace(row, entries=tuple(replace(e, **by_name.get(e.name, {})) for e in row.entries))
    (found,) = report_of(tmp_path, bench_text(marked)).sheets["accuracy"].rows
    assert found[-1] == "no"


def test_a_memory_without_a_time_is_no_tile(tmp_path: Path):
    head, line = stored("linear")
    line["entries"][0] |= {"median_us": None, "why": "out of memory in the rounds"}
    text = "".join(json.dumps(each) + "\n" for each in (head, line))
    tiles = report_of(tmp_path, text).plain()["tiles"]
    assert not [each for each in tiles if "linear_cross_entropy" in each["of"]]
