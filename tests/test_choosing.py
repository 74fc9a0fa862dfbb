"""docs/choosing.md: its tables of cuts are what the planner answers at both sides of each step."""

from __future__ import annotations

from pathlib import Path

import pytest

from online_softmax import rowplan

PAGE = Path(__file__).resolve().parents[1] / "docs" / "choosing.md"
HEADINGS = {"softmax, log_softmax": rowplan.FORWARD, "their backwards": rowplan.BACKWARD,
            "logsumexp": ("logsumexp",)}  # fmt: skip


def tables() -> list[list[list[str]]]:
    """Every table of the page: its lines, each a list of cells, without the rule."""
    found: list[list[list[str]]] = [[]]
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            found.append([])
        elif not set(line) <= set("|-: "):
            found[-1].append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return [table for table in found if table]


def named(row: rowplan.Row) -> str:
    """A cut as the page calls it."""
    if row.kernel != "registers":
        return row.kernel
    if row.lanes:
        return "a warp" if row.lanes == rowplan.WARP else "several rows a warp"
    return f"{row.cluster} blocks" if row.cluster > 1 else "a block"


def agree(op: str, dtype: str, arch: str, steps: list[tuple[str, str]]) -> None:
    """steps: ("128" or "more", name of the cut) by growing columns."""
    least = 1
    for most, name in steps:
        last = 2**24 if most == "more" else int(most.replace(",", ""))
        for cols in (least, last):
            planned = named(rowplan.numbers(op, cols, dtype, arch))
            assert planned == name, f"{op} {dtype} {arch}: {cols} columns"
        least = last + 1
    assert steps[-1][0] == "more"


@pytest.mark.parametrize("arch", rowplan.CLUSTER_ARCHES)
@pytest.mark.parametrize(
    ("heading", "dtypes"),
    [("columns, float32", ["float32"]), ("columns, 16 bits", ["float16", "bfloat16"])],
)
def test_the_cuts_with_clusters(heading: str, dtypes: list[str], arch: str) -> None:
    (table,) = [each for each in tables() if each[0][0] == heading]
    head, *lines = table
    assert set(head[1::2]) == set(HEADINGS)
    for place in range(1, len(head), 2):
        steps = [(line[place - 1].removeprefix("to "), line[place]) for line in lines]
        for op in HEADINGS[head[place]]:
            for dtype in dtypes:
                agree(op, dtype, arch, [step for step in steps if step[0]])


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_120"])
def test_the_cuts_elsewhere(arch: str) -> None:
    (table,) = [each for each in tables() if each[0][0].startswith("to so many columns")]
    head, *lines = table
    assert set(head[1:]) == set(HEADINGS)
    for place, heading in enumerate(head[1:], 1):
        for half, dtypes in enumerate((["float32"], ["float16", "bfloat16"])):
            steps = [(line[place].split(" / ")[-1 if half else 0], line[0]) for line in lines]
            for op in HEADINGS[heading]:
                for dtype in dtypes:
                    agree(op, dtype, arch, steps)
