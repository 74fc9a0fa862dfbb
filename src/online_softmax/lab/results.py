"""What a run of the ladder found, as records; and the JSON lines they are kept in.

A stored file is one header line and one line a rung, for a shell, a script and report.py alike.
Infinities and NaN become null. Files joined end to end are read as several runs.
"""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from online_softmax.lab import storedlines
from online_softmax.lab.storedlines import TIME

FORMAT = 1


@dataclass(frozen=True)
class Figures:
    """What a kernel takes on one architecture; of a rung with two kernels, the larger of each."""

    arch: str
    registers: int = 0  # a thread
    spill_bytes: int = 0  # a thread, stores and loads
    stack_bytes: int = 0  # a thread; above 0, an array lives in local memory
    shared_bytes: int = 0  # a block, static and dynamic
    occupancy: float = 0.0  # resident warps over the most possible, by theory
    missing: str = ""  # why there are no figures, a sentence


@dataclass(frozen=True)
class Result:
    """One rung: is it right, what does it cost, how fast is it. None: not known here."""

    name: str
    kernel: str  # the catalogue's name; differs from `name` for "production"
    backend: str
    idea: str
    ok: bool | None = None  # agrees with float64; None: it did not run
    max_error: float | None = None
    why: str = ""  # what is wrong, a sentence
    chosen_because: str = ""  # of "production": the planner's sentence
    reasons: tuple[str, ...] = ()  # why it did not run, each a sentence
    rows: int = 0  # that it ran on
    block: int = 0  # threads a block
    is_counted: bool = False  # by host execution; else reads and writes are predicted
    reads: float | None = None  # per element, between multiprocessor and L2
    writes: float | None = None  # per element
    exps: float | None = None  # counted exponentials per element
    exps_predicted: float | None = None  # per element
    figures: tuple[Figures, ...] = ()
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    rounds_us: tuple[float, ...] = ()  # the median of each interleaved round
    gbs: float | None = None  # ideal bytes over the median, GB/s
    of_datasheet: float | None = None  # share of the datasheet's bandwidth
    of_copy: float | None = None  # share of a copy kernel measured in the same run
    of_torch: float | None = None  # times as fast as torch.softmax
    every_us: dict[str, float] = field(default_factory=dict)  # by block size, quick medians


@dataclass(frozen=True)
class Header:
    """What was run, where and how."""

    date: str  # UTC, ISO 8601
    command: str
    device: str  # the GPU's name, or "cpu"
    source: str  # of the values, in words
    rows: int  # that ran; of a rung, its own figure counts
    rows_asked: int
    cols: int
    dtype: str
    arches: tuple[str, ...]  # whose registers and occupancy are given
    versions: dict[str, str | None]
    machine: dict[str, Any] = field(default_factory=dict)  # driver, clocks...
    notes: tuple[str, ...] = ()  # what a reader must know, each a sentence
    is_cold_l2: bool | None = None  # None: nothing was timed
    clock: str = ""
    counted_rows: int = 0  # counts were taken on so many rows
    checked_rows: int = 0  # results were compared with float64 on so many rows
    bytes_moved: int = 0  # ideal: one read, one write
    copy_us: float | None = None
    copy_gbs: float | None = None
    datasheet_gbs: float | None = None
    datasheet: str = ""  # whose


@dataclass(frozen=True)
class Run:
    """One climb of the ladder."""

    header: Header
    results: tuple[Result, ...]

    @property
    def is_right(self) -> bool:
        """No rung gave a wrong result."""
        return all(result.ok is not False for result in self.results)

    @property
    def is_timed(self) -> bool:
        return any(result.median_us is not None for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """The run as one object of plain JSON values."""
        rungs = [plain({"kind": "rung", **asdict(result)}) for result in self.results]
        return {"header": self._header(), "rungs": rungs}

    def _header(self) -> dict[str, Any]:
        return plain({"kind": "header", "format": FORMAT, **asdict(self.header)})


def save(run: Run, path: str | Path) -> None:
    """Write a run as JSON lines, in place of what stood in the file."""
    storedlines.save(run.to_json(), path)


def read(path: str | Path) -> list[Run]:
    """Read the runs of a file that `save` wrote, or that `ladder --json` printed.

    Raises:
        ValueError: the file holds something else, or another format; one line says what.
        OSError: it cannot be read.
    """
    try:
        lines = storedlines.objects(Path(path).read_text(encoding="utf-8"), "rungs")
        runs: list[tuple[Header, list[Result]]] = []
        for line in lines:
            storedlines.check(line)
            if line["kind"] == "header":
                if "what" in line:
                    raise ValueError(f"its lines are not those of a run but of `{line['what']}`")
                storedlines.must_be_format(line, FORMAT, "ladder")
                runs.append((record(Header, line), []))
            elif not runs:
                raise ValueError("no header comes first")
            else:
                figures = tuple(record(Figures, each) for each in line.get("figures", ()))
                runs[-1][1].append(record(Result, {**line, "figures": figures}))
    except storedlines.OtherFormatError as error:
        raise ValueError(f"{path} {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = str(error) if type(error) is ValueError else "its lines are not those of a run"
        raise ValueError(f"{path} holds no results of `ladder --save`: {why}") from None
    return [Run(header, tuple(results)) for header, results in runs]


def plain(value: Any) -> Any:
    """A value as JSON has it: infinities and NaN become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


TIMES = ("median_us", "copy_us")  # that other figures are made of: none is 0
_KINDS: dict[str, tuple[type, ...]] = {  # by how the annotations of the records begin
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "tuple": (list, tuple),
    "dict": (dict,),
}


def record(cls: Any, values: dict[str, Any]) -> Any:
    """A record from JSON: lists become tuples, names of a later format are passed over.

    Raises:
        ValueError: a figure is missing, of another kind, or a time of 0 that no doubt stands by.
    """
    kept = {}
    for each in fields(cls):
        if each.name in values:
            value = values[each.name]
            if not _fits(value, str(each.type)):
                raise ValueError(f"{each.name} is {value!r} there, where {each.type} is wanted")
            if each.name in TIMES and value == 0 and not values.get("doubt"):
                raise ValueError(f"{each.name} is {value!r} there, where {TIME} is wanted")
            kept[each.name] = tuple(value) if isinstance(value, list) else value
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{each.name} is missing there")
    return cls(**kept)


def _fits(value: Any, wanted: str) -> bool:
    """Whether a value is of an annotation of the records; numbers of theirs are never below 0."""
    first, _, inner = wanted.partition("[")
    if value is None and "None" in (wanted.rpartition("]")[2] if inner else wanted):
        return True
    name = re.split(r"\W", first)[0]
    if name not in _KINDS:  # Any, or a record, which is one already
        return True
    if not isinstance(value, _KINDS[name]) or (isinstance(value, bool) and name != "bool"):
        return False
    if isinstance(value, (list, tuple)):
        return all(_fits(each, inner.partition(",")[0]) for each in value)
    if isinstance(value, dict):
        return all(_fits(each, inner.partition(", ")[2][:-1]) for each in value.values())
    return not isinstance(value, (int, float)) or value >= 0
