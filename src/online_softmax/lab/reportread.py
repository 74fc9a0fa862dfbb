"""The stored results that a report is made of: where they are looked for, and what each file holds.

What a file is, its content says: `bench --save` and what is stored beside it, `ladder --save` or
`--json`, bytes by the GPU's counters (`profile --save`, and what was stored before that).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from online_softmax.lab import benchfile, profilefile, results, storedlines
from online_softmax.lab.benchfile import Part
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.profilefile import Profile
from online_softmax.lab.results import Run

STORED = Path("benchmarks", "results", "h200")  # in a checkout
SUFFIXES = (".jsonl", ".json")
# Lines beside cells that a report shows; of the others ("tuning", "cuts") its readers have files.
KINDS = ("accuracy", "attention", "attention_memory", "fusion", "host", "linear")
WANTED = "give what `bench --save`, `ladder --save` or `profile --save` kept"


@dataclass(frozen=True)
class Stored:
    """Everything that was read."""

    runs: tuple[Run, ...] = ()  # of the ladder
    parts: tuple[Part, ...] = ()  # of bench
    traffic: tuple[Profile, ...] = ()  # bytes by the GPU's counters
    files: tuple[str, ...] = ()  # names of those that hold something
    passed: tuple[str, ...] = ()  # sentences: what was passed over and why, a file or a line

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured, or counted, anywhere."""
        cells = any(part.rows or of_kind([part], *KINDS) for part in self.parts)
        return not (cells or self.traffic or any(run.results for run in self.runs))


def of_kind(parts: Iterable[Part], *kinds: str) -> list[dict[str, Any]]:
    """The lines beside cells that are of these kinds."""
    return [other for part in parts for other in part.others if other["kind"] in kinds]


# ---- where


def places() -> list[Path]:
    """Where stored results may be, the first choice first: the checkout that one stands in, the
    checkout that the package lies in, the package."""
    here, package = Path.cwd(), Path(__file__).resolve().parent
    around = [folder / STORED for folder in (here, *here.parents)]
    found = [each for each in around if each.is_dir()][:1] or around[:1]
    return list(dict.fromkeys([*found, package.parents[2] / STORED, package / "stored" / "h200"]))


def default() -> Path:
    """The folder of the stored results.

    Raises:
        BadInput: there is none; one line says where it was looked for.
    """
    looked = places()
    for each in looked:
        if _files(each):
            return each
    said = ", ".join(map(str, looked))
    raise BadInput(f"no stored results were found in {said}: {WANTED}")


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES and p.is_file())


# ---- reading


def read(given: Sequence[str | Path]) -> Stored:
    """What files and folders hold; of a folder its .jsonl and .json files, and those that hold no
    results are passed over and said.

    Raises:
        BadInput: something is not there, a named file holds no results, or nothing was measured in
            any; one line says which.
    """
    found: list[Stored] = []
    for path in dict.fromkeys(map(Path, given)):
        if not path.is_dir():
            found.append(_file(path))
            continue
        files = _files(path)
        if not files:
            raise BadInput(f"{path} holds no .jsonl and no .json file: {WANTED}")
        kept = [_file_or_reason(each) for each in files]
        found += kept
        if not any(each.files for each in kept):
            raise BadInput(f"{path} holds no results: {kept[0].passed[0]}")
    stored = Stored(*(tuple(x for each in found for x in getattr(each, name)) for name in FIELDS))
    if stored.is_empty:
        raise BadInput(f"nothing was measured in {', '.join(map(str, given))}: {WANTED}")
    return stored


def _profiles(path: Path) -> tuple[Profile, ...]:
    """Runs of `profile` that have counters."""
    try:
        found = profilefile.read(path)
    except ValueError as error:
        raise BadInput(str(error)) from None
    counted = tuple(each for each in found if any(line.counters for line in each.lines))
    if counted and all(line.least_bytes for each in counted for line in each.lines):
        raise BadInput(f"{path} has counters of whole operations, which `profile --from` shows")
    return counted


FIELDS = ("runs", "parts", "traffic", "files", "passed")  # of Stored, in order


def _file_or_reason(path: Path) -> Stored:
    try:
        return _file(path)
    except BadInput as error:
        return Stored(passed=(f"{path.name} was passed over: {error}",))


def _file(path: Path) -> Stored:
    text, name = _text(path), (path.name,)
    first = _first(text, path)
    if first.get("kind") == "header" and first.get("what") == benchfile.WHAT:
        torn = () if text.endswith("\n") else (f"{path.name} {benchfile.TORN}",)
        return Stored(parts=tuple(benchfile.parse(text, str(path))), files=name, passed=torn)
    if first.get("kind") == "header" and first.get("what") == profilefile.WHAT:
        return Stored(traffic=_profiles(path), files=name)
    if first.get("kind") == "header" or "header" in first:
        try:
            return Stored(runs=tuple(results.read(path)), files=name)
        except ValueError as error:
            raise BadInput(str(error)) from None
    if isinstance(first.get("rungs"), dict) and "metrics" in first:
        return Stored(traffic=_profiles(path), files=name)
    if "kind" in first:
        raise BadInput(
            f"{path} begins with a line of kind {first['kind']!r} and has no header before it, so "
            "nobody knows which machine it is of"
        )
    raise BadInput(f"{path} holds no results: {WANTED}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is no text: {WANTED}") from None


def _first(text: str, path: Path) -> dict[str, Any]:
    """The object on the first line; or all of a file that is one object over many lines."""
    if not text.strip():
        raise BadInput(f"{path} is empty: {WANTED}")
    is_json = False
    for part in (text.lstrip().split("\n", 1)[0], text):
        try:
            value = storedlines.loads(part)
        except json.JSONDecodeError:
            continue
        except ValueError as error:
            raise BadInput(f"{path} holds no results: {error}") from None
        if isinstance(value, dict):
            return value
        is_json = True
    what = "is JSON but holds no results" if is_json else "is no JSON"
    raise BadInput(f"{path} {what}: {WANTED}")


def shown(path: Path) -> str:
    """A path as short as it can be said from here."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
