"""README's pictures of what is more than a matrix: a decode's speed by its keys, a merge's by its
parts, linear_cross_entropy's time beside its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from online_softmax.lab import attentionplot, benchplot, benchtable, canvas, plot
from online_softmax.lab.benchfile import Entry, Row
from online_softmax.lab.fusedsizes import MERGE, parsed
from online_softmax.lab.lineartable import PRODUCTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECODE = "attention_decode"
DTYPE = "bfloat16"
READ = "ceiling"
MERGES = {"ours": benchplot.COLOURS["ours"], "torch": benchplot.COLOURS["torch"]}
SHADES = {"ours, fast": "#0072B2", "ours, low": "#56B4E9", **benchplot.COLOURS}


def _gbs(entry: Entry | None) -> float | None:
    """A rate that is to be believed."""
    return None if entry is None or entry.doubt else entry.gbs


# ---- decode


def decode_lines(rows: Sequence[Row]) -> dict[int, dict[str, list[tuple[int, float]]]]:
    """By the number of sequences, of the read and each contender: (keys, GB/s), by keys."""
    found: dict[int, dict[str, list[tuple[int, float]]]] = {}
    for row in sorted(
        (r for r in rows if r.op == DECODE and r.dtype == DTYPE), key=lambda r: r.cols
    ):
        lines = found.setdefault(parsed(row.sizes)["batch"], {})
        for name in (READ, *attentionplot.NAMES):
            if (gbs := _gbs(row.entry(name))) is not None:
                lines.setdefault(name, []).append((row.cols, gbs))
    return dict(sorted(found.items()))


def decode(rows: Sequence[Row]) -> Figure:
    """GB/s of keys and values over the keys of a sequence, a panel a number of sequences.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: no decode was timed.
    """
    panels = decode_lines(rows)
    if not any(panels.values()):
        raise ValueError(f"there is nothing to draw: no {DECODE} in {DTYPE} was timed")
    return canvas.styled(lambda: _decode(panels))


def _decode(panels: dict[int, dict[str, list[tuple[int, float]]]]) -> Figure:
    from matplotlib.lines import Line2D

    below = f"GB/s of keys and values by the keys of a sequence, one query each, {DTYPE}, L2 cold"
    figure = canvas.blank(10, 3.9, DECODE, below)
    every = [lines for panel in panels.values() for lines in panel.values()]
    top = 1.1 * max(gbs for line in every for _, gbs in line)
    ticks = sorted({keys for line in every for keys, _ in line})
    wide = 9.3 / len(panels)
    for place, (batch, panel) in enumerate(panels.items()):
        axes = canvas.axes(figure, (0.6 + place * wide, 0.85, wide - 0.35, 2.1))
        said = f"{batch} sequence" + ("s" if batch > 1 else "")
        axes.set_title(said, loc="left", fontsize=11)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [benchtable.short(each) for each in ticks])
        axes.set_xlim(ticks[0] / 1.6, ticks[-1] * 1.6)
        axes.set_ylim(0, top)
        axes.minorticks_off()
        axes.tick_params(axis="y", labelleft=not place)
        for name, line in panel.items():
            is_ours, is_read = name == "ours", name == READ
            axes.plot(
                *zip(*line, strict=True), linestyle=":" if is_read else "-",
                color=plot.LIMIT if is_read else attentionplot.COLOURS[name],
                marker="" if is_read else attentionplot.MARKERS[name],
                linewidth=2.4 if is_ours else 1.2, markersize=6 if is_ours else 4.5,
                zorder=4 if is_ours else 3,
            )  # fmt: skip
    handles = [
        Line2D([], [], color=attentionplot.COLOURS[n], marker=attentionplot.MARKERS[n], label=label)
        for n, label in attentionplot.NAMES.items()
    ]
    handles.append(Line2D([], [], color=plot.LIMIT, linestyle=":", label="a read of them"))
    canvas.legend(figure, handles, 0.6)
    return figure


# ---- merge


def merge(rows: Sequence[Row], peak_gbs: float | None = None) -> Figure:
    """GB/s of the parts and the result by the number of parts, and of the addition beside two.
    Beside more there was a read of the parts alone, without the write: it is doubted, not drawn.

    Args:
        rows: of any operation.
        peak_gbs: the memory's by its datasheet, a line; None: not known.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: no merge was timed.
    """
    mine = [r for r in rows if r.op == MERGE and r.dtype == DTYPE and _gbs(r.entry("ours"))]
    if not mine:
        raise ValueError(f"there is nothing to draw: no {MERGE} in {DTYPE} was timed")
    mine.sort(key=lambda row: (parsed(row.sizes)["parts"], row.rows))
    return canvas.styled(lambda: _merge(mine, peak_gbs))


def _merge(rows: Sequence[Row], peak_gbs: float | None) -> Figure:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    below = f"GB/s of the parts and the result, {DTYPE}, L2 cold"
    high = 0.62 * len(rows)
    figure = canvas.blank(10, 1.75 + high, "merge_outputs", below)
    axes = canvas.axes(figure, (2.6, 0.75, 7.1, high))
    axes.grid(axis="y", visible=False)
    names = [f"{parsed(r.sizes)['parts']} parts of {r.rows:,} x {r.cols}" for r in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9.5)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    rates = [gbs for row in rows for each in row.entries if (gbs := _gbs(each))]
    axes.set_xlim(0, 1.08 * max(peak_gbs or 0.0, *rates))
    for y, row in enumerate(rows):
        for place, (name, colour) in enumerate(MERGES.items()):
            if (gbs := _gbs(row.entry(name))) is None:
                continue
            at = y - 0.19 + 0.38 * place
            axes.barh(at, gbs, 0.36, color=colour, zorder=2)
            axes.annotate(
                f"{gbs:,.0f}", (gbs, at), (-5 if gbs > 1000 else 5, 0), va="center",
                ha="right" if gbs > 1000 else "left", textcoords="offset points", fontsize=9.5,
                color="white" if gbs > 1000 else plot.INK, zorder=4,
            )  # fmt: skip
        if (gbs := _gbs(row.entry(READ))) is not None:
            axes.plot([gbs, gbs], [y - 0.42, y + 0.42], color=plot.LIMIT, linewidth=2.4, zorder=4)
    handles: list[Any] = [Patch(color=c, label=benchplot.NAMES[n]) for n, c in MERGES.items()]
    handles.append(Line2D([], [], color=plot.LIMIT, linewidth=2.4, label="an addition"))
    if peak_gbs:
        axes.axvline(peak_gbs, color=plot.LIMIT, linestyle=":", linewidth=1.2)
        handles.append(Line2D([], [], color=plot.LIMIT, linestyle=":", label="datasheet"))
    canvas.legend(figure, handles, 2.6)
    return figure


# ---- linear_cross_entropy


def timed(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The contenders of a stored line that have a time; products alone are none."""
    return [e for e in line["entries"] if e.get("median_us") and e["name"] not in PRODUCTS]


