"""Benchmarking where there is no GPU: the host's clock, a minute, and that it says so; what a run
without results says; a file that a crash tore."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from bench_kit import HEADER, cells, lines, make, right, setting
from online_softmax.lab import benchcli, benchfile, cli, contenders, cpuclock, grid, repeats
from online_softmax.lab.benchask import Words
from online_softmax.lab.grid import Cell
from online_softmax.lab.rotation import Follows, Overwrites, Rotation

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
SMALL = ("--cells", "16x256", "--seconds", "20")


def invoke(*words: object):
    return CliRunner().invoke(cli.app, ["bench", *map(str, words)])


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
    found = cpuclock.setting(now=now).interleaved(
        buffers, {"fast": call("fast", 50.0), "slow": call("slow", 50_000.0)}, []
    )
    assert found["fast"].median_us == pytest.approx(50.0)
    assert found["slow"].rounds_us == pytest.approx((50_000.0,) * 3)
    rounds = [name for name, _ in seen[4:]]  # two of each before
    assert rounds == (["fast"] * cpuclock.CALLS + ["slow"]) * 3
    places = [place for _, place in seen[4:]]
    assert all(a != b for a, b in itertools.pairwise(places))  # they rotate


def test_what_precedes_or_overwrites_is_outside_of_the_time():
    now, buffers = Now(), sets(3)

    def first(x: Tensor, y: Tensor) -> float:
        now.spend(9000.0)
        return 7.0

    def then(made: float, x: Tensor, y: Tensor) -> None:
        assert made == 7.0
        now.spend(20.0)

    def spoil(x: Tensor, y: Tensor) -> None:
        assert bool((x == 0).all())
        x.fill_(1.0)
        now.spend(30.0)

    buffers.keep()
    calls = {"follows": Follows(first, then), "spoils": Overwrites(spoil)}
    found = cpuclock.setting(now=now).interleaved(buffers, calls, [])
    assert found["follows"].median_us == pytest.approx(20.0)
    assert found["spoils"].median_us == pytest.approx(30.0)
    assert all(bool((x == 0).all()) for x, _ in buffers.sets)


def test_who_raises_has_a_row():
    def failing(x: Tensor, y: Tensor) -> None:
        raise RuntimeError("no such thing")

    here = cpuclock.setting()
    found = here.interleaved(sets(2), {"bad": failing}, ["bad"])
    assert found["bad"].refused == "RuntimeError: no such thing"
    with pytest.raises(RuntimeError, match="no such thing"):
        here.interleaved(sets(2), {"bad": failing}, [])


def test_caches_and_memory_are_known(tmp_path: Path):
    for index, size in enumerate(("48K", "1024K", "32M", "odd")):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(size + "\n")
    assert cpuclock.cache_bytes(tmp_path) == 32 * 2**20
    assert cpuclock.cache_bytes(tmp_path / "none") == cpuclock.CACHE_BYTES
    assert cpuclock.free_bytes() > 2**26


def test_a_cell_of_every_operation_on_the_cpu():
    """Small ones: every contender that runs is right, and has a time by the host's clock."""
    small = dict.fromkeys(("attention", "attention_backward"), "2x2x24x16")
    small |= {"attention_decode": "2x40", "merge": "3x12x16"}
    for op in grid.EVERY_OP[:-1]:
        for cell in grid.named_cells([op], ["float32"], small.get(op, "6x40")):
            found = contenders.contenders(cell, ("torch",))
            row = repeats.measure(cell, found, cpuclock.setting())
            assert [entry.why for entry in row.entries] == [""] * len(row.entries), row
            assert {entry.clock for entry in row.entries} == {"host"}
            assert all(entry.median_us > 0 for entry in row.entries)


@without_gpu
def test_the_command_times_the_cpu_and_says_so(tmp_path: Path):
    saved = tmp_path / "run.jsonl"
    done = invoke("softmax", "cross_entropy", *SMALL, "--save", saved)
    assert done.exit_code == 0, done.output
    assert "torch sees no CUDA GPU here: the CPU is timed" in done.stderr
    (part,) = benchfile.read([saved])
    assert part.header.device == "cpu"
    assert "host's clock" in part.header.clock
    assert part.header.machine["threads"] == torch.get_num_threads()
    assert {(row.op, row.dtype) for row in part.rows} == {
        ("softmax", "float32"), ("cross_entropy", "float32")
    }  # fmt: skip
    assert {entry.name for entry in part.rows[0].entries} == {"ceiling", "ours", "torch"}
    assert "CPU " in done.stdout
    assert "driver" not in done.stdout


