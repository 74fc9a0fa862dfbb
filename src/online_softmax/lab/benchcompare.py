"""Two stored runs beside each other: what became slower or faster by more than the noise.

The noise of a time is how far the rounds of both runs are apart, each as a share of its median, and
how much the cell's ceiling moved: what slows a kernel that only moves bytes is the machine's. Runs
whose cells were measured once know little of what lies between two runs, so of those a change of
under FLOOR counts for nothing; with `--repeat` in both there is no such floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from online_softmax.lab import benchfile, benchtable, goals, results
from online_softmax.lab.benchfile import Part
from online_softmax.lab.benchtable import Table
from online_softmax.lab.marks import doubted

FLOOR = goals.NOISE - 1
SLOWER, FASTER, SAME, LOST, DOUBTED = "slower", "faster", "same", "no time now", "doubted"


@dataclass(frozen=True)
class Timed:
    """One contender's time in one cell of one run."""

    kind: str  # "ceiling", "ours" or "rival"
    us: float | None
    spread_us: float = 0.0
    repeats: int = 1
    why: str = ""  # why it has none, or why it is not to be believed


Times = dict[tuple[str, str], Timed]  # by cell, in words, and contender


@dataclass(frozen=True)
class Change:
    """A contender of a cell in both runs."""

    cell: str
    name: str
    kind: str
    verdict: str
    old_us: float | None
    new_us: float | None
    noise: float | None = None  # a share: what a change must pass to be one
    ceiling: float | None = None  # the ceiling's new time over its old
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """The new time over the old."""
        return self.new_us / self.old_us if self.old_us and self.new_us else None


@dataclass(frozen=True)
class Compared:
    """Every contender that both runs have, and how many each has alone."""

    changes: tuple[Change, ...]
    only_old: int = 0
    only_new: int = 0

    def those(self, *verdicts: str, kind: str = "ours") -> list[Change]:
        """Some of them, of one kind."""
        return [c for c in self.changes if c.verdict in verdicts and c.kind == kind]

    @property
    def regressions(self) -> list[Change]:
        """What of ours became slower, or has no time any more."""
        return self.those(SLOWER, LOST)


def times(parts: Iterable[Part]) -> Times:
    """Every time of stored runs, each cell as measured last."""
    parts = [doubted(part) for part in parts]
    found: Times = {}
    for row in benchfile.latest(parts):
        order = "" if row.values == "normal" else f", {row.values}"
        throttled = "the clock was throttled" if row.is_throttled else ""
        for entry in row.entries:
            us = entry.median_us or None  # no time is 0
            why = entry.doubt or (throttled if us else entry.why)
            found[row.cell.text + order, entry.name] = Timed(
                entry.kind, us, entry.spread_us, row.repeats, why
            )
    for part in parts:
        for line in part.others:
            found |= _others(line)
    return found


def _others(line: dict[str, Any]) -> Times:
    """Of lines of other kinds those of a linear layer's loss."""
    if line["kind"] != "linear":
        return {}
    size = ", ".join(f"{line[name]}" for name in ("dtype", "tokens", "features", "classes"))
    reasons = set((line.get("clocks") or {}).get("reasons") or ())
    throttled = bool(reasons - {"power limit"})  # at which long products run
    found: Times = {}
    for entry in line["entries"]:
        name, rounds = entry["name"], entry.get("rounds_us") or [0.0]
        kind = "ours" if name.startswith("ours") else "rival"
        kind = "ceiling" if name == "three products" else kind
        why = "the clock was throttled" if throttled and not entry["why"] else entry["why"]
        spread = max(rounds) - min(rounds)
        found[f"linear_cross_entropy {size}", name] = Timed(
            kind, entry.get("median_us") or None, spread, line.get("repeats", 1), why
        )
    return found


def compare(old: Times, new: Times) -> Compared:
    """Two runs, contender by contender."""
    both = [key for key in new if key in old]
    drift = {
        cell: new[cell, name].us / old[cell, name].us  # type: ignore[operator]
        for cell, name in both
        if new[cell, name].kind == "ceiling" and new[cell, name].us and old[cell, name].us
    }
    changes = [_change(*key, old[key], new[key], drift.get(key[0])) for key in both]
    known = [each for each in changes if each is not None]
    return Compared(tuple(known), len(old.keys() - new.keys()), len(new.keys() - old.keys()))


def _change(cell: str, name: str, old: Timed, new: Timed, ceiling: float | None) -> Change | None:
    """None where neither run has a time."""
    if old.us is None and new.us is None:
        return None
    if new.us is None:
        return Change(cell, name, new.kind, LOST, old.us, None, why=new.why)
    if old.us is None:
        return Change(cell, name, new.kind, SAME, None, new.us, why=old.why)
    if why := new.why or old.why:
        return Change(cell, name, new.kind, DOUBTED, old.us, new.us, None, ceiling, why)
    noise = old.spread_us / old.us + new.spread_us / new.us
    if ceiling is not None and new.kind != "ceiling":
        noise += abs(ceiling - 1)
    if min(old.repeats, new.repeats) == 1:
        noise = max(noise, FLOOR)
    change = new.us / old.us - 1
    verdict = SLOWER if change > noise else FASTER if -change > noise else SAME
    return Change(cell, name, new.kind, verdict, old.us, new.us, noise, ceiling)


# ---- as text


def _percent(value: float | None) -> str:
    return benchtable.NONE if value is None else f"{value:+.1%}"


def _table(title: str, changes: Sequence[Change]) -> Table:
    lines = []
    for c in sorted(changes, key=lambda c: -(c.ratio or 0)):
        change = None if c.ratio is None else c.ratio - 1
        moved = None if c.ceiling is None else c.ceiling - 1
        noise = benchtable.NONE if c.noise is None else f"{c.noise:.1%}"
        lines.append((c.cell, c.name, benchtable.us(c.old_us), benchtable.us(c.new_us),
                      _percent(change), noise, _percent(moved), c.why))  # fmt: skip
    head = ("cell", "contender", "old µs", "new µs", "change", "noise", "ceiling", "why")
    return Table(title, head, tuple(lines), text=2)


def tables(found: Compared) -> list[Table]:
    """What of ours changed; what could not be compared, where there is such."""
    shown = [
        _table("Slower than before, beyond the noise, or without a time now", found.regressions),
        _table("Faster than before, beyond the noise", found.those(FASTER)),
    ]
    doubted = found.those(DOUBTED)
    return shown + ([_table("Not compared: not to be believed", doubted)] if doubted else [])


def summary(found: Compared) -> str:
    """What came out, a sentence."""
    ours = found.those(SLOWER, FASTER, SAME, LOST)
    moved = [c.ceiling for c in found.changes if c.kind == "ours" and c.ceiling is not None]
    text = (
        f"{len(ours)} times of ours compared: {len(found.regressions)} slower or gone, "
        f"{len(found.those(FASTER))} faster, beyond the noise"
    )
    if moved:
        text += f"; the ceiling moved by {median(moved) - 1:+.1%} at the median"
    if found.only_old or found.only_new:
        text += f"; {found.only_old} times are in the old run alone, {found.only_new} in the new"
    return text


def as_json(found: Compared) -> dict[str, Any]:
    """All of it, plain."""
    changes = [results.plain({**asdict(c), "ratio": c.ratio}) for c in found.changes]
    return {
        "regressions": len(found.regressions),
        "faster": len(found.those(FASTER)),
        "only_old": found.only_old,
        "only_new": found.only_new,
        "changes": changes,
    }
