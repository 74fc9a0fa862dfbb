"""What `profile` found, as records; and the JSON lines they are kept in.

A header line, then a line a kernel. Files of before, one object with `rungs`, are read too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from online_softmax.catalogue import KERNELS
from online_softmax.lab import results, storedlines
from online_softmax.lab.results import Figures
from online_softmax.plan import ELEMENT_BYTES

FORMAT = 1
WHAT = "profile"  # a header says so, to be told from a ladder's or a benchmark's
UNIT = (
    "counters: bytes per element, of a whole operation per byte of least_bytes, microseconds, "
    "sectors per request, shares of 100; stalls: cycles an issued instruction; predicted and "
    "counted: elements per element"
)


@dataclass(frozen=True)
class Code:
    """What a kernel's machine code moves at a time: bits -> instructions in the code, not run."""

    loads: dict[str, int] = field(default_factory=dict)  # from global memory
    stores: dict[str, int] = field(default_factory=dict)  # to global memory
    bulk: int = 0  # copies of many bytes by the hardware
    exps: int = 0  # exponentials
    missing: str = ""  # why there is no machine code to read, a sentence


@dataclass(frozen=True)
class Line:
    """One kernel: what it should move, what it did, and what its threads waited for.

    `counters` has, where ncu gave them: time_us; dram_read, dram_write, l2_read, l2_write, l1_load,
    l1_store, bytes per element, of a whole operation for each byte of `least_bytes`; sectors_load,
    sectors_store, a request; occupancy, occupancy_most, issue, xu, tensor, shares of 100;
    registers, shared_bytes, block, grid, waves, limit_*.
    """

    name: str
    kernel: str  # the catalogue's name, which differs for "production"; "": none of ours
    idea: str
    reasons: tuple[str, ...] = ()  # why it did not run, each a sentence
    least_bytes: int = 0  # that a whole operation moves, what goes in and out once; 0: a kernel's
    launches: tuple[str, ...] = ()  # kernels that the profiler saw
    reads_predicted: float | None = None  # elements per element, before any run
    reads: float | None = None  # counted by host execution
    writes: float | None = None
    exps: float | None = None
    counters: dict[str, float] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)  # largest first
    figures: tuple[Figures, ...] = ()  # the static report, by architecture
    code: Code | None = None  # of the first architecture of the figures


@dataclass(frozen=True)
class Header:
    """What was profiled, where and how."""

    date: str  # UTC, ISO 8601
    command: str
    device: str  # the GPU's name; "" where the static report stands in place of counters
    rows: int
    cols: int
    dtype: str
    op: str
    arches: tuple[str, ...]
    versions: dict[str, str | None] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    ncu: str = ""  # its version
    notes: tuple[str, ...] = ()  # what a reader must know, each a sentence


@dataclass(frozen=True)
class Profile:
    """One run of `profile`."""

    header: Header
    lines: tuple[Line, ...]

    def to_json(self) -> dict[str, Any]:
        """The run as one object of plain JSON values."""
        head = {"kind": "header", "what": WHAT, "format": FORMAT, **asdict(self.header)}
        head["unit"] = UNIT
        lines = [results.plain({"kind": WHAT, **asdict(line)}) for line in self.lines]
        return {"header": results.plain(head), "kernels": lines}


def save(profile: Profile, path: Path) -> None:
    """Write a run as JSON lines, in place of what stood in the file."""
    storedlines.save(profile.to_json(), path)


def read(path: str | Path) -> list[Profile]:
    """Read the runs of a file that `save` wrote, that `profile --json` printed, or of before.

    Raises:
        ValueError: the file holds something else, or another format; one line says what.
        OSError: it cannot be read.
    """
    try:
        return _profiles(storedlines.objects(Path(path).read_text(encoding="utf-8"), "kernels"))
    except storedlines.OtherFormatError as error:
        raise ValueError(f"{path} {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = str(error) if type(error) is ValueError else "its lines are not those of a run"
        raise ValueError(f"{path} holds no results of `profile --save`: {why}") from None


def _profiles(objects: Iterable[Any]) -> list[Profile]:
    runs: list[tuple[Header, list[Line]]] = []
    for each in objects:
        if "rungs" in each:
            runs.append(_of_before(each))
        elif each["kind"] == "header":
            if each["what"] != WHAT:
                raise ValueError(f"it is of `{each['what']}`")
            storedlines.must_be_format(each, FORMAT, WHAT)
            runs.append((_known(results.record(Header, each)), []))
        elif not runs:
            raise ValueError("no header comes first")
        else:
            runs[-1][1].append(_line(each))
    return [Profile(header, tuple(lines)) for header, lines in runs]


def _known(header: Header) -> Header:
    if header.dtype not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise ValueError(f"dtype is {header.dtype!r} there, where {known} are known")
    return header


def _line(values: dict[str, Any]) -> Line:
    code = values.get("code")
    plain = {key: value for key, value in values.items() if key not in ("code", "figures")}
    line: Line = results.record(Line, plain)
    _must_be_timed(line.name, line.counters)
    return Line(
        **{
            **vars(line),
            "code": results.record(Code, code) if code else None,
            "figures": tuple(results.record(Figures, each) for each in values.get("figures", ())),
        }
    )


def _must_be_timed(name: str, counters: dict[str, float], time: str = "time_us") -> None:
    if counters.get(time) == 0:
        raise ValueError(f"{time} of {name} is 0 there, where {storedlines.TIME} is wanted")


def _of_before(stored: dict[str, Any]) -> tuple[Header, list[Line]]:
    """What benchmarks/traffic.py wrote: one object, rungs with bytes an element and a time."""
    storedlines.must_be(storedlines.BEFORE, stored)
    names = ("date", "command", "rows", "cols", "dtype")
    facts = {name: stored[name] for name in names}
    machine = stored["machine"]
    header = _known(
        Header(**facts, device=machine["gpu"], op="softmax", arches=("sm_90a",), machine=machine)
    )
    lines = []
    for name, figures in stored["rungs"].items():
        _must_be_timed(name, figures, "time")
        counters = {("time_us" if key == "time" else key): v for key, v in figures.items()}
        record = KERNELS[name]
        lines.append(
            Line(name, name, record.idea, reads_predicted=float(record.reads), counters=counters)
        )
    return header, lines
