"""A report as pictures, a file each: the ladder and its roofline, speed by columns, few rows,
accuracy, memory, linear_cross_entropy, attention, the host's cost, a softmax within a compiled
model. For slides; the page has more of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from online_softmax.lab import (
    benchplot,
    benchtable,
    fusedplot,
    goals,
    hostplot,
    plot,
    reportcells,
    reportfused,
    reportladder,
    roofplot,
)
from online_softmax.lab.benchfile import Row
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.reportdata import Report
from online_softmax.lab.reportread import of_kind
from online_softmax.lab.reportsheet import Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS = ("TFLOP/s", "GB/s", "MB")  # behind the names of columns that are drawn as bars
WITHIN = 4.0  # times as fast, at which a heat map's colours end
Draw = Callable[[Path], None]


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw all that the report has into a folder; return the files.

    Raises:
        BadInput: there is no matplotlib, or nothing to draw.
        OSError: a file cannot be written.
    """
    try:
        plot.needed()
    except plot.Unavailable as error:
        raise BadInput(str(error)) from None
    made = list(_pictures(report))
    if not made:
        raise BadInput("--format png: these results have nothing to draw; give --format md")
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in made:
        write(folder / name)
    return [folder / name for name, _ in made]


def _pictures(report: Report) -> Iterator[tuple[str, Draw]]:
    for run in report.runs:
        if any((r.of_copy if run.is_timed else r.reads) is not None for r in run.results):
            h = run.header
            size = f"{h.rows}x{h.cols}-{h.dtype}"
            yield f"ladder-{size}.png", partial(plot.draw, run)
            if reportladder.roofline(run):
                yield f"roofline-{size}.png", partial(_keep, partial(roofplot.picture, run))
    rows = [row for row in report.rows if row.values == "normal"]
    for op, group in benchtable.operations(rows).items():
        if _has_line(group):
            yield f"speed-{op}.png", partial(benchplot.draw, rows, op)
        if few := few_rows(group):
            yield f"few-rows-{op}.png", partial(_write, partial(heat_maps, op, few))
    makers: dict[str, Callable[[Sheet], Figure]] = {
        "accuracy": _accuracy,
        "memory": _memory,
        **dict.fromkeys(("attention_memory", *reportfused.TITLES), _bars),
    }
    for name, make in makers.items():
        if sheet := report.sheets.get(name):
            yield f"{name}.png", partial(_write, partial(make, sheet))
    yield from _of_lines(report)


def _of_lines(report: Report) -> Iterator[tuple[str, Draw]]:
    """Of what is stored as lines of its own; each is drawn as it was measured last."""
    latest: dict[str, Draw] = {}
    for line in of_kind(report.parts, "linear"):
        if fusedplot.timed(line):
            size = f"{line['tokens']}x{line['features']}x{line['classes']}-{line['dtype']}"
            name = f"linear_cross_entropy-{size}.png"
            latest[name] = partial(_keep, partial(fusedplot.linear, line))
    for line in of_kind(report.parts, "host"):
        if any(call.get("median_us") for call in line["calls"]):
            latest["host.png"] = partial(_keep, partial(hostplot.host, line))
    compiled = of_kind(report.parts, "fusion")
    if any(map(hostplot.beside_alone, compiled)):
        latest["fusion.png"] = partial(_keep, partial(hostplot.compiled, compiled))
    yield from latest.items()


def _keep(make: Callable[[], Figure], path: Path) -> None:
    plot.write(make(), path)


def _write(make: Callable[[], Figure], path: Path) -> None:
    """Draw a figure in the style of the others, and keep it."""
    import matplotlib as mpl

    with mpl.rc_context(plot.STYLE):
        plot.write(make(), path)


def _has_line(rows: Sequence[Row]) -> bool:
    large = [row for row in rows if row.cell.is_large and row.dtype in benchplot.DTYPES]
    return bool(benchplot.shares(large, "ours"))


def _figure(
    title: str, below: str, width: float, height: float, left: float = 0.24
) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=plot.DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((left, 0.8 / height, 0.96 - left, 1 - 1.7 / height))
    axes.tick_params(length=0)
    figure.text(0.01, 1 - 0.02 / height, title, fontsize=15, fontweight="bold", va="top")
    figure.text(0.01, 1 - 0.36 / height, below, fontsize=10.5, color=plot.FAINT, va="top")
    return figure, axes


def _colour(name: str, spare: Sequence[str]) -> str:
    """A contender's; one of the spare colours, in order, where it has none of its own."""
    known = benchplot.COLOURS.get(name.removesuffix(", flash"))
    return known or benchplot.SPARES[spare.index(name) % len(benchplot.SPARES)]


# ---- few rows


def few_rows(rows: Sequence[Row]) -> list[Row]:
    """The cells of few rows in which ours stands beside a rival."""
    few = [row for row in rows if row.rows <= reportcells.FEW_ROWS and not row.cell.is_large]
    return [row for row in few if goals.beside_fastest(row)]


