"""What the losses' cells are held to beside the ceiling, as tables: the gradient made in the
forward beside a rival's two kernels, token_stats beside the forward of cross_entropy. A CPU's cells
are held to neither."""

from __future__ import annotations

from collections.abc import Sequence

from online_softmax.lab import benchtable, goals
from online_softmax.lab.benchfile import Row
from online_softmax.lab.benchtable import Table

IN_PLACE = "ours, in place"


def in_forward_table(rows: Sequence[Row]) -> Table:
    """Loss and gradient, the gradient made in the forward: apart from the logits, and in them."""
    rival, lines = goals.IN_FORWARD_RIVAL, []
    for row in rows:
        if row.op != "cross_entropy_in_forward" or not goals.is_held(row):
            continue
        ours, theirs = row.entry("ours"), row.entry(rival)
        ratio = goals.times(ours, theirs)
        said = benchtable.times(ratio)
        if ratio is not None and ratio < goals.IN_FORWARD:
            said += " (below)"
        in_place = goals.times(row.entry(IN_PLACE), theirs)
        lines.append((benchtable.name(row), benchtable.time(ours),
                      benchtable.time(row.entry(IN_PLACE)), benchtable.time(theirs), said,
                      benchtable.times(in_place)))  # fmt: skip
    head = ("cell", "µs", "in place µs", f"{rival} µs", f"x {rival}", f"in place x {rival}")
    title = f"The gradient made in the forward, {goals.IN_FORWARD:g} x {rival} aimed at"
    return Table(title, head, tuple(lines))


def stats_table(rows: Sequence[Row]) -> Table:
    """token_stats in times of cross_entropy's forward on the same logits."""
    forward = {
        (row.dtype, row.rows, row.cols, row.values): row.entry("ours")
        for row in rows
        if row.op == "cross_entropy"
    }
    lines = []
    for row in rows:
        loss = forward.get((row.dtype, row.rows, row.cols, row.values))
        if row.op != "token_stats" or loss is None or not goals.is_held(row):
            continue
        ours = row.entry("ours")
        ratio = goals.times(loss, ours)
        said = benchtable.times(ratio)
        if ratio is not None and ratio >= goals.STATS_OF_FORWARD:
            said += " (over)"
        others = (benchtable.time(row.entry(name)) for name in ("torch", "compile"))
        cells = (benchtable.time(ours), benchtable.time(loss), said, *others)
        lines.append((benchtable.name(row), *cells))
    head = ("cell", "µs", "cross_entropy µs", "times", "torch µs", "compile µs")
    title = f"token_stats, in under {goals.STATS_OF_FORWARD:g} times of cross_entropy's forward"
    return Table(title, head, tuple(lines))
