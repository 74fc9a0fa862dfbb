"""Every picture of README, the site and the lessons: where it lies, and what draws it of the stored
results. `make readme` draws them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from online_softmax.lab import (
    attentionplot,
    benchfile,
    benchplot,
    canvas,
    fusedplot,
    lessonplot,
    losspage,
    marks,
    plot,
    profilefile,
    reportpng,
)
from online_softmax.lab.benchfile import Part
from online_softmax.lab.laddertables import MAIN, cell
from online_softmax.lab.profilefile import Profile
from online_softmax.lab.reportread import of_kind
from online_softmax.lab.results import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward", "logsumexp")
FEW = "softmax"  # of the heat map of few rows
Pictures = dict[str, Callable[[], "Figure"]]  # below docs/


def of(runs: Sequence[Run], parts: Sequence[Part], counted: Sequence[Profile]) -> Pictures:
    """Every picture, by its file below docs/, and how it is drawn.

    Args:
        runs: of the ladder.
        parts: of `bench`, with what else is stored in its files.
        counted: of `profile`.
    """
    rows = benchfile.latest(parts)
    found: Pictures = {}
    main = next(run for run in runs if cell(run) == MAIN)
    found["ladder.png"] = partial(plot.picture, main)
    for op in (*DRAWN, *losspage.drawn(rows)):
        found[f"performance-{op}.png"] = partial(benchplot.picture, rows, op)
    found["performance-attention.png"] = partial(attentionplot.picture, rows)
    found["performance-attention_decode.png"] = partial(fusedplot.decode, rows)
    peak = marks.peak_gbs(main.header.device, runs)
    found["performance-merge.png"] = partial(fusedplot.merge, rows, peak)
    linear = of_kind(parts, "linear")
    found["performance-linear_cross_entropy.png"] = partial(fusedplot.linear, linear[-1])
    for name in lessonplot.rungs(runs):
        found[f"lessons/rungs-{name}.png"] = partial(lessonplot.climb, runs, name)
    found["lessons/traffic.png"] = partial(lessonplot.traffic, counted)
    found["lessons/long-sum.png"] = lessonplot.long_sum
    few = [r for r in rows if r.op == FEW and r.values == "normal" and r.dtype in benchplot.DTYPES]
    heat = partial(reportpng.heat_maps, FEW, reportpng.few_rows(few))
    found["lessons/few-rows.png"] = partial(canvas.styled, heat)
    memory = of_kind(parts, "attention_memory")
    found["lessons/attention-memory.png"] = partial(lessonplot.memory, memory)
    return found


def stored(folder: Path) -> Pictures:
    """Every picture, of the results that a folder has."""
    from online_softmax.lab import report

    parts = benchfile.read(
        sorted([*folder.glob("bench-*.jsonl"), *folder.glob("attention-memory*")]), warnings.warn
    )
    counted = [run for path in sorted(folder.glob("ncu-*.json*")) for run in profilefile.read(path)]
    return of(report.stored(folder), parts, counted)
