"""How (m, d) moves over a few numbers, step by step, in the float32 that kernels use."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from online_softmax.reference.online import State, absorb, join, lse, prob

FRAMED = 80  # columns of a terminal from which on tables have frames
EXP_LIMIT = math.log(torch.finfo(torch.float32).max)  # 88.72: the last x whose exp is a float32


@dataclass(frozen=True)
class Step:
    """One merge: the state so far with one element, or one block of elements."""

    step: int  # from 1
    values: tuple[float, ...]  # what was read
    m: float  # maximum, afterwards
    d: float  # sum of exp(x - m), afterwards; means nothing where m is not finite
    old_weight: float  # what d was multiplied by: exp(old m - m)
    new_weight: float  # what the new part's sum was multiplied by
    exponentials: int  # evaluated in this step


@dataclass(frozen=True)
class Trace:
    """A walk, and what comes out of it."""

    block: int
    steps: tuple[Step, ...]
    probabilities: tuple[float, ...]  # exp(x - m) / d
    lse: float  # natural logarithm of the sum of exponentials
    naive: tuple[float, ...]  # exp(x) / sum(exp(x)), no maximum subtracted


def trace(values: Sequence[float], block: int = 1) -> Trace:
    """Walk over numbers, `block` at a time.

    Args:
        values: the row; infinities and NaN are fine.
        block: elements a step. 1 is the bare recurrence with two exponentials an element; larger
            blocks take their maximum first and pay one an element and two a block.

    Raises:
        ValueError: there are no values, or block is under 1.

    >>> [(step.m, round(step.d, 6)) for step in trace([1, 5, 3, 9, 2], block=3).steps]
    [(5.0, 1.153651), (9.0, 1.022042)]
    """
    if not values:
        raise ValueError("trace needs at least one number")
    if block < 1:
        raise ValueError(f"a block has at least 1 element, not {block}")
    x = torch.tensor(values, dtype=torch.float32)
    identity = State.empty(())
    state, steps = identity, []
    for number, part in enumerate(x.split(block), 1):
        _, old_weight, new_weight = join(state.m, absorb(identity, part).m)
        state = absorb(state, part)
        numbers = tuple(part.tolist())
        m, d, old, new = (t.item() for t in (state.m, state.d, old_weight, new_weight))
        count = 2 if len(numbers) == 1 else len(numbers) + 2
        steps.append(Step(number, numbers, m, d, old, new, count))
    naive = x.exp() / x.exp().sum()
    probabilities = tuple(prob(x, state).tolist())
    return Trace(block, tuple(steps), probabilities, lse(state).item(), tuple(naive.tolist()))


def to_json(values: Sequence[float], block: int = 1) -> str:
    """The trace as JSON."""
    return as_json(asdict(trace(values, block)))


def as_json(value: object) -> str:
    """JSON; infinities and NaN, which it lacks, as the strings inf, -inf and nan."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(inner) for inner in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), indent=2)


def render(values: Sequence[float], block: int, console: Console) -> None:
    """Print the walk, the results, and what exponentials without a maximum would have given."""
    walk = trace(values, block)
    console.print(_walk_table(walk, console.width))
    console.print(_result_table(values, walk, console.width))
    fold = sum(step.exponentials for step in walk.steps)
    taken = [value for step in walk.steps for value in step.values]
    pairs = zip(values, taken, strict=True)
    for given in dict.fromkeys(x for x, y in pairs if math.isfinite(x) and math.isinf(y)):
        line = f"{given:.10g} is past the largest float32: it is taken as infinite."
        console.print(line, soft_wrap=not console.is_terminal)
    for line in (
        f"log-sum-exp {_number(walk.lse)} (natural logarithm)",
        f"exponentials: {fold} to fold, {len(values)} to write",
        _naive_sentence(values, walk),
    ):
        console.print(line, soft_wrap=not console.is_terminal)


def framed(title: str, headings: Sequence[str], lists: Sequence[str], width: int) -> Table:
    """A table that loses no digit: without a frame where a terminal is narrow, cells folded.

    Args:
        title: above it, to the left.
        headings: one a column.
        lists: which of them hold several numbers, and so may be broken between two.
        width: of the terminal, in columns.
    """
    table = Table(title=title, title_justify="left")
    if width < FRAMED:
        table.box, table.pad_edge, table.collapse_padding = box.SIMPLE_HEAD, False, True
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold", no_wrap=heading not in lists)
    return table


def _walk_table(walk: Trace, width: int) -> Table:
    how = "element by element" if walk.block == 1 else f"{walk.block} elements at a time"
    cost = "exponentials" if width >= FRAMED else "exps"
    headings = ("step", "reads", "m", "old d x", "new part x", "d", cost)
    table = framed(f"(m, d), {how}", headings, ("reads",), width)
    table.columns[1].justify = "left"
    for step in walk.steps:
        reads = " ".join(_number(value) for value in step.values)
        weights = (_number(step.old_weight), _number(step.new_weight))
        d = _number(step.d) if math.isfinite(step.m) else "-"
        table.add_row(str(step.step), reads, _number(step.m), *weights, d, str(step.exponentials))
    return table


def _result_table(values: Sequence[float], walk: Trace, width: int) -> Table:
    headings = ("x", "softmax", "exp(x) / sum of exp(x)")
    table = framed("softmax, exp(x - m) / d", headings, headings[2:], width)
    for row in zip(values, walk.probabilities, walk.naive, strict=True):
        table.add_row(*(_number(value) for value in row))
    return table


def _naive_sentence(values: Sequence[float], walk: Trace) -> str:
    m = walk.steps[-1].m
    if not math.isfinite(m):
        return f"m is {m}: d means nothing, and softmax is nan, as torch's is."
    largest = max(value for value in values if math.isfinite(value))
    if largest > EXP_LIMIT:
        return f"Without a maximum: exp({_number(largest)}) overflows, as all past {EXP_LIMIT:.2f}."
    if any(math.isnan(value) for value in walk.naive):
        return "Without a maximum: every exp(x) is 0 in float32, and 0 / 0 is nan."
    if not any(walk.naive):
        return "Without a maximum: the sum overflows, and every result is 0."
    return f"Without a maximum this row happens to work: no x is over {EXP_LIMIT:.2f}."


def _number(value: float) -> str:
    return f"{value:.7g}"
