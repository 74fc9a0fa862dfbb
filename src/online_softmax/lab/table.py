"""A run of the ladder as tables for people: as wide as the terminal, in parts where that is narrow;
piped of 80 columns at the least, and with more columns of a table where there is room for them.

Every mark is a word or a number; colour only repeats what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from rich.console import Console
from rich.text import Text

from online_softmax.lab import fitting
from online_softmax.lab.results import Figures, Header, Result, Run

WIDE = 120  # columns of the console from which ideas, bars and several architectures fit beside
NARROWEST = 80  # columns of a page that is piped, at the least
BAR = 24  # characters of a full bar
PREDICTED = "*"  # behind a figure that the algorithm predicts and nothing counted
Record = TypeVar("Record")


@dataclass(frozen=True)
class Column(Generic[Record]):
    """A heading, how a record fills the cell, and one line on what it means ("": no need)."""

    heading: str
    cell: Callable[[Record], str]
    legend: str = ""
    justify: Literal["left", "right"] = "right"


# ---- cells


def _number(value: float | None, digits: int = 0) -> str:
    """A figure without trailing zeros: 2, 3.25, 2.625."""
    if value is None:
        return "-"
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _share(value: float | None) -> str:
    return (
        "-" if value is None else f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.1f} %"
    )


def _counted(value: float | None, result: Result) -> str:
    mark = "" if result.is_counted or value is None else PREDICTED
    return _number(value, 3) + mark


def _exps(result: Result) -> str:
    return _counted(result.exps if result.is_counted else result.exps_predicted, result)


def _error(result: Result) -> str:
    return "-" if result.max_error is None else f"{result.max_error:.1e}"


def _microseconds(us: float | None) -> str:
    return "-" if us is None else f"{us:,.0f}" if us >= 1000 else f"{us:.1f}"


def _spread(result: Result) -> str:
    if result.p20_us is None or result.p80_us is None:
        return "-"
    return f"{_microseconds(result.p20_us)} to {_microseconds(result.p80_us)}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _bar(result: Result) -> str:
    return "" if result.of_copy is None else "#" * round(BAR * min(result.of_copy, 1.0))


def verdict(result: Result) -> str:
    """A rung's state in a word."""
    return {True: "ok", False: "WRONG", None: "not run"}[result.ok]


# ---- columns

NAME = Column[Result]("rung", lambda r: r.name, justify="left")
BLOCK = Column[Result]("block", lambda r: str(r.block or "-"), "threads a block")
COSTS: tuple[Column[Result], ...] = (
    NAME,
    Column("result", verdict, "ok: every element agrees with float64", "left"),
    Column("max error", _error, "largest |y - float64| among the probabilities"),
    Column("reads", lambda r: _counted(r.reads, r), "input elements read, per element"),
    Column("writes", lambda r: _counted(r.writes, r), "output elements written, per element"),
    Column("exps", _exps, "exponentials evaluated, per element"),
    Column(
        "predicted",
        lambda r: _number(r.exps_predicted, 3),
        "exponentials per element, worked out before the run",
    ),
    BLOCK,
)
IDEA = Column[Result]("idea", lambda r: r.idea, justify="left")
TIMES: tuple[Column[Result], ...] = (
    NAME,
    Column("us", lambda r: _microseconds(r.median_us), "microseconds a call, median, L2 cold"),
    Column(
        "GB/s", lambda r: _number(r.gbs), "one read and one write of the matrix, over that time"
    ),
    Column("of sheet", lambda r: _share(r.of_datasheet), "GB/s as a share of the card's bandwidth"),
    Column("of copy", lambda r: _share(r.of_copy), "as a share of a copy in this run: the limit"),
    Column("x torch", lambda r: _times(r.of_torch), "times as fast as torch.softmax"),
    BLOCK,
)
SPREAD = Column("p20 to p80", _spread, "20th to 80th percentile of the microseconds")
BARS = Column("share of the copy's speed", _bar, justify="left")
FIGURES: tuple[Column[Figures], ...] = (
    Column("regs", lambda f: str(f.registers), "registers a thread"),
    Column("spills", lambda f: str(f.spill_bytes), "bytes a thread moves for want of registers"),
    Column("stack", lambda f: str(f.stack_bytes), "bytes a thread has in local memory; 0 is right"),
    Column("shared", lambda f: str(f.shared_bytes), "bytes of shared memory a block"),
    Column("warps", lambda f: _share(f.occupancy), "theoretical occupancy: resident warps of most"),
)  # fmt: skip


# ---- the page


def render(run: Run, console: Console) -> None:
    """Print everything about a run that a person wants to see."""
    fitting.widen(console, NARROWEST)
    is_wide = console.width >= WIDE
    _say(console, _title(run.header), "bold")
    for line in _circumstances(run.header):
        _say(console, line)
    legend: list[Column] = []
    if run.is_timed:
        columns = [*TIMES, SPREAD, BARS] if is_wide else [*TIMES]
        legend += _results(console, "Speed", columns, run.results)
    columns = [*COSTS, IDEA] if is_wide else [*COSTS]
    legend += _results(console, "Right, and at what cost", columns, run.results)
    legend += _figures(console, run, is_wide)
    _legend(console, run, legend)
    _remarks(console, run)
    _conclusion(console, run)


