"""What a call costs the host, measured here on the CPU: the clock, the pieces, fresh processes."""

from __future__ import annotations

import time

import pytest
import torch

import jit_kit
import jit_notes
from jit_notes import Built, Notes
from online_softmax import rowkernels, rowops
from online_softmax.cuda.launch import Launch
from online_softmax.lab import freshcost, hostcost, overridecost
from online_softmax.lab.inputs import BadInput

fresh_cache, nvrtc = jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
notes, built = jit_notes.notes, jit_notes.built


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
    monkeypatch.setattr(freshcost, "fresh", lambda *_: {"import_ms": 1.0})
    said: list[str] = []
    found = hostcost.measure(4, 64, ("torch", "quack"), "cpu", said.append)
    assert said[0] == "first call of ours"
    calls = {(each["name"], each["recorded"]): each for each in found["calls"]}
    assert set(calls) == {(n, r) for n in ("ours", "torch", "quack") for r in (False, True)}
    assert calls["ours", False]["median_us"] > 0
    assert calls["torch", True]["p20_us"] <= calls["torch", True]["p80_us"]
    pieces = {each["name"]: each["median_us"] for each in found["pieces"]}
    assert {"allocation", "planning", "checks of the arguments"} <= set(pieces)
    assert list(pieces)[-1] == "Python's rest"
    assert sum(pieces.values()) == pytest.approx(calls["ours", False]["median_us"])
    (title, _, rows), (_, _, parts), under, (_, _, first) = hostcost.tables(found)
    assert title == "Host cost of an eager call, softmax 4 x 64 float32"
    assert {row[0] for row in rows} == {"ours", "torch", "quack"}
    assert [row[0] for row in parts] == list(pieces)
    assert first == ((freshcost.NAMES["import_ms"], "1.0"),)
    assert under[0] == "Under override_torch, softmax 4 x 64 float32"
    assert under[1][1:] == tuple(f"{way}, µs" for way in overridecost.WAYS)
    assert [row[0] for row in under[2]] == list(overridecost._calls(torch.zeros(2, 3)))
    assert hostcost.tables({**found, "override": []})[2][0] == "In a fresh process"


def test_the_ways_of_an_override(monkeypatch: pytest.MonkeyPatch):
    """torch's own before there is a registration; then it passes on; then ours is called."""
    ran: list[str] = []
    for name in ("forward", "backward", "logsumexp"):
        function = getattr(rowops, name)
        monkeypatch.setattr(
            rowops,
            name,
            lambda *a, name=name, function=function: (ran.append(name), function(*a))[1],
        )
    counts = []

    def timed(calls: dict[str, hostcost.Plain]) -> dict[str, dict[str, float]]:
        ran.clear()
        for call in calls.values():
            call()
        counts.append([*ran])
        return {name: {"median_us": 1.0} for name in calls}

    lines = overridecost.measure(torch.randn(3, 5), timed)
    ours = ["forward", "forward", "backward", "forward", "logsumexp"]
    assert counts == [[], [], ours]
    assert [line["way"] for line in lines] == [way for way in overridecost.WAYS for _ in ours]
    torch.softmax(torch.zeros(2), -1)
    assert ran == ours  # it has ended

    def fails(calls: dict[str, hostcost.Plain]) -> dict[str, dict[str, float]]:
        return 1 / 0 if timed(calls) and ran else {}

    with pytest.raises(ZeroDivisionError):
        overridecost.measure(torch.randn(3, 5), fails)
    torch.softmax(torch.zeros(2), -1)
    assert ran == ours  # after an exception too


