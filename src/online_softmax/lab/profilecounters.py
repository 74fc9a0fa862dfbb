"""Counters of launches made the figures of a kernel: added, averaged, for each element.

Of a whole operation, which has more than one kind of element, for each byte of the least that it
moves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from online_softmax.lab import ncu, profiledriver
from online_softmax.lab.ncu import Launch
from online_softmax.lab.profilefile import Line

SECTOR_BYTES = 32
SEVERAL = (
    "of several kernels in a row bytes and microseconds are added, shares and stalls averaged by "
    "time"
)


def add(lines: Sequence[Line], text: str, elements: int) -> list[Line]:
    """The lines with what ncu's CSV has of those that ran, in the driver's order.

    Args:
        lines: what ran, and what did not.
        text: the CSV.
        elements: of the matrix that kernels on rows ran on.

    Raises:
        ValueError: it is no CSV of ncu's, or not of these kernels; one line says what.
    """
    parts: list[list[Launch]] = []
    for launch in ncu.read(text):
        if profiledriver.MARK in launch.name:
            parts.append([])
        elif parts:
            parts[-1].append(launch)
    running = [line for line in lines if not line.reasons]
    if len(parts) != len(running) or not all(parts):
        full = sum(map(bool, parts))
        raise ValueError(f"ncu saw launches of {full} kernels where {len(running)} were to run")
    seen = iter(parts)
    return [
        line if line.reasons else _counted(line, next(seen), line.least_bytes or elements)
        for line in lines
    ]


def _counted(line: Line, launches: Sequence[Launch], units: int) -> Line:
    """A line with its counters, bytes for each of so many units."""

    def added(name: str) -> float | None:
        found = [each.figure(name) for each in launches]
        return None if None in found else sum(figure for figure in found if figure is not None)

    def mean(name: str) -> float | None:
        """By time."""
        times = [each.figure("time_us") or 1.0 for each in launches]
        found = [each.figure(name) for each in launches]
        known = [(f, time) for f, time in zip(found, times, strict=True) if f is not None]
        return sum(f * t for f, t in known) / sum(t for _, t in known) if known else None

    def most(name: str) -> float | None:
        return max((f for each in launches if (f := each.figure(name)) is not None), default=None)

    def scaled(value: float | None, factor: float) -> float | None:
        return None if value is None else value * factor

    def a_request(kind: str) -> float | None:
        sectors, requests = added(f"{kind}_sectors"), added(f"{kind}_requests")
        return sectors / requests if sectors is not None and requests else None

    static, dynamic = most("shared_static"), most("shared_dynamic")
    figures: dict[str, float | None] = {
        "time_us": added("time_us"),
        **{n: scaled(added(n), 1 / units) for n in ("dram_read", "dram_write")},
        **{n: scaled(added(n), SECTOR_BYTES / units) for n in ("l2_read", "l2_write")},
        "l1_load": scaled(added("load_sectors"), SECTOR_BYTES / units),
        "l1_store": scaled(added("store_sectors"), SECTOR_BYTES / units),
        "sectors_load": a_request("load"),
        "sectors_store": a_request("store"),
        **{n: mean(n) for n in ("occupancy", "occupancy_most", "issue", "xu", "tensor")},
        "shared_bytes": None if static is None and dynamic is None
        else (static or 0.0) + (dynamic or 0.0),
        **{n: most(n) for n in ("registers", "block", "grid", "waves")},
        **{f"limit_{n}": most(f"limit_{n}") for n in ncu.LIMITS},
    }  # fmt: skip
    stalls = {name: mean(f"stall_{name}") for name in ncu.STALLS}
    known = {name: value for name, value in stalls.items() if value is not None}
    return replace(
        line,
        launches=tuple(_short(launch.name) for launch in launches),
        counters={name: value for name, value in figures.items() if value is not None},
        stalls=dict(sorted(known.items(), key=lambda pair: -pair[1])),
    )


def _short(name: str) -> str:
    """A kernel's name without types and arguments.

    >>> _short("void rows_in_registers<float, float, 8>(const T1 *, T2 *)")
    'rows_in_registers'
    >>> _short("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4>(float *)")
    'cunn_SoftMaxForward'
    """
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", plain)[0].rpartition("::")[2]


def left_out(lines: Sequence[Line], is_asked: bool) -> list[str]:
    """Sentences on what the counters lack and what they mean; `is_asked`: ncu ran just now."""
    notes = []
    given = {
        name for line in lines for name in (*line.counters, *(f"stall_{n}" for n in line.stalls))
    }
    given |= {"load_sectors", "load_requests"} if "sectors_load" in given else set()
    given |= {"store_sectors", "store_requests"} if "sectors_store" in given else set()
    given |= {"shared_static", "shared_dynamic"} if "shared_bytes" in given else set()
    lacking = [names[0] for ours, names in ncu.METRICS.items() if ours not in given]
    if lacking:
        why = "ncu does not know them here" if is_asked else "ncu did not give them"
        notes.append(f"left out, since {why}: {', '.join(lacking)}")
    if any(len(line.launches) > 1 for line in lines):
        notes.append(SEVERAL)
    return notes
