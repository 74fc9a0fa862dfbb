"""What `explain` says: which kernel a softmax takes, and why not the others."""

from __future__ import annotations

import operator

from online_softmax import catalogue, invariance, plan, rowchoice, rowplan
from online_softmax.catalogue import DTYPES, KERNELS
from online_softmax.plan import Problem

_DTYPE_NAMES = tuple(catalogue.dtype_name(dtype) for dtype in DTYPES)


def explain(rows: int, cols: int, dtype: str = "float32", arch: str = plan.DEFAULT_ARCH) -> str:
    """Which kernel a rows x cols softmax takes on a GPU, why, and why not the others.

    Args:
        rows, cols: the matrix; softmax runs along cols.
        dtype: "float32", "float16", "bfloat16" or "float64".
        arch: an architecture of plan.ARCHES, "sm_90a" for example.

    Raises:
        TypeError: rows or cols is not a whole number.
        ValueError: an unknown type or architecture, or a negative size.

    >>> print(explain(1, 1_048_576).splitlines()[0])
    split: 128 parts in all are few for 132 multiprocessors: parts of rows, two kernels
    """
    if arch not in plan.ARCHES:
        raise ValueError(f"explain(): no facts about {arch!r}; known are {', '.join(plan.ARCHES)}")
    if dtype not in _DTYPE_NAMES:
        raise ValueError(
            f"explain(): dtype must be one of {', '.join(_DTYPE_NAMES)}, got {dtype!r}"
        )
    for name, size in (("rows", rows), ("cols", cols)):
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"explain(): {name} must be an int, got {size!r}")
    rows, cols = operator.index(rows), operator.index(cols)  # a NumPy integer, for example
    if rows < 0 or cols < 0:
        raise ValueError(f"explain(): rows and cols must be at least 0, got {rows} x {cols}")
    problem = Problem(rows, cols, dtype, arch=arch)
    kernel, why = catalogue.choose(problem)
    lines = [f"{kernel.name}: {why}"]
    if kernel.rung:
        numbers = kernel.numbers(problem)
        lines.append(f"  numbers: {numbers.why}")
    rung, why = plan.choose(problem)
    if rung in plan.RUNGS:
        lines.append(f"  of the ladder's rungs, {rung}: {why}")
    if kernel.is_row_kernel and (line := _few(problem)):
        lines.append(f"  {line}")
    if not problem.facts.measured:
        lines.append(f"  nobody has measured {arch} yet: chosen from its datasheet facts")
    for other in KERNELS.values():
        if other.name == kernel.name or other.backend in ("torch", "reference"):
            continue
        refusals = other.reasons(problem)
        missing = catalogue.lacks(other.backend)
        against = rowplan.WHY_NOT.get(other.name) or plan.why_not(other.name, problem)
        note = missing or (refusals[0] if refusals else against)
        lines.append(f"  not {other.name}: {note}")
    return "\n".join(lines)


def _few(problem: Problem) -> str:
    """What the other setting of batch invariance would do, where that is something else."""
    cut = rowchoice.few("softmax", problem)
    if cut is None:
        return ""
    if invariance.setting.is_on:
        shape = f"{cut.cluster} blocks a row, {cut.block} threads of {cut.vectors} vectors"
        return f"with batch_invariant(False): {shape}; other bits"
    return f"with batch_invariant(True): {rowchoice.chosen('softmax', problem).why}"
