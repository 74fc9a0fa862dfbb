"""The lessons' pictures, of stored runs: each rung among those before it, what crosses which wire,
attention's memory; and one that is computed, the error of a long sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from online_softmax.catalogue import KERNELS
from online_softmax.lab import canvas, plot
from online_softmax.lab.laddertables import cell
from online_softmax.lab.profilefile import Line, Profile
from online_softmax.lab.results import Result, Run
from online_softmax.plan import ELEMENT_BYTES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DTYPE = "float32"  # of the runs that are drawn
BEFORE = {"cuda": "#A9CBE3", "triton": "#F4D28C"}  # rungs of earlier lessons, paler
DRAM, L2 = "#0072B2", "#56B4E9"
CANNOT, NONE = "cannot", "—"  # of what says why it did not run; of what has no figure
LONG = 70  # per cent: a bar that has room for its figure
LINES = {
    "ours": ("#0072B2", "o"),
    "torch, flash": ("#8C8C8C", "s"),
    "torch, cudnn": ("#009E73", "D"),
}
KEYS = tuple(2**n for n in range(10, 18))
LINE_HEIGHT = 0.075  # of words beside a picture, a share of its height
BOUND = 1e-5  # of a probability of softmax in float32: docs/accuracy.md


# ---- a rung among those before it


def rungs(runs: Sequence[Run]) -> list[str]:
    """The ladder's rungs, in the order of the lessons."""
    return [r.name for r in runs[0].results if r.name in KERNELS and KERNELS[r.name].rung]


def climb(runs: Sequence[Run], name: str) -> Figure:
    """A rung's share of a copy's speed, a panel a shape, below the rungs before it; torch last.

    Args:
        runs: of the ladder; those in float32 are drawn.
        name: a rung.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: no such rung was timed.
    """
    names = rungs(runs)
    drawn = [run for run in runs if run.header.dtype == DTYPE and run.is_timed]
    if name not in names or not drawn:
        raise ValueError(f"there is nothing to draw: {name} was not timed in {DTYPE}")
    shown = [*names[: names.index(name) + 1], "torch"]
    return canvas.styled(lambda: _climb(drawn, shown, name))


def _climb(runs: Sequence[Run], shown: Sequence[str], name: str) -> Figure:
    high = 0.29 * len(shown) + 0.1
    device = runs[0].header.device
    below = (
        f"share of a copy's speed, {DTYPE}, cold L2, {device}; pale: the rungs before, and torch"
    )
    figure = canvas.blank(10, 1.35 + high, name, below)
    wide = 8.3 / len(runs)
    for place, run in enumerate(runs):
        axes = canvas.axes(figure, (1.6 + place * wide, 0.35, wide - 0.55, high))
        _, rows, cols = cell(run)
        axes.set_title(f"{rows:,} x {cols:,}", loc="left", fontsize=10.5)
        found = {r.name: r for r in run.results}
        axes.set_yticks(range(len(shown)), shown if not place else [""] * len(shown), fontsize=9.5)
        axes.set_ylim(len(shown) - 0.45, -0.55)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, max(100.0, *(100 * (found[n].of_copy or 0) for n in shown if n in found)))
        axes.set_xticks([0, 50, 100], ["0", "50 %", "100 %"], fontsize=9)
        axes.axvline(100, color=plot.LIMIT, linewidth=1.4, zorder=3)
        for y, each in enumerate(shown):
            _bar(axes, y, found.get(each), is_new=each == name)
    return figure


def _bar(axes: Axes, y: int, result: Result | None, is_new: bool) -> None:
    """One rung's bar with its figure beside it, or within where the bar is long."""
    share = None if result is None or result.of_copy is None else 100 * result.of_copy
    if result is not None and share is not None:
        pale = BEFORE.get(result.backend, "#C4C4C4")
        axes.barh(y, share, 0.7, color=plot.COLOURS[result.backend] if is_new else pale, zorder=2)
    if share is None:
        text = CANNOT if result and result.reasons else NONE
    elif share < 0.05:
        text = "under 0.1"
    else:
        text = f"{share:.0f}" if share >= 9.95 else f"{share:.1f}"
    is_long = share is not None and share > LONG
    axes.annotate(
        text, (share or 0, y), (-5 if is_long else 5, 0), textcoords="offset points",
        ha="right" if is_long else "left", va="center", fontsize=9,
        fontweight="bold" if is_new else "normal",
        color="white" if is_long and is_new and result and result.backend == "cuda" else plot.INK,
        zorder=4,
    )  # fmt: skip


