"""The lesson's tables of attention in Markdown, from what `bench attention ...` stored.

Files of the script that was there before are read too: their lines are of kind "attention".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from online_softmax.lab.fusedsizes import TOKENS, parsed
from online_softmax.lab.laddertables import table

NO_RATE = "—"  # a contender that refused the cell
PASSES = {
    "attention": "forward",
    "attention_backward": "backward",
    "attention_decode": "decode",
}
DTYPE = "bfloat16"  # the lesson's
BY_GRAPH = "calls in a graph, without the host's part"
BY_HOST = "the host's part of a call is in its time"
Line = dict[str, Any]


def products_table(path: Path) -> str:
    """Forward and backward: what was computed, then each contender's TFLOP/s."""
    header, lines = _read(path, "forward", "backward")
    names = _names(lines)
    rows = [
        (
            line["what"],
            str(line["head_dim"]),
            "causal" if line["causal"] else "all keys",
            *(_rate(line, name) for name in names),
        )
        for line in lines
    ]
    note = (
        "TFLOP/s, bfloat16, one sequence of 16,384 tokens and 2,048 features; half the products "
        f"count where causal, 2.5 times as many in a backward. {_circumstances(header)}"
    )
    return f"{table(('pass', 'head_dim', 'keys', *names), rows, text=3)}\n\n{note}"


def decode_table(path: Path) -> str:
    """Decode: the microseconds of our call, then the GB/s at which each contender reads."""
    header, lines = _read(path, "decode")
    names = _names(lines)
    rows = [
        (
            f"{line['batch']:,}",
            f"{line['keys']:,}",
            _microseconds(line["rounds_ms"].get("ours")),
            *(_rate(line, name) for name in names),
        )
        for line in lines
    ]
    how = BY_GRAPH if any("op" in line for line in lines) else BY_HOST
    note = (
        "GB/s of keys and values, bfloat16, one query of 32 heads on 8 heads of keys, head_dim "
        f"128; {how}. {_circumstances(header)}"
    )
    return f"{table(('sequences', 'keys', 'ours, µs', *names), rows, text=0)}\n\n{note}"


# ---- the parts


def _read(path: Path, *passes: str) -> tuple[Line, list[Line]]:
    """The last header, and the lines of these passes in order, each cell as it was measured last,
    whatever the order that shards left them in."""
    objects = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    header = [each for each in objects if each.get("kind") == "header"][-1]
    found: dict[str, Line] = {}
    for each in objects:
        line = _of_cell(each) if each.get("kind") == "cell" else each
        if line is not None and line.get("what") in passes:
            key = {name: line.get(name) for name in ("what", "head_dim", "causal", "batch", "keys")}
            found[json.dumps(key)] = line

    def place(line: Line) -> tuple[int, ...]:
        sizes = -line.get("head_dim", 0), line.get("causal", 0), line.get("batch", 0)
        return passes.index(line["what"]), *map(int, sizes), line.get("keys", 0)

    return header, sorted(found.values(), key=place)


def _of_cell(cell: Line) -> Line | None:
    """A cell of `bench` as a line of the tables; None: it is in none of them."""
    if cell["op"] not in PASSES or cell["dtype"] != DTYPE:
        return None
    sizes, what = parsed(cell["sizes"]), PASSES[cell["op"]]
    if what != "decode" and (sizes["batch"] != 1 or cell["cols"] != TOKENS):
        return None
    timed = [e for e in cell["entries"] if e.get("median_us") and not e.get("doubt")]
    timed = [e for e in timed if e["kind"] != "ceiling"]
    rate = "gbs" if what == "decode" else "tflops"
    line = {
        "op": cell["op"],
        "what": what,
        "rates": {e["name"]: e[rate] for e in timed},
        "rounds_ms": {e["name"]: [us / 1e3 for us in e["rounds_us"]] for e in timed},
    }
    if what == "decode":
        return line | {"batch": sizes["batch"], "keys": cell["cols"]}
    return line | {"head_dim": sizes["head_dim"], "causal": bool(sizes["causal"])}


def _names(lines: list[Line]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line["rates"]))


def _rate(line: Line, name: str) -> str:
    rate = line["rates"].get(name)
    return NO_RATE if rate is None else f"{rate:,.0f}"


def _microseconds(rounds: list[float] | None) -> str:
    return f"{sorted(rounds)[len(rounds) // 2] * 1e3:,.4g}" if rounds else NO_RATE


def _circumstances(header: Line) -> str:
    versions = header["versions"]
    return (
        f"{header['device']}, {header['date'][:10]}, commit {versions['commit']}, torch "
        f"{versions['torch']}, Triton {versions['triton']}; contenders interleaved, median of "
        "three rounds."
    )