def test_the_pieces_of_a_row_kernel_s_call(monkeypatch: pytest.MonkeyPatch):
    """As where a row kernel runs, all but the driver: the launches that the call itself makes."""
    monkeypatch.setattr(rowkernels, "takes", lambda *_: True)
    x = torch.randn(3, 5)
    parts, beside = hostcost._pieces(x)
    assert list(parts) == ["checks of the arguments", "choice of the route", "allocation"]
    planning, records = (call() for call in beside.values())
    made: list[Launch] = []
    monkeypatch.setattr(rowkernels, "_run", lambda work, device: made.extend(work))
    rowops.forward("softmax", x, -1, None, 1.0, False, "")
    assert (planning[0].kernel, planning[1]) == ("registers", False)
    assert [work.symbol for work in records] == [work.symbol for work in made]


def test_the_pieces_of_a_call_like_one_before(built: Built, notes: Notes):
    x = torch.randn(3, 8)
    for _ in range(2):
        hostcost.online_softmax.softmax(x)
    lines = hostcost._apart(x, 50.0, lambda: None)
    names = [line["name"] for line in lines]
    rest = names.index("Python's rest")
    look_up = "choice of the route, look-up of the launch"
    assert names[:rest] == [look_up, "allocation", "launch"]
    assert "of a call unlike those before: checks of the arguments" in names
    assert names[-1] == "of the launch: the driver"
    assert sum(line["median_us"] for line in lines[: rest + 1]) == pytest.approx(50.0)
    own, driver = (launch.words[2:] for launch in (notes.launches[0], notes.launches[-1]))
    assert own == driver


def test_a_rival_that_is_not_here_is_a_row(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(hostcost, "import_module", missing)
    found = hostcost._whole(torch.randn(2, 8), ("liger",), lambda: None, print)
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
        hostcost._whole(torch.randn(2, 8), (), lambda: None, print)


def test_fresh_processes_say_milliseconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(freshcost, "PROCESSES", 1)
    monkeypatch.setattr(freshcost, "CHILD_SECONDS", 120)
    said: list[str] = []
    found = freshcost.fresh(4, 64, "cpu", said.append)
    assert set(found) == set(freshcost.NAMES)
    assert 0 < found["import_ms"] < found["cold_import_ms"] < 60_000
    assert [line.split(", ")[1] for line in said] == ["nothing on disk", "kernels on disk"]


def test_a_process_that_hangs_costs_its_last_steps(monkeypatch: pytest.MonkeyPatch):
    program = "import time\nprint('{\"import_ms\": 3.0}', flush=True)\ntime.sleep(60)"
    monkeypatch.setattr(freshcost, "PROGRAM", program)
    monkeypatch.setattr(freshcost, "CHILD_SECONDS", 1)
    found = freshcost.fresh(4, 64, "cpu")
    assert found == {"cold_import_ms": 3.0, "why": "still at work after 1 s"}
    assert freshcost._child(4, 64, "cpu", "")["import_ms"] == 3.0


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(freshcost, "PROGRAM", "raise ValueError('no device')")
    found = freshcost.fresh(4, 64, "cpu")
    assert found == {"why": "ended with 1: ValueError: no device"}
    line = {"calls": [], "pieces": [], "fresh": found, "op": "softmax", "rows": 2, "cols": 8}
    *_, (_, _, rows) = hostcost.tables({**line, "dtype": "float32"})
    assert rows == (("a process failed: ended with 1: ValueError: no device", "—"),)


def test_no_process_begins_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(freshcost, "PROGRAM", "print('{\"first_ms\": 3.0}')")
    monkeypatch.setattr(freshcost, "SECONDS", 0)
    said: list[str] = []
    assert freshcost.fresh(4, 64, "cpu", said.append) == {"first_ms": 3.0, "cold_first_ms": 3.0}
    assert len(said) == 2


@pytest.mark.parametrize("text", ["[8,1024]", "8,1024", "8x1024", " 8 , 1024 "])
def test_sizes(text: str):
    assert hostcost.parse(text) == (8, 1024)


@pytest.mark.parametrize("text", ["8", "0,4", "a,b", "1,2,3", ""])
def test_no_sizes(text: str):
    with pytest.raises(BadInput, match="--host"):
        hostcost.parse(text)
