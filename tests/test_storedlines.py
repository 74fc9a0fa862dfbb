"""Stored lines that are not of their kind, whatever they have instead: each is refused in one line,
in words of ours, by every command that reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_kit import refusal
from online_softmax.lab import benchfile
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.storedlines import text_of
from report_kit import FIGURES, bench_text, climb, put, rows, stored, written

CELL_TEXT = bench_text(*rows()[:1])


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a line has something; of a list the first alone."""
    each = value.items() if isinstance(value, dict) else []
    if isinstance(value, list):
        each = list(enumerate(value))[:1]
    for name, inner in each:
        yield (*way, name)
        yield from places(inner, (*way, name))


@pytest.mark.parametrize("kind", ["cell", "host", "linear"])
def test_whatever_a_line_has_is_refused_in_words(kind: str):
    head, line = stored(kind) if kind in FIGURES else map(json.loads, CELL_TEXT.splitlines())
    refused: dict[tuple[Any, ...], str] = {}
    for index, place in [(i, p) for i, each in enumerate((head, line)) for p in places(each)]:
        for value in (None, [], {}, [None], "x", -1, True):
            lines = [json.loads(json.dumps(each)) for each in (head, line)]
            put(lines[index], *place, value)
            try:
                benchfile.parse("".join(json.dumps(each) + "\n" for each in lines), "text")
            except BadInput as error:
                refused[(index, *place, repr(value))] = str(error)
    assert len(refused) >= 2 * len(line)
    assert not [each for each in refused.values() if re.search("Error|NoneType|is not", each)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("null", "a line is None there, where an object is wanted"),
        ("[]", "a line is [] there, where an object is wanted"),
        ("{}", "kind is missing there"),
        ('{"kind": "header"}', "it is of `ladder`"),
        ('{"kind": "header", "what": "bench"}', "date is missing there"),
        ("[" * 10**5, "lie too deep in each other"),
        (CELL_TEXT.split("\n")[1], "begins with a line of kind 'cell' and has no header before it"),
        (CELL_TEXT + "{", "line 3 is no JSON"),
    ],
)  # fmt: skip
def test_other_lines_are_refused_in_words(lines: str, said: str, tmp_path: Path):
    path = tmp_path / "given.jsonl"
    path.write_text(lines + "\n")
    for words in (("bench", "--from", path), ("bench", "--compare", path, path)):
        line = refusal(*words)
        assert said in line
        assert "Error" not in line
    refusal("report", path)
    refusal("ladder", "--from", path)
    refusal("profile", "--from", path)


@pytest.mark.parametrize("text", ["null", "[]", "5", '"words"', "[\n1,\n2\n]"])
def test_json_that_is_no_results_is_not_said_to_be_none(text: str, tmp_path: Path):
    path = tmp_path / "given.jsonl"
    path.write_text(text)
    assert f"{path} is JSON but holds no results: give what" in refusal("report", path)


@pytest.mark.parametrize("what", ["bench", "profile"])
def test_results_of_another_format_are_refused(what: str, tmp_path: Path):
    head = {"kind": "header", "what": what, "format": 2}
    path = written(tmp_path / "given.jsonl", {**json.loads(CELL_TEXT.split("\n")[0]), **head})
    said = f"{path} is in format 2 of `{what} --save`, and this version reads format 1 alone"
    ways = {
        "bench": [("bench", "--from", path), ("bench", "--compare", path, path),
                  ("bench", "softmax", "--cells", "2x8", "--resume", "--save", path)],
        "profile": [("profile", "--from", path)],
    }  # fmt: skip
    for words in (*ways[what], ("report", path)):
        assert said in refusal(*words)


def test_a_ladder_s_time_of_0_is_refused(tmp_path: Path):
    head, *rungs = (json.loads(line) for line in text_of(climb().to_json()).splitlines())
    path = tmp_path / "ladder.jsonl"
    written(path, head, put(rungs[0], "median_us", 0.0))
    assert "median_us is 0.0 there, where a number above 0" in refusal("ladder", "--from", path)
    written(path, put(head, "copy_us", 0), *rungs[1:])
    assert "copy_us is 0 there, where a number above 0" in refusal("report", path)
