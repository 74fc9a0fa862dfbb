"""Losses on a page: goals, what they stand beside, the parts that are there with results alone."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest

from bench_kit import HEADER
from online_softmax.lab import (
    benchpage,
    benchplot,
    benchtable,
    goals,
    grid,
    losspage,
    lossverdicts,
    report,
    verdicts,
)
from online_softmax.lab.benchfile import Entry, Part, Row
from online_softmax.lab.grid import Cell
from online_softmax.lab.linear import Work

BOTH, IN_FORWARD = "cross_entropy_both", "cross_entropy_in_forward"


def row(op: str, dtype: str, cols: int, rows: int = 0, **us: float) -> Row:
    """A cell, a large one unless `rows` is given; names are as in a file, but for "in_place"."""
    cell = Cell(op, dtype, rows or grid.LOSS_WHOLE // cols, cols)
    kinds = {"ceiling": "ceiling", "ours": "ours", "in_place": "ours"}
    entries = tuple(
        Entry({"in_place": "ours, in place"}.get(name, name), kinds.get(name, "rival"), ok=True,
              clock="graph", median_us=each, rounds_us=(each,))
        for name, each in us.items()
    )  # fmt: skip
    return Row(op, dtype, cell.rows, cols, "normal", cell.ideal_bytes, entries)


@pytest.mark.parametrize(
    ("op", "rows", "wanted"),
    [("cross_entropy", 0, 0.95), (BOTH, 0, 0.93), (IN_FORWARD, 0, None), ("token_stats", 0, None),
     ("cross_entropy", 256, None)],
)  # fmt: skip
def test_goals(op: str, rows: int, wanted: float | None):
    for cols in grid.LOSS_COLS:
        for dtype in ("bfloat16", "float32"):
            assert goals.goal(Cell(op, dtype, rows or grid.LOSS_WHOLE // cols, cols)) == wanted


def test_losses_are_among_the_verdicts_of_all():
    rows = [
        row("cross_entropy", "bfloat16", 50257, ceiling=90.0, ours=100.0, torch=300.0),
        row(BOTH, "bfloat16", 4096, ceiling=92.0, ours=100.0, quack=95.0),
        row(BOTH, "float32", 4096, ceiling=94.0, ours=100.0, quack=110.0),
    ]
    assert [found[0].cell for found in goals.below_goal(rows)] == [rows[0].cell, rows[1].cell]
    assert [each.row.cell for each in goals.slower(rows)] == [rows[1].cell]
    table = verdicts.means_table(rows)
    assert [line[:3] for line in table.rows] == [
        ("cross_entropy bfloat16", "1", "0.900"), (f"{BOTH} bfloat16", "1", "0.920"),
        (f"{BOTH} float32", "1", "0.940"),
    ]  # fmt: skip
    softmax = replace(rows[0], op="softmax")
    assert benchtable.ordered([*rows, softmax])[0] == softmax


def test_the_gradient_in_the_forward_stands_beside_quack_s_two_kernels():
    rows = [
        row(IN_FORWARD, "bfloat16", 4096, ours=300.0, in_place=250.0, quack=400.0, torch=999.0),
        row(IN_FORWARD, "float32", 4096, ours=400.0, quack=480.0),
        row(IN_FORWARD, "bfloat16", 50257, ours=300.0),
        row(BOTH, "bfloat16", 4096, ours=300.0, quack=400.0),
    ]
    table = lossverdicts.in_forward_table(rows)
    assert table.head == ("cell", "µs", "in place µs", "quack µs", "x quack", "in place x quack")
    assert table.rows == (
        (f"{IN_FORWARD} bfloat16 65,536 x 4,096", "300.0", "250.0", "400.0", "1.33", "1.60"),
        (f"{IN_FORWARD} float32 65,536 x 4,096", "400.0", "—", "480.0", "1.20 (below)", "—"),
        (f"{IN_FORWARD} bfloat16 5,341 x 50,257", "300.0", "—", "—", "—", "—"),
    )


def test_token_stats_stand_beside_the_forward_on_the_same_logits():
    rows, cols = grid.TOKENS
    tokens = [
        row("cross_entropy", "bfloat16", cols, rows, ours=240.0),
        row("token_stats", "bfloat16", cols, rows, ours=380.0, torch=9000.0, compile=5000.0),
        row("cross_entropy", "float32", cols, rows, ours=500.0),
        row("token_stats", "float32", cols, rows, ours=800.0),
        row("token_stats", "float32", 4096, ours=800.0),  # no forward of it
    ]
    table = lossverdicts.stats_table(tokens)
    assert table.rows == (
        ("token_stats bfloat16 4,096 x 128,256", "380.0", "240.0", "1.58", "9,000", "5,000"),
        ("token_stats float32 4,096 x 128,256", "800.0", "500.0", "1.60 (over)", "—", "—"),
    )


# ---- the document


def stored() -> list[Row]:
    return [
        row("cross_entropy", "bfloat16", 4096, ceiling=120.0, ours=125.0, torch=700.0),
        row("token_stats", "bfloat16", 4096, ceiling=120.0, ours=150.0, torch=900.0),
        row(IN_FORWARD, "bfloat16", 4096, ceiling=250.0, ours=260.0, quack=400.0),
    ]


def parts_of(text: str) -> dict[str, str]:
    found = re.findall(r"<!-- (\w+):begin -->\n(.*?)\n<!-- \1:end -->", text, re.DOTALL)
    return dict(found)


def test_the_page_has_the_part_of_losses_with_results_and_not_without():
    text = report.PERFORMANCE.read_text(encoding="utf-8")
    softmax = Row("softmax", "bfloat16", 2, 8, "normal", 64)
    assert parts_of(report.performance(text, [Part(HEADER, (softmax,))]))["losses"] == ""
    drawn = report.performance(text, [Part(HEADER, tuple(stored()))])
    losses = parts_of(drawn)["losses"]
    assert losses.startswith("## Cross-entropy and token_stats\n\nEach contender's public function")
    for op in ("cross_entropy", "token_stats", IN_FORWARD):
        assert f"](performance-{op}.png)" in losses
    assert f"performance-{BOTH}.png" not in losses
    assert (
        "| cross_entropy_in_forward bfloat16 65,536 x 4,096 | 260.0 | — | 400.0 | 1.54 | — |"
        in losses
    )
    assert "| token_stats bfloat16 65,536 x 4,096 | 150.0 | 125.0 | 1.20 | 900.0 | — |" in losses
    assert parts_of(drawn)["linear"] == ""
    assert report.performance(drawn, [Part(HEADER, tuple(stored()))]) == drawn
    assert parts_of(report.performance(drawn, []))["losses"] == ""


def test_the_page_has_the_part_of_the_linear_loss_with_results():
    entry = {"name": "torch", "why": "", "median_us": 60000.0, "memory_bytes": 8 * 10**9}
    line = {"kind": "linear", **asdict(Work()), "device": "cuda", "entries": [entry]}
    text = report.PERFORMANCE.read_text(encoding="utf-8")
    linear = parts_of(report.performance(text, [Part(HEADER, (), (line,))]))["linear"]
    assert linear.startswith("## linear_cross_entropy\n\nForward and backward of a linear layer")
    assert "**linear_cross_entropy bfloat16, 8,192 tokens, 4,096 features" in linear
    assert "| torch | 60.00 | — | — | 8.00 | — | — | — |" in linear


def test_a_terminal_shows_them():
    found = benchpage.sections([Part(HEADER, tuple(stored()))])
    assert [len(table.rows) for table in found["losses"]] == [1, 1]
    assert benchpage.sections([Part(HEADER, ())])["losses"] == []


# ---- pictures


def test_which_pictures_there_are():
    few = row("token_stats", "bfloat16", 32000, 16, ceiling=3.0, ours=5.0)
    untimed = row(BOTH, "bfloat16", 4096, ceiling=300.0)
    assert losspage.drawn([*stored(), few, untimed]) == [
        "cross_entropy", IN_FORWARD, "token_stats"
    ]  # fmt: skip
    assert losspage.drawn([few, untimed]) == []


def test_a_picture_of_a_loss():
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    rows = [row(BOTH, dtype, cols, ceiling=90.0, ours=100.0, torch=200.0, quack=110.0)
            for dtype in benchplot.DTYPES for cols in grid.LOSS_COLS]  # fmt: skip
    figure = benchplot.picture(rows, BOTH)
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    said = {t.get_text() for t in texts}
    assert {BOTH, "4K", "256K", "online-softmax", "quack"} <= said
    assert "4M" not in said
    assert any("a read and then a copy" in text and "2²⁸ elements" in text for text in said)
    boxes = [(t.get_text(), t.get_window_extent().shrunk(0.98, 0.9)) for t in texts]
    for i, (one, box) in enumerate(boxes):
        for other, second in boxes[i + 1 :]:
            assert not box.overlaps(second) or one == other, f"{one!r} covers {other!r}"
