"""A run of `profile` as tables for people, and the sentence that tells what crosses which wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.text import Text

from online_softmax.lab import fitting, table
from online_softmax.lab.profilefile import Line, Profile
from online_softmax.lab.table import Column
from online_softmax.plan import ELEMENT_BYTES

NARROWEST = 110  # columns of a page that is piped, at the least
STALLS = 3  # shown of a kernel
WIRES = (
    "What a kernel asks for (3 reads an element, 2 or 1) is between a multiprocessor and L2, and "
    "L1 and L2 answer most of what is read again: DRAM sees about one read of the matrix wherever "
    "a row is read again while the caches hold it."
)
LEAST = (
    "The least is what goes in and what comes out, once: of attention q, k, v and out, of a merge "
    "its parts and what they give, of a loss the logits and the targets."
)
# ncu's words for what a warp waits for; those that are not here are shown as they are.
WAITS = {
    "long_scoreboard": "memory beyond the multiprocessor: L1, L2 or DRAM",
    "short_scoreboard": "shared memory, or an exponential",
    "barrier": "the other warps of its block",
    "wait": "a fixed number of cycles after an instruction",
    "lg_throttle": "a place in the queue of loads and stores",
    "mio_throttle": "a place in the queue of shared memory and exponentials",
    "math_pipe_throttle": "a pipe of arithmetic",
    "drain": "its stores, at its end",
    "not_selected": "its turn: another warp was taken",
    "selected": "nothing: it issues",
    "membar": "a fence",
    "sleeping": "its own sleep",
    "no_instruction": "its instructions",
    "imc_miss": "constants",
    "branch_resolve": "a branch",
    "tex_throttle": "a place in the queue of textures",
    "dispatch_stall": "the dispatcher",
    "gmma": "a product of the tensor cores",
    "misc": "other things",
}

Cell = Callable[[Line], str]


def render(profile: Profile, console: Console) -> None:
    """Print everything about a run that a person wants to see."""
    fitting.widen(console, NARROWEST)
    h = profile.header
    of = f"by the counters of {h.device}" if h.device else "without counters: the static report"
    _say(console, f"{h.op} of {h.rows:,} x {h.cols:,} {h.dtype}, {of}", "bold")
    if h.ncu:
        _say(console, f"Nsight Compute {h.ncu}; caches emptied before each kernel, clocks free.")
    for note in h.notes:
        _say(console, f"Note: {note}.")
    shown = [line for line in profile.lines if not line.reasons]
    legend: list[Column[Line]] = []
    if any(line.counters for line in shown):
        on_rows = [line for line in shown if not line.least_bytes]
        title = "What moves, in elements for each element"
        if of_rows := _table(console, title, moves(ELEMENT_BYTES[h.dtype]), on_rows):
            legend += of_rows
            _say(console, f"  {WIRES}")
        whole = [line for line in shown if line.least_bytes]
        title = "What moves, in bytes for each byte of the least that there is to move"
        if of_whole := _table(console, title, moves(1), whole):
            legend += of_whole
            _say(console, f"  {LEAST}")
        legend += _table(console, "What it waits for", WAITING, shown)
    else:
        legend += _table(console, "What should move, in elements for each element", ASKED, shown)
        for i, arch in enumerate(h.arches):
            columns = _static(i)
            having = [line for line in shown if len(line.figures) > i or (line.code and not i)]
            legend += _table(console, f"Registers and the rest on {arch}", columns, having)
    _legend(console, legend, shown)
    _remarks(console, profile.lines)


# ---- columns


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _counter(name: str, digits: int = 2, factor: float = 1.0) -> Cell:
    def cell(line: Line) -> str:
        value = line.counters.get(name)
        return _number(None if value is None else value * factor, digits)

    return cell


NAME: Column[Line] = Column("kernel", lambda line: line.name, justify="left")
ASKED: tuple[Column[Line], ...] = (
    NAME,
    Column("predicted", lambda line: _number(line.reads_predicted), "reads that the algorithm has"),
    Column("counted", lambda line: _number(line.reads), "reads that host execution counts"),
    Column("writes", lambda line: _number(line.writes), "writes that host execution counts"),
    Column("exps", lambda line: _number(line.exps), "exponentials that host execution counts"),
)


def moves(bytes_each: int) -> tuple[Column[Line], ...]:
    """What was to move and what did, in units of so many bytes: elements of a type, or bytes."""
    share = 1 / bytes_each
    return (
        NAME,
        Column("us", _counter("time_us", 1), "microseconds by the profiler, caches empty"),
        *ASKED[1:3],
        Column("L1", _counter("l1_load", 2, share), "loads that L1 was asked for, in sectors"),
        Column("from L2", _counter("l2_read", 2, share), "reads from L2 to multiprocessors"),
        Column("from DRAM", _counter("dram_read", 2, share), "reads from DRAM"),
        Column("to L2", _counter("l2_write", 2, share), "writes from multiprocessors to L2"),
        Column("to DRAM", _counter("dram_write", 2, share), "writes to DRAM until it ended"),
        Column("sect/ld", _counter("sectors_load", 1), "32-byte sectors a load of a warp"),
        Column("sect/st", _counter("sectors_store", 1), "the same of a store"),
    )


def _stalls(line: Line) -> str:
    total = sum(line.stalls.values())
    if not total:
        return "-"
    waits = [name for name in line.stalls if name != "selected"][:STALLS]
    return ", ".join(f"{name} {100 * line.stalls[name] / total:.0f} %" for name in waits)


WAITING: tuple[Column[Line], ...] = (
    NAME,
    Column("warps", _counter("occupancy", 0), "achieved occupancy, %: warps of the most resident"),
    Column("most", _counter("occupancy_most", 0), "theoretical occupancy, %"),
    Column("issue", _counter("issue", 0), "% of cycles in which a scheduler issues"),
    Column("exp", _counter("xu", 0), "% of the pipe of exponentials (xu)"),
    Column("tensor", _counter("tensor", 0), "% of the tensor cores"),
    Column("regs", _counter("registers", 0), "registers a thread"),
    Column("block", _counter("block", 0), "threads a block"),
    Column("waits for", _stalls, "the longest waits, % of a warp's time between its instructions",
           "left"),
)  # fmt: skip


def _widths(found: dict[str, int]) -> str:
    return ", ".join(f"{count} x {bits}" for bits, count in found.items()) or "none"


def _static(place: int) -> tuple[Column[Line], ...]:
    """Registers and the rest on one architecture; what stands in the code, of the first."""

    def of(column: Column[table.Figures]) -> Column[Line]:
        def cell(line: Line) -> str:
            there = len(line.figures) > place and not line.figures[place].missing
            return column.cell(line.figures[place]) if there else "-"

        return Column(column.heading, cell, column.legend)

    def code(read: Cell) -> Cell:
        return lambda line: read(line) if line.code and not line.code.missing else "-"

    columns = (NAME, *map(of, table.FIGURES))
    if place:
        return columns
    return (
        *columns,
        Column("loads", code(lambda line: _widths(line.code.loads if line.code else {})),
               "loads from global memory in the code, by their bits", "left"),
        Column("stores", code(lambda line: _widths(line.code.stores if line.code else {})),
               "stores to global memory in the code, by their bits", "left"),
        Column("bulk", code(lambda line: str(line.code.bulk if line.code else 0)),
               "copies by the hardware, in the code"),
    )  # fmt: skip


# ---- the page


def _table(
    console: Console, title: str, columns: Sequence[Column[Line]], lines: Sequence[Line]
) -> Sequence[Column[Line]]:
    """A table of the columns that have a figure; which those are."""
    columns = [c for c in columns if c is NAME or any(c.cell(line) != "-" for line in lines)]
    if len(columns) < 2:
        return ()
    fields = [
        fitting.Field(c.heading, c.justify, c.heading in ("waits for", "loads", "stores"), "dim")
        for c in columns
    ]
    console.print()
    _say(console, title, "bold")
    rows = [[Text(column.cell(line)) for column in columns] for line in lines]
    fitting.show(console, fields, rows)
    return columns


def _legend(console: Console, columns: Iterable[Column[Line]], lines: Sequence[Line]) -> None:
    said = {column.heading: column.legend for column in columns if column.legend}
    shown = {
        name for line in lines for name in [n for n in line.stalls if n != "selected"][:STALLS]
    }
    said |= {name: f"waits for {WAITS[name]}" for name in WAITS if name in shown}
    width = max(map(len, said), default=0)
    console.print()
    for heading, text in said.items():
        _say(console, f"  {heading:<{width}}  {text}", "dim")


def _remarks(console: Console, lines: Sequence[Line]) -> None:
    console.print()
    for line in lines:
        for reason in line.reasons:
            _say(console, f"{line.name} did not run: {reason.rstrip('.')}.", "yellow")
    missing = [figures.missing for line in lines for figures in line.figures]
    missing += [line.code.missing for line in lines if line.code]
    for sentence in dict.fromkeys(filter(None, missing)):
        names = [n.name for n in lines if n.code and n.code.missing == sentence]
        _say(console, f"{', '.join(names) or 'Not shown'}: {sentence.rstrip('.')}.", "yellow")
    for line in lines:
        if line.name == "production" and line.kernel:
            _say(console, f"production here is {line.kernel}.")


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(line, style))
