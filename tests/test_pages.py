"""The ladder's page fits a terminal and says all; its picture is drawn, and no text overlaps."""

from __future__ import annotations

import dataclasses
import re

import pytest

from ladder_kit import EMPTY, on_cpu, printed, timed
from online_softmax.lab import ladder, plot
from online_softmax.lab.results import Result, Run


@on_cpu
@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("is_timed", [False, True], ids=["counted", "timed"])
def test_page_fits_and_says_all(whole: Run, width: int, is_timed: bool):
    page = printed(timed(whole) if is_timed else whole, width)
    assert max(map(len, page.splitlines())) <= width
    assert "\u2026" not in page, "a cell is cut off"
    for word in (*ladder.NAMES, "max error", "reads", "exps", "regs", "spills", "warps"):
        assert word in page, word
    assert ("of copy" in page) == is_timed
    assert "All 11 lines that ran agree with float64." in page
    assert "production " in page


@on_cpu
def test_page_fits_with_the_widest_cells(whole: Run):
    refused = dataclasses.replace(whole.results[0], ok=None, reasons=("no",), block=1024)
    for run in (whole, timed(whole)):
        page = printed(Run(run.header, (refused, *whole.results[1:])), 80)
        assert "\u2026" not in page, "a cell is cut off"
        assert re.search(r"not run .* 1024\n", page)


def test_a_reason_is_said_once():
    """Also where it keeps most lines from running; two reasons are two sentences."""
    refused = [
        Result(name, name, "cuda", "", reasons=("no compiler here: install one.",))
        for name in ("safe", "v0_thread", "v1_warp_shuffle")
    ]
    wide = Result("v3", "v3", "cuda", "", reasons=("too wide", "no memory"))
    late = Result("torch", "torch", "torch", "", ok=True, reasons=("no memory",))
    page = printed(Run(EMPTY, (*refused, wide, late)), 160)
    lines = [line for line in page.splitlines() if "not run:" in line or "not timed:" in line]
    assert lines == [
        "safe, v0_thread and v1_warp_shuffle did not run: no compiler here: install one.",
        "v3 did not run: too wide.",
        "v3 did not run: no memory.",
        "torch was not timed: no memory.",
    ]


@on_cpu
@pytest.mark.parametrize("is_timed", [False, True], ids=["counted", "timed"])
def test_picture_is_drawn_and_no_text_overlaps(whole: Run, is_timed: bool, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    run = timed(whole) if is_timed else whole
    plot.draw(run, tmp_path / "new" / "ladder.png")
    data = (tmp_path / "new" / "ladder.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    figure = plot.picture(run)
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    boxes = [(t.get_text(), t.get_window_extent().shrunk(0.98, 0.9)) for t in texts]
    assert len({text for text, _ in boxes} & set(ladder.NAMES)) >= len(ladder.RUNGS)
    for i, (one, box) in enumerate(boxes):
        for other, second in boxes[i + 1 :]:
            assert not box.overlaps(second) or one == other, f"{one!r} covers {other!r}"


def test_nothing_to_draw():
    pytest.importorskip("matplotlib")
    header = EMPTY
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.picture(Run(header, ()))
