"""Errors beside torch's: measured here on the CPU, kept, and drawn as a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from online_softmax.lab import accuracy, benchfile, cli, contenders, goals, grid
from online_softmax.lab.grid import Cell

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", grid.OPS)
@pytest.mark.parametrize("dtype", grid.DTYPES)
def test_ours_is_as_exact_as_torch(op: str, dtype: str):
    for cell, values in accuracy.each([Cell(op, dtype, 3, 333)]):
        line = accuracy.measure(cell, values, CPU)
        assert line["ours"]["ok"], line
        assert accuracy.is_exact(line), line
        assert line["values"] == values
        assert 0 <= line["ours"]["mean"] <= line["ours"]["max"] < 0.01


def test_every_input_is_there_and_the_scores_once():
    cells = grid.cells(["softmax", "logsumexp"], ["float32"], [(3, 8), (2, 9)])
    found = [(cell.op, cell.cols, values) for cell, values in accuracy.each(cells)]
    assert found == [
        ("softmax", 8, "normal"), ("softmax", 8, "wide"), ("softmax", 40, "scores"),
        ("softmax", 9, "normal"), ("softmax", 9, "wide"),
        ("logsumexp", 8, "normal"), ("logsumexp", 8, "wide"), ("logsumexp", 40, "scores"),
        ("logsumexp", 9, "normal"), ("logsumexp", 9, "wide"),
    ]  # fmt: skip


def test_inputs_are_what_they_are_called():
    normal, _ = accuracy.inputs(Cell("softmax", "float32", 4, 4000), "normal", CPU)
    wide, _ = accuracy.inputs(Cell("softmax", "float32", 4, 4000), "wide", CPU)
    assert 0.95 < float(normal.std()) < 1.05
    assert torch.equal(wide, normal * accuracy.WIDE)
    scores = accuracy.scores()
    assert scores.shape[1] == 40
    assert bool((scores == -torch.inf).any())
    assert bool(scores.amax(-1).isfinite().all())


def line(**more) -> dict:
    ours = {"ok": True, "why": "", "max": 1e-7, "mean": 1e-9}
    given = {"kind": "accuracy", "op": "softmax", "dtype": "float32", "rows": 3, "cols": 128,
             "values": "normal", "device": "cuda", "ours": ours, "torch": dict(ours)}  # fmt: skip
    return given | more


def test_a_row_of_the_table_has_the_largest_over_the_sizes():
    late = line(
        cols=4096, ours={"ok": True, "why": "", "max": 1e-7 + 2 * goals.EXACT, "mean": 2e-9}
    )
    _, head, rows, text = accuracy.table([line(), late, line(values="wide", device="cpu")])
    assert head[:text] == ("operation", "type", "input", "columns")
    assert rows[0] == ("softmax", "float32", "normal", "128 to 4,096", "3.38e-07", "1.00e-07",
                       "2.00e-09", "1.00e-09", "NO: 4,096")  # fmt: skip
    assert rows[1][2:4] == ("wide, cpu", "128")
    assert rows[1][-1] == "yes"
    again = line(cols=4096)
    assert accuracy.table([line(), late, again])[2][0][-1] == "yes", "as it was measured last"
    wrong = line(ours={"ok": False, "why": "wrong", "max": 0.0, "mean": 0.0})
    assert accuracy.table([wrong])[2][0][-1] == "WRONG"


def test_the_command_measures_here_keeps_and_shows(tmp_path: Path):
    saved = tmp_path / "accuracy.jsonl"
    asked = ["bench", "softmax", "logsumexp", "--accuracy", "--cells", "3x40", "--dtype", "bf16"]
    done = CliRunner().invoke(cli.app, [*asked, "--save", str(saved)])
    assert done.exit_code == 0, done.output
    assert "Errors beside torch's, against float64" in done.stdout
    (part,) = benchfile.read([saved])
    assert [each["values"] for each in part.others] == ["normal", "wide", "scores"] * 2
    shown = CliRunner().invoke(cli.app, ["bench", "--from", str(saved)])
    assert shown.stdout == done.stdout
    printed = CliRunner().invoke(cli.app, [*asked, "--json"])
    kinds = [json.loads(text)["kind"] for text in printed.stdout.splitlines()]
    assert kinds == ["header"] + ["accuracy"] * 6


def test_a_wrong_result_ends_with_1(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(contenders.OURS, "ours", lambda op: lambda x, y: y.zero_())
    done = CliRunner().invoke(
        cli.app, ["bench", "softmax", "--accuracy", "--cells", "3x40", "--dtype", "fp32"]
    )
    assert done.exit_code == 1
    assert "WRONG: softmax float32 3 x 40, normal: [0, 0] is 0, should be" in done.stderr
