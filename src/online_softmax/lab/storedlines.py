"""What stored lines must look like, beyond the records of cells and rungs: checked when they are
read, so that what shows them need not ask. JSON is read here, with numbers that are numbers, and
what is one run, a header and a list, is written as lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from online_softmax.lab import freshcost

TEXT, FLAG = "text", "true or false"
COUNT, NUMBER, DIFFERENCE = "a whole number from 0", "a number from 0", "a number"
TIME = "a number above 0"
MOST = 2**63  # of a whole number


@dataclass(frozen=True)
class Maybe:
    """A shape, or null."""

    shape: Any


@dataclass(frozen=True)
class Named:
    """An object of any names, each value of one shape."""

    shape: Any


# Shapes: one of the words above; a list of one shape for a list of such; an object of named
# shapes, where a name that ends in "?" may be absent and others may be there.
_KIND = {"kind": TEXT}
_SIZE = {"dtype": TEXT, "rows": COUNT, "cols": COUNT}
_ERRORS = {"ok": FLAG, "why": TEXT, "max": Maybe(NUMBER), "mean": Maybe(NUMBER)}
_TIME = {"name": TEXT, "median_us?": Maybe(TIME)}
_MEASURED = {
    **_TIME, "why": TEXT, "memory_bytes?": Maybe(COUNT), "loss_error?": Maybe(NUMBER),
    "dx_error?": Maybe(NUMBER), "dweight_error?": Maybe(NUMBER), "rounds_us?": [NUMBER],
}  # fmt: skip
_CALL = {
    **_TIME, "recorded": FLAG, "p20_us?": Maybe(NUMBER), "p80_us?": Maybe(NUMBER), "why?": TEXT,
}  # fmt: skip
_PIECE = {"name": TEXT, "median_us": DIFFERENCE}
_FRESH = {"why?": TEXT} | {f"{name}?": Maybe(DIFFERENCE) for name in freshcost.NAMES}
_RATES = {
    "what": TEXT, "unit": TEXT, "rates": Named(Maybe(NUMBER)), "rounds_ms": Named([NUMBER]),
}  # fmt: skip
_MACHINE = {
    "multiprocessors?": COUNT, "l2_bytes?": COUNT, "cpu?": TEXT, "driver_version?": Maybe(TEXT),
}  # fmt: skip
_READING = {"sm_mhz?": Maybe(NUMBER), "temperature_c?": Maybe(NUMBER)}
_CLOCKS = {"reasons?": [TEXT], "before?": _READING, "after?": _READING}
SHAPES: dict[str, Any] = {  # by a line's kind
    "header": {"machine?": _MACHINE},
    "cell": {"entries": [{}], "clocks?": _CLOCKS},
    "accuracy": {**_SIZE, "op": TEXT, "values": TEXT, "device": TEXT, "ours": _ERRORS,
                 "torch": _ERRORS},
    "fusion": {**_SIZE, "case": TEXT, "entries": [{**_TIME, "why": TEXT}]},
    "host": {**_SIZE, "op": TEXT, "calls": [_CALL], "pieces": [_PIECE], "fresh": _FRESH,
             "override?": [{"name": TEXT, "way": TEXT, "median_us": TIME}]},
    "attention_step": {"step": TEXT, "head_dim": COUNT, "causal": FLAG, "why": TEXT, "tiles": TEXT,
                       "tflops": Maybe(NUMBER), "over": Maybe(NUMBER), "median_us": Maybe(TIME)},
    "attention_step_build": {"step": TEXT, "head_dim": COUNT, "causal": FLAG, "numbers": TEXT,
                             "arch": TEXT, "why?": TEXT},
    "linear": {"tokens": COUNT, "features": COUNT, "classes": COUNT, "dtype": TEXT, "device": TEXT,
               "entries": [_MEASURED], "clocks?": _CLOCKS, "repeats?": COUNT},
    "attention_memory": {"contender": TEXT, "tokens": COUNT, "head_dim": COUNT, "dtype": TEXT,
                         "forward_bytes": COUNT, "with_backward_bytes": COUNT,
                         "inputs_bytes": COUNT, "matrix_bytes_computed": COUNT},
}  # fmt: skip
_DECODE = {**_RATES, "batch": COUNT, "keys": COUNT}
_WHOLE = {**_RATES, "head_dim": COUNT, "causal": FLAG}
# Bytes by the GPU's counters: a header of `profile --save` and a kernel; and as it was before.
COUNTED = {**_SIZE, "op?": TEXT, "date": TEXT}
COUNTERS = Named(Maybe(NUMBER))
BEFORE = {**COUNTED, "machine": {**_MACHINE, "gpu": TEXT}, "rungs": Named(COUNTERS)}


class OtherFormatError(ValueError):
    """Lines of a format that this version cannot read; says of which format they are."""


def must_be_format(line: dict[str, Any], ours: int, command: str) -> None:
    """OtherFormatError for a header of another format than ours; one that names none is of ours."""
    number = line.get("format", ours)
    if number != ours:
        raise OtherFormatError(
            f"is in format {number} of `{command} --save`, and this version reads format {ours} "
            "alone: read it with the version of online-softmax that wrote it, or a newer one"
        )


def text_of(run: dict[str, Any]) -> str:
    """A run as JSON lines: its header, then a line for each of its one list.

    >>> text_of({"header": {"a": 1}, "rungs": [{"b": 2}]})
    '{"a": 1}\\n{"b": 2}\\n'
    """
    header, each = run.values()
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in (header, *each))


def save(run: dict[str, Any], path: str | Path) -> None:
    """Write a run as JSON lines, in place of what stood in the file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(run), encoding="utf-8")