# ---- what crosses which wire


def traffic(runs: Sequence[Profile]) -> Figure:
    """Bytes an element that each kernel reads from L2 and from DRAM, by the GPU's counters, and
    what its algorithm asks for; a panel a run of `profile`, the smaller matrix first.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: no run has counters.
    """
    drawn = [run for run in runs if any(line.counters for line in run.lines)]
    if not drawn:
        raise ValueError("there is nothing to draw: no run of `profile` has counters")
    drawn.sort(key=lambda run: (run.header.dtype, run.header.rows * run.header.cols))
    return canvas.styled(lambda: _traffic(drawn))


def _traffic(runs: Sequence[Profile]) -> Figure:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(line.name for run in runs for line in run.lines))
    most = max(each for run in runs for line in run.lines for each in _bytes(run, line) if each)
    high = 0.36 * len(names)
    h = runs[0].header
    title = "What is asked for, and what crosses the wires"
    below = f"bytes read an element, {h.dtype}, {h.device}, caches emptied before each kernel"
    figure = canvas.blank(10, high + 1.75, title, below)
    wide = 8.3 / len(runs)
    for place, run in enumerate(runs):
        axes = canvas.axes(figure, (1.6 + place * wide, 0.7, wide - 0.35, high))
        axes.set_title(f"{run.header.rows:,} x {run.header.cols:,}", loc="left", fontsize=11)
        axes.set_yticks(range(len(names)), names if not place else [""] * len(names), fontsize=9.5)
        axes.set_ylim(len(names) - 0.45, -0.55)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.08 * most)
        axes.set_xticks(range(0, int(most) + 1, 4))
        found = {line.name: line for line in run.lines}
        for y, name in enumerate(names):
            line = found.get(name)
            if line is None or not line.counters:
                text = CANNOT if line and line.reasons else NONE
                axes.annotate(text, (0, y), (5, 0), textcoords="offset points", va="center",
                              fontsize=9)  # fmt: skip
                continue
            asked, l2, dram = _bytes(run, line)
            axes.barh(y - 0.19, l2 or 0.0, 0.36, color=L2, zorder=2)
            axes.barh(y + 0.19, dram or 0.0, 0.36, color=DRAM, zorder=2)
            if asked is not None:
                axes.plot(asked, y, "d", color=plot.LIMIT, markersize=6.5, zorder=4)
    handles = [
        Line2D(
            [], [], color=plot.LIMIT, marker="d", linestyle="", label="asked for by the algorithm"
        ),
        Patch(color=L2, label="read from L2"),
        Patch(color=DRAM, label="read from DRAM"),
    ]
    canvas.legend(figure, handles, 1.6)
    return figure


def _bytes(run: Profile, line: Line) -> tuple[float | None, float | None, float | None]:
    """What a kernel reads an element: by its algorithm, from L2, from DRAM; None: not known."""
    asked = line.reads_predicted
    if asked is not None:
        asked *= ELEMENT_BYTES[run.header.dtype]
    return asked, line.counters.get("l2_read"), line.counters.get("dram_read")


# ---- attention's memory


def memory(lines: Sequence[dict[str, Any]]) -> Figure:
    """Bytes of one head of attention over the number of keys: all scores and what a forward
    returns, both computed, and what was measured at one length.

    Args:
        lines: of kind "attention_memory", of one size; those of LINES' contenders are drawn.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: there are none.
    """
    drawn = [line for line in lines if line["contender"] in LINES]
    if not drawn:
        raise ValueError("there is nothing to draw: attention's memory was not measured")
    return canvas.styled(lambda: _memory(drawn))


