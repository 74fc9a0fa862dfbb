"""Pictures of a report: rooflines, linear_cross_entropy, the host's cost, compiled models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from online_softmax.lab import fusion, reportladder, reportpng
from pictures_kit import covered, said
from report_kit import bench_text, climb, report_of

pytest.importorskip("matplotlib")
from online_softmax.lab import hostplot, roofplot

HOST = {
    "kind": "host", "op": "softmax", "dtype": "float32", "rows": 8, "cols": 1024,
    "pieces": [], "beside": [], "fresh": {},
    "calls": [
        {"name": "ours", "recorded": False, "median_us": 6.2, "p20_us": 6.1, "p80_us": 6.4},
        {"name": "torch", "recorded": False, "median_us": 5.1, "p20_us": 5.0, "p80_us": 5.3},
        {"name": "ours", "recorded": True, "median_us": 12.9, "p20_us": 12.6, "p80_us": 13.2},
        {"name": "quack", "recorded": True, "why": "not installed"},
    ],
}  # fmt: skip


def compiled(case: str, us: dict[str, float | None], cols: int = 1024) -> dict[str, Any]:
    entries = [{"name": n, "why": "" if t else "refused", "median_us": t} for n, t in us.items()]
    return {"kind": "fusion", "case": case, "dtype": "float32", "rows": 64, "cols": cols,
            "ideal_bytes": 1, "sets": 2, "entries": entries}  # fmt: skip


def linear(us: float) -> dict[str, Any]:
    error = {"loss_error": 1e-4, "dx_error": 1e-4, "dw_error": 1e-4}
    known = {"why": "", "memory_bytes": 10**9, **error}
    entries = [
        {"name": "ours, low", "median_us": us, **known},
        {"name": "torch", "median_us": 2 * us, **known},
    ]
    return {"kind": "linear", "tokens": 64, "features": 32, "classes": 128, "dtype": "bfloat16",
            "device": "cuda", "entries": entries}  # fmt: skip


def test_each_has_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A line is drawn as measured last, and what has no time not at all."""
    kept: list[tuple[Any, str]] = []
    monkeypatch.setattr(
        reportpng.plot, "write", lambda figure, path: kept.append((figure, path.name))
    )
    refused = {**HOST, "calls": HOST["calls"][-1:]}
    lines = (
        linear(1000.0),
        linear(3000.0),
        compiled("softmax", {fusion.ALONE: 2.0}),
        HOST,
        refused,
    )
    reportpng.draw(report_of(tmp_path, bench_text(others=lines)), tmp_path / "drawn")
    figures = {name: figure for figure, name in kept}
    assert len(figures) == len(kept)
    lines = ("linear_cross_entropy-64x32x128-bfloat16.png", "host.png", "fusion.png")
    assert tuple(figures) == ("memory.png", *lines)
    assert "3.0" in said(figures[lines[0]])


def test_a_roofline_has_each_rung_below_its_roof():
    run = climb()
    found = reportladder.roofline(run)
    assert found is not None
    figure = roofplot.picture(run)
    (axes,) = figure.axes
    dots = {(x, y) for line in axes.lines if line.get_marker() == "o" for x, y in line.get_xydata()}
    assert dots == {(p["x"], p["y"]) for p in found["points"]}
    words = said(figure)
    assert {"safe", "v0_thread", "a copy, 4,000 GB/s", "datasheet, 4,800 GB/s"} <= set(words)
    assert covered(figure) == []
    with pytest.raises(ValueError, match="no rung was timed"):
        roofplot.picture(climb(is_timed=False))


def test_names_stand_apart_where_points_do_not():
    heights = roofplot.spread([3.0, 2.9, 2.9, 1.0], 0.5)
    assert heights == pytest.approx([3.4333333, 2.9333333, 2.4333333, 1.0])


def test_host_and_compiled_models_by_their_figures():
    figure = hostplot.host(HOST)
    words = said(figure)
    assert {"6.2", "5.1", "12.9", "online-softmax", "torch", "no gradient recorded"} <= set(words)
    assert "quack" not in words
    assert covered(figure) == []
    widths = [[bar.get_width() for bar in axes.patches] for axes in figure.axes]
    assert widths == [[6.2, 5.1], [12.9]]

    one, two = fusion.CASES
    lines = [
        compiled(one, {"eager": 8.0, fusion.ALONE: 2.0, fusion.AROUND: 9.0}),
        compiled(one, {"eager": 8.0, fusion.ALONE: 2.0, fusion.AROUND: 1.0}),  # measured last
        compiled(two, {"eager": 4.0, fusion.ALONE: None}),
        compiled(two, {"eager": 4.0, fusion.ALONE: 2.0}, cols=4096),
    ]
    figure = hostplot.compiled(lines)
    assert covered(figure) == []
    dots = [
        [
            (line.get_marker(), *line.get_xydata()[0])
            for line in axes.lines
            if line.get_marker() in ("o", "s")
        ]
        for axes in figure.axes
    ]
    assert [sorted(each) for each in dots] == [
        [("o", 2.0, 0.0), ("s", 0.25, 0.0)],
        [("s", 0.5, 1.0)],
    ]
    for draw, given in ((hostplot.host, {**HOST, "calls": []}), (hostplot.compiled, lines[2:3])):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw(given)