def objects(text: str, name: str) -> list[Any]:
    """The objects of a file: a line each, or a run as one object, whose list has that name.

    Raises:
        ValueError: it is no JSON, or empty.
    """
    try:
        found = [loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError:
        try:
            found = [loads(text)]
        except json.JSONDecodeError:
            raise ValueError("it is no JSON") from None
    if not found:
        raise ValueError("it is empty")
    if name in found[0] and "header" in found[0]:
        return [found[0]["header"], *found[0][name]]
    return found


def loads(text: str) -> Any:
    """JSON as it is defined: ValueError for NaN, infinities and numbers past all counts."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError("its lists and objects lie too deep in each other") from None


def objects_by_line(text: str) -> Iterator[dict[str, Any]]:
    """The object of each line, checked; ValueError where one is none, or has no kind."""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            values = loads(line)
        except json.JSONDecodeError:
            raise ValueError(f"line {number} is no JSON") from None
        must_be(_KIND, values)
        check(values)
        yield values


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number in JSON")


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _int(text: str) -> int:
    return int(text) if len(text) < len(str(MOST)) else _refuse(text)


def check(values: Any) -> None:
    """ValueError for a line whose kind has a shape that it does not have; it says where, what is
    there and what is wanted."""
    kind = values.get("kind")
    if kind == "attention":
        must_be(_DECODE if values.get("what") == "decode" else _WHOLE, values)
    elif isinstance(kind, str) and kind in SHAPES:
        must_be(SHAPES[kind], values)


def must_be(shape: Any, value: Any, where: str = "") -> None:
    """The same of any value and shape."""
    if isinstance(shape, Maybe):
        if value is not None:
            must_be(shape.shape, value, where)
    elif isinstance(shape, str):
        if not _is(shape, value):
            _wanted(where, value, shape)
    elif isinstance(shape, list):
        if not isinstance(value, (list, tuple)):
            _wanted(where, value, "a list")
        for i, each in enumerate(value):
            must_be(shape[0], each, f"{where}[{i}]")
    elif not isinstance(value, dict):
        _wanted(where, value, "an object")
    elif isinstance(shape, Named):
        for name, each in value.items():
            must_be(shape.shape, each, f"{where}.{name}")
    else:
        for name, each in shape.items():
            key = name.removesuffix("?")
            if key in value:
                must_be(each, value[key], f"{where}.{key}")
            elif key == name:
                raise ValueError(f"{f'{where}.{key}'.lstrip('.')} is missing there")


def _is(word: str, value: Any) -> bool:
    if word == TEXT:
        return isinstance(value, str)
    if word == FLAG:
        return isinstance(value, bool)
    kinds = (int,) if word == COUNT else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        return False
    return word == DIFFERENCE or value > 0 or (value == 0 and word != TIME)


def _wanted(where: str, value: Any, wanted: str) -> NoReturn:
    place = where.lstrip(".") or "a line"
    raise ValueError(f"{place} is {value!r:.60} there, where {wanted} is wanted")
