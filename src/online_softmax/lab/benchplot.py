"""A benchmark's large cells as a picture: the share of the ceiling over the columns of a row.

One picture an operation, a panel a type. Lines join the widths whose rows all begin on 16-byte
boundaries; an open mark is a ragged width, which has no neighbours to be joined with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from online_softmax.lab import benchtable, goals, plot
from online_softmax.lab.benchfile import Row
from online_softmax.lab.grid import LOSS_OPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DTYPES = ("bfloat16", "float32")  # the rivals' types; float16 lies where bfloat16 does
NAMES = {
    "ours": "online-softmax",
    "torch": "torch",
    "compile": "torch.compile",
    "quack": "quack",
    "liger": "liger",
    "tutorial": "Triton's tutorial",
}
COLOURS = {
    "ours": "#0072B2",
    "torch": "#8C8C8C",
    "compile": "#E69F00",
    "quack": "#009E73",
    "liger": "#CC79A7",
    "tutorial": "#56B4E9",
}
SPARES = ("#7A5BB5", "#8A6D3B", "#2D7F9D", "#56B4E9")  # of contenders without a colour of their own
MARKERS = {"ours": "o", "torch": "s", "compile": "^", "quack": "D", "liger": "v"}
MARKERS |= {"tutorial": "P"}
CEILING = {"softmax": "a copy", "log_softmax": "a copy", "logsumexp": "a read"}
CEILING |= {"cross_entropy": "a read", "cross_entropy_both": "a read and then a copy"}
CEILING |= {"cross_entropy_in_forward": "a copy", "token_stats": "a read"}
WIDTHS, LOSS_WIDTHS = (5, 22), (12, 18)  # log2 of the columns that an axis shows
GAP = 9  # times as wide: what lies further apart is not joined

Share = tuple[int, float, bool]  # columns, share of the ceiling, whether the width is ragged


def shares(rows: Sequence[Row], name: str) -> list[Share]:
    """Of a contender, by columns: the ceiling's time over its own, where a graph held it."""
    found = []
    for row in rows:
        entry, ceiling = row.entry(name), row.entry("ceiling")
        if entry is None or ceiling is None or not entry.median_us or not ceiling.median_us:
            continue
        if entry.clock == ceiling.clock == "graph":
            share = ceiling.median_us / entry.median_us
            found.append((row.cols, share, goals.kind(row.cell) == goals.RAGGED))
    return sorted(found)


def draw(rows: Sequence[Row], op: str, path: str | Path) -> None:
    """Draw an operation's large cells into a file.

    Args:
        rows: of any operation; those of `op` in large cells, of the usual input, are taken.
        op: the operation, a name of `grid.EVERY_OP`.
        path: .png, or any ending that matplotlib knows.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: no cell of that operation was timed, or matplotlib does not know the ending.
        OSError: the file cannot be written.
    """
    plot.check(path)
    plot.write(picture(rows, op), path)


def picture(rows: Sequence[Row], op: str) -> Figure:
    """The chart of one operation.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: no cell of that operation was timed.
    """
    plot.needed()
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mine = [r for r in rows if r.op == op and r.cell.is_large and r.values == "normal"]
    found = {
        dtype: {name: shares([r for r in mine if r.dtype == dtype], name) for name in NAMES}
        for dtype in DTYPES
    }
    dtypes = [dtype for dtype in DTYPES if found[dtype]["ours"]]
    if not dtypes:
        raise ValueError(f"there is nothing to draw: no large cell of {op} was timed")
    with mpl.rc_context(plot.STYLE | {"ytick.color": plot.FAINT}):
        figure = Figure(figsize=(10, 1.2 + 2.5 * len(dtypes)), dpi=plot.DPI, facecolor="white")
        FigureCanvasAgg(figure)
        _title(figure, op)
        inch = 1 / figure.get_figheight()
        for place, dtype in enumerate(reversed(dtypes)):
            axes = figure.add_axes((0.065, (0.95 + 2.5 * place) * inch, 0.925, 1.95 * inch))
            _panel(axes, found[dtype], dtype, LOSS_WIDTHS if op in LOSS_OPS else WIDTHS)
            if not place:
                axes.set_xlabel("columns", color=plot.FAINT, fontsize=10)
        _legend(figure, [n for n in NAMES if any(found[dtype][n] for dtype in dtypes)])
        figure.canvas.draw()
    return figure


