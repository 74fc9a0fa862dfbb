"""Measuring many cells without a GPU: the file that keeps them, resuming, the time left."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench_kit import HEADER, cells, make, setting
from online_softmax.lab import benchfile, benchrun, grid, opbench
from online_softmax.lab.benchfile import Log
from online_softmax.lab.benchrun import Outlet
from online_softmax.lab.contenders import Contender
from online_softmax.lab.grid import Cell
from online_softmax.lab.inputs import BadInput

CELL = Cell("softmax", "float32", 5, 40)


def test_each_cell_is_written_at_once(tmp_path: Path):
    log, seen = Log(tmp_path / "run.jsonl"), []

    def progress(text: str, done: int, total: int, left: float | None) -> None:
        seen.append((done, total, left is None, log.path.exists()))
        if done:
            assert len(log.path.read_text().splitlines()) == 1 + done

    emitted: list[str] = []
    benchrun.run(cells(3), make, setting(), Outlet(log, HEADER, progress, emitted.append))
    assert seen == [(0, 3, True, False), (1, 3, False, True), (2, 3, False, True)]
    assert "".join(emitted) == log.path.read_text()
    header, *rows = [json.loads(each) for each in log.path.read_text().splitlines()]
    assert (header["kind"], header["what"], header["command"]) == (
        "header",
        "bench",
        HEADER.command,
    )
    assert [(row["kind"], row["cols"]) for row in rows] == [("cell", 8), ("cell", 9), ("cell", 10)]


def test_what_is_read_is_what_was_measured(tmp_path: Path):
    log = Log(tmp_path / "run.jsonl")
    found = benchrun.run(cells(2), make, setting(), Outlet(log, HEADER))
    part = benchfile.read([log.path])[0]
    assert (part.header, part.rows) == (HEADER, found.rows)


@pytest.mark.parametrize("torn", ["", '{"kind": "cell", "op": "softm', '{"kind": "cell"}'])
def test_resuming_skips_what_is_there_and_cuts_a_torn_line(tmp_path: Path, torn: str):
    path = tmp_path / "run.jsonl"
    benchrun.run(cells(2), make, setting(), Outlet(Log(path), HEADER))
    before = path.read_text()
    path.write_text(before + torn)
    measured = []

    def counted(cell: Cell) -> list[Contender]:
        measured.append(cell)
        return make(cell)

    benchrun.run(cells(4), counted, setting(), Outlet(Log(path, resume=True), HEADER))
    assert measured == cells(4)[2:]
    assert path.read_text().startswith(before)
    parts = benchfile.read([path])
    assert [len(part.rows) for part in parts] == [2, 2]
    assert [row.cell for row in benchfile.latest(parts)] == cells(4)
    whole = path.read_text()
    again = benchrun.run(cells(4), counted, setting(), Outlet(Log(path, resume=True), HEADER))
    assert (again.rows, again.left) == ((), 0)
    assert path.read_text() == whole


def test_resuming_a_file_that_was_torn_in_its_first_line(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "hea')
    benchrun.run(cells(1), make, setting(), Outlet(Log(path, resume=True), HEADER))
    assert [row.cell for row in benchfile.read([path])[0].rows] == cells(1)


def test_other_values_are_other_cells(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    benchrun.run(cells(1), make, setting(), Outlet(Log(path), HEADER))
    log = Log(path, resume=True)
    assert log.has(cells(1)[0], "normal")
    assert not log.has(cells(1)[0], "ascending")


def test_a_file_is_not_overwritten_and_another_file_not_continued(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "header", "format": 1, "dtype": "float32"}\n')
    with pytest.raises(BadInput, match="--resume goes on"):
        Log(path)
    with pytest.raises(BadInput, match="holds no results of `bench --save`"):
        Log(path, resume=True)
    assert len(path.read_text().splitlines()) == 1


def test_shards_in_files_of_their_own_are_read_as_one(tmp_path: Path):
    paths = [tmp_path / f"{index}.jsonl" for index in range(3)]
    for index, path in enumerate(paths):
        part = grid.shard(cells(7), f"{index}/3")
        benchrun.run(part, make, setting(), Outlet(Log(path), HEADER))
    rows = benchfile.latest(benchfile.read(paths))
    assert sorted(row.cols for row in rows) == [cell.cols for cell in cells(7)]


def test_a_cell_measured_twice_counts_as_measured_last():
    rows = [opbench.measure(CELL, make(CELL), setting({"ours": us})) for us in (1.0, 2.0)]
    parts = [benchfile.Part(HEADER, (row,)) for row in rows]
    assert [row.entry("ours").median_us for row in benchfile.latest(parts)] == [2.0]


def test_no_infinity_gets_into_the_file():
    text = benchfile.line("cell", {"a": math.nan, "b": [math.inf]})
    assert json.loads(text) == {"kind": "cell", "a": None, "b": [None]}


def test_the_time_left_knows_that_rivals_take_longer():
    pace = benchrun.Pace()
    with_rivals, without = Cell("softmax", "float32", 1, 1024), Cell("softmax", "float32", 2, 1024)
    assert pace.left([with_rivals]) is None
    pace.add(with_rivals, 10.0)
    assert pace.left([without]) == 10.0
    pace.add(without, 2.0)
    assert pace.left([with_rivals, without, without]) == 14.0
