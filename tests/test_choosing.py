"""docs/choosing.md: its tables of cuts are what the planner answers, from each step to the next."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from online_softmax import rowchoice, rowplan
from online_softmax.lab import benchfile, benchpage, goals
from online_softmax.lab.reportdata import Report
from online_softmax.lab.reportread import Stored
from online_softmax.plan import Problem

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "choosing.md"
ROWS = ROOT / "benchmarks" / "results" / "h200" / "bench-rows.jsonl"
HEADINGS = {"softmax, log_softmax": rowplan.FORWARD, "softmax": ("softmax",),
            "log_softmax": ("log_softmax",), "their backwards": rowplan.BACKWARD,
            "logsumexp": ("logsumexp",)}  # fmt: skip
KINDS = {
    "columns, float32": (["float32"], False),
    "columns, 16 bits": (["float16", "bfloat16"], False),
    "ragged columns, float32": (["float32"], True),
    "ragged columns, 16 bits": (["float16", "bfloat16"], True),
}
LOSSES = {"loss": "cross_entropy", "with gradient": "cross_entropy_in_forward"}
LOSS_KINDS = {
    "classes, float32": (["float32"], [False]),
    "ragged classes, float32": (["float32"], [True]),
    "classes, 16 bits, ragged too": (["float16", "bfloat16"], [False, True]),
}
SAMPLES = 48  # of a step
PAST = 2**24  # columns: more than any step
WHOLE = 8  # columns that are whole vectors in any type


def tables() -> list[list[list[str]]]:
    """Every table of the page: its lines, each a list of cells, without the rule."""
    found: list[list[list[str]]] = [[]]
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            found.append([])
        elif not set(line) <= set("|-: "):
            cells = (cell.strip().replace("`", "") for cell in line.strip("|").split("|"))
            found[-1].append(list(cells))
    return [table for table in found if table]


def named(rows: list[rowplan.Row]) -> str:
    """Cuts of one step as the page calls them: the most blocks that a row of them has."""
    who = " and ".join(sorted({_kind(each) for each in rows}))
    if who not in ("a block or more", "landed"):
        return who
    counts = [each.cluster for each in rows]
    blocks = f"{max(counts)} blocks" if max(counts) > 1 else "a block"
    blocks = blocks if min(counts) == max(counts) else f"up to {blocks}"
    return f"landed, {blocks}" if who == "landed" else blocks


def _kind(row: rowplan.Row) -> str:
    if row.kernel != "registers":
        return row.kernel
    if not row.lanes:
        return "a block or more"
    return "a warp" if row.lanes == rowplan.WARP else "several rows a warp"


def sampled(least: int, most: int, is_ragged: bool) -> list[int]:
    """Columns from least to most, both ends of their kind among them: those that fill their last
    vector, or (ragged) odd ones. Each step ends with whole vectors."""
    if is_ragged:
        most -= 1
    found = {least + (most - least) * n // SAMPLES for n in range(SAMPLES + 1)}
    return sorted({cols | 1 if is_ragged else -(-cols // WHOLE) * WHOLE for cols in found})


def agree(op: str, dtype: str, arch: str, steps: list[tuple[str, str]], is_ragged: bool) -> None:
    """steps: ("128" or "more", name of the cuts) by growing columns."""
    least = 1
    for most, name in steps:
        last = PAST if most == "more" else int(most.replace(",", ""))
        several = sampled(least, last, is_ragged)
        cuts = [rowplan.numbers(op, cols, dtype, arch) for cols in several]
        if op in rowplan.LOSSES:  # which have no kernel that streams
            parts = rowplan.split(1, "")
            cuts = [each if each.kernel == "registers" else parts for each in cuts]
        planned = named(cuts)
        assert planned == name, f"{op} {dtype} {arch}: {least} to {last} columns"
        least = last + 1
    assert steps[-1][0] == "more"


@pytest.mark.parametrize("arch", rowplan.CLUSTER_ARCHES)
@pytest.mark.parametrize("heading", KINDS)
def test_the_cuts_with_clusters(heading: str, arch: str) -> None:
    (table,) = [each for each in tables() if each[0][0] == heading]
    head, *lines = table
    assert sorted(op for each in head[1::2] for op in HEADINGS[each]) == sorted(rowplan.OPERATIONS)
    dtypes, is_ragged = KINDS[heading]
    for place in range(1, len(head), 2):
        steps = [(line[place - 1].removeprefix("to "), line[place]) for line in lines]
        for op in HEADINGS[head[place]]:
            for dtype in dtypes:
                agree(op, dtype, arch, [step for step in steps if step[0]], is_ragged)


@pytest.mark.parametrize("arch", rowplan.CLUSTER_ARCHES)
@pytest.mark.parametrize("heading", LOSS_KINDS)
def test_the_cuts_of_cross_entropy(heading: str, arch: str) -> None:
    (table,) = [each for each in tables() if each[0][0] == heading]
    head, *lines = table
    assert [LOSSES[each] for each in head[1::2]] == list(rowplan.LOSSES)
    dtypes, kinds = LOSS_KINDS[heading]
    for place in range(1, len(head), 2):
        steps = [(line[place - 1].removeprefix("to "), line[place]) for line in lines]
        for dtype, is_ragged in itertools.product(dtypes, kinds):
            given = [step for step in steps if step[0]]
            agree(LOSSES[head[place]], dtype, arch, given, is_ragged)


@pytest.mark.parametrize(("loss", "like"), [("cross_entropy", "logsumexp"),
                                            ("cross_entropy_in_forward", "softmax")])  # fmt: skip
def test_the_cuts_of_cross_entropy_elsewhere(loss: str, like: str) -> None:
    """The page says that they are those of another operation."""
    for dtype, cols in itertools.product(rowplan.ITEM_BYTES, sampled(1, PAST, False)):
        found = [rowplan.numbers(op, cols, dtype, "sm_80") for op in (loss, like)]
        assert found[0] == found[1], (dtype, cols)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_120"])
def test_the_cuts_elsewhere(arch: str) -> None:
    (table,) = [each for each in tables() if each[0][0].startswith("to so many columns")]
    head, *lines = table
    assert sorted(op for each in head[1:] for op in HEADINGS[each]) == sorted(rowplan.OPERATIONS)
    for place, heading in enumerate(head[1:], 1):
        for half, dtypes in enumerate((["float32"], ["float16", "bfloat16"])):
            steps = [(line[place].split(" / ")[-1 if half else 0], line[0]) for line in lines]
            for op in HEADINGS[heading]:
                for dtype in dtypes:
                    for is_ragged in (False, True):
                        agree(op, dtype, arch, steps, is_ragged)


def test_the_cuts_without_batch_invariance() -> None:
    """The page's steps are the only ones, each up to its number of rows, in the types it names."""
    (table,) = [each for each in tables() if each[0][0] == "columns of few rows, 16 bits"]
    steps = [
        (int(cols.removeprefix("to ").replace(",", "")), int(most.replace("none", "0")), name)
        for cols, most, name in table[1:]
    ]
    for op in rowplan.OPERATIONS:
        for dtype, arch in itertools.product(rowplan.ITEM_BYTES, ("sm_80", "sm_90a", "sm_100a")):
            has = op in rowplan.FORWARD and dtype != "float32" and arch != "sm_80"
            least = 1
            for last, most, name in [*steps, (PAST, 0, "as planned")]:
                for cols in sampled(least, last, False):
                    for rows in (1, 4, 5, 8, 16, 17):
                        found = rowchoice.few(op, Problem(rows, cols, dtype, arch=arch))
                        says = f"{found.cluster} blocks, {found.vectors} vectors" if found else None
                        assert says == (name if has and rows <= most else None), (op, rows, cols)
                    assert rowchoice.few(op, Problem(1, cols - 1, dtype, arch=arch)) is None
                least = last + 1


