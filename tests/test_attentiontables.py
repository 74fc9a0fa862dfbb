"""The tables of attention say what the stored lines say, and of which run they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from online_softmax.lab import fusedsizes
from online_softmax.lab.attentiontables import decode_table, products_table
from online_softmax.lab.benchfile import Entry, Row, line

HEADER = {
    "kind": "header",
    "date": "2031-02-03T04:05:06+00:00",
    "device": "a card",
    "versions": {"commit": "abc1234", "torch": "9.1", "triton": "8.2"},
}
FORWARD = {
    "what": "forward", "head_dim": 128, "causal": True, "rates": {"ours": 1234.6, "other": 55.4}
}  # fmt: skip
BACKWARD = {"what": "backward", "head_dim": 64, "causal": False, "rates": {"ours": 7.0}}
DECODE = {
    "what": "decode",
    "batch": 2,
    "keys": 4096,
    "rates": {"ours": 99.5, "other": 10000.0},
    "rounds_ms": {"ours": [3.0, 1.004, 2.345], "other": [1.0, 1.0, 1.0]},
}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "bench-attention.jsonl"
    lines = (HEADER, FORWARD, BACKWARD, DECODE)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_products(kept: Path):
    lines = products_table(kept).splitlines()
    assert lines[:4] == [
        "| pass | head_dim | keys | ours | other |",
        "| --- | --- | --- | ---: | ---: |",
        "| forward | 128 | causal | 1,235 | 55 |",
        "| backward | 64 | all keys | 7 | — |",
    ]
    assert "a card, 2031-02-03, commit abc1234, torch 9.1, Triton 8.2" in lines[-1]


def test_decode(kept: Path):
    lines = decode_table(kept).splitlines()
    assert lines[:3] == [
        "| sequences | keys | ours, µs | ours | other |",
        "| ---: | ---: | ---: | ---: | ---: |",
        "| 2 | 4,096 | 2,345 | 100 | 10,000 |",
    ]
    assert "commit abc1234" in lines[-1]


# ---- cells of `bench`


def cell(op: str, rows: int, cols: int, sizes: str, dtype: str = "bfloat16", **us: float) -> Row:
    entries = [
        Entry(name.replace("_", ", "), "ceiling" if name == "ceiling" else "rival", True,
              median_us=each, rounds_us=(each,) * 3, gbs=each * 2, tflops=each * 3)
        for name, each in us.items()
    ]  # fmt: skip
    return Row(op, dtype, rows, cols, "normal", 1, (*entries, Entry("compile", "rival")),
               sizes=sizes)  # fmt: skip


def stored(path: Path, *rows: Row) -> Path:
    path.write_text(json.dumps(HEADER) + "\n" + "".join(line("cell", row) for row in rows))
    return path


def test_cells_are_read_as_well_each_as_measured_last(tmp_path: Path):
    batch, heads, length, dim = 1, 16, 16384, 128
    whole = fusedsizes.attention(batch, heads, length, dim, True)
    short = fusedsizes.attention(4, heads, 4096, dim, True)
    path = stored(
        tmp_path / "bench-attention.jsonl",
        cell("attention", *whole, ours=1.0, torch_flash=2.0),
        cell("attention", *short, ours=7.0),  # no sequence of the lesson's
        cell("attention", *whole, dtype="float16", ours=7.0),
        cell("attention_backward", *whole, ceiling=9.0, ours=20.0),
        cell("attention", *whole, ours=10.0, torch_flash=2.0),
        cell("attention_decode", *fusedsizes.decode(8, 4096), ours=1500.0),
    )
    assert products_table(path).splitlines()[:4] == [
        "| pass | head_dim | keys | ours | torch, flash |",
        "| --- | --- | --- | ---: | ---: |",
        "| forward | 128 | causal | 30 | 6 |",
        "| backward | 128 | causal | 60 | — |",
    ]
    lines = decode_table(path).splitlines()
    assert lines[2] == "| 8 | 4,096 | 1,500 | 3,000 |"
    assert "calls in a graph, without the host's part" in lines[-1]
