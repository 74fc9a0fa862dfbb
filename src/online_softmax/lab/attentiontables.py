"""The tables of attention in Markdown, from what benchmarks/attention.py stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from online_softmax.lab.laddertables import table

NO_RATE = "—"  # a contender that refused the cell


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
    """Decode: the milliseconds of our call, then the GB/s at which each contender reads."""
    header, lines = _read(path, "decode")
    names = _names(lines)
    rows = [
        (
            f"{line['batch']:,}",
            f"{line['keys']:,}",
            f"{_median(line['rounds_ms']['ours']):.2f}",
            *(_rate(line, name) for name in names),
        )
        for line in lines
    ]
    note = (
        "GB/s of keys and values, bfloat16, one query of 32 heads on 8 heads of keys, head_dim "
        f"128; the host's part of a call is in its time. {_circumstances(header)}"
    )
    return f"{table(('sequences', 'keys', 'ours, ms', *names), rows, text=0)}\n\n{note}"


# ---- the parts


def _read(path: Path, *passes: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header, and the lines of these passes."""
    header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return header, [line for line in lines if line["what"] in passes]


def _names(lines: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line["rates"]))


def _rate(line: dict[str, Any], name: str) -> str:
    rate = line["rates"].get(name)
    return NO_RATE if rate is None else f"{rate:,.0f}"


def _median(rounds: list[float]) -> float:
    return sorted(rounds)[len(rounds) // 2]


def _circumstances(header: dict[str, Any]) -> str:
    versions = header["versions"]
    return (
        f"{header['device']}, {header['date'][:10]}, commit {versions['commit']}, torch "
        f"{versions['torch']}, Triton {versions['triton']}; contenders interleaved, median of "
        "three rounds."
    )
