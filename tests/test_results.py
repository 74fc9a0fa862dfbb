"""Kept results are read as they were written; anything else is refused in a sentence."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from ladder_kit import EMPTY, on_cpu, timed
from online_softmax.lab import ladder, results
from online_softmax.lab.results import Result, Run
from online_softmax.lab.storedlines import text_of


@on_cpu
def test_results_are_read_as_they_were_saved(whole: Run, tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    for run in (whole, timed(whole)):
        results.save(run, path)
        assert results.read(path) == [run]
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["kind"] for line in lines] == ["header"] + ["rung"] * len(ladder.NAMES)
    path.write_text(text_of(whole.to_json()) + text_of(timed(whole).to_json()))
    assert results.read(path) == [whole, timed(whole)]
    path.write_text(json.dumps(whole.to_json(), indent=2))
    assert results.read(path) == [whole]


@on_cpu
def test_results_name_the_code_that_made_them(whole: Run, tmp_path: Path):
    versions = whole.header.versions
    assert re.fullmatch(r"[0-9a-f]{12}", versions["sources"] or "")
    assert "commit" in versions
    older = dataclasses.replace(whole.header, versions={"torch": "2.11.0"})
    path = tmp_path / "older.jsonl"
    results.save(Run(older, whole.results), path)
    assert results.read(path)[0].header.versions == {"torch": "2.11.0"}


def test_json_has_no_nan():
    result = Result("safe", "safe", "cuda", "", max_error=math.nan, every_us={"32": math.inf})
    header = EMPTY
    text = text_of(Run(header, (result,)).to_json())
    rung_line = json.loads(text.splitlines()[1])
    assert (rung_line["max_error"], rung_line["every_us"]) == (None, {"32": None})


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", '{"kind": "rung"}', '"kind"', '{"kind": "header"}', "hello"]
)
def test_other_files_are_not_results(tmp_path, text: str):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no results") as caught:
        results.read(path)
    assert "\n" not in str(caught.value)


def test_what_a_later_version_adds_is_passed_over(tmp_path):
    header = EMPTY
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"kind": "header", "new": 1, **dataclasses.asdict(header)}))
    assert results.read(path) == [Run(header, ())]


@pytest.mark.parametrize("number", [2, 0, "next"])
def test_another_format_is_named(tmp_path: Path, number: object):
    path = tmp_path / "x.jsonl"
    line = {"kind": "header", **dataclasses.asdict(EMPTY), "format": number}
    for text in (json.dumps(line), json.dumps({"header": line, "rungs": []}, indent=1)):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"is in format {number} .* reads format 1") as caught:
            results.read(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": "many"}, "rows is 'many' there, where int is wanted"),
        ({"notes": "one"}, "notes is 'one' there, where tuple"),
        ({"copy_us": "x"}, r"copy_us is 'x' there, where float \| None is wanted"),
        ({"device": None}, "device is None there, where str is wanted"),
    ],
)
def test_a_figure_of_another_kind_is_named(tmp_path: Path, change: dict[str, object], why: str):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"kind": "header", **dataclasses.asdict(EMPTY), **change}))
    with pytest.raises(ValueError, match=why):
        results.read(path)


def test_bytes_are_not_results(tmp_path: Path):
    (tmp_path / "x.jsonl").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match=r"x.jsonl holds no results"):
        results.read(tmp_path / "x.jsonl")
