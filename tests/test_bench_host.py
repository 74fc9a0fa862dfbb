"""What a call costs the host, measured here on the CPU: the clock, the pieces, fresh processes."""

from __future__ import annotations

import time

import pytest
import torch

from online_softmax import rowkernels, rowops
from online_softmax.cuda.launch import Launch
from online_softmax.lab import hostcost
from online_softmax.lab.inputs import BadInput


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostcost, "BATCHES", 3)
    monkeypatch.setattr(hostcost, "CALLS", 5)


def test_batches_take_turns_and_synchronise_between():
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    found = hostcost.batches_us(calls, lambda: order.append("|"), batches=2, count=3)
    assert "".join(order) == "|aaa|bbb" * 3 + "|"
    assert {name: len(per_batch) for name, per_batch in found.items()} == {"a": 2, "b": 2}


def test_microseconds_are_those_of_a_call():
    found = hostcost.batches_us({"nap": lambda: time.sleep(0.002)}, lambda: None, 3, 2)
    assert 1900 < min(found["nap"]) < 100_000


def test_everything_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hostcost, "fresh", lambda *_: {"import_ms": 1.0})
    found = hostcost.measure(4, 64, ("torch", "quack"), "cpu")
    calls = {(each["name"], each["recorded"]): each for each in found["calls"]}
    assert set(calls) == {(n, r) for n in ("ours", "torch", "quack") for r in (False, True)}
    assert calls["ours", False]["median_us"] > 0
    assert calls["torch", True]["p20_us"] <= calls["torch", True]["p80_us"]
    pieces = {each["name"]: each["median_us"] for each in found["pieces"]}
    assert {"empty_like", "planning", "Python's rest"} <= set(pieces)
    assert sum(pieces.values()) == pytest.approx(calls["ours", False]["median_us"])
    (title, _, rows), (_, _, parts), (_, _, first) = hostcost.tables(found)
    assert title == "Host cost of an eager call, softmax 4 x 64 float32"
    assert {row[0] for row in rows} == {"ours", "torch", "quack"}
    assert [row[0] for row in parts] == list(pieces)
    assert first == (("import online_softmax, beyond torch", "1.0"),)


def test_the_pieces_of_a_row_kernel_s_call(monkeypatch: pytest.MonkeyPatch):
    """As where a row kernel runs, all but the driver: the launches that the call itself makes."""
    monkeypatch.setattr(rowkernels, "takes", lambda *_: True)
    x = torch.randn(3, 5)
    pieces = hostcost._pieces(x)
    assert list(pieces) == ["empty_like", "planning", "launch records"]
    row, streams = pieces["planning"]()
    made: list[Launch] = []
    monkeypatch.setattr(rowkernels, "_run", lambda work, device: made.extend(work))
    rowops.forward("softmax", x, -1, None, 1.0, False, "")
    assert (row.kernel, streams) == ("registers", False)
    assert [work.symbol for work in pieces["launch records"]()] == [work.symbol for work in made]


def test_a_rival_that_is_not_here_is_a_row(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(hostcost, "import_module", missing)
    found = hostcost._whole(torch.randn(2, 8), ("liger",), lambda: None)
    assert [each["why"] for each in found if each["name"] == "liger"] == [
        "ModuleNotFoundError: No module named 'liger_kernel.ops.softmax'"
    ] * 2
    (_, _, rows), *_ = hostcost.tables(
        {"calls": found, "pieces": [], "fresh": {}, "op": "softmax", "rows": 2, "cols": 8,
         "dtype": "float32"}
    )  # fmt: skip
    assert ("liger", "refuses", "—", "refuses", "—") in rows


def test_ours_failing_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hostcost.online_softmax, "softmax", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hostcost._whole(torch.randn(2, 8), (), lambda: None)


def test_fresh_processes_say_milliseconds():
    found = hostcost.fresh(4, 64, "cpu", processes=1)
    assert set(found) == {
        "import_ms", "first_ms", "further_ms", "again_ms", "cold_first_ms", "cold_further_ms",
        "cold_again_ms",
    }  # fmt: skip
    assert 0 < found["import_ms"] < 60_000
    assert set(hostcost.FRESH_NAMES) <= set(found)


@pytest.mark.parametrize("text", ["[8,1024]", "8,1024", "8x1024", " 8 , 1024 "])
def test_sizes(text: str):
    assert hostcost.parse(text) == (8, 1024)


@pytest.mark.parametrize("text", ["8", "0,4", "a,b", "1,2,3", ""])
def test_no_sizes(text: str):
    with pytest.raises(BadInput, match="--host"):
        hostcost.parse(text)
