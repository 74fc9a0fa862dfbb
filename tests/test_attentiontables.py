"""The tables of attention say what the stored lines say, and of which run they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from online_softmax.lab.attentiontables import decode_table, products_table

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
        "| sequences | keys | ours, ms | ours | other |",
        "| ---: | ---: | ---: | ---: | ---: |",
        "| 2 | 4,096 | 2.35 | 100 | 10,000 |",
    ]
    assert "commit abc1234" in lines[-1]