def _memory(lines: Sequence[dict[str, Any]]) -> Figure:
    first = lines[0]
    dim, item, tokens = first["head_dim"], ELEMENT_BYTES[first["dtype"]], first["tokens"]
    title = "Memory of one head of attention, beyond its inputs"
    below = (
        f"by queries and keys; {first['dtype']}, head_dim {dim}; lines are computed, marks measured"
    )
    figure = canvas.blank(10, 4.6, title, below)
    axes = canvas.axes(figure, (0.95, 0.65, 6.2, 3.1))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(KEYS, [f"{keys // 1024}K" for keys in KEYS])
    axes.set_yticks([1e6, 1e8, 1e10], ["1 MB", "100 MB", "10 GB"])
    axes.set_xlim(KEYS[0], KEYS[-1] * 1.12)
    axes.plot(KEYS, [4 * n * n for n in KEYS], color=plot.LIMIT, linewidth=2)
    axes.plot(KEYS, [n * (item * dim + 4) for n in KEYS], color=LINES["ours"][0], linewidth=2)
    axes.set_xlabel("keys", color=plot.FAINT, fontsize=10)
    said = [(first["matrix_bytes_computed"], "all scores in float32, computed", plot.LIMIT)]
    for line in lines:
        colour, marker = LINES[line["contender"]]
        for kind, filled in (("forward_bytes", True), ("with_backward_bytes", False)):
            face = colour if filled else "white"
            axes.plot(tokens, line[kind], marker, color=colour, markerfacecolor=face, markersize=7,
                      clip_on=False, zorder=4)  # fmt: skip
    for kind, name in (("with_backward_bytes", "with backward"), ("forward_bytes", "forward")):
        found = sorted(((line[kind], line["contender"]) for line in lines), reverse=True)
        said += [(size, f"{who}, {name}", LINES[who][0]) for size, who in found]
    _beside(axes, said)
    return figure


def _beside(axes: Axes, said: Sequence[tuple[float, str, str]]) -> None:
    """Words at the right edge, largest first, each at its height or below the one before it."""
    low, high = map(math.log, axes.get_ylim())
    place = 2.0
    for size, text, colour in said:
        place = min((math.log(size) - low) / (high - low), place - LINE_HEIGHT)
        label = f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
        axes.annotate(
            f"{label}  {text}", (1.03, place), xycoords="axes fraction", va="center",
            fontsize=9.5, color=colour, annotation_clip=False,
        )  # fmt: skip


# ---- a long sum


def long_sum() -> Figure:
    """The relative error of a float32 sum of exponentials by its length: one after another as a
    single thread adds, and 256 at a time; computed with NumPy, as the lesson's lines do.

    Raises plot.Unavailable: there is no matplotlib.
    """
    import numpy as np

    x = np.random.default_rng(0).standard_normal(131_072).astype(np.float32) * 3
    e = np.exp(x - x.max())
    lengths = [2**n for n in range(8, 18)]
    exact = np.cumsum(e.astype(np.float64))
    one = np.cumsum(e)
    parts = np.cumsum(np.cumsum(e.reshape(-1, 256), axis=1)[:, -1])
    errors = {
        "one after the other": [abs(one[n - 1] - exact[n - 1]) / exact[n - 1] for n in lengths],
        "256 at a time, then merged": [
            abs(parts[n // 256 - 1] - exact[n - 1]) / exact[n - 1] for n in lengths
        ],
    }
    return canvas.styled(lambda: _long_sum(lengths, errors))


def _long_sum(lengths: Sequence[int], errors: dict[str, list[float]]) -> Figure:
    below = "relative error of a sum of exponentials against float64, by the terms added"
    figure = canvas.blank(10, 3.9, "A long sum in float32 loses digits", below)
    axes = canvas.axes(figure, (0.95, 0.65, 6.6, 2.45))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(lengths, [f"{n:,}" if n < 1024 else f"{n // 1024}K" for n in lengths])
    axes.axhline(BOUND, color=plot.LIMIT, linewidth=1.4, linestyle=":")
    said = [(BOUND, "the bound of softmax", plot.LIMIT)]
    for (name, line), colour in zip(errors.items(), ("#8C8C8C", "#0072B2"), strict=True):
        axes.plot(lengths, line, "o-", color=colour, linewidth=2, markersize=5)
        said.append((line[-1], name, colour))
    for y, name, colour in said:
        axes.annotate(name, (1.03, y), xycoords=("axes fraction", "data"), va="center",
                      fontsize=10, color=colour, annotation_clip=False)  # fmt: skip
    axes.set_xlabel("terms", color=plot.FAINT, fontsize=10)
    return figure
