"""What pictures of stored results share: a blank figure with a title, a plain grid, the saving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from online_softmax.lab import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID = "#ECECEC"


def blank(width: float, height: float, title: str, below: str) -> Figure:
    """A white figure of so many inches, with a title and a line beneath it.

    Raises plot.Unavailable: there is no matplotlib.
    """
    plot.needed()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=plot.DPI, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.01, 1 - 0.02 / height, title, fontsize=15, fontweight="bold", va="top")
    figure.text(0.01, 1 - 0.33 / height, below, fontsize=10.5, color=plot.FAINT, va="top")
    return figure


def axes(figure: Figure, box: tuple[float, float, float, float]) -> Axes:
    """Axes at left, bottom, width and height in inches, with a faint grid behind what is drawn."""
    width, height = figure.get_size_inches()
    left, bottom, wide, high = box
    found = figure.add_axes((left / width, bottom / height, wide / width, high / height))
    found.tick_params(length=0)
    found.grid(color=GRID, linewidth=0.8)
    found.set_axisbelow(True)
    return found


def legend(figure: Figure, handles: Sequence[Any], left: float, bottom: float = 0.1) -> None:
    """What the marks mean, in a line, so many inches from the left and the bottom."""
    width, height = figure.get_size_inches()
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(left / width, bottom / height),
        frameon=False, ncols=len(handles), fontsize=10, handlelength=1.4, columnspacing=1.8,
        borderpad=0, borderaxespad=0,
    )  # fmt: skip


def styled(make: Callable[[], Figure]) -> Figure:
    """A figure made, and its tick labels with it, in the style of all pictures."""
    plot.needed()
    import matplotlib as mpl

    with mpl.rc_context(plot.STYLE):
        figure = make()
        figure.canvas.draw()
    return figure
