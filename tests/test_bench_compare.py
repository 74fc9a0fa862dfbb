"""Two runs beside each other: what is slower beyond the noise, and that noise is none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench_kit import HEADER, timing
from cli_kit import bench as invoke
from online_softmax.lab import benchcompare, benchfile
from online_softmax.lab.benchcompare import compare, times
from online_softmax.lab.benchfile import Entry, Part, Row

LINEAR = {"kind": "linear", "tokens": 8, "features": 4, "classes": 50, "dtype": "bfloat16",
          "device": "cuda"}  # fmt: skip


def entry(name: str, us: float | None, spread: float = 0.0, **more: object) -> Entry:
    kind = name if name in ("ceiling", "ours") else "rival"
    rounds = () if us is None else (us - spread / 2, us, us + spread / 2)
    return Entry(name, kind, True, clock="graph", median_us=us, rounds_us=rounds, **more)


def row(cols: int = 1024, *entries: Entry, **more: object) -> Row:
    return Row("softmax", "float32", 8, cols, "normal", 64 * cols, entries, **more)


def run(*rows: Row, others: Sequence[dict] = ()) -> list[Part]:
    return [Part(HEADER, rows, tuple(others))]


def verdicts(old: list[Part], new: list[Part]) -> dict[str, str]:
    found = compare(times(old), times(new))
    return {change.name: change.verdict for change in found.changes}


@pytest.mark.parametrize(
    ("old_spread", "us", "new_spread", "verdict"),
    [
        (0.1, 100.5, 0.1, "same"),
        (0.1, 101.9, 0.1, "same"),  # measured once: 2 % say nothing
        (0.1, 103.0, 0.1, "slower"),
        (2.0, 103.0, 2.0, "same"),  # rounds of both are apart by as much
        (2.0, 105.0, 2.0, "slower"),
        (0.1, 96.0, 0.1, "faster"),
        (3.0, 96.0, 3.0, "same"),
    ],
)
def test_what_the_rounds_of_both_do_not_explain(old_spread, us, new_spread, verdict):
    old, new = row(1024, entry("ours", 100.0, old_spread)), row(1024, entry("ours", us, new_spread))
    assert verdicts(run(old), run(new)) == {"ours": verdict}


def test_repeats_take_the_floor_away():
    old = row(1024, entry("ours", 100.0, 0.2), repeats=5)
    new = row(1024, entry("ours", 101.0, 0.2), repeats=5)
    assert verdicts(run(old), run(new)) == {"ours": "slower"}
    assert verdicts(run(old), run(replace(new, repeats=1))) == {"ours": "same"}


def test_what_slows_the_ceiling_is_the_machine_s():
    old = row(1024, entry("ceiling", 90.0), entry("ours", 100.0))
    new = row(1024, entry("ceiling", 94.5), entry("ours", 105.0))
    assert verdicts(run(old), run(new)) == {"ceiling": "slower", "ours": "same"}
    found = compare(times(run(old)), times(run(new)))
    assert found.regressions == []  # of ours alone
    assert "the ceiling moved by +5.0% at the median" in benchcompare.summary(found)


def test_a_time_that_is_gone_is_a_regression_and_a_doubted_one_is_not_compared():
    old = row(1024, entry("ours", 100.0))
    gone = replace(entry("ours", None), why="wrong: [0, 0] is 1")
    found = compare(times(run(old)), times(run(row(1024, gone))))
    assert [(c.verdict, c.why) for c in found.regressions] == [("no time now", gone.why)]
    doubted = row(1024, entry("ours", 200.0, doubt="it cannot"))
    assert verdicts(run(old), run(doubted)) == {"ours": "doubted"}
    throttled = row(1024, entry("ours", 200.0), clocks={"reasons": ("power brake",)})
    assert verdicts(run(old), run(throttled)) == {"ours": "doubted"}
    warm = row(1024, entry("ours", 200.0, gbs=9000.0), is_cold_l2=True)  # stored without a doubt
    h200 = replace(HEADER, device="NVIDIA H200")
    assert verdicts(run(old), [Part(h200, (warm,))]) == {"ours": "doubted"}


def test_the_last_measurement_counts_and_what_one_run_has_alone_is_counted():
    old = run(row(1024, entry("ours", 300.0)), row(1024, entry("ours", 100.0)),
              row(7, entry("ours", 1.0)))  # fmt: skip
    found = compare(times(old), times(run(row(1024, entry("ours", 100.0)))))
    assert [c.verdict for c in found.changes] == ["same"]
    assert (found.only_old, found.only_new) == (1, 0)


def linear(us: float) -> dict:
    products = {"name": "three products", "why": "", "median_us": 50.0, "rounds_us": [50.0]}
    ours = {"name": "ours, low", "why": "", "median_us": us, "rounds_us": [us, us]}
    entries = [ours, products]
    return {**LINEAR, "entries": entries}


def test_a_linear_layer_s_loss_is_compared_too():
    found = verdicts(run(others=[linear(60.0)]), run(others=[linear(70.0)]))
    assert found == {"ours, low": "slower", "three products": "same"}


# ---- the command


def kept(path: Path, us: float, torn: bool = False) -> Path:
    text = benchfile.header_line(HEADER) + benchfile.line("cell", row(1024, entry("ours", us)))
    path.write_text(text + ('{"kind": "cell", "o' if torn else ""))
    return path


def test_the_exit_code_and_the_table(tmp_path: Path):
    old, new = kept(tmp_path / "old.jsonl", 100.0), kept(tmp_path / "new.jsonl", 120.0)
    done = invoke("--compare", old, new)
    assert done.exit_code == 1
    assert "softmax float32 8 x 1024" in done.stdout
    assert "+20.0%" in done.stdout
    assert "2.0%" in done.stdout  # the noise
    assert "1 times of ours compared: 1 slower or gone, 0 faster" in done.stdout
    done = invoke("--compare", new, old)
    assert done.exit_code == 0
    assert "-16.7%" in done.stdout
    done = invoke("--compare", old, new, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["regressions"], found["faster"]) == (1, 0)
    assert found["changes"][0]["ratio"] == pytest.approx(1.2)


def test_what_cannot_be_compared_is_refused(tmp_path: Path):
    old = kept(tmp_path / "old.jsonl", 100.0, torn=True)
    other = tmp_path / "other.jsonl"
    other.write_text(benchfile.header_line(HEADER) + benchfile.line("cell", row(7)))
    for words, said in (
        (["--compare", old], "--compare takes two files, OLD and NEW; there are 1"),
        (["--compare", old, other], "have no timed cell in common"),
        (["--compare", old, tmp_path / "none"], "error: " + str(tmp_path / "none") + " cannot"),
        (["--compare", old, old, "--save", tmp_path / "x"], "--save cannot change it"),
        (["--compare", old, old, "--list"], "--list cannot change it"),
        (["--compare", old, old, "--from", old], "--from cannot change it"),
        (["--compare", old, old, "--shard", "0/2"], "--shard cannot change it"),
    ):
        done = invoke(*words)
        assert done.exit_code == 2
        assert said in done.stderr
    done = invoke("--compare", old, old)
    assert done.exit_code == 0
    assert "old.jsonl ends within a line, which is passed over" in done.stderr


def test_the_kit_s_own_rounds_are_noise():
    """Fake times whose rounds are 2 % apart: another run of the same is the same."""
    us = timing(100.0)
    one = Entry("ours", "ours", True, median_us=us.median_us, rounds_us=us.rounds_us)
    assert verdicts(run(row(8, one)), run(row(8, replace(one, median_us=103.0)))) == {
        "ours": "same"
    }
