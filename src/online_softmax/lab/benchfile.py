"""What `bench` found, as records; and the file they are kept in, a line each, written at once.

A header line, then a line a cell. A run that was interrupted is resumed: cells that are in the file
are skipped, a torn last line is cut off, and what follows has a header of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from online_softmax.lab import fusedsizes, results, storedlines
from online_softmax.lab.grid import ITEM_BYTES, Cell
from online_softmax.lab.inputs import BadInput

FORMAT = 1
TORN = "ends within a line, which is passed over"
WHAT = "bench"  # a header says so, to be told from a ladder's


@dataclass(frozen=True)
class Entry:
    """One contender in one cell. None: not known; without a time, `why` says why.

    `median_us` is the figure that counts: the median of the rounds' medians; where `clock` is
    "host", a CPU's, the least of all calls, so that it lies below `p20_us`.
    """

    name: str
    kind: str  # "ceiling", "ours" or "rival"
    ok: bool | None = None  # agrees with float64; None: it gave nothing to compare
    max_error: float | None = None  # largest |result - float64|
    share_max: float | None = None  # the same over the size of its row: opjudge.size
    share_mean: float | None = None  # its mean over all elements compared
    why: str = ""  # what is wrong, or why it did not run, or why no graph held it
    clock: str = ""  # of the times: "graph"; "do_bench" where no graph held the call; "host"
    median_us: float | None = None  # a call: the figure that counts
    p20_us: float | None = None
    p80_us: float | None = None
    rounds_us: tuple[float, ...] = ()  # the figure of each interleaved round
    do_bench_us: float | None = None  # a second figure: triton.testing.do_bench, median
    gbs: float | None = None  # ideal bytes over median_us, GB/s
    tflops: float | None = None  # of operations whose limit is products: those over median_us
    repeats_us: tuple[float, ...] = ()  # where the cell was measured again: median_us of each time
    doubt: str = ""  # why the time is not to be believed (doubts.py)

    @property
    def spread_us(self) -> float:
        """How far the rounds are apart."""
        return max(self.rounds_us) - min(self.rounds_us) if self.rounds_us else 0.0


@dataclass(frozen=True)
class Row:
    """One cell's result."""

    op: str
    dtype: str
    rows: int
    cols: int
    values: str  # of the input: "normal", or "ascending" in each row
    ideal_bytes: int
    entries: tuple[Entry, ...] = ()
    is_cold_l2: bool | None = None
    sets: int = 0  # buffer sets in rotation
    checked_rows: int = 0  # compared with float64 of each result; all elements were written
    seconds: float = 0.0  # that measuring took
    spent: dict[str, float] = field(default_factory=dict)  # of them, by what they went to
    why: str = ""  # why the whole cell was not measured
    sizes: str = ""  # what rows and columns do not say: grid.Cell.sizes
    flops: int = 0  # of the products that the operation is made of; 0: memory is its limit
    repeats: int = 1  # how often it was measured, all of which is in the entries
    clocks: dict[str, Any] = field(default_factory=dict)  # clocks.between; empty: nobody looked

    @property
    def cell(self) -> Cell:
        return Cell(self.op, self.dtype, self.rows, self.cols, self.sizes)

    @property
    def is_throttled(self) -> bool:
        """Something slowed the GPU's clocks while it was timed. Long products run at the card's
        power limit, all contenders alike: that is no fault of a measurement."""
        reasons = set(self.clocks.get("reasons") or ())
        return bool(reasons - {"power limit"} if self.flops else reasons)

    @property
    def is_right(self) -> bool:
        """Nothing of ours gave a wrong result."""
        return all(e.ok is not False for e in self.entries if e.kind != "rival")

    def entry(self, name: str) -> Entry | None:
        return next((e for e in self.entries if e.name == name), None)


@dataclass(frozen=True)
class Header:
    """What was run, where and how."""

    date: str  # UTC, ISO 8601
    command: str
    device: str
    versions: dict[str, str | None]  # the commit among them
    machine: dict[str, Any] = field(default_factory=dict)  # driver, clocks...
    clock: str = ""
    rivals: dict[str, str | None] = field(default_factory=dict)  # asked for: name -> version
    values: str = "normal"


@dataclass(frozen=True)
class Part:
    """What follows one header: cells, and lines of other kinds ("tuning", "host") as they are."""

    header: Header
    rows: tuple[Row, ...]
    others: tuple[dict[str, Any], ...] = ()


def line(kind: str, record: Any) -> str:
    """A record, or a dictionary, as one JSON line."""
    values = record if isinstance(record, dict) else asdict(record)
    return json.dumps(results.plain({"kind": kind, **values}), allow_nan=False) + "\n"


