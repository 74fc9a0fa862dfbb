"""The host's clock: turns, the least of many calls, what stays outside of a time, and the marks."""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from bench_kit import HEADER
from online_softmax.lab import (
    benchpage,
    benchtable,
    contenders,
    cpuclock,
    goals,
    grid,
    opbench,
    repeats,
)
from online_softmax.lab.benchfile import Entry, Part, Row
from online_softmax.lab.contender import Contender
from online_softmax.lab.grid import Cell
from online_softmax.lab.linear import Work
from online_softmax.lab.rotation import Follows, Overwrites, Rotation


class Now:
    """A clock of seconds that calls move on."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def spend(self, us: float) -> None:
        self.seconds += us / 1e6


def sets(count: int) -> Rotation:
    return Rotation([(torch.zeros(2), torch.zeros(2)) for _ in range(count)], True)


def test_contenders_take_turns_on_the_host_s_clock():
    now, seen = Now(), []

    def call(name: str, us: float):
        def one(x: Tensor, y: Tensor) -> None:
            seen.append((name, x.data_ptr()))
            now.spend(us)

        return one

    buffers = sets(4)
    here = cpuclock.setting(now=now)
    assert here.grant(1.0) == 1.0
    found = here.interleaved(
        buffers, {"fast": call("fast", 50.0), "slow": call("slow", 50_000.0)}, []
    )
    assert found["fast"].median_us == pytest.approx(50.0)
    assert found["slow"].rounds_us == pytest.approx((50_000.0,) * cpuclock.ROUNDS)
    assert now() == pytest.approx(1.0, abs=0.12)  # a turn of all and what is before
    turns = (["fast"] * cpuclock.TURN_CALLS + ["slow"]) * cpuclock.ROUNDS
    rounds = [name for name, _ in seen[2:]]  # one of each before
    assert rounds[: len(turns)] == turns
    places = [place for _, place in seen[2:]]
    assert all(a != b for a, b in itertools.pairwise(places))  # they rotate


def test_the_least_of_many_calls_counts_and_rounds_far_apart_are_marked():
    """A processor that is taken away makes calls longer: the least of all is the figure, marked
    where most rounds never had it."""
    now, taken = Now(), itertools.count()

    def often(x: Tensor, y: Tensor) -> None:
        now.spend(100.0 if next(taken) % 9 == 0 else 8000.0)

    here = cpuclock.setting(now=now)
    here.grant(cpuclock.MOST_S)
    found = here.interleaved(sets(3), {"ours": often}, [])["ours"]
    assert found.median_us == pytest.approx(100.0)
    assert len(found.rounds_us) == cpuclock.ROUNDS
    entry = Entry("ours", "ours", clock=here.clock, rounds_us=found.rounds_us, median_us=100.0)
    assert benchtable.time(entry) == "100.0"
    once = replace(entry, rounds_us=(100.0, 8000.0, 8000.0, 8000.0, 110.0))
    assert benchtable.time(once) == "100.0~"
    assert benchtable.time(replace(once, clock="graph")) == "100.0"


def test_long_calls_have_few_rounds_and_seconds_have_bounds():
    now = Now()

    def long(x: Tensor, y: Tensor) -> None:
        now.spend(9e6)

    here = cpuclock.setting(now=now)
    assert here.grant(0.0) == cpuclock.LEAST_S
    assert here.grant(1e9) == cpuclock.MOST_S
    found = here.interleaved(sets(3), {"long": long}, [])
    assert found["long"].rounds_us == pytest.approx((9e6,) * cpuclock.FEWEST_ROUNDS)


def test_what_beats_its_limit_is_marked():
    """Of a CPU products too: nothing is as fast as the fewest that there are."""

    def slow(*tensors: Tensor) -> None:
        time.sleep(0.02)

    (cell, _) = grid.named_cells(["attention"], ["float32"], "1x1x16x16")
    found = [line for line in contenders.contenders(cell, ("torch",)) if line.kind != "ceiling"]
    lines = [Contender("ceiling", "ceiling", lambda: slow), *found]
    row = repeats.measure(cell, lines, cpuclock.setting())
    for name in ("ours", "torch"):
        assert "which it cannot" in row.entry(name).doubt
    assert goals.of_ceiling(row) is None


def test_what_precedes_or_overwrites_is_outside_of_the_time():
    """And nobody, whoever took the turn before, is timed on what another left in a set."""
    now, buffers = Now(), sets(3)

    def first(x: Tensor, y: Tensor) -> float:
        assert bool((x == 0).all())
        now.spend(9000.0)
        return 7.0

    def then(made: float, x: Tensor, y: Tensor) -> None:
        assert made == 7.0
        now.spend(20.0)

    def spoil(x: Tensor, y: Tensor) -> None:
        assert bool((x == 0).all())
        x.fill_(1.0)
        now.spend(30.0)

    def read(x: Tensor, y: Tensor) -> None:
        assert bool((x == 0).all())
        now.spend(10.0)

    buffers.keep()
    calls = {"follows": Follows(first, then), "spoils": Overwrites(spoil), "reads": read}
    found = cpuclock.setting(now=now).interleaved(buffers, calls, [])
    assert found["follows"].median_us == pytest.approx(20.0)
    assert found["spoils"].median_us == pytest.approx(30.0)
    assert found["reads"].median_us == pytest.approx(10.0)
    assert all(bool((x == 0).all()) for x, _ in buffers.sets)


def test_who_raises_has_a_row():
    def failing(x: Tensor, y: Tensor) -> None:
        raise RuntimeError("no such thing")

    here = cpuclock.setting()
    found = here.interleaved(sets(2), {"bad": failing}, ["bad"])
    assert found["bad"].refused == "RuntimeError: no such thing"
    with pytest.raises(RuntimeError, match="no such thing"):
        here.interleaved(sets(2), {"bad": failing}, [])


def host_rows() -> list[Row]:
    """Rows of a CPU for which a GPU has goals, all below them."""
    rows = []
    for op, size in (("cross_entropy", (64, 32000)), ("cross_entropy_in_forward", (64, 32000)),
                     ("token_stats", (64, 32000)), ("softmax", (2**20, 128))):  # fmt: skip
        row = opbench.blank(Cell(op, "float32", *size), "normal")
        made = [Entry(name, name, clock="host", median_us=us, rounds_us=(us, 2 * us, 2 * us))
                for name, us in (("ceiling", 10.0), ("ours", 40.0))]  # fmt: skip
        made.append(replace(made[1], name="torch", kind="rival"))
        rows.append(replace(row, entries=tuple(made)))
    return rows


def shown(part: Part) -> str:
    console = Console(file=StringIO(), width=200)
    benchpage.render([part], console)
    return console.file.getvalue()


def test_a_cpu_has_no_goals():
    rows = host_rows()
    text = shown(Part(HEADER, tuple(rows)))
    for word in ("goal", "aimed at", "in under", "do_bench", "quack"):
        assert word not in text
    assert "~: the middle of its rounds is over 1.2 times the least" in text
    on_a_gpu = [replace(r, entries=tuple(replace(e, clock="graph") for e in r.entries))
                for r in rows]  # fmt: skip
    text = shown(Part(HEADER, tuple(on_a_gpu)))
    for word in ("Cells below their goal", "aimed at", "in under", "do_bench µs", "(goal)"):
        assert word in text
    assert "~" not in text


def test_a_linear_layer_s_times_are_marked_on_a_cpu_and_held_to_goals_on_a_gpu():
    def entry(name: str, us: float, rounds: tuple[float, ...] = ()) -> dict:
        return {"name": name, "why": "", "median_us": us, "rounds_us": rounds or (us,) * 3}

    entries = [entry("ours, low", 9e5, (9e5, 2e6, 2e6)), entry("ours, fast", 9e4),
               entry("three products", 1e5), entry("four products", 1.3e5)]  # fmt: skip
    line = {"kind": "linear", **asdict(Work(8, 8, 16)), "device": "cpu", "entries": entries}
    text = shown(Part(HEADER, (), (line,)))
    assert "900.00~" in text
    assert "90.00!" in text
    assert "(over" not in text
    assert "~: the middle" in text
    assert "!: not to be believed" in text
    text = shown(Part(HEADER, (), ({**line, "device": "cuda"},)))
    assert "900.00 " in text
    assert "6.92 (over 1.15)" in text


def test_caches_and_memory_are_known(tmp_path: Path):
    for index, size in enumerate(("48K", "1024K", "32M", "odd")):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(size + "\n")
    assert cpuclock.cache_bytes(tmp_path) == 32 * 2**20
    assert cpuclock.cache_bytes(tmp_path / "none") == cpuclock.CACHE_BYTES
    assert cpuclock.free_bytes() > 2**26
