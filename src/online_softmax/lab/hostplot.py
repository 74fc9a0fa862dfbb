"""Pictures of what the host pays for an eager call, and of a softmax within a compiled model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from online_softmax.lab import benchplot, canvas, fusion, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = dict[str, Any]
RECORDED = {False: "no gradient recorded", True: "a gradient recorded"}
# The models of the comparison: its name, colour and mark.
MODELS = {
    fusion.AROUND: ("torch.compile around ours", "#0072B2", "o"),
    fusion.ALONE: ("torch.compile alone", plot.LIMIT, ""),
    "eager, ours": ("eager, ours", "#56B4E9", "D"),
    "eager": ("eager", "#8C8C8C", "s"),
}


# ---- the host


def host(line: Line) -> Figure:
    """Microseconds of an eager call, a panel without and one with a gradient recorded.

    Args:
        line: of kind "host", as it was stored.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: no call was timed.
    """
    calls = [call for call in line["calls"] if call.get("median_us")]
    if not calls:
        raise ValueError("there is nothing to draw: no call was timed")
    return canvas.styled(lambda: _host(line, calls))


def _host(line: Line, calls: Sequence[Line]) -> Figure:
    size = f"{line['op']} of {line['rows']:,} x {line['cols']:,} {line['dtype']}"
    names = list(dict.fromkeys(call["name"] for call in calls))
    high = 0.36 * len(names)
    below = "µs of the host, the middle of many calls; whiskers: a fifth of the calls lies beyond"
    figure = canvas.blank(10, 1.4 + high, f"Host cost of an eager call, {size}", below)
    most = max(call["p80_us"] for call in calls)
    for place, (recorded, title) in enumerate(RECORDED.items()):
        axes = canvas.axes(figure, (2.1 + place * 3.95, 0.4, 3.55, high))
        axes.set_title(title, loc="left", fontsize=10.5)
        axes.grid(axis="y", visible=False)
        shown = [benchplot.NAMES.get(name, name) for name in names]
        axes.set_yticks(range(len(names)), [""] * len(names) if place else shown, fontsize=9.5)
        axes.set_ylim(len(names) - 0.45, -0.55)
        axes.set_xlim(0, 1.2 * most)
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 1.2 * most])
        for call in calls:
            if call["recorded"] is not recorded:
                continue
            y, us = names.index(call["name"]), call["median_us"]
            colour = benchplot.COLOURS.get(call["name"], benchplot.SPARES[0])
            axes.barh(y, us, 0.7, color=colour, zorder=2)
            axes.plot([call["p20_us"], call["p80_us"]], [y, y], color=plot.INK, linewidth=1.2,
                      zorder=3)  # fmt: skip
            axes.annotate(f"{us:.1f}", (max(us, call["p80_us"]), y), (5, 0), va="center",
                          textcoords="offset points", fontsize=9.5)  # fmt: skip
    return figure


# ---- a softmax within a model


def beside_alone(line: Line) -> dict[str, float]:
    """How many times as fast as torch.compile alone each model is; {}: that was not timed."""
    us = {each["name"]: each["median_us"] for each in line["entries"] if each.get("median_us")}
    alone = us.get(fusion.ALONE)
    return {name: alone / us[name] for name in MODELS if name in us} if alone else {}


def compiled(lines: Sequence[Line]) -> Figure:
    """Each model beside torch.compile alone, a panel a case, a line a shape and type.

    Args:
        lines: of kind "fusion", as they were stored; each shape is drawn as measured last.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: torch.compile alone was timed nowhere.
    """
    latest = {(e["case"], e["dtype"], e["rows"], e["cols"]): e for e in lines}
    drawn = [line for line in latest.values() if beside_alone(line)]
    if not drawn:
        raise ValueError("there is nothing to draw: torch.compile alone was not timed")
    return canvas.styled(lambda: _compiled(drawn))


def _compiled(lines: Sequence[Line]) -> Figure:
    from matplotlib.lines import Line2D

    cases = list(dict.fromkeys(line["case"] for line in lines))
    shapes = list(dict.fromkeys((e["dtype"], e["rows"], e["cols"]) for e in lines))
    high = 0.3 * len(shapes)
    below = "times as fast as torch.compile alone, which may fuse all of it; to the right is faster"
    title = "A softmax between a prologue and an epilogue"
    figure = canvas.blank(10, 1.75 + high, title, below)
    wide = 7.9 / len(cases)
    most = max(1.0, *(times for line in lines for times in beside_alone(line).values()))
    for place, case in enumerate(cases):
        axes = canvas.axes(figure, (2.0 + place * wide, 0.75, wide - 0.3, high))
        axes.set_title(case, loc="left", fontsize=10)
        names = [f"{dtype} {rows:,} x {cols:,}" for dtype, rows, cols in shapes]
        axes.set_yticks(range(len(shapes)), [""] * len(names) if place else names, fontsize=9)
        axes.set_ylim(len(shapes) - 0.45, -0.55)
        axes.set_xlim(0, 1.1 * most)
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 1.1 * most])
        axes.axvline(1, color=plot.LIMIT, linewidth=1.4)
        for line in (each for each in lines if each["case"] == case):
            y = shapes.index((line["dtype"], line["rows"], line["cols"]))
            for name, times in beside_alone(line).items():
                _, colour, mark = MODELS[name]
                is_first = name == fusion.AROUND
                axes.plot(times, y, marker=mark, color=colour, markersize=7 if is_first else 5,
                          zorder=4 if is_first else 3)  # fmt: skip
    handles = [
        Line2D([], [], color=colour, marker=mark, linestyle="" if mark else "-", label=label)
        for label, colour, mark in MODELS.values()
    ]
    canvas.legend(figure, handles, 2.0)
    return figure
