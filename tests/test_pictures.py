"""Pictures of README, the site and the lessons: each is what stored results draw, no text in one
overlaps, each is on a page in both languages; and what is on those of the lessons."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from online_softmax.lab import (
    benchfile,
    canvas,
    fusedplot,
    lessonplot,
    pictures,
    plot,
    profilefile,
    report,
)
from online_softmax.lab.fusedsizes import parsed
from online_softmax.lab.profilefile import Profile
from online_softmax.lab.results import Run
from pictures_kit import covered, said

matplotlib = pytest.importorskip("matplotlib")
DOCS = Path(__file__).parents[1] / "docs"
STORED = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.png"))
COMPUTED = "lessons/long-sum.png"  # by NumPy, whose exponentials differ between machines


@functools.cache
def drawn() -> pictures.Pictures:
    return pictures.stored(report.RESULTS)


@functools.cache
def runs() -> list[Run]:
    return report.stored()


@functools.cache
def counted() -> list[Profile]:
    paths = sorted(report.RESULTS.glob("ncu-*.jsonl"))
    return [run for path in paths for run in profilefile.read(path)]


def test_text_that_covers_text_is_seen():
    figure = canvas.blank(4, 2, "title", "below")
    figure.text(0.5, 0.3, "one")
    figure.canvas.draw()
    assert covered(figure) == []
    figure.text(0.51, 0.31, "two")
    assert covered(figure) == ["'one' covers 'two'"]


def test_every_picture_is_drawn_and_no_other_lies_there():
    assert sorted(drawn()) == STORED


@pytest.mark.parametrize("name", STORED)
def test_a_picture_is_what_the_results_say(name: str, tmp_path: Path):
    """Its pixels too, where the same matplotlib drew what is stored."""
    import numpy as np
    from matplotlib.image import imread

    figure = drawn()[name]()
    assert covered(figure) == []
    if name == COMPUTED:
        return
    if f"Matplotlib version{matplotlib.__version__}".encode() not in (DOCS / name).read_bytes():
        pytest.skip(f"pixels: another matplotlib than {matplotlib.__version__} drew it")
    plot.write(figure, tmp_path / "now.png")
    then, now = imread(DOCS / name), imread(tmp_path / "now.png")
    assert then.shape == now.shape, "make readme draws it anew"
    assert np.array_equal(then, now), "make readme draws it anew"


def test_a_picture_is_on_a_page_in_both_languages():
    pages = [*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")]
    for is_chinese in (False, True):
        shown = set()
        for page in pages:
            if page.name.endswith(".zh.md") == is_chinese:
                links = re.findall(r"\]\((\S+\.png)\)", page.read_text(encoding="utf-8"))
                shown |= {(page.parent / link).resolve() for link in links}
        assert [name for name in STORED if (DOCS / name).resolve() not in shown] == []


@pytest.mark.parametrize("page", sorted((DOCS / "lessons").glob("*.md")), ids=lambda p: p.name)
def test_a_lesson_of_a_rung_shows_it_among_those_before(page: Path):
    rung = page.name.partition(".")[0]
    shown = f"](rungs-{rung}.png)" in page.read_text(encoding="utf-8")
    assert shown == (rung in lessonplot.rungs(runs()))


# ---- what is on them


def test_a_rung_stands_below_those_before_it_and_above_torch():
    names = lessonplot.rungs(runs())
    figure = lessonplot.climb(runs(), "v3_register_cache")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "32,768 x 4,096", "4,096 x 4,096", "64 x 131,072", "1 x 1,048,576"
    ]  # fmt: skip
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown == [*names[: names.index("v3_register_cache") + 1], "torch"]
    main = {r.name: r for r in runs()[0].results}
    bars = [bar.get_width() for bar in figure.axes[0].patches]
    assert bars == [pytest.approx(100 * (main[name].of_copy or 0)) for name in shown]
    assert said(figure).count(lessonplot.CANNOT) == 2


def test_counters_stand_beside_what_is_asked_for():
    figure = lessonplot.traffic(counted())
    for axes, run in zip(figure.axes, sorted(counted(), key=lambda r: r.header.cols), strict=True):
        lines = [line for line in run.lines if line.counters]
        widths = [bar.get_width() for bar in axes.patches]
        read = [line.counters[name] for line in lines for name in ("l2_read", "dram_read")]
        assert widths == pytest.approx(read)
        asked = [float(mark.get_xdata()[0]) for mark in axes.lines]
        assert asked == [4 * line.reads_predicted for line in lines if line.reads_predicted]
    assert said(figure).count(lessonplot.CANNOT) == 1  # v3's rows end at 32,768 columns


def test_only_what_did_not_run_for_a_reason_cannot():
    """What was wrong, not timed or not counted has no figure, and may well be able to run."""
    lost = [
        replace(run, results=tuple(replace(r, of_copy=None, ok=False) if r.name == "safe" else r
                                   for r in run.results))
        for run in runs()
    ]  # fmt: skip
    on_it = said(lessonplot.climb(lost, "v3_register_cache"))
    assert on_it.count(lessonplot.CANNOT) == 2
    assert on_it.count(lessonplot.NONE) == 4  # a panel a shape
    first = counted()[0]
    bare = tuple(
        replace(each, counters={}) if each.name == "safe" else each for each in first.lines
    )
    on_it = said(lessonplot.traffic([replace(first, lines=bare), *counted()[1:]]))
    assert on_it.count(lessonplot.CANNOT) == 1
    assert on_it.count(lessonplot.NONE) == 1


def test_memory_that_is_drawn_is_that_of_the_file():
    parts = benchfile.read([report.RESULTS / "attention-memory.jsonl"])
    lines = [other for part in parts for other in part.others]
    figure = lessonplot.memory(lines)
    (axes,) = figure.axes
    points = [float(line.get_ydata()[0]) for line in axes.lines if len(line.get_ydata()) == 1]
    names = ("forward_bytes", "with_backward_bytes")
    assert points == [line[name] for line in lines for name in names]
    scores, kept = (line.get_ydata()[-1] for line in axes.lines[:2])
    assert scores == lines[0]["matrix_bytes_computed"]
    ours = next(line for line in lines if line["contender"] == "ours")
    assert kept == pytest.approx(ours["forward_bytes"], rel=0.01)
    assert "68.7 GB  all scores in float32, computed" in said(figure)


def test_a_sum_in_parts_stays_within_the_bound():
    (axes,) = lessonplot.long_sum().axes
    one, parts = (line.get_ydata() for line in axes.lines[1:])
    assert one[-1] > 10 * lessonplot.BOUND
    assert max(parts) < lessonplot.BOUND
    assert one[0] == parts[0]  # of 256 terms there is one part


def test_decodes_and_merges_are_those_of_the_file():
    rows = benchfile.latest(benchfile.read([report.ATTENTION]))
    lines = fusedplot.decode_lines(rows)
    assert {batch: len(panel["ours"]) for batch, panel in lines.items()} == {1: 4, 8: 3, 64: 2}
    row = next(r for r in rows if r.op == fusedplot.DECODE and r.sizes.startswith("batch=64"))
    assert (row.cols, row.entry("torch, cudnn").gbs) in lines[64]["torch, cudnn"]
    figure = fusedplot.merge(rows, 4800)
    merges = {parsed(r.sizes)["parts"]: r for r in rows if r.op == "merge"}
    for row in merges.values():
        assert f"{row.entry('ours').gbs:,.0f}" in said(figure)
    (axes,) = figure.axes
    marks = [line.get_xdata()[0] for line in axes.lines]
    assert marks == [merges[2].entry("ceiling").gbs, 4800]  # the others' ceilings are doubted


def test_a_linear_layer_s_loss_is_that_of_the_file():
    """Milliseconds and gigabytes of each contender that has a time, and no product among them."""
    (part,) = benchfile.read([report.RESULTS / "bench-linear.jsonl"])
    figure = fusedplot.linear(part.others[-1])
    timed = [e for e in part.others[-1]["entries"] if "memory_bytes" in e and e.get("median_us")]
    for axes, key, scale in zip(
        figure.axes, ("median_us", "memory_bytes"), (1e3, 1e9), strict=True
    ):
        widths = [bar.get_width() for bar in axes.patches if bar.get_height() == 0.7]
        assert widths == pytest.approx([each[key] / scale for each in timed])
    assert {"ours, low", "ours, fast", "three products", "four products"} <= set(said(figure))


@pytest.mark.parametrize(
    ("draw", "why"),
    [
        (lambda: lessonplot.climb(runs(), "torch"), "torch was not timed in float32"),
        (lambda: lessonplot.traffic([]), "no run of `profile` has counters"),
        (lambda: lessonplot.memory([]), "attention's memory was not measured"),
        (lambda: fusedplot.decode([]), "no attention_decode in bfloat16 was timed"),
        (lambda: fusedplot.merge([]), "no merge in bfloat16 was timed"),
        (lambda: fusedplot.linear({"entries": []}), "no linear_cross_entropy was timed"),
    ],
)
def test_nothing_to_draw(draw: Any, why: str):
    with pytest.raises(ValueError, match=f"there is nothing to draw: {why}"):
        draw()


# ---- the words beside the counters


@pytest.mark.parametrize("language", ["", ".zh"])
def test_the_words_have_the_counters_figures(language: str):
    text = (DOCS / "lessons" / f"README{language}.md").read_text(encoding="utf-8")
    words = text.partition("](traffic.png)")[2].partition("\n\n## ")[0]
    small, large = (
        {line.name: line.counters for line in run.lines if line.counters}
        for run in sorted(counted(), key=lambda r: r.header.cols)
    )
    online = [small[name]["l2_read"] for name in ("v1_warp_shuffle", "v4_grid_stride")]
    three = [large[n] for n in ("triton_two_pass", "torch")]
    figures = [
        small["safe"]["l2_read"], *online, small["triton_online"]["l2_read"],
        small["triton_two_pass"]["l2_read"], *(each["dram_read"] for each in three),
    ]  # fmt: skip
    two = ("v2_vectorized", "v4_grid_stride", "v5_split_row", "triton_online")
    times = [large[n]["time_us"] for n in two]
    spans = [large["registers"]["time_us"], min(times), max(times)]
    wanted = [f"{each:.1f}" for each in figures]
    wanted += [f"{each:,.0f}" for each in (*spans, *(each["time_us"] for each in three))]
    assert [each for each in wanted if not re.search(rf"(?<![\d,.]){each}(?![\d.]\d)", words)] == []
    assert "`v3_register_cache`" in words
    assert "v3_register_cache" not in large
