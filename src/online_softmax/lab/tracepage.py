"""What `trace --attention` prints: the walk of each query, two parts merged, the results."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from online_softmax.lab.attentiontrace import Row, Sizes, Summary, Walk, walk
from online_softmax.lab.trace import framed

# Columns whose cells hold several numbers, or whose heading may be broken.
LISTS = ("scores", "o", "q", "k", "v", "tile by tile", "two parts", "softmax(z) v", "w, old x")


def render(sizes: Sizes, console: Console) -> None:
    """Print what is read, the walk and the merge of each query, and the results."""
    done = walk(sizes)
    width = console.width
    console.print(_input_table(done, width))
    for query, row in enumerate(done.rows):
        console.print(_walk_table(query, row, sizes, width))
        console.print(_merge_table(query, row, width))
    console.print(_result_table(done, width))
    tile = min(sizes.block, sizes.keys)
    lines = [
        f"score: {_number(done.scale)} q k, with 1 / sqrt({sizes.dim}) for scale",
        "w: exp(old m - m), which d and o are both multiplied by before a tile is added",
        f"scores held at once: {sizes.queries} x {tile}; "
        f"the whole matrix: {sizes.queries} x {sizes.keys}",
    ]
    if sizes.is_causal:
        lines.append(_causal_sentence(done))
    none = [str(query) for query, row in enumerate(done.rows) if row.lse == -math.inf]
    if none:
        queries = "query" if len(none) == 1 else "queries"
        lines.append(f"No key is seen by {queries} {', '.join(none)}: 0 here, nan by the formula.")
    lines.append(f"largest difference from float64: {done.largest_difference:.1e}")
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal)


# ---- the parts


def _input_table(done: Walk, width: int) -> Table:
    table = _table("what is read", ("row", "q", "k", "v"), width)
    for i in range(max(done.sizes.queries, done.sizes.keys)):
        matrices = (done.q, done.k, done.v)
        cells = (_numbers(matrix[i]) if i < len(matrix) else "" for matrix in matrices)
        table.add_row(str(i), *cells)
    return table


def _walk_table(query: int, row: Row, sizes: Sizes, width: int) -> Table:
    title = f"query {query}: (m, d, o), {_many(sizes.block)} at a time"
    table = _table(title, ("keys", "scores", "m", "w, old x", "tile x", "d", "o"), width)
    table.add_row("none", "", *_state(row.steps[0].before, "", ""))
    for step in row.steps:
        weights = _number(step.old_weight), _number(step.new_weight)
        read = _keys(step.first, step.last), _numbers(step.scores)
        table.add_row(*read, *_state(step.after, *weights))
    return table


def _merge_table(query: int, row: Row, width: int) -> Table:
    headings = ("keys", "m", "part x", "d", "o")
    table = _table(f"query {query}: two parts merged", headings, width)
    for half in row.halves:
        table.add_row(_keys(half.first, half.last), *_state(half.state, _number(half.weight)))
    table.add_row("both", *_state(row.merged, ""))
    return table


def _result_table(done: Walk, width: int) -> Table:
    headings = ("query", "tile by tile", "two parts", "softmax(z) v", "log-sum-exp")
    title = "output, o / d; softmax(z) v with all scores z at once, in float64"
    table = _table(title, headings, width)
    for query, row in enumerate(done.rows):
        outputs = (_numbers(given) for given in (row.output, row.merged_output, row.plain))
        table.add_row(str(query), *outputs, _number(row.lse))
    return table


def _causal_sentence(done: Walk) -> str:
    block, keys = done.sizes.block, done.sizes.keys
    masked = ", ".join(_keys(first, min(first + block, keys) - 1) for first in done.masked)
    if not masked:
        return "causal: every tile is seen whole, none wants a mask"
    return f"causal: a mask for keys {masked}; other tiles are seen whole and want none"


def _many(keys: int) -> str:
    return "1 key" if keys == 1 else f"{keys} keys"


def _table(title: str, headings: tuple[str, ...], width: int) -> Table:
    table = framed(title, headings, LISTS, width)
    for column in table.columns:
        if column.header in ("keys", "scores"):
            column.justify = "left"
    return table


def _state(state: Summary, *weights: str) -> tuple[str, ...]:
    return _number(state.m), *weights, _number(state.d), _numbers(state.o)


def _keys(first: int, last: int) -> str:
    if last < first:
        return "none"
    return str(first) if first == last else f"{first}-{last}"


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(_number(value) for value in values)


def _number(value: float) -> str:
    return f"{value:.5g}"