def heat_maps(op: str, rows: Sequence[Row]) -> Figure:
    """A panel a type, rows over columns: times as fast as the fastest rival; of one operation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    colours = LinearSegmentedColormap.from_list("beside", ["#E08A32", "#F5F5F2", "#4F9FD8"])
    groups = benchtable.groups(rows)
    figure = Figure(figsize=(14, 0.8 + 3.0 * len(groups)), dpi=plot.DPI, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, ((_, dtype), group) in zip(panels, groups.items(), strict=True):
        _heat(axes, group, colours)
        axes.set_title(dtype, loc="left", fontsize=11, fontweight="bold")
    figure.subplots_adjust(hspace=0.55, top=1 - 0.9 / figure.get_figheight())
    title = f"{op}, few rows: times as fast as the fastest rival"
    figure.text(
        0.125, 1 - 0.1 / figure.get_figheight(), title, fontsize=15, fontweight="bold", va="top"
    )
    return figure


def _heat(axes: Axes, rows: Sequence[Row], colours: Any) -> None:
    counts, widths = sorted({row.rows for row in rows}), sorted({row.cols for row in rows})
    grid = [[math.nan] * len(widths) for _ in counts]
    for row in rows:
        found = goals.beside_fastest(row)
        if found:
            place = counts.index(row.rows), widths.index(row.cols)
            grid[place[0]][place[1]] = math.log2(found.times)
            text = f"{found.times:.2f}" if found.times < 9.95 else f"{found.times:.0f}"
            axes.text(place[1], place[0], text, ha="center", va="center", fontsize=8)
    end = math.log2(WITHIN)
    axes.imshow(grid, cmap=colours, vmin=-end, vmax=end, aspect="auto")
    axes.set_xticks(
        range(len(widths)), [f"{each:,}" for each in widths], rotation=45, ha="right", fontsize=8.5
    )
    axes.set_yticks(range(len(counts)), [f"{each:,}" for each in counts])
    axes.set_ylabel("rows")
    axes.tick_params(length=0)


# ---- accuracy and memory


def _accuracy(sheet: Sheet) -> Figure:
    """The largest errors over the sizes, ours beside torch's."""
    groups: dict[str, tuple[float, float]] = {}
    for op, dtype, values, _, _, ours, torchs, *_ in sheet.rows:
        name = f"{op} {dtype}, {values}"
        known = groups.get(name, (0.0, 0.0))
        groups[name] = max(known[0], _number(ours)), max(known[1], _number(torchs))
    title, below = sheet.title, "the largest over all sizes, a share of the row's size"
    figure, axes = _figure(title, below, 10, 1.9 + 0.26 * len(groups))
    places = range(len(groups))
    for at, name, marker, size in ((1, "torch", "s", 8), (0, "ours", "o", 5)):
        errors = [pair[at] for pair in groups.values()]
        face = "none" if at else benchplot.COLOURS[name]
        axes.plot(errors, list(places), marker, color=benchplot.COLOURS[name], markersize=size,
                  markerfacecolor=face, label=benchplot.NAMES[name])  # fmt: skip
    axes.set_yticks(places, list(groups), fontsize=9)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.grid(color="#ECECEC", linewidth=0.8)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _memory(sheet: Sheet) -> Figure:
    """Time against bytes, a point a contender."""
    said = "forward and backward; dotted: matrix products alone"
    figure, axes = _figure(f"{sheet.title}, {sheet.rows[0][0]}", said, 10, 5.5, left=0.08)
    others = [str(row[1]) for row in sheet.rows if row[1] not in benchplot.COLOURS]
    below = False  # names of neighbours go to different sides of their points
    for row in sorted(sheet.rows, key=lambda row: _number(row[3])):
        name, ms, memory = str(row[1]), row[2], row[3]
        if ms is None:
            continue
        if memory is None:
            axes.axhline(_number(ms), color=plot.LIMIT, linestyle=":", linewidth=1.4)
            continue
        colour = benchplot.COLOURS["ours"] if name.startswith("ours") else _colour(name, others)
        axes.plot(_number(memory) / 1e9, _number(ms), "o", color=colour, markersize=9, zorder=4)
        axes.annotate(name, (_number(memory) / 1e9, _number(ms)), (0, -18 if below else 9),
                      ha="center", textcoords="offset points", fontsize=10,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
        below = not below
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("GB beyond inputs and gradients", color=plot.FAINT)
    axes.set_ylabel("ms", color=plot.FAINT)
    axes.grid(color="#ECECEC", linewidth=0.8)
    return figure


# ---- attention: rates, bytes


def _bars(sheet: Sheet) -> Figure:
    """A group of bars a line of the table, a bar a contender."""
    heads = [name for name, _ in sheet.columns]
    unit = next(each for each in UNITS if any(name.endswith(f" {each}") for name in heads))
    at = [place for place, name in enumerate(heads) if name.endswith(f" {unit}")]
    names = [heads[place].removesuffix(f" {unit}") for place in at]
    groups = {str(row[0]) for row in sheet.rows}
    said = f"{unit}; {groups.pop()}" if len(groups) == 1 else unit
    figure, axes = _figure(sheet.title, said, 10, 1.9 + 0.24 * len(at) * len(sheet.rows))
    step = 0.8 / len(at)
    for order, (place, name) in enumerate(zip(at, names, strict=True)):
        values = [_number(row[place]) for row in sheet.rows]
        where = [line + (order - (len(at) - 1) / 2) * step for line in range(len(sheet.rows))]
        axes.barh(where, values, step * 0.92, color=_colour(name, names), label=name)
        for y, value in zip(where, values, strict=True):
            axes.annotate(f"{value:,.0f}", (value, y), (4, 0), textcoords="offset points",
                          va="center", fontsize=8.5)  # fmt: skip
    labels = [f"{row[0]}\n{row[1]}" if groups else str(row[1]) for row in sheet.rows]
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="x", color="#ECECEC", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(names))
    return figure
