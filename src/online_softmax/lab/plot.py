"""The ladder as a picture: speed against the copy limit where there was a GPU, else what it costs.

The colours (Okabe and Ito's) are told apart by people who see fewer of them, and every bar carries
its figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from online_softmax.lab.results import Header, Result, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"cuda": "#0072B2", "triton": "#E69F00", "torch": "#8C8C8C", "production": "#009E73"}
KINDS = {
    "cuda": "CUDA C++",
    "triton": "Triton",
    "torch": "PyTorch",
    "production": "what softmax() runs",
}
WRITES = "#56B4E9"
LIMIT = "#D55E00"
INK, FAINT = "#222222", "#777777"
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#BBBBBB",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "ytick.color": INK,
}
BAR_HEIGHT = 0.66
DPI = 160


class Unavailable(RuntimeError):  # noqa: N818 a state of the machine, like jit.Unavailable
    """matplotlib is missing; the message says how to get it."""


def draw(run: Run, path: str | Path) -> None:
    """Draw a run as a bar chart into a file: .png, or any ending that matplotlib knows.

    Raises:
        Unavailable: there is no matplotlib.
        ValueError: nothing ran, or matplotlib does not know the ending.
        OSError: the file cannot be written.
    """
    check(path)
    figure = picture(run)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write(figure, path)


def write(figure: Figure, path: str | Path) -> None:
    """Keep a figure in a file; its folder must be there."""
    figure.savefig(path, bbox_inches="tight", pad_inches=0.25)


def check(path: str | Path) -> None:
    """Find out before a run whether a picture of that name can be drawn.

    Raises:
        Unavailable: there is no matplotlib.
        ValueError: matplotlib does not know the name's ending.
    """
    needed()
    from matplotlib.backend_bases import FigureCanvasBase

    endings = [f".{ending}" for ending in sorted(FigureCanvasBase.get_supported_filetypes())]
    suffix = Path(path).suffix.lower()
    if suffix not in endings:
        wrong = f"no picture ends in {suffix}" if suffix else "the name has no ending"
        raise ValueError(f"{wrong}: give one of {', '.join(endings)}")


def needed() -> None:
    """Raise Unavailable where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Unavailable("a picture needs matplotlib: pip install 'online-softmax[lab]'") from None


def picture(run: Run) -> Figure:
    """The chart: speed if the run was timed, else what each rung costs."""
    needed()
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results = [r for r in run.results if _is_drawn(r, run.is_timed)]
    if not results:
        raise ValueError("there is nothing to draw: no rung was counted or timed")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 1.9 + 0.42 * len(results)), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        (_draw_speed if run.is_timed else _draw_costs)(figure, run.header, results)
        figure.canvas.draw()  # tick labels are made here, in this style
    return figure


def _is_drawn(result: Result, is_timed: bool) -> bool:
    return (result.of_copy if is_timed else result.reads) is not None


def _colour(result: Result) -> str:
    return COLOURS[result.name if result.name == "production" else result.backend]


def _title(figure: Figure, text: str, below: str) -> float:
    """Put both above everything; return the height left for the rest."""
    inch = 1 / figure.get_figheight()
    figure.text(0.01, 1 - 0.02 * inch, text, fontsize=15, fontweight="bold", va="top")
    figure.text(0.01, 1 - 0.36 * inch, below, fontsize=10.5, color=FAINT, va="top")
    return 1 - 0.95 * inch


def _rows(axes: Axes, names: Sequence[str]) -> range:
    """One row a name, the first on top."""
    places = range(len(names))
    axes.set_yticks(places, names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, pad=8)
    axes.tick_params(axis="x", length=3)
    axes.grid(axis="x", color="#E8E8E8", linewidth=0.8)
    axes.set_axisbelow(True)
    return places


# ---- with a GPU: share of the copy's speed


def _draw_speed(figure: Figure, header: Header, results: Sequence[Result]) -> None:
    top = _title(
        figure,
        f"softmax of {header.rows:,} x {header.cols:,} {header.dtype} on {header.device}",
        "share of what a copy kernel reaches, one read and one write; L2 cold",
    )
    inch = 1 / figure.get_figheight()
    axes = figure.add_axes((0.19, 0.95 * inch, 0.62, top - 0.95 * inch))
    places = _rows(axes, [_speed_name(r) for r in results])
    shares = [100 * (r.of_copy or 0.0) for r in results]
    axes.barh(places, shares, BAR_HEIGHT, color=[_colour(r) for r in results], zorder=2)
    axes.set_xlim(0, max(100.0, *shares) * 1.02)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    for place, result, share in zip(places, results, shares, strict=True):
        _speed_label(axes, place, result, share)
    copy = f"copy: {header.copy_gbs:,.0f} GB/s" if header.copy_gbs else "copy"
    _limit(axes, 100, copy)
    _kinds(figure, results, 0.19, 0.2 * inch)


def _speed_name(result: Result) -> str:
    return f"production\n({result.kernel})" if result.name == "production" else result.name


