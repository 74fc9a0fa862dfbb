"""What stored rows amount to on a page: in order, by kind, summed up; and their pictures."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench_kit import HEADER
from online_softmax.lab import benchpage, benchplot, benchtable, goals, grid, verdicts
from online_softmax.lab.benchfile import Entry, Part, Row
from online_softmax.lab.grid import Cell


def row(op: str, dtype: str, cols: int, rows: int = 0, ours: float = 100.0, **rivals: float) -> Row:
    """A cell, a large one unless `rows` is given, whose ceiling takes 90 µs."""
    cell = Cell(op, dtype, rows or grid.WHOLE // cols, cols)
    times = {"ceiling": ("ceiling", 90.0), "ours": ("ours", ours)}
    times |= {name: ("rival", us) for name, us in rivals.items()}
    entries = tuple(
        Entry(name, kind, ok=True, clock="graph", median_us=us, rounds_us=(us,))
        for name, (kind, us) in times.items()
    )
    return Row(op, dtype, cell.rows, cols, "normal", cell.ideal_bytes, entries)


def test_rows_of_shards_come_in_order():
    wanted = [
        row("softmax", "bfloat16", 128, 1),
        row("softmax", "bfloat16", 128, 16),
        row("softmax", "bfloat16", 1024, 2),
        row("softmax", "float32", 128, 4),
        row("log_softmax", "bfloat16", 128, 1),
        row("logsumexp", "bfloat16", 32, 1),
    ]
    mixed = list(wanted)
    random.Random(0).shuffle(mixed)
    assert mixed != wanted
    assert benchtable.ordered(mixed) == wanted
    (first, *_) = benchpage.sections([Part(HEADER, tuple(mixed))])["small"]
    assert [line[0] for line in first.rows] == ["1 x 128", "16 x 128", "2 x 1,024"]


def test_cells_below_their_goal_stand_by_kind():
    rows = [
        row("softmax", "float32", 1000),
        row("softmax", "bfloat16", 50257),
        row("softmax_backward", "float32", 50257),
        row("softmax", "bfloat16", 262144),
        row("softmax", "bfloat16", 1024, ours=91.0),
    ]
    ragged, long, rest = verdicts.below_tables(rows)
    assert ragged.title == "Ragged columns: 2 cells"
    assert ragged.head == ("of ceiling (goal)", "50,257")
    assert ragged.rows == (
        ("softmax bfloat16", "0.900 (0.97)"), ("softmax_backward float32", "0.900 (0.965)")
    )  # fmt: skip
    assert (long.rows, rest.rows) == (
        (("softmax bfloat16", "0.900 (0.94)"),), (("softmax float32", "0.900 (0.97)"),)
    )  # fmt: skip
    (none,) = verdicts.below_tables(rows[-1:])
    assert none.rows == ()


@pytest.mark.parametrize(
    ("dtype", "cols", "wanted"),
    [
        ("bfloat16", 1000, goals.REST),  # 2,000 bytes: 125 words of 16
        ("bfloat16", 1001, goals.RAGGED),
        ("bfloat16", 1004, goals.RAGGED),
        ("float32", 1004, goals.REST),
        ("float32", 131072, goals.REST),
        ("float32", 201088, goals.LONG),
        ("float32", 200001, goals.RAGGED),
    ],
)
def test_what_kind_of_cell_it_is(dtype: str, cols: int, wanted: str):
    assert goals.kind(Cell("softmax", dtype, 1, cols)) == wanted


def test_slower_cells_are_summed_up_and_listed():
    rows = [
        row("softmax", "bfloat16", 1024, 1, liger=80.0),
        row("softmax", "float32", 1024, 256, liger=90.0),
        row("softmax", "float32", 4096, 1, liger=200.0),
        row("softmax_backward", "float32", 4096, 1, quack=95.0),
    ]
    summary, *cells = verdicts.slower_tables(rows)
    assert summary.rows == (
        ("softmax", "liger", "bfloat16, float32", "1 to 256", "1,024", "2", "3", "0.80 to 0.90"),
        ("softmax_backward", "quack", "float32", "1", "4,096", "1", "1", "0.95"),
    )
    assert [each.fold for each in cells] == [
        "softmax, cell by cell",
        "softmax_backward, cell by cell",
    ]
    assert [line[0] for line in cells[0].rows] == [
        "softmax bfloat16 1 x 1,024", "softmax float32 256 x 1,024"
    ]  # fmt: skip
    (none,) = verdicts.slower_tables(rows[2:3])
    assert none.rows == ()


def test_errors_are_summed_up():
    def exact(cols: int, ours: float) -> Row:
        found = row("softmax", "float32", cols, torch=200.0)
        errors = {"ours": ours, "torch": 1e-7}
        return replace(found, entries=tuple(
            replace(each, share_max=errors.get(each.name)) for each in found.entries))  # fmt: skip

    table = verdicts.exact_table([exact(128, 1e-7), exact(512, 2e-7), exact(1024, 3e-7)])
    assert table.rows == (("softmax float32", "3", "2", "3.00e-07", "1.00e-07"),)
    assert verdicts.exact_table([exact(256, 1e-7)]).rows == ()  # not a main cell


def test_runs_that_differ_in_date_alone_have_one_line():
    later = replace(HEADER, date="2026-01-03T00:00:00+00:00", rivals={"quack": "1.0"})
    headers = [HEADER, later, replace(HEADER, date="2026-01-02T00:00:00+00:00")]
    (said,) = benchpage.circumstances(Part(each, ()) for each in headers)
    assert "2026-01-01T00:00:00+00:00 to 2026-01-03T00:00:00+00:00" in said
    assert ", quack 1.0, commit" in said
    other = replace(later, rivals={"quack": "2.0"})
    said = benchpage.circumstances(Part(each, ()) for each in (*headers, other))
    assert [", quack 1.0," in said[0], ", quack 2.0," in said[1], len(said)] == [True, True, 2]
    moved = replace(HEADER, versions={**HEADER.versions, "commit": "abc1234"})
    assert len(benchpage.circumstances(Part(each, ()) for each in (HEADER, moved))) == 2


# ---- pictures


def test_shares_are_those_that_one_clock_gave():
    timed = row("softmax", "bfloat16", 50257, ours=100.0, torch=180.0)
    held = replace(timed.entries[2], clock="do_bench")
    lost = replace(timed.entries[2], median_us=None, ok=False)
    assert benchplot.shares([timed], "torch") == [(50257, 0.5, True)]
    assert benchplot.shares([timed], "quack") == []
    for each in (held, lost):
        rows = [replace(timed, entries=(*timed.entries[:2], each))]
        assert benchplot.shares(rows, "torch") == []
        assert benchplot.shares(rows, "ours") == [(50257, 0.9, True)]


def test_a_picture_shows_every_share_and_no_text_overlaps(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    rows = [row("softmax", dtype, cols, torch=180.0, quack=120.0)
            for dtype in benchplot.DTYPES for cols in grid.BIG_COLS]  # fmt: skip
    rows.append(row("softmax", "bfloat16", 1024, 4, torch=1.0))  # few rows: not in the picture
    benchplot.draw(rows, "softmax", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    figure = benchplot.picture(rows, "softmax")
    assert len(figure.axes) == len(benchplot.DTYPES)
    for axes in figure.axes:
        drawn = {
            (round(x), round(y, 3))
            for line in axes.findobj(Line2D) if line.get_color() == benchplot.COLOURS["torch"]
            for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
        }  # fmt: skip
        assert {(cols, 0.5) for cols in grid.BIG_COLS} == drawn
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    boxes = [(t.get_text(), t.get_window_extent().shrunk(0.98, 0.9)) for t in texts]
    assert {"softmax", "bfloat16", "float32", "quack", "4M"} <= {text for text, _ in boxes}
    for i, (one, box) in enumerate(boxes):
        for other, second in boxes[i + 1 :]:
            assert not box.overlaps(second) or one == other, f"{one!r} covers {other!r}"


def test_what_was_not_timed_has_no_picture():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no large cell of logsumexp was timed"):
        benchplot.picture([row("softmax", "float32", 1024)], "logsumexp")
    with pytest.raises(ValueError, match="no picture ends in"):
        benchplot.draw([row("softmax", "float32", 1024)], "softmax", "x.nothing")