def linear(line: dict[str, Any]) -> Figure:
    """Time beside memory, a bar a contender in each panel; the products alone as lines.

    Args:
        line: of kind "linear", as it was stored.

    Raises:
        plot.Unavailable: there is no matplotlib.
        ValueError: nothing was timed.
    """
    entries = timed(line)
    if not entries:
        raise ValueError("there is nothing to draw: no linear_cross_entropy was timed")
    return canvas.styled(lambda: _linear(line, entries))


def _linear(line: dict[str, Any], entries: Sequence[dict[str, Any]]) -> Figure:
    size = f"{line['tokens']:,} tokens, {line['features']:,} features, {line['classes']:,} classes"
    high = 0.36 * len(entries)
    below = f"forward and backward, {size}, {line['dtype']}; dotted: matrix products alone"
    figure = canvas.blank(10, 1.65 + high, "linear_cross_entropy", below)
    names = [benchplot.NAMES.get(each["name"], each["name"]) for each in entries]
    colours = [SHADES.get(each["name"], benchplot.SPARES[0]) for each in entries]
    alone = {e["name"]: e["median_us"] / 1e3 for e in line["entries"]
             if e["name"] in PRODUCTS and e.get("median_us")}  # fmt: skip
    panels = (
        ("ms", 1e3, "median_us", 1),
        ("GB beyond inputs and gradients", 1e9, "memory_bytes", 2),
    )
    for place, (unit, scale, key, digits) in enumerate(panels):
        axes = canvas.axes(figure, (1.6 + place * 4.15, 0.6, 3.8, high))
        axes.grid(visible=False)  # each bar has its figure
        axes.set_xticks([])
        axes.set_yticks(range(len(names)), names if not place else [""] * len(names), fontsize=9.5)
        axes.set_ylim(len(names) - 0.45, -0.55)
        values = [(each.get(key) or 0) / scale for each in entries]
        axes.set_xlim(0, 1.18 * max(values))
        axes.set_xlabel(unit, color=plot.FAINT, fontsize=10)
        axes.barh(range(len(names)), values, 0.7, color=colours, zorder=2)
        for y, value in enumerate(values):
            said = f"{value:.{digits}f}" if value >= 0.01 else "under 0.01"
            axes.annotate(said, (value, y), (5, 0), textcoords="offset points",
                          va="center", fontsize=9.5, zorder=5,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
        if not place:
            for name, ms in alone.items():
                axes.axvline(ms, color=plot.LIMIT, linestyle=":", linewidth=1.4, zorder=3)
                side = "right" if ms == min(alone.values()) else "left"
                axes.annotate(name, (ms, 1), (3 if side == "right" else -3, 3), ha=side,
                              xycoords=("data", "axes fraction"), textcoords="offset points",
                              color=plot.LIMIT, fontsize=9)  # fmt: skip
    return figure