def _speed_label(axes: Axes, place: int, result: Result, share: float) -> None:
    """The share inside a long bar or beside a short one; speed and time at the right edge."""
    text = f"{share:.0f} %" if share >= 10 else f"{share:.1f} %"
    is_long = share > 14
    axes.annotate(
        text, (share, place), (-6 if is_long else 6, 0), textcoords="offset points",
        ha="right" if is_long else "left", va="center", fontweight="bold", fontsize=10,
        color="white" if is_long and result.backend != "triton" else INK, zorder=4,
    )  # fmt: skip
    us = result.median_us or 0.0
    time = f"{us:,.0f} µs" if us >= 1000 else f"{us:.1f} µs"
    for column, text in ((0.09, f"{result.gbs or 0:,.0f} GB/s"), (0.24, time)):
        axes.annotate(
            text, (1 + column + 0.06, place), xycoords=("axes fraction", "data"),
            ha="right", va="center", fontsize=10, color=INK, annotation_clip=False,
        )  # fmt: skip


def _kinds(figure: Figure, results: Sequence[Result], left: float, bottom: float) -> None:
    """Which colour is what, in the order of the bars."""
    from matplotlib.patches import Patch

    kinds = dict.fromkeys(r.name if r.name == "production" else r.backend for r in results)
    handles = [Patch(color=COLOURS[kind], label=KINDS[kind]) for kind in kinds]
    _legend(figure, handles, left, bottom)


def _legend(figure: Figure, handles: Sequence[Any], left: float, bottom: float) -> None:
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(left, bottom), frameon=False,
        ncols=len(handles), fontsize=10, handlelength=1.1, handleheight=1.0, columnspacing=1.8,
        borderpad=0, borderaxespad=0,
    )  # fmt: skip


# ---- without: transfers and exponentials an element


def _draw_costs(figure: Figure, header: Header, results: Sequence[Result]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    top = _title(
        figure,
        "What each rung does for one element",
        f"softmax of {header.rows_asked:,} x {header.cols:,} {header.dtype}; counted while the "
        "kernels ran on a CPU",
    )
    inch = 1 / figure.get_figheight()
    bottom, height = 0.95 * inch, top - 0.95 * inch
    transfers = figure.add_axes((0.19, bottom, 0.33, height))
    exponentials = figure.add_axes((0.60, bottom, 0.36, height))
    names = [_speed_name(r) for r in results]
    _transfers(transfers, _rows(transfers, names), results)
    _exponentials(exponentials, _rows(exponentials, [""] * len(names)), results)
    handles: list[Any] = [
        Patch(color=COLOURS["cuda"], label="reads"),
        Patch(color=WRITES, label="writes"),
        Patch(color=COLOURS["production"], label="exponentials"),
        Line2D([], [], color=INK, marker="d", linestyle="", label="predicted before the run"),
    ]
    if not all(r.is_counted for r in results):
        handles.append(
            Patch(facecolor="white", edgecolor=FAINT, hatch="////", label="predicted only")
        )
    _legend(figure, handles, 0.19, 0.12 * inch)


def _bars(
    axes: Axes,
    places: Sequence[int],
    widths: Sequence[float],
    colour: str,
    results: Sequence[Result],
    left: Sequence[float] | None = None,
) -> None:
    """Bars; hatched where nothing counted."""
    bars = axes.barh(places, widths, BAR_HEIGHT, left=left, color=colour, zorder=2)
    for bar, result in zip(bars, results, strict=True):
        if not result.is_counted:
            bar.set(facecolor="white", edgecolor=colour, hatch="////", linewidth=0)


def _transfers(axes: Axes, places: range, results: Sequence[Result]) -> None:
    reads = [r.reads or 0.0 for r in results]
    writes = [r.writes or 0.0 for r in results]
    _bars(axes, places, reads, COLOURS["cuda"], results)
    _bars(axes, places, writes, WRITES, results, left=reads)
    axes.set_xlim(0, max(2.0, *(r + w for r, w in zip(reads, writes, strict=True))) * 1.18)
    for place, read, write in zip(places, reads, writes, strict=True):
        text = f"{_figure(read)} + {_figure(write)}"
        _beside(axes, read + write, place, text)
    _limit(axes, 2, "the least: 1 + 1")
    axes.set_xlabel("elements read + written", color=FAINT, fontsize=10)


def _exponentials(axes: Axes, places: range, results: Sequence[Result]) -> None:
    from matplotlib.ticker import MaxNLocator

    exps = [(r.exps if r.is_counted else r.exps_predicted) or 0.0 for r in results]
    predicted = [r.exps_predicted for r in results]
    _bars(axes, places, exps, COLOURS["production"], results)
    axes.set_xlim(0, max(1.0, *exps) * 1.22)
    for place, value, expected in zip(places, exps, predicted, strict=True):
        _beside(axes, value, place, _figure(value))
        if expected is not None:
            axes.plot(expected, place, "d", color=INK, markersize=5.5, zorder=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("exponentials evaluated", color=FAINT, fontsize=10)


def _figure(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _beside(axes: Axes, x: float, place: int, text: str) -> None:
    axes.annotate(
        text, (x, place), (9, 0), textcoords="offset points", va="center", fontsize=10, zorder=5
    )


def _limit(axes: Axes, x: float, text: str) -> None:
    """A line that nothing can pass, named above it."""
    axes.axvline(x, color=LIMIT, linewidth=1.6, zorder=3)
    axes.annotate(
        text, (x, 1), (0, 4), xycoords=("data", "axes fraction"), textcoords="offset points",
        ha="center", va="bottom", color=LIMIT, fontsize=10, annotation_clip=False,
    )  # fmt: skip
