"""The ladder's roofline as a picture: exponentials a second over exponentials a byte of each rung,
below what a copy, the datasheet's memory and the units for exponentials allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from online_softmax.lab import canvas, plot, reportladder
from online_softmax.lab.results import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

APART = 0.2  # inches between names
TICKS = ((0.125, "⅛"), (0.25, "¼"), (0.5, "½"), (1.0, "1"), (2.0, "2"), (4.0, "4"))
TALL, NAMES_AT = 3.9, 7.15  # inches of the axes, and from the left to the names


def picture(run: Run) -> Figure:
    """One run's rungs.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: nothing was timed.
    """
    found = reportladder.roofline(run)
    if found is None:
        raise ValueError("there is nothing to draw: no rung was timed")
    return canvas.styled(lambda: _picture(run, found))


def _picture(run: Run, found: dict[str, Any]) -> Figure:
    from matplotlib.lines import Line2D

    device = run.header.device
    below = f"exponentials a second over exponentials a byte that must move, {device}"
    title = f"Roofline, softmax of {reportladder.size(run.header)}"
    figure = canvas.blank(10, 5.75, title, below)
    axes = canvas.axes(figure, (0.85, 1.15, 6.1, TALL))
    points = sorted(found["points"], key=lambda point: point["y"], reverse=True)
    xs, ys = [p["x"] for p in points], [p["y"] for p in points]
    low, high = min(xs) * 0.72, max(xs) * 1.5
    peak = found["exps"]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(ys) * 0.6, (peak or max(ys)) * 2.2)
    axes.minorticks_off()
    ticks = [(at, text) for at, text in TICKS if low <= at <= high]
    axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
    axes.set_xlabel("exponentials a byte", color=plot.FAINT)
    axes.yaxis.set_major_formatter(lambda rate, _: _rate(rate))
    handles: list[Any] = []
    for gbs, name, style in (
        (found["copy"], "a copy", "-"), (found["datasheet"], "datasheet", ":")
    ):  # fmt: skip
        if gbs:
            end = min(high, peak / (gbs * 1e9)) if peak else high
            axes.plot([low, end], [low * gbs * 1e9, end * gbs * 1e9], style, color=plot.LIMIT)
            said = f"{name}, {gbs:,.0f} GB/s"
            handles.append(Line2D([], [], color=plot.LIMIT, linestyle=style, label=said))
    if peak:
        colour = plot.COLOURS["triton"]
        axes.plot([low, high], [peak, peak], "--", color=colour)
        said = "units for exponentials"
        handles.append(Line2D([], [], color=colour, linestyle="--", label=said))
    for point in points:
        colour = plot.COLOURS.get(point["kind"], plot.INK)
        is_rung = point["kind"] != "production"  # that may lie below the rung that it runs
        axes.plot(point["x"], point["y"], "o", color=colour, markersize=7 if is_rung else 11,
                  zorder=4 if is_rung else 3)  # fmt: skip
    _names(figure, axes, points)
    kinds = list(dict.fromkeys(point["kind"] for point in points))
    marks = [Line2D([], [], linestyle="", marker="o", color=plot.COLOURS.get(kind, plot.INK),
                    label=plot.KINDS.get(kind, kind)) for kind in kinds]  # fmt: skip
    canvas.legend(figure, marks, 0.85, 0.36)
    canvas.legend(figure, handles, 0.85, 0.06)
    return figure


def _rate(value: float) -> str:
    """Of a second: "10 G", "1 T"."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g}"


def _names(figure: Figure, axes: Axes, points: Sequence[dict[str, Any]]) -> None:
    """Each point's, beside the axes, the fastest on top; a thin line leads there."""
    width, height = figure.get_size_inches()
    figure.canvas.draw()
    scale = figure.get_dpi()
    heights = [axes.transData.transform((p["x"], p["y"]))[1] / scale for p in points]
    for point, at in zip(points, spread(heights), strict=True):
        axes.annotate(
            point["name"], (point["x"], point["y"]), (NAMES_AT / width, at / height),
            textcoords="figure fraction", va="center", fontsize=9.5,
            arrowprops={"arrowstyle": "-", "color": "#BBBBBB", "linewidth": 0.8,
                        "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 5},
        )  # fmt: skip


def spread(heights: Sequence[float], apart: float = APART) -> list[float]:
    """Heights from the top down, moved so that neighbours are so far apart, as a whole where they
    were.

    >>> spread([3.0, 2.0, 2.0], 0.5)
    [3.0, 2.25, 1.75]
    """
    groups: list[list[float]] = []  # each the heights that hang together
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _end(groups[-2], apart) - _begin(groups[-1], apart) < apart:
            last = groups.pop()
            groups[-1] += last
    return [_begin(group, apart) - apart * place for group in groups for place in range(len(group))]


def _begin(group: Sequence[float], apart: float) -> float:
    return sum(group) / len(group) + apart * (len(group) - 1) / 2


def _end(group: Sequence[float], apart: float) -> float:
    return _begin(group, apart) - apart * (len(group) - 1)
