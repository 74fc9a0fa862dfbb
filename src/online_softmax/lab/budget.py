"""How many rows a CPU can run: fewer than asked where kernels would take too long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from online_softmax.catalogue import Kernel
from online_softmax.lab import rung
from online_softmax.lab.inputs import Matrix
from online_softmax.lab.rung import Setting
from online_softmax.plan import Problem

PROBE_ELEMENTS = 2**15  # of the first run that says what a row costs, or that counts beside a GPU
PROBE_ROWS = 2  # the same for Triton's interpreter, which takes milliseconds a row
PROBE_SHARE = 0.05  # of the seconds: a run that takes so long says enough
INTERPRETED_SHARE = 0.25  # of the seconds: no row that Triton's interpreter runs is counted

Step = Callable[[str], None]


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """On a busy machine torch's threads wait for each other, up to a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def few_rows(problem: Problem) -> int:
    """So many that counting or timing them takes no time worth speaking of."""
    return min(problem.rows, max(1, PROBE_ELEMENTS // problem.cols))


def affordable(
    setting: Setting, records: Sequence[Kernel], matrix: Matrix, seconds: float, step: Step
) -> Setting:
    """The setting with as many rows as take about `seconds`.

    Triton's interpreter takes some hundred times as long for a row, and only shows that the rungs
    are right: it has rows of its own, what fits into INTERPRETED_SHARE of the seconds.
    """
    one = matrix.take(1)
    for record in records:
        step(f"{record.name}: compiled")
        rung.run(rung.blank(record), record, replace(setting, rows=1), one)
    step("measuring what a row costs")
    interpreted = [record for record in records if record.backend == "triton"]
    others = [record for record in records if record.backend != "triton"]
    left = INTERPRETED_SHARE * seconds if others else seconds
    share = seconds - left if interpreted and others else seconds
    few, least = few_rows(setting.problem), min(PROBE_ROWS, matrix.rows)
    row_seconds = _row_seconds(setting, others, matrix, share, few)
    rows = _within(matrix.rows, share, row_seconds)
    row_seconds = _row_seconds(setting, interpreted, matrix, left, least)
    return replace(setting, rows=rows, interpreted_rows=_within(rows, left, row_seconds))


def notes(setting: Setting) -> list[str]:
    """What a reader must know of rows that did not run, each a sentence."""
    said = []
    if setting.rows < setting.problem.rows:
        said.append(
            f"{setting.rows:,} of {setting.problem.rows:,} rows: host execution is for counting, "
            "not for speed"
        )
    if 0 < setting.interpreted_rows < setting.rows:
        said.append(
            f"Triton's rungs took {setting.interpreted_rows:,} rows, spread over all: its "
            "interpreter is slower still"
        )
    return said


def _row_seconds(
    setting: Setting, records: Sequence[Kernel], matrix: Matrix, seconds: float, rows: int
) -> float:
    """What a further row costs these kernels together, from larger and larger runs."""
    rows_before, spent_before = 0, 0.0
    while True:
        probe, x = replace(setting, rows=rows, interpreted_rows=rows), matrix.take(rows)
        start = time.perf_counter()
        for record in records:
            rung.run(rung.blank(record), record, probe, x)
        spent = time.perf_counter() - start
        if spent >= PROBE_SHARE * seconds or rows == matrix.rows or not records:
            # Without what any run costs; but two clocks on a busy machine may say anything.
            slope = (spent - spent_before) / (rows - rows_before)
            return max(slope, spent / rows / 4)
        rows, rows_before, spent_before = min(rows * 4, matrix.rows), rows, spent


def _within(asked: int, seconds: float, row_seconds: float) -> int:
    """At most `asked` rows, else a round number that fits: the estimate is no better than that."""
    rows = int(min(seconds / row_seconds, asked)) if row_seconds else asked
    return asked if rows == asked else 1 << max(rows.bit_length() - 1, 0)