def _title(header: Header) -> str:
    return f"softmax of {header.rows:,} x {header.cols:,} {header.dtype}: {header.source}"


def _circumstances(header: Header) -> list[str]:
    lines = [f"Note: {note}." for note in header.notes]
    if header.device == "cpu":
        how = "CUDA rungs run compiled for the CPU, Triton's interpreted"
        return [*lines, f"No GPU: {how}; checked and counted, not timed."]
    known = [header.device]
    if header.datasheet_gbs:
        known.append(f"{header.datasheet_gbs:,.0f} GB/s ({header.datasheet})")
    if header.copy_gbs and header.copy_us:
        known.append(f"a copy reaches {header.copy_gbs:,.0f} GB/s in {header.copy_us:.1f} us")
    return [*lines, "; ".join(known) + "."]


def _results(
    console: Console, title: str, columns: list[Column[Result]], results: Iterable[Result]
) -> list[Column[Result]]:
    block, rows = "\u2588" if console.encoding.startswith("utf") else "#", []
    for result in results:
        cells = (column.cell(result).replace("#", block) for column in columns)
        styles = (_style(column, result) for column in columns)
        rows.append([*map(Text, cells, styles)])
    _show(console, title, columns, rows)
    return columns


def _figures(console: Console, run: Run, is_wide: bool) -> Sequence[Column[Figures]]:
    """Registers and the rest: architectures beside each other, or one below the other."""
    arches = run.header.arches
    rows = [
        r for r in run.results if r.name != "production" and any(not f.missing for f in r.figures)
    ]
    if not rows:
        return ()
    for group in [arches] if is_wide and len(arches) <= 2 else [(arch,) for arch in arches]:
        lines = []
        for result in rows:
            known = {f.arch: f for f in result.figures if not f.missing}
            cells = [
                column.cell(known[arch]) if arch in known else "-"
                for arch in group
                for column in FIGURES
            ]
            lines.append([Text(result.name), *map(Text, cells)])
        columns: list[Column[Any]] = [NAME, *FIGURES * len(group)]
        _show(console, f"Registers and the rest on {', then on '.join(group)}", columns, lines)
    return FIGURES


def _show(
    console: Console, title: str, columns: Sequence[Column], rows: Sequence[Sequence[Text]]
) -> None:
    fields = [fitting.Field(c.heading, c.justify, c is IDEA, "dim") for c in columns]
    console.print()
    _say(console, title, "bold")
    fitting.show(console, fields, rows)


def _style(column: Column[Result], result: Result) -> str:
    if column.heading == "result":
        return {True: "green", False: "bold red", None: "yellow"}[result.ok]
    if column is BARS:
        return "cyan"
    return "bold" if result.name == "production" else ""


def _legend(console: Console, run: Run, columns: Iterable[Column]) -> None:
    lines = {column.heading: column.legend for column in columns if column.legend}
    if any(PREDICTED in column.cell(r) for column in COSTS for r in run.results):
        lines[PREDICTED] = "predicted from the algorithm: nothing counts there"
    width = max(map(len, lines))
    console.print()
    for heading, text in lines.items():
        _say(console, f"  {heading:<{width}}  {text}", "dim")


def _remarks(console: Console, run: Run) -> None:
    console.print()
    reasons = {result.name: result.reasons for result in run.results}
    names: dict[tuple[str, str], list[str]] = {}  # of the lines that one sentence is about
    for result in run.results:
        # What keeps the planner's choice from running is said of its own line, if that is here.
        said = result.name == "production" and result.reasons == reasons.get(result.kernel)
        lacks = "did not run" if result.ok is None else "was not timed"
        for reason in () if said else result.reasons:
            names.setdefault((lacks, reason), []).append(result.name)
    for (lacks, reason), those in names.items():
        if len(those) > 1:
            lacks = lacks.replace("was", "were")
        _say(console, f"{_and(those)} {lacks}: {reason.rstrip('.')}.", "yellow")
    for sentence in dict.fromkeys(f.missing for r in run.results for f in r.figures if f.missing):
        _say(console, f"No registers: {sentence.rstrip('.')}.", "yellow")
    for result in run.results:
        if result.chosen_because:
            _say(console, _what_ships(run.header, result))


def _what_ships(header: Header, result: Result) -> str:
    said = f"{result.kernel}: {result.chosen_because.rstrip('.')}."
    if header.device != "cpu":
        return f"production here is {said}"
    arch, *rest = header.arches
    why = "the first of " + _and([arch, *rest]) if rest else "which was asked for"
    return (
        f"production is what softmax would run on a GPU; without one it is chosen for {arch}, "
        f"{why} (--arch names others): {said}"
    )


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _conclusion(console: Console, run: Run) -> None:
    ran = [result for result in run.results if result.ok is not None]
    wrong = [result for result in ran if not result.ok]
    for result in wrong:
        _say(console, f"WRONG: {result.name}: {result.why}", "bold red")
    if wrong:
        _say(console, f"{len(wrong)} of {len(ran)} lines disagree with float64.", "bold red")
    elif ran:
        those = (
            f"All {len(ran)} lines that ran agree" if len(ran) > 1 else "The line that ran agrees"
        )
        _say(console, f"{those} with float64.", "green")
    else:
        _say(console, "Nothing ran.", "yellow")


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(line, style))
