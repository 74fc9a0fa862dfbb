"""Attention, merges and further operations as tables: time, rate beside the ceiling, and every
rival's rate.

A rate is in TFLOP/s where products are the limit, else in GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence

from online_softmax.lab import benchtable, goals
from online_softmax.lab.benchfile import Entry, Row
from online_softmax.lab.benchtable import NONE, Table
from online_softmax.lab.fusedsizes import MERGE, parsed
from online_softmax.lab.moresizes import MORE_OPS, OUTER_OPS, VARLEN, lengths

HEADS = {
    "attention": ("batch", "heads", "tokens", "head_dim", "keys"),
    "attention_backward": ("batch", "heads", "tokens", "head_dim", "keys"),
    "attention_decode": ("sequences", "heads", "on heads", "head_dim", "keys"),
    MERGE: ("parts", "rows", "columns"),
    **dict.fromkeys(MORE_OPS, ("rows", "columns")),
    **dict.fromkeys(OUTER_OPS, ("planes", "along", "inner")),
    VARLEN: ("sequences", "heads", "tokens", "longest", "head_dim", "keys"),
}


def size(row: Row) -> tuple[str, ...]:
    """What a cell is, a column each of HEADS."""
    sizes = parsed(row.sizes)
    if row.op == MERGE:
        return (str(sizes["parts"]), f"{row.rows:,}", f"{row.cols:,}")
    if row.op in OUTER_OPS:
        return f"{row.rows:,}", f"{row.cols:,}", f"{sizes['inner']:,}"
    if row.op in MORE_OPS and row.op != VARLEN:
        return f"{row.rows:,}", f"{row.cols:,}"
    batch, heads = sizes["batch"], sizes["heads"]
    seen = "causal" if sizes["causal"] else "all"
    if row.op == VARLEN:
        tokens = sum(lengths(batch, row.cols))
        return (str(batch), str(heads), f"{tokens:,}", f"{row.cols:,}", str(sizes["head_dim"]),
                seen)  # fmt: skip
    if row.op == "attention_decode":
        return (str(batch), str(heads), str(sizes["kv_heads"]), str(sizes["head_dim"]),
                f"{row.cols:,}")  # fmt: skip
    return str(batch), str(heads), f"{row.rows // (batch * heads):,}", str(sizes["head_dim"]), seen


def rate(entry: Entry | None, unit: str) -> str:
    """An entry's rate; what it did instead where it has none."""
    if entry is None:
        return NONE
    if entry.median_us is None:
        return "wrong" if entry.ok is False else "refuses"
    value = entry.tflops if unit == "TFLOP/s" else entry.gbs
    digits = "" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
    return (digits or NONE) + benchtable.mark(entry)


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table for each operation and type, the rivals in the order in which they stand."""
    found = []
    for (op, dtype), group in benchtable.groups(rows).items():
        if op not in HEADS:
            continue
        unit = "TFLOP/s" if any(row.flops for row in group) else "GB/s"
        rivals = dict.fromkeys(e.name for row in group for e in row.entries if e.kind == "rival")
        lines = []
        for row in group:
            ours = row.entry("ours")
            line = [benchtable.time(row.entry("ceiling")), benchtable.time(ours)]
            line += [rate(ours, unit), benchtable.share(goals.of_ceiling(row))]
            lines.append((*size(row), *line, *(rate(row.entry(name), unit) for name in rivals)))
        head = (*HEADS[op], "ceiling µs", "µs", unit, "of ceiling", *rivals)
        found.append(Table(f"{op} {dtype}, {unit}", head, tuple(lines), text=0))
    return found
