"""The price of bits that do not depend on the number of rows: from kept rankings of cuts."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from bench_kit import HEADER
from online_softmax.lab import benchpage, tune
from online_softmax.lab.benchfile import Entry, Part, Row
from online_softmax.lab.grid import Cell
from online_softmax.plan import Problem


def test_the_price_stands_beside_few_rows_alone():
    few, large = (Cell("softmax", "bfloat16", rows, 65536) for rows in (4, 2048))
    rows = [
        Row(c.op, c.dtype, c.rows, c.cols, "normal", c.ideal_bytes, (Entry("ours", "ours"),))
        for c in (few, large)
    ]
    tuned = [ranking(few, 10.0, 8.0), ranking(large, 10.0, 7.0)]
    small, *_ = benchpage.sections([Part(HEADER, tuple(rows), tuple(tuned))])["small"]
    assert dict(zip(small.head, small.rows[0], strict=True))["price"] == "0.80"
    (large_table,) = benchpage.sections([Part(HEADER, tuple(rows), tuple(tuned))])["large"]
    assert "price" not in large_table.head
    (alone,) = benchpage.sections([Part(HEADER, tuple(rows[:1]))])["small"]
    assert "price" not in alone.head


def ranking(cell: Cell, planned_us: float, best_us: float) -> dict:
    """A kept ranking: the cut that is planned today, and a faster one."""
    found = tune.variants(cell.op, Problem(cell.rows, cell.cols, cell.dtype))
    (today,) = [each for each in found if each.is_planned]
    entries = [
        {"kernel": "other", "numbers": {"block": 32}, "why": "", "is_planned": True,
         "median_us": best_us},
        {"kernel": today.kernel, "numbers": today.numbers, "why": "", "is_planned": False,
         "median_us": planned_us},
    ]  # fmt: skip
    return {"kind": "tuning", **asdict(cell), "values": "normal", "arch": "sm_90a",
            "ranking": entries}  # fmt: skip


def test_a_price_is_that_of_the_cut_that_is_planned_today():
    found = ranking(Cell("softmax", "bfloat16", 4, 65536), 10.0, 8.0)
    assert tune.price(found) == pytest.approx(0.8)
    found["ranking"].pop()  # what is planned today was not ranked then
    assert tune.price(found) is None
    assert tune.price({**found, "ranking": []}) is None
