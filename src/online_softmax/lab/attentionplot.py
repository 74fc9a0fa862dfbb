"""Attention's cells as a picture: TFLOP/s over the length of a sequence, ours and PyTorch's.

A panel a pass and head_dim; where queries see no later key, lines are broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from online_softmax.lab import benchtable, plot
from online_softmax.lab.benchfile import Row
from online_softmax.lab.fusedsizes import TOKENS, parsed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PASSES = {"attention": "forward", "attention_backward": "backward"}
HEAD_DIMS = (128, 64)
DTYPE = "bfloat16"
NAMES = {"ours": "online-softmax", "torch, cudnn": "cuDNN", "torch, flash": "FlashAttention-2"}
COLOURS = {"ours": "#0072B2", "torch, cudnn": "#009E73", "torch, flash": "#8C8C8C"}
MARKERS = {"ours": "o", "torch, cudnn": "D", "torch, flash": "s"}
CAUSAL = {False: "-", True: (0, (4, 2))}
HEADROOM = 1.12  # of the largest figure

Line = list[tuple[int, float]]  # tokens of a sequence, TFLOP/s


def lines(rows: Sequence[Row], op: str, head_dim: int) -> dict[tuple[str, bool], Line]:
    """Of each contender, causal or not, by the length of a sequence; 16,384 tokens in all."""
    found: dict[tuple[str, bool], Line] = {}
    for row in rows:
        if row.op != op or row.dtype != DTYPE:
            continue
        sizes, tokens = parsed(row.sizes), row.cols
        if sizes["head_dim"] != head_dim or sizes["batch"] * tokens != TOKENS:
            continue
        for name in NAMES:
            entry = row.entry(name)
            if entry and entry.tflops and not entry.doubt:
                point = (tokens, entry.tflops)
                found.setdefault((name, bool(sizes["causal"])), []).append(point)
    return {key: sorted(line) for key, line in found.items()}


def picture(rows: Sequence[Row]) -> Figure:
    """The chart.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: no such cell was timed.
    """
    plot.needed()
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {(op, dim): lines(rows, op, dim) for op in PASSES for dim in HEAD_DIMS}
    if not any(panels.values()):
        raise ValueError(f"there is nothing to draw: no attention of {TOKENS:,} tokens was timed")
    top = HEADROOM * max(y for panel in panels.values() for line in panel.values() for _, y in line)
    with mpl.rc_context(plot.STYLE | {"ytick.color": plot.FAINT}):
        figure = Figure(figsize=(10, 6.4), dpi=plot.DPI, facecolor="white")
        FigureCanvasAgg(figure)
        figure.text(0.01, 0.995, "attention", fontsize=15, fontweight="bold", va="top")
        below = "TFLOP/s by tokens of a sequence, 16,384 in all, 2,048 features, bfloat16"
        figure.text(0.01, 0.945, below, fontsize=10.5, color=plot.FAINT, va="top")
        for at, ((op, dim), panel) in enumerate(panels.items()):
            left, low = 0.065 + 0.485 * (at % 2), 0.53 - 0.475 * (at // 2)
            axes = figure.add_axes((left, low, 0.43, 0.34))
            axes.set_title(f"{PASSES[op]}, head_dim {dim}", loc="left", fontsize=11)
            _panel(axes, panel, top)
        _legend(figure.axes[0])
        figure.canvas.draw()
    return figure


def _panel(axes: Axes, panel: dict[tuple[str, bool], Line], top: float) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted({tokens for line in panel.values() for tokens, _ in line})
    axes.set_xticks(ticks, [benchtable.short(each) for each in ticks])
    axes.set_ylim(0, top)
    axes.tick_params(axis="both", length=0)
    axes.minorticks_off()
    axes.grid(color="#ECECEC", linewidth=0.8)
    axes.set_axisbelow(True)
    for (name, causal), line in panel.items():
        is_ours = name == "ours"
        axes.plot(
            *zip(*line, strict=True), color=COLOURS[name], linestyle=CAUSAL[causal],
            linewidth=2.4 if is_ours else 1.2, marker=MARKERS[name],
            markersize=6 if is_ours else 4.5, zorder=4 if is_ours else 3,
        )  # fmt: skip


def _legend(axes: Axes) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=COLOURS[name], marker=MARKERS[name], label=label)
        for name, label in NAMES.items()
    ]
    handles += [
        Line2D([], [], color=plot.FAINT, linestyle=CAUSAL[causal], label=label)
        for causal, label in ((False, "all keys"), (True, "causal"))
    ]
    axes.figure.legend(
        handles=handles, loc="upper right", bbox_to_anchor=(0.985, 1.01), ncols=len(handles),
        frameon=False, fontsize=9,
    )  # fmt: skip