@without_gpu
def test_a_linear_layer_on_the_cpu_is_kept_and_resumed(tmp_path: Path):
    saved = tmp_path / "run.jsonl"
    words = ("linear_cross_entropy", "--cells", "24x16x50", "--save", saved, "--resume")
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    (part,) = benchfile.read([saved])
    (line,) = part.others
    assert (line["tokens"], line["features"], line["classes"], line["device"]) == (
        24,
        16,
        50,
        "cpu",
    )
    names = [entry["name"] for entry in line["entries"]]
    assert names[:3] == ["ours, low", "ours, fast", "torch"]
    assert "liger" not in names
    before = saved.read_text()
    assert invoke(*words).exit_code == 0
    assert saved.read_text() == before


def test_defaults_follow_the_machine():
    nothing = Words(None, None, None, None, "normal", "0/1")
    small, large = nothing.filled(True, False), nothing.filled(False, False)
    assert (small.grid, small.dtype, small.against) == ("cpu", "fp32", "torch")
    assert (large.grid, large.dtype) == ("big", "bf16,fp16,fp32")
    assert large.against.split(",") == list(contenders.KNOWN)
    asked = Words("odd", None, "bf16", "quack", "normal", "0/1").filled(True, False)
    assert (asked.grid, asked.dtype, asked.against) == ("odd", "bf16", "quack")
    for op in grid.EVERY_OP:  # small: a CPU's cells are of a second
        for cell in small.cells([op], False):
            assert cell.ideal_bytes < 2**26
            assert cell.flops < 2**32


# ---- results that are none, and files that a crash tore


def test_a_file_without_a_cell_says_so(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_text(benchfile.header_line(HEADER))
    done = invoke("--from", path)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert "no cell was measured before the run ended" in done.stderr


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpuclock, "setting", lambda values: setting(values=values))
    monkeypatch.setattr(benchcli, "header_now", lambda rivals, values: HEADER)


@without_gpu
def test_a_run_in_which_nothing_was_timed_says_so(pretended: None, monkeypatch: pytest.MonkeyPatch):
    full = setting(free_bytes=0)
    monkeypatch.setattr(cpuclock, "setting", lambda values: full)
    done = invoke("softmax", *SMALL)
    assert done.exit_code == 1
    assert "error: nothing was timed in 1 cells: it would take 1.0 GiB" in done.stderr


@without_gpu
def test_a_torn_line_is_dropped_and_said(
    pretended: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(contenders, "contenders", lambda cell, rivals: make(cell))
    path = tmp_path / "run.jsonl"
    words = ("softmax", "--cells", "3x40,2x64", "--save", path)
    assert invoke(*words).exit_code == 0
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:-1]) + whole[-1][:50])
    done = invoke(*words, "--resume")
    assert done.exit_code == 0
    assert f"{path} ended within a line: its 50 bytes are dropped" in done.stderr
    rows = benchfile.latest(benchfile.read([path]))
    assert [row.cell.cols for row in rows] == [40, 64]
    assert "ended within a line" not in invoke(*words, "--resume").stderr


@without_gpu
def test_repeat_reaches_the_file(pretended: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(contenders, "contenders", lambda cell, rivals: make(cell))
    path = tmp_path / "run.jsonl"
    assert invoke("softmax", *SMALL, "--repeat", "3", "--save", path).exit_code == 0
    (row,) = benchfile.read([path])[0].rows
    assert (row.repeats, len(row.entry("ours").repeats_us)) == (3, 3)


def test_the_time_left_is_by_operation():
    from online_softmax.lab.benchrun import Pace

    pace = Pace()
    rows, heads = (
        Cell("softmax", "float32", 2, 64),
        grid.grid_cells(["attention"], ["float32"], "cpu"),
    )
    pace.add(rows, 1.0)
    assert pace.left([rows, heads[0]]) == 2.0
    pace.add(heads[0], 40.0)
    assert pace.left([rows, *heads]) == 81.0


def test_right_and_slow_is_still_right():
    """The clock has no say in what is right: a slow contender is judged like any other."""

    def slow(x: Tensor, y: Tensor) -> None:
        time.sleep(0.001)
        right("softmax")(x, y)

    row = repeats.measure(cells(1)[0], lines("softmax", slow), cpuclock.setting())
    assert row.entry("ours").ok
    assert row.entry("ours").median_us > 1000
