"""Attention and merges in a report: a rate for each contender, of the cells of `bench` and of the
lines that were stored before it had these operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from online_softmax.lab import goals, marks
from online_softmax.lab.benchfile import Entry, Part, Row
from online_softmax.lab.fusedsizes import (
    FEATURES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MERGE,
    TOKENS,
    parsed,
)
from online_softmax.lab.moresizes import MORE_OPS, OUTER_OPS, VARLEN, lengths
from online_softmax.lab.reportread import of_kind
from online_softmax.lab.reportsheet import Sheet, Value

TITLES = {
    "attention": "Attention, forward",
    "attention_backward": "Attention, backward",
    "attention_decode": "Attention, decode of one query",
    MERGE: "Merge of parts",
    "logsumexp_backward": "Gradient of logsumexp",
    "softmax_outer": "Softmax along a dim that is not the last",
    "log_softmax_outer": "log_softmax along a dim that is not the last",
    "logsumexp_outer": "logsumexp along a dim that is not the last",
    "softmax_fp8": "Softmax of float8_e4m3fn",
    "token_stats_both": "token_stats and its gradient",
    VARLEN: "Attention of packed sequences",
}
PASSES = {"forward": "attention", "backward": "attention_backward", "decode": "attention_decode"}
NOTES = {
    "attention": "Half the products count where causal.",
    "attention_backward": "2.5 times the forward's products; half of them where causal.",
    "attention_decode": "GB/s of keys and values.",
    MERGE: "GB/s of the parts and the result. The limit of two parts is an addition, of more a "
    "read of them alone: counted with the write that it leaves out, it may pass the datasheet.",
    **dict.fromkeys(MORE_OPS, "GB/s of what goes in and what comes out."),
    VARLEN: "Half the products count where causal.",
}
BY_HOST = " The host's part of a call is in its time."  # of lines of kind "attention"
Line = dict[str, Any]


def sheets(rows: Sequence[Row], parts: Sequence[Part]) -> dict[str, Sheet]:
    """A table for each operation that has figures, by its name."""
    found = {}
    for op in TITLES:
        mine = [row for row in rows if row.op == op]
        sheet = _of_cells(op, mine) if mine else _of_lines(op, parts)
        if sheet:
            found[op] = sheet
    return found


def _head(names: Sequence[str], unit: str) -> tuple[tuple[str, str], ...]:
    kind = "count" if unit == "GB/s" else "number"
    rates = tuple((f"{name} {unit}", kind) for name in names)
    return (("of", "text"), ("cell", "text"), ("ours ms", "ms"), *rates, ("note", "text"))


# ---- cells of bench


def _of_cells(op: str, rows: Sequence[Row]) -> Sheet:
    unit = "TFLOP/s" if any(row.flops for row in rows) else "GB/s"
    names = list(dict.fromkeys(e.name for row in rows for e in row.entries))
    lines = []
    for row in sorted(rows, key=lambda row: parsed(row.sizes).get("parts", 0)):
        group, cell = _words(row)
        ours = row.entry("ours")
        rates = (_rate(row.entry(name), unit) for name in names)
        ms = ours.median_us / 1000 if ours and ours.median_us else None
        lines.append((group, cell, ms, *rates, _note(row)))
    head = _head(["the limit" if name == "ceiling" else name for name in names], unit)
    return Sheet(TITLES[op], head, tuple(lines), NOTES[op])


def _words(row: Row) -> tuple[str, str]:
    """What a cell has in common with others, and what is its own."""
    sizes = parsed(row.sizes)
    if row.op == MERGE:
        return row.dtype, f"{sizes['parts']} parts of {row.rows:,} x {row.cols:,}"
    if row.op in OUTER_OPS:
        return row.dtype, f"{row.rows:,} x {row.cols:,} x {sizes['inner']:,}"
    if row.op in MORE_OPS and row.op != VARLEN:
        return row.dtype, f"{row.rows:,} x {row.cols:,}"
    batch, dim = sizes["batch"], sizes["head_dim"]
    if row.op == "attention_decode":
        return f"{row.dtype}, head_dim {dim}", f"{batch} x {row.cols:,} keys"
    keys = "causal" if sizes["causal"] else "all keys"
    if row.op == VARLEN:
        tokens = sum(lengths(batch, row.cols))
        return f"{row.dtype}, head_dim {dim}, {keys}", f"{batch} of {tokens:,} tokens"
    return f"{row.dtype}, head_dim {dim}, {keys}", f"{batch} x {row.cols:,} tokens"


def _rate(entry: Entry | None, unit: str) -> float | None:
    if entry is None or entry.doubt:
        return None
    return entry.tflops if unit == "TFLOP/s" else entry.gbs


def _note(row: Row) -> str:
    share = goals.of_ceiling(row)
    said = [] if share is None else [f"{100 * share:.1f} % of the limit"]
    late = [e.name for e in row.entries if e.clock == "do_bench" and e.median_us]
    said += [f"{', '.join(late)} by do_bench"] if late else []
    said += [each.text for each in marks.of_row(row)]
    return "; ".join([*said, row.why] if row.why else said)


# ---- lines of before


def _of_lines(op: str, parts: Sequence[Part]) -> Sheet | None:
    what = next((name for name, of in PASSES.items() if of == op), "")
    found = [
        (line, marks.peak_gbs(part.header.device))
        for part in parts
        for line in of_kind([part], "attention")
        if line["what"] == what
    ]
    if not found:
        return None
    names = list(dict.fromkeys(name for line, _ in found for name in line["rates"]))
    rows = {_old_words(line): _old_line(line, names, peak) for line, peak in found}  # the last
    unit = found[0][0]["unit"]
    lines = tuple((*words, *line) for words, line in rows.items())
    return Sheet(TITLES[op], _head(names, unit), lines, NOTES[op] + BY_HOST)


def _old_words(line: Line) -> tuple[str, str]:
    if line["what"] == "decode":
        heads = f"{HEADS} heads on {KV_HEADS} heads of keys, head_dim {HEAD_DIM}"
        return f"bfloat16, {heads}", f"{line['batch']} x {line['keys']:,} keys"
    tokens = f"one sequence of {TOKENS:,} tokens, {FEATURES:,} features"
    keys = "causal" if line["causal"] else "all keys"
    return f"bfloat16, {tokens}", f"head_dim {line['head_dim']}, {keys}"


def _old_line(line: Line, names: Sequence[str], peak: float | None) -> tuple[Value, ...]:
    """Milliseconds of ours, every rate that can be, and what is said of those that cannot."""
    held = peak if line["unit"] == "GB/s" else None
    past = [n for n in names if held and (line["rates"].get(n) or 0.0) > held]
    rates = (None if name in past else line["rates"].get(name) for name in names)
    rounds = sorted(line["rounds_ms"].get("ours", ()))
    ms = rounds[len(rounds) // 2] if rounds else None
    mark = f"{marks.IMPOSSIBLE}: {', '.join(past)} past {held:,.0f} GB/s" if past else ""
    return (ms, *rates, mark)
