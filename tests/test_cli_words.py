"""`trace` and `explain`, and one clear line for whatever words are wrong, of any command."""

from __future__ import annotations

import json

import pytest

from cli_kit import refusal, run


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["1", "5", "3", "9", "2"], [1, 5, 3, 9, 2]),
        (["-3"], [-3]),
        (["1", "-3", "-inf", "2"], [1, -3, "-inf", 2]),
        (["-1e-3", "+inf", "nan", "-.5"], [-0.0010000000474974513, "inf", "nan", -0.5]),
        (["-infinity", "-nan", "-0"], ["-inf", "nan", -0.0]),
        (["--", "-3", "2"], [-3, 2]),
        (["1,-5, 3"], [1, -5, 3]),
        (["[1 -5]"], [1, -5]),
    ],
)
def test_trace_takes_any_number(words: list[str], values: list[object]):
    for arguments in (["--json", *words], [*words, "--json"]):
        if "--" in words and arguments[-1] == "--json":
            continue  # behind "--" all is values
        found = json.loads(run("trace", *arguments))
        assert [value for step in found["steps"] for value in step["values"]] == values


def test_trace_of_the_worked_example():
    found = json.loads(run("trace", 1, 5, 3, 9, 2, "--block", 3, "--json"))
    states = [(step["m"], round(step["d"], 6)) for step in found["steps"]]
    assert states == [(5.0, 1.153651), (9.0, 1.022042)]
    page = run("trace", 1, 5, 3, 9, 2, "--block", 3)
    assert "1.153651" in page
    assert "1.022042" in page


@pytest.mark.parametrize("words", [["1", "two"], ["--bogus", "1"], ["1", "-x"], [""]])
def test_trace_refuses_in_one_line(words: list[str]):
    refusal("trace", *words)


def test_trace_usage():
    run("trace", exit_code=2)
    run("trace", 1, "--block", 0, exit_code=2)


def test_explain():
    assert run("explain", 4096, 4096).startswith("v3_register_cache: 4096 columns fit")
    page = run("explain", 1, 1048576, "--dtype", "bf16", "--arch", "90")
    assert page.startswith("v5_split_row: ")
    assert "not v3_register_cache: " in page
    assert run("explain", 3, 4, "--dtype", "double").startswith("reference: ")
    assert "known are" in refusal("explain", 3, 4, "--arch", "sm_1")
    assert "int8" in refusal("explain", 3, 4, "--dtype", "int8")
    run("explain", 3, exit_code=2)
    run("explain", -3, 4, exit_code=2)


def test_explain_on_a_gpu_without_facts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("online_softmax.lab.arguments.arches", lambda _: ["sm_103"])
    assert refusal("explain", 3, 4).startswith("error: no facts about 'sm_103'; known are sm_75")
