"""The page that `check` ends in: Markdown, piped or in a file to be pasted into a bug report as it
is. A terminal that is too narrow for it shows it in its width, and is told how to have it whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from online_softmax.lab import info, results
from online_softmax.lab.check import Outcome, Report
from online_softmax.lab.laddertables import table

SHOWN = 10  # faults of one record in one type; the others are counted
HEAD = ("what", "type", "cases", "passed", "wrong", "refused", "largest error")
ERROR = {
    "kernel": "An error is that of a probability.",
    "operation": "An error is a share of its row's size (src/online_softmax/lab/opjudge.py); of "
    "linear_cross_entropy a share of the norm; of attention and merges it is absolute.",
}


def to_json(report: Report) -> dict[str, Any]:
    """The run as plain JSON values."""
    found = {"device": report.device, "arch": report.arch, "is_quick": report.is_quick}
    found |= {"is_right": report.is_right, "notes": report.notes, "facts": report.facts}
    found["outcomes"] = [asdict(outcome) for outcome in report.outcomes]
    made: dict[str, Any] = results.plain(found)
    return made


def page(report: Report, command: str) -> str:
    """The whole page."""
    parts = [f"# {command}", _conclusion(report)]
    parts += [f"{note[:1].upper()}{note[1:]}." for note in report.notes]
    parts.append("## What is here")
    parts.append(_facts(report))
    wrong = [outcome for outcome in report.outcomes if outcome.faults]
    if wrong:
        parts += ["## What is wrong", *map(_faults, wrong)]
    for kind, title in (("kernel", "Kernels"), ("operation", "Operations")):
        of_kind = [outcome for outcome in report.outcomes if outcome.kind == kind]
        if of_kind:
            parts += [f"## {title}", table(HEAD, map(_row, of_kind), text=2), ERROR[kind]]
    if refused := _refused(report.outcomes):
        parts += ["## What did not run, and why", "\n".join(refused)]
    return "\n\n".join(parts) + "\n"


def _conclusion(report: Report) -> str:
    passed = sum(outcome.passed for outcome in report.outcomes)
    wrong = sum(len(outcome.faults) for outcome in report.outcomes)
    where = f"{report.device} ({report.arch})" if report.arch else "the CPU"
    if wrong:
        names = {outcome.name: None for outcome in report.outcomes if outcome.faults}
        return (
            f"**WRONG: {wrong:,} of {passed + wrong:,} results on {where} disagree with float64: "
            f"{', '.join(names)}.**"
        )
    if not passed:
        return f"Nothing ran on {where}."
    return f"All {passed:,} results on {where} agree with float64."


def _facts(report: Report) -> str:
    """Versions and devices, as `info` says them; no folder of anybody's."""
    lines = info.lines(report.facts)
    at = next(i for i, (name, _) in enumerate(lines) if name == "cache")
    end = next((i for i, (name, _) in enumerate(lines) if name == "missing"), len(lines))
    kept = [*lines[:at], *lines[end:]]
    return "\n".join(f"- {name}: {text}" if name else f"  {text}" for name, text in kept)


def _row(outcome: Outcome) -> tuple[str, ...]:
    ran = outcome.passed + len(outcome.faults)
    refused = outcome.cases if outcome.why_not and not ran else sum(outcome.refused.values())
    error = f"{outcome.max_error:.1e}" if outcome.passed else "-"
    counts = (outcome.cases, outcome.passed, len(outcome.faults), refused)
    return (f"`{outcome.name}`", outcome.dtype, *(f"{count:,}" for count in counts), error)


def _faults(outcome: Outcome) -> str:
    lines = [f"`{outcome.name}`, {outcome.dtype}: {len(outcome.faults):,} of {outcome.cases:,}"]
    for fault in outcome.faults[:SHOWN]:
        source = f" ({fault.source})" if fault.source else ""
        lines.append(f"- {fault.case}{source}: {fault.why}")
    if len(outcome.faults) > SHOWN:
        lines.append(f"- and {len(outcome.faults) - SHOWN:,} more")
    return "\n".join(lines)


def _refused(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """A line a sentence, with those that it is about; of those that differ in a number, one."""
    whole: dict[str, dict[str, None]] = {}
    for outcome in outcomes:
        if outcome.why_not:
            whole.setdefault(outcome.why_not, {})[f"{outcome.name} {outcome.dtype}"] = None
    lines = [f"- {', '.join(names)}: {why.rstrip('.')}." for why, names in whole.items()]
    cases: dict[tuple[str, str], int] = {}  # of a record and its most frequent sentence
    for outcome in outcomes:
        if outcome.refused:
            place = outcome.name, outcome.refused.most_common(1)[0][0]
            cases[place] = cases.get(place, 0) + sum(outcome.refused.values())
    for (name, why), count in cases.items():
        said = f"{count:,} case" + ("s, such as" if count > 1 else "")
        lines.append(f"- {name}, {said}: {why.rstrip('.')}.")
    return lines
