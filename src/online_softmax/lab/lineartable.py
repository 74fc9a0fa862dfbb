"""What was measured of linear_cross_entropy, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from online_softmax.lab import doubts, goals
from online_softmax.lab.linear import Work

PRODUCTS = ("three products", "four products")
ERRORS = ("loss_error", "dx_error", "dweight_error")
HEAD = ("contender", "ms", *(f"x {name}" for name in PRODUCTS), "memory GB", "error of the loss",
        "of the input's gradient", "of the weight's")  # fmt: skip
Line = dict[str, Any]
Shown = tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...], int]


def _gigabytes(name: str, memory: int | None) -> str:
    """It says so where that is more than is aimed at."""
    if memory is None:
        return "—"
    most = goals.LINEAR.get(name, (math.inf, ""))[0]
    return f"{memory / 1e9:.2f}" + (f" (over {most / 1e9:g})" if memory >= most else "")


def is_apart(line: Line, entry: Line) -> bool:
    """Whether an entry's rounds are far apart, on a CPU."""
    clock = doubts.HOST if line["device"] == "cpu" else ""
    return doubts.is_apart(clock, entry.get("rounds_us") or ())


def is_beaten(line: Line, entry: Line) -> bool:
    """Whether a CPU's time beats the fewest products that there are, taken alone: three."""
    alone = next((e.get("median_us") for e in line["entries"] if e["name"] == PRODUCTS[0]), None)
    us = entry.get("median_us")
    if line["device"] != "cpu" or entry["name"] in PRODUCTS or not (us and alone):
        return False
    return bool(alone > doubts.CEILING_TIMES * us)


def _marks(line: Line, entry: Line) -> str:
    found = doubts.MARK if is_beaten(line, entry) else ""
    return found + (doubts.APART_MARK if is_apart(line, entry) else "")


def _over(entry: Line, products_us: float | None, which: str, is_held: bool) -> str:
    """Time over that of products; the same, on a GPU, whose goal it is."""
    us = entry.get("median_us")
    if not us or not products_us:
        return "—"
    ratio = us / products_us
    is_held = is_held and goals.LINEAR.get(entry["name"], (0.0, ""))[1] == which
    late = is_held and ratio > goals.LINEAR_OF_PRODUCTS
    return f"{ratio:.2f}" + (f" (over {goals.LINEAR_OF_PRODUCTS:g})" if late else "")


def _row(line: Line, entry: Line, products_us: dict[str, float | None]) -> tuple[str, ...]:
    is_held = line["device"] != "cpu"
    us, errors = entry.get("median_us"), (entry.get(name) for name in ERRORS)
    return (
        entry["name"], f"{us / 1000:.2f}{_marks(line, entry)}" if us else "—",
        *(_over(entry, products_us.get(name), name, is_held) for name in PRODUCTS),
        _gigabytes(entry["name"], entry.get("memory_bytes")),
        *("—" if each is None else f"{each:.1e}" for each in errors),
    )  # fmt: skip


def tables(lines: Iterable[Line]) -> list[Shown]:
    """Title, heading, rows and how many columns are words: of each size, as it was measured last,
    what has a time; and what has none, with the reason."""
    latest = {tuple(line[name] for name in asdict(Work())): line for line in lines}
    found: list[Shown] = []
    for size, line in latest.items():
        entries = line["entries"]
        us = {each["name"]: each.get("median_us") for each in entries}
        timed = tuple(_row(line, each, us) for each in entries if not each["why"])
        refused = tuple((each["name"], each["why"]) for each in entries if each["why"])
        where = "" if line["device"] == "cuda" else f", {line['device']}"
        found.append((f"{Work(*size).text}{where}", HEAD, timed, 1))
        if refused:
            found.append(("Without a time", ("contender", "why"), refused, 2))
    return found