def header_line(header: Header) -> str:
    return line("header", {"what": WHAT, "format": FORMAT, **asdict(header)})


def parse(text: str, name: str) -> list[Part]:
    """The parts of a file's text; a last line without its end is passed over.

    Raises:
        BadInput: it holds something else; one line says what.
    """
    parts: list[tuple[Header, list[Row], list[dict[str, Any]]]] = []
    try:
        for values in storedlines.objects_by_line(text[: text.rfind("\n") + 1]):
            if values["kind"] == "header":
                if values.get("what") != WHAT:
                    raise ValueError(f"it is of `{values.get('what', 'ladder')}`")
                storedlines.must_be_format(values, FORMAT, WHAT)
                parts.append((results.record(Header, values), [], []))
            elif not parts:
                raise ValueError(
                    f"it begins with a line of kind {values['kind']!r} and has no header before it"
                )
            elif values["kind"] == "cell":
                parts[-1][1].append(_row(values))
            else:
                parts[-1][2].append(values)
    except storedlines.OtherFormatError as error:
        raise BadInput(f"{name} {error}") from None
    except ValueError as error:
        raise BadInput(f"{name} holds no results of `bench --save`: {error}") from None
    if not parts:
        raise BadInput(f"{name} holds no results of `bench --save`: it has no whole line")
    return [Part(header, tuple(rows), tuple(others)) for header, rows, others in parts]


def _row(values: dict[str, Any]) -> Row:
    entries = tuple(results.record(Entry, each) for each in values["entries"])
    row: Row = results.record(Row, {**values, "entries": entries})
    if row.dtype not in ITEM_BYTES:
        raise ValueError(f"dtype is {row.dtype!r} there, where {', '.join(ITEM_BYTES)} are known")
    if row.cell.is_empty and (row.entries or not row.why):
        raise ValueError(f"a cell is {row.rows} x {row.cols} there, where both are above 0")
    fusedsizes.check(row.op, row.sizes)
    return row


def read(paths: Iterable[Path], note: Callable[[str], None] = lambda text: None) -> list[Part]:
    """The parts of several files, in order. A last line without its end is passed over, and `note`
    is told so.

    Raises:
        BadInput: a file cannot be read, or holds something else.
    """
    parts: list[Part] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise BadInput(f"{path} is no text: {error}") from None
        if text and not text.endswith("\n"):
            note(f"{path} {TORN}")
        parts += parse(text, str(path))
    return parts


def latest(parts: Iterable[Part]) -> list[Row]:
    """Every cell once, as it was measured last, in the order of the first time."""
    found: dict[tuple[Cell, str], Row] = {}
    for part in parts:
        for row in part.rows:
            found[row.cell, row.values] = row
    return list(found.values())


def merged(parts: Iterable[Part]) -> list[str]:
    """The lines of one file that says what several say: each header once, with those of its cells
    that were not measured again later; lines of other kinds as they are."""
    parts = list(parts)
    last = {(row.cell, row.values): id(row) for part in parts for row in part.rows}
    headers: dict[str, list[str]] = {}
    for part in parts:
        lines = headers.setdefault(header_line(part.header), [])
        kept = [row for row in part.rows if last[row.cell, row.values] == id(row)]
        lines += [line("cell", row) for row in kept]
        lines += [line(other["kind"], other) for other in part.others]
    return [text + "".join(lines) for text, lines in headers.items() if lines]


class Log:
    """The file of a run; without a path nothing is kept."""

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        """Raises BadInput for a file that is there already, unless `resume` goes on with it."""
        self.path = path
        self.kept: list[Part] = []
        self.torn_bytes = 0  # of a last line without its end, which were cut off
        if path is None or not path.exists() or not path.stat().st_size:
            return
        if not resume:
            raise BadInput(f"{path} is there already: --resume goes on with it")
        whole = path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end:  # else torn in its first line: nothing to go on with
            self.kept = parse(whole[:end].decode("utf-8", "replace"), str(path))
        self.torn_bytes = len(whole) - end
        if self.torn_bytes:
            os.truncate(path, end)

    def has(self, cell: Cell, values: str) -> bool:
        """Whether a cell was measured, or given up, before."""
        return any(r.cell == cell and r.values == values for part in self.kept for r in part.rows)

    @property
    def sources(self) -> set[str | None]:
        """The digests of the kernel sources that made what is in the file."""
        return {part.header.versions.get("sources") for part in self.kept}

    def write(self, text: str) -> None:
        """Append whole lines; they are on the disk when this returns. BadInput: they cannot be."""
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BadInput(f"{self.path} cannot be written: {error.strerror}") from None
