"""The picture of attention: what is on its lines, and that nothing to draw is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from online_softmax.lab import attentionplot, benchfile, plot

matplotlib = pytest.importorskip("matplotlib")
STORED = Path(__file__).parents[1] / "benchmarks" / "results" / "h200" / "bench-attention.jsonl"


def test_stored_cells_are_on_the_lines(tmp_path: Path):
    rows = benchfile.latest(benchfile.read([STORED]))
    found = attentionplot.lines(rows, "attention_backward", 64)
    assert set(found) == {
        (name, causal) for name in attentionplot.NAMES for causal in (False, True)
    }
    for line in found.values():
        assert [tokens for tokens, _ in line] == [1024, 2048, 4096, 8192, 16384]
    last = next(r for r in rows if r.op == "attention_backward" and r.cols == 16384
                and "head_dim=64 causal=1" in r.sizes)  # fmt: skip
    assert found["ours", True][-1][1] == last.entry("ours").tflops
    path = tmp_path / "attention.png"
    plot.write(attentionplot.picture(rows), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="no attention of 16,384 tokens was timed"):
        attentionplot.picture([])