def _title(figure: Figure, op: str) -> None:
    inch = 1 / figure.get_figheight()
    ceiling = CEILING.get(op, "an addition")
    elements = "2²⁸" if op in LOSS_OPS else "2²⁷"
    below = f"share of the speed of {ceiling} that moves the same bytes"
    below += f"; {elements} elements, L2 cold"
    figure.text(0.01, 1 - 0.02 * inch, op, fontsize=15, fontweight="bold", va="top")
    figure.text(0.01, 1 - 0.32 * inch, below, fontsize=10.5, color=plot.FAINT, va="top")


def _panel(
    axes: Axes, lines: Mapping[str, Sequence[Share]], dtype: str, widths: tuple[int, int]
) -> None:
    axes.set_xscale("log", base=2)
    ticks = [2**n for n in range(widths[0], widths[1] + 1)]
    axes.set_xticks(ticks, [benchtable.short(each) for each in ticks])
    axes.set_xlim(2 ** (widths[0] - 0.2), 2 ** (widths[1] + 0.2))
    axes.set_ylim(0, 1.12)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.tick_params(axis="both", length=0)
    axes.minorticks_off()
    axes.grid(color="#ECECEC", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.axhline(1, color=plot.LIMIT, linewidth=1.2, zorder=1)
    axes.annotate(
        "ceiling", (1, 1), (0, 2), xycoords=("axes fraction", "data"), textcoords="offset points",
        ha="right", va="bottom", color=plot.LIMIT, fontsize=9,
    )  # fmt: skip
    axes.set_title(dtype, loc="left", fontsize=11, fontweight="bold")
    for name in reversed(NAMES):  # ours on top
        _line(axes, name, lines[name])


def _line(axes: Axes, name: str, found: Sequence[Share]) -> None:
    is_ours = name == "ours"
    width, size = (2.4, 6.5) if is_ours else (1.2, 4.5)
    style: dict[str, Any] = {
        "color": COLOURS[name],
        "marker": MARKERS[name],
        "zorder": 4 if is_ours else 3,
    }
    whole = [(cols, share) for cols, share, is_ragged in found if not is_ragged]
    for piece in joined(whole):
        axes.plot(*zip(*piece, strict=True), linewidth=width, markersize=size, **style)
    open_ = [(cols, share) for cols, share, is_ragged in found if is_ragged]
    if open_:
        axes.plot(
            *zip(*open_, strict=True), linestyle="", markersize=size, markerfacecolor="white",
            markeredgewidth=1.4, **{**style, "zorder": 5},
        )  # fmt: skip


def joined(points: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Points in pieces: a piece ends where the next width is far off, and was not measured.

    >>> joined([(32, 1.0), (64, 1.0), (4096, 1.0)])
    [[(32, 1.0), (64, 1.0)], [(4096, 1.0)]]
    """
    pieces: list[list[tuple[int, float]]] = []
    for point in points:
        if pieces and point[0] < GAP * pieces[-1][-1][0]:
            pieces[-1].append(point)
        else:
            pieces.append([point])
    return pieces


def _legend(figure: Figure, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=COLOURS[n], marker=MARKERS[n], label=NAMES[n], markersize=6)
        for n in names
    ]
    handles.append(
        Line2D([], [], color=plot.INK, marker="o", linestyle="", markerfacecolor="white",
               label="open: ragged columns")
    )  # fmt: skip
    inch = 1 / figure.get_figheight()
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.065, 0.1 * inch), frameon=False,
        ncols=len(handles), fontsize=10, handlelength=1.6, columnspacing=1.6,
        borderpad=0, borderaxespad=0,
    )  # fmt: skip
