"""The contract: a record of the catalogue on a case, judged; and which cases a machine can afford.

On a GPU the real kernels run, on every case. On a CPU CUDA kernels run through host execution and
Triton kernels through the interpreter, on cases of size class "cpu".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from online_softmax.catalogue import Kernel, problem_of
from online_softmax.lab import cases, judge
from online_softmax.lab.judge import Case

INTERPRETER_ROWS = 5  # a program of Triton's interpreter, a row, takes 40 ms
INTERPRETER_STEP = 15  # of the sweep over widths, every fifteenth
REFERENCE_ELEMENTS = 2**27  # it holds several copies at a time
# A quick look: all values at one width, and of the rest so many a record, evenly.
QUICK_COLS, QUICK_MORE, QUICK_INTERPRETED = 33, 24, 8
QUICK_ELEMENTS = 2**14


@dataclass(frozen=True)
class Ran:
    """What a record did with a case."""

    refusals: tuple[str, ...] = ()  # why it did not run, each a sentence
    why: str = ""  # what is wrong, a sentence; "": nothing
    max_error: float = 0.0


def lacks(record: Kernel) -> str | None:
    """What running this record on a CPU needs and lacks, a sentence; None: nothing."""
    if record.backend == "cuda":
        from online_softmax.cuda import host

        if host.compiler() is None:
            return "host execution needs g++ or clang++"
    if record.backend == "triton" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def cases_of(record: Kernel, dtype: torch.dtype, device: str) -> list[Case]:
    """Everything on a GPU; on the CPU what is small, and less of it for Triton's interpreter."""
    wanted = torch.float32 if dtype == torch.float64 else dtype  # float64: what float32 takes
    chosen = [case for case in cases.CASES if wanted in case.dtypes]
    if device == "cuda":
        few = record.name == "reference"
        return [case for case in chosen if not (few and case.elements > REFERENCE_ELEMENTS)]
    chosen = [case for case in chosen if case.size == "cpu"]
    if record.backend == "triton":
        chosen = [case for case in chosen if case.rows <= INTERPRETER_ROWS]
        sweep = [case for case in chosen if case.rows == 2 and case.source.startswith("S02")]
        thinned = set(sweep) - set(sweep[::INTERPRETER_STEP])
        chosen = [case for case in chosen if case not in thinned]
        if wanted != torch.float32:  # the same steps, each value at fewer widths
            chosen = chosen[::2]
    return chosen


def quick(record: Kernel, chosen: Sequence[Case], device: str) -> list[Case]:
    """Some of a record's cases, for an answer in seconds."""
    if record.backend == "triton" and device == "cpu":
        return _evenly([case for case in chosen if case.elements <= 2**12], QUICK_INTERPRETED)
    values = [
        c for c in chosen if c.cols == QUICK_COLS and c.rows == 5 and c.layout == "contiguous"
    ]
    rest = [c for c in chosen if c not in values and c.elements <= QUICK_ELEMENTS]
    return [*values, *_evenly(rest, QUICK_MORE)]


def _evenly(chosen: Sequence[Case], count: int) -> list[Case]:
    return list(chosen[:: max(-(-len(chosen) // count), 1)])


def run(record: Kernel, case: Case, dtype: torch.dtype, device: str) -> Ran:
    """Run a record on a case laid out among NaN, and judge all that it wrote."""
    x = judge.lay_out(case, dtype, device)
    # The problem as if on a GPU: host execution and interpreter run what a GPU would run.
    problem = replace(problem_of(x), device="cuda")
    refusals = record.reasons(problem)
    if refusals:
        return Ran(tuple(refusals))
    y = judge.output(case.rows, case.cols, dtype, device)
    before = x.clone() if case.elements <= cases.CPU_ELEMENTS else None
    record.run(x, y, record.numbers(problem))
    if spilled := judge.spilled(y):
        return Ran(why=f"{spilled} elements around y were written")
    if before is not None and not torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0)):
        return Ran(why="x was written")
    interpreted = record.backend == "triton" and device == "cpu" and dtype == torch.bfloat16
    verdict = judge.check(
        judge.checked_rows(case, y), judge.checked_rows(case, x), ulps=1.0 if interpreted else 0.5
    )
    return Ran(why=verdict.why if not verdict.ok else "", max_error=verdict.max_error)
