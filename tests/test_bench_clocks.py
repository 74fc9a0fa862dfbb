"""The GPU's clocks beside a cell: read before and after, what slowed them told, measured again."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest

from bench_kit import cells, lines, make, right, setting
from online_softmax.lab import clocks, doubts, repeats
from online_softmax.lab.benchfile import Row
from online_softmax.lab.clocks import Reading

COOL = Reading(1980, 3201, 40, 300.0, (), 1_000_000, 0, 0)
LATER = replace(COOL, at_us=2_000_000, temperature_c=44)
CELL = cells(1)[0]


class NVMLError(Exception):
    """As the package's own."""


def nvml(**answers: object) -> types.ModuleType:
    """A module pynvml whose queries answer with what they are given, or raise it."""
    module = types.ModuleType("pynvml")
    vars(module).update(
        NVMLError=NVMLError, nvmlInit=lambda: None, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0, NVML_PERF_POLICY_POWER=0, NVML_PERF_POLICY_THERMAL=1,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
    )  # fmt: skip
    for name, answer in answers.items():

        def query(handle: object, *more: int, answer: object = answer) -> object:
            found = answer[more[0]] if isinstance(answer, dict) else answer
            if isinstance(found, Exception):
                raise found
            return found

        setattr(module, f"nvmlDeviceGet{name}", query)
    return module


def status(now_us: int, slowed_ns: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(referenceTime=now_us, violationTime=slowed_ns)


def test_what_nvml_says_is_read(monkeypatch: pytest.MonkeyPatch):
    slowed = {0: status(7_000_000, 5_000_000), 1: status(7_000_000, 0)}
    found = nvml(ClockInfo={1: 1410, 2: 3201}, Temperature={0: 84}, PowerUsage=699_500,
                 CurrentClocksEventReasons=4 | 32 | 1, ViolationStatus=slowed)  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", found)
    watch, note = clocks.watcher("12ab")
    assert note == ""
    reasons = ("power limit", "temperature (driver)")  # idle is none
    assert watch() == Reading(1410, 3201, 84, 699.5, reasons, 7_000_000, 5000, 0)


def test_what_a_card_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch):
    """And an old driver's name for the reasons is taken."""
    no = NVMLError("Not Supported")
    found = nvml(ClockInfo={1: 1410, 2: no}, Temperature=no, PowerUsage=no, ViolationStatus=no,
                 CurrentClocksEventReasons=no, CurrentClocksThrottleReasons=64)  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", found)
    watch, _ = clocks.watcher("GPU-12ab")
    assert watch() == Reading(1410, reasons=("temperature (hardware)",))


def test_without_nvml_there_is_a_note_and_no_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch, note = clocks.watcher("12ab")
    assert watch is None
    assert "pip install nvidia-ml-py" in note
    broken = nvml()

    def refuse() -> None:
        raise NVMLError("Driver Not Loaded")

    broken.nvmlInit = refuse
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert "Driver Not Loaded" in clocks.watcher("12ab")[1]
    assert clocks.between(None, COOL) == {}


@pytest.mark.parametrize(
    ("after", "reasons"),
    [
        (LATER, ()),
        (replace(LATER, reasons=("power brake",)), ("power brake",)),
        (replace(LATER, power_limited_us=9_000), ()),  # 0.9 % of the second between
        (replace(LATER, power_limited_us=200_000), ("power limit",)),
        (replace(LATER, heat_limited_us=200_000), ("temperature",)),
        (replace(LATER, at_us=None, heat_limited_us=200_000), ()),
    ],
)
def test_a_slowdown_that_was_over_is_in_the_counters(after: Reading, reasons: tuple[str, ...]):
    found = clocks.between(COOL, after)
    assert found["reasons"] == reasons
    assert bool(clocks.said(found)) is bool(reasons)
    assert found["before"]["sm_mhz"] == 1980


def watched(*after: Reading):
    """A setting whose readings after the rounds are these, one a measurement."""
    readings = iter([each for one in after for each in (COOL, one)])
    return setting(watch=lambda: next(readings))


HOT = replace(LATER, sm_mhz=1200, temperature_c=87, reasons=("temperature (driver)",))


def test_a_throttled_cell_is_measured_again_and_stands_when_it_is_over():
    row = repeats.measure(CELL, make(CELL), watched(HOT, LATER))
    assert not row.is_throttled
    assert row.clocks["after"]["temperature_c"] == 44
    assert doubts.lines([row]) == []


def test_a_cell_that_stays_throttled_is_flagged_and_not_thrown_away():
    row = repeats.measure(CELL, make(CELL), watched(*[HOT] * (1 + repeats.RETRIES)))
    assert row.is_throttled
    assert row.entry("ours").median_us == 100.0
    ((_, name, why),) = doubts.lines([row])
    assert name == "the cell"
    assert why == (
        "the clock was throttled: temperature (driver); SM 1,980 MHz before, 1,200 after, 87 °C"
    )


def test_a_power_limit_lasts_and_is_flagged_at_once():
    row = repeats.measure(CELL, make(CELL), watched(replace(LATER, reasons=("power limit",))))
    assert row.clocks["reasons"] == ("power limit",)


def test_repeats_are_one_row_with_every_round():
    us = iter([{"ours": 100.0}, {"ours": 110.0}, {"ours": 104.0}])
    from bench_kit import clock

    def interleaved(*given):
        return clock(next(us), ())(*given)

    here = setting(interleaved=interleaved)
    row = repeats.measure(CELL, lines("softmax", theirs=right("softmax")), here, repeat=3)
    ours = row.entry("ours")
    assert (row.repeats, ours.repeats_us, ours.median_us) == (3, (100.0, 110.0, 104.0), 104.0)
    assert len(ours.rounds_us) == 9
    assert ours.spread_us == pytest.approx(110 * 1.01 - 100 * 0.99)  # of all, not of one
    assert ours.gbs == pytest.approx(row.ideal_bytes / 104.0 / 1e3)


def test_what_was_wrong_once_is_wrong():
    row = repeats.measure(CELL, make(CELL), setting())
    bad = replace(row.entry("ours"), ok=False, why="wrong: once", median_us=None)
    entries = tuple(bad if entry.name == "ours" else entry for entry in row.entries)
    merged = repeats.merged([row, replace(row, entries=entries), row])
    assert merged.entry("ours").why == "wrong: once"
    assert merged.entry("ours").median_us is None
    assert merged.entry("theirs").repeats_us == (100.0,) * 3


def test_products_at_the_power_limit_are_not_doubted():
    """Where a card's long products run: all contenders alike."""
    held = {"reasons": ("power limit",), "before": {}, "after": {}}
    row = Row("attention", "bfloat16", 16, 64, "normal", 0, clocks=held)
    assert row.is_throttled
    assert [why for _, _, why in doubts.lines([row])] == ["the clock was throttled: power limit"]
    row = replace(row, flops=1)
    assert not row.is_throttled
    assert doubts.lines([row]) == []
    assert replace(row, clocks={"reasons": ("temperature (driver)", "power limit")}).is_throttled