def test_the_other_cut_is_taken_where_it_was_sooner() -> None:
    """In the stored run, of each cell timed by both cuts; 1 % is within what runs differ by."""
    shares: dict[bool, list[float]] = {True: [], False: []}
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        cell = json.loads(line)
        ours = {each["name"]: each["median_us"] for each in cell.get("entries", ())}
        if other := ours.get("ours, not batch invariant"):
            problem = Problem(cell["rows"], cell["cols"], cell["dtype"])
            taken = rowchoice.few(cell["op"], problem) is not None
            shares[taken].append(other / ours["ours"])
    assert len(shares[True]) > 60
    assert max(shares[True]) < 1.01
    assert all(share > 1.01 for share in shares[False])


def test_no_table_counts_a_cut_that_no_longer_runs() -> None:
    """Neither the page's nor a report's; and the page says how many were stored."""
    parts = benchfile.read([ROWS])
    stored = [row for row in benchfile.latest(parts) if row.entry(goals.NOT_INVARIANT)]
    given_up = [row for row in stored if not goals.has_other_cut(row.cell)]
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    told = re.search(r"(\w+) stored ones of 8 and 16 rows past 163,840 columns", page)
    assert told
    assert {"seven": 7, "eight": 8, "nine": 9}[told[1]] == len(given_up)
    assert {row.rows for row in given_up} == {8, 16}
    assert min(row.cols for row in given_up) > 163840
    (few,) = benchpage.sections(parts, is_page=True)["few"]
    counted = sum(int(line[2]) for line in few.rows if line[1] == goals.NOT_INVARIANT)
    left = [row for row in stored if row not in given_up]
    assert counted == len(goals.few(left, goals.NOT_INVARIANT)) > 0
    assert len(goals.few(given_up, goals.NOT_INVARIANT)) > 0
    shown = [row for row in Report(Stored(parts=tuple(parts))).every if row in given_up]
    assert shown == []


def test_a_step_is_seen_where_it_is_wrong() -> None:
    steps = [("384", "several rows a warp"), ("512", "a warp"), ("more", "a block")]
    with pytest.raises(AssertionError, match="513 to"):
        agree("softmax", "bfloat16", "sm_80", steps, False)
    with pytest.raises(AssertionError, match="1 to 392"):
        agree("softmax", "bfloat16", "sm_90a", [("392", "several rows a warp"), *steps[1:]], False)
