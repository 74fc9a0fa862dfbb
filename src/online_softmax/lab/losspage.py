"""The parts of docs/performance.md that are there only once their results are: with heading,
text and pictures, since without results there is nothing of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from online_softmax.lab import goals, grid
from online_softmax.lab.benchfile import Row
from online_softmax.lab.benchtable import Table

LOSSES = (
    "## Cross-entropy and token_stats",
    "Each contender's public function on 2²⁸ logits, the loss their mean: alone, with its gradient "
    "by the logits, and with the gradient made in the forward. Their cells are among the tables of "
    f"all operations too; aimed at are {goals.LOSSES['cross_entropy']:g} of a read for the loss, "
    f"and {goals.LOSSES['cross_entropy_both']:g} of a read and then a copy for both.",
)
LINEAR = (
    "## linear_cross_entropy",
    "Forward and backward of a linear layer and its cross-entropy, beside the matrix products "
    "alone, every call as it stands between two events. Memory is the most that was allocated at "
    "once beyond inputs and gradients. An error is the distance to the float64 gradient over that "
    "gradient's size, both as norms.",
)
ATTENTION = (
    "## Attention",
    "Forward and backward in TFLOP/s, half the products counted where causal, beside as many "
    "products as one matrix product of cuBLAS; decode in GB/s, beside a read of keys and values. "
    "Merges are in GB/s of the parts and the result: two parts beside an addition, which moves all "
    "but the log-sum-exps. More have a read of the parts alone beside them, without the write: "
    "counted with it, its speed passes the datasheet, so it is marked, and no share is given.",
)
MORE = (
    "## Further operations",
    "logsumexp's gradient, operations along a dim that is not the last, softmax of float8_e4m3fn, "
    "token_stats with its gradient, and attention of packed sequences: in GB/s beside a copy, of "
    "logsumexp a read, of token_stats both; attention in TFLOP/s beside as many products.",
)
PICTURES = {  # of operations that are more than a matrix
    "attention": "attention: TFLOP/s by tokens of a sequence, ours, cuDNN and FlashAttention",
    "attention_decode": "attention_decode: GB/s by the keys of a sequence, ours and the rivals",
    "merge": "merge: GB/s by the number of parts, ours and torch",
    "linear_cross_entropy": "linear_cross_entropy: time and memory, ours and the rivals",
}
PICTURE = "![{0}: share of the ceiling by columns, ours and the rivals](performance-{0}.png)"


def drawn(rows: Sequence[Row]) -> list[str]:
    """The losses of which there is a picture to draw: large cells of ours were timed."""
    timed = {r.op for r in rows if r.cell.is_large and r.values == "normal" and _is_timed(r)}
    return [op for op in grid.LOSS_OPS if op in timed]


def _is_timed(row: Row) -> bool:
    ours, ceiling = row.entry("ours"), row.entry("ceiling")
    clocks = {entry.clock for entry in (ours, ceiling) if entry and entry.median_us}
    return bool(ours and ours.median_us and clocks == {"graph"})


def bodies(
    rows: Sequence[Row],
    sections: Mapping[str, Sequence[Table]],
    shown: Callable[[Sequence[Table]], str],
) -> dict[str, str]:
    """What stands between the markers of these parts; "" where nothing is stored.

    Args:
        rows: each cell once.
        sections: the tables by section, as `benchpage.sections` gives them.
        shown: tables as Markdown.
    """
    found = {"losses": "", "linear": "", "attention": "", "more": ""}
    if any(row.cell.is_loss for row in rows):
        pictures = [PICTURE.format(op) for op in drawn(rows)]
        tables = _titled(sections.get("losses", ()), shown)
        found["losses"] = "\n\n".join([*LOSSES, *pictures, *tables])
    if linear := sections.get("linear", ()):
        shot = _shot("linear_cross_entropy")
        found["linear"] = "\n\n".join([*LINEAR, shot, *_titled(linear, shown)])
    if attention := sections.get("attention", ()):
        ops = dict.fromkeys(row.op for row in rows)
        shots = [_shot(op) for op in PICTURES if op in ops]
        found["attention"] = "\n\n".join([*ATTENTION, *shots, *_titled(attention, shown)])
    if more := sections.get("more", ()):
        found["more"] = "\n\n".join([*MORE, *_titled(more, shown)])
    return found


def _shot(op: str) -> str:
    return f"![{PICTURES[op]}](performance-{op}.png)"


def _titled(tables: Sequence[Table], shown: Callable[[Sequence[Table]], str]) -> list[str]:
    return [f"**{each.title}**\n\n{shown([each])}" for each in tables]
