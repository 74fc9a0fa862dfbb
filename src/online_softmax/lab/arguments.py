"""What a person types, as what the lab takes. Whatever is wrong is `BadInput`, one line.

None is an option that was not given; an empty one is refused: whoever typed it meant something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from online_softmax import plan
from online_softmax.lab import inputs, ladder, places
from online_softmax.lab.attentiontrace import Sizes
from online_softmax.lab.inputs import BadInput, Matrix

ROWS, COLS = 4096, 4096  # of a random matrix
MOST = 2**63 - 1  # of anything that torch counts
ELEMENTS = MOST // 4  # of a matrix in float32, as torch counts its bytes
# Of an attention that is printed; past 16 queries a screen says no more.
SIZES = {"--queries": 16, "--keys": 256, "--dim": 256, "--value-dim": 16, "--block": 256}
SHOWN = 60  # characters of what was typed that an error repeats
DOUBLE = ("float64", "fp64", "f64", "double")
Number = TypeVar("Number", int, float)


# ---- a word, a number, a list


def shown(text: str) -> str:
    """What was typed, as an error repeats it: quoted if it is blank, cut if it is long.

    >>> shown(" "), shown("3")
    ("' '", '3')
    """
    if not text.strip():
        return repr(text)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def word(option: str, text: str | None, wanted: str) -> str:
    """An option's text; "" if it was not given. `wanted` says what to give: "a file"."""
    if text is not None and not text.strip():
        raise BadInput(f"{option} {shown(text)}: give {wanted}")
    return text or ""


def whole(option: str, text: str | None, least: int = 1) -> int | None:
    """A whole number.

    >>> whole("--rows", "64")
    64
    """
    wanted = f"a whole number, at least {least:,}"
    number = _number(option, text, int, wanted)
    if number is not None and number < least:
        raise BadInput(f"{option} {shown(text or '')}: give {wanted}")
    if number is not None and number > MOST:
        raise BadInput(f"{option} {shown(text or '')}: give at most {MOST:,}")
    return number


def seconds(option: str, text: str | None, least: float = 0.1) -> float | None:
    """A number of seconds."""
    wanted = f"a number of seconds, at least {least:g}"
    number = _number(option, text, float, wanted)
    if number is not None and not number >= least:  # NaN is no number of seconds either
        raise BadInput(f"{option} {shown(text or '')}: give {wanted}")
    return number


def _number(
    option: str, text: str | None, read: Callable[[str], Number], wanted: str
) -> Number | None:
    if text is None:
        return None
    try:
        return read(text)
    except ValueError:
        raise BadInput(f"{option} {shown(text)}: give {wanted}") from None


def _listed(option: str, text: str | None, wanted: str) -> list[str]:
    found = [part.strip() for part in (text or "").split(",") if part.strip()]
    if text is not None and not found:
        raise BadInput(f"{option} {shown(text)}: give {wanted}")
    return found


def arches(text: str | None) -> list[str]:
    """Architectures that the planner knows, by any of their names.

    >>> arches("sm_80,90")
    ['sm_80', 'sm_90a']
    """
    found = []
    for name in _listed("--arch", text, f"one of {', '.join(plan.ARCHES)}, or several"):
        full = f"sm_{name.lower().removeprefix('sm_').removeprefix('sm')}"
        known = [arch for arch in (full, f"{full}a") if arch in plan.ARCHES]
        if not known:
            raise BadInput(f"--arch {shown(name)}: known are {', '.join(plan.ARCHES)}")
        found.append(known[0])
    return list(dict.fromkeys(found))


def names(text: str | None) -> list[str]:
    """Lines of the ladder, by how their names start.

    >>> names("v3,triton")
    ['v3_register_cache', 'triton_two_pass', 'triton_online']
    """
    return starts("--only", text, ladder.NAMES)


def starts(option: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Some of the known names, by how they start; a whole name is that one alone.

    >>> starts("--only", "softmax", ("softmax", "softmax_backward"))
    ['softmax']
    """
    there = ", ".join(known)
    found: list[str] = []
    for start in _listed(option, text, f"the start of a name, or several; there are {there}"):
        word = start.lower()
        matching = [word] if word in known else [n for n in known if n.startswith(word)]
        if not matching:
            raise BadInput(f"{option} {shown(start)}: no name starts so; there are {there}")
        found += matching
    return list(dict.fromkeys(found))


def rivals(text: str | None) -> tuple[str, ...]:
    """Rivals that the clock knows; torch if none was named.

    >>> rivals("torch,compile")
    ('torch', 'compile')
    """
    from online_softmax.lab.bench import RIVALS

    given = _listed("--against", text, f"one of {', '.join(RIVALS)}, or several")
    unknown = [name for name in given if name not in RIVALS]
    if unknown:
        raise BadInput(f"--against {shown(unknown[0])}: there are {', '.join(RIVALS)}")
    return tuple(dict.fromkeys(given or ["torch"]))


def block(text: str | None) -> int:
    """Threads a block that every kernel takes; 0, where none was given: the planner's."""
    if text is None:
        return 0
    wanted = f"one of {', '.join(map(str, plan.BLOCKS))}"
    threads = _number("--block", text, int, wanted)
    if threads not in plan.BLOCKS:
        raise BadInput(f"--block {shown(text)}: give {wanted}")
    return threads


def dtype_name(text: str) -> str:
    """A dtype's full name, float64 among them, for which there is no kernel but an explanation.

    >>> dtype_name("half"), dtype_name("double")
    ('float16', 'float64')
    """
    if text.lower().removeprefix("torch.") in DOUBLE:
        return "float64"
    try:
        return inputs.short_name(inputs.dtype_of(text))
    except BadInput:
        wanted = "float32, float16, bfloat16 or float64"
        raise BadInput(f"--dtype {shown(text)}: give {wanted}") from None


def sizes(words: Sequence[str]) -> tuple[int, int]:
    """The rows and columns of `explain`: all its words that are no known option."""
    for each in words:
        if each.startswith("-") and not each[1:2].isdigit():
            raise BadInput(f"no such option: {shown(each)}; see online-softmax explain --help")
    if len(words) != 2:
        raise BadInput(f"explain takes ROWS and COLS, two numbers; there are {len(words)}")
    rows, cols = (whole(*pair, least=0) for pair in zip(("ROWS", "COLS"), words, strict=True))
    return rows or 0, cols or 0


def attention_sizes(
    words: Sequence[str], given: Mapping[str, str | None], is_causal: bool
) -> Sizes:
    """What `trace --attention` walks over; `given` has an option's text, or None.

    >>> attention_sizes([], {"--keys": "4"}, True)
    Sizes(queries=2, keys=4, dim=4, value_dim=2, block=2, is_causal=True)
    """
    for each in words:
        if each.startswith("-") and not each[1:2].isdigit():
            raise BadInput(f"no such option: {shown(each)}; see online-softmax trace --help")
        raise BadInput(f"--attention takes no numbers, got {shown(each)}: give --queries or --keys")
    counts = {}
    for option, text in given.items():
        count = whole(option, text)
        if count is not None and count > SIZES[option]:
            raise BadInput(f"{option} {shown(text or '')}: give at most {SIZES[option]}")
        if count is not None:
            counts[option.removeprefix("--").replace("-", "_")] = count
    return Sizes(**counts, is_causal=is_causal)


def only_with(option: str, given: Mapping[str, object]) -> None:
    """Refuse options that say something beside another alone."""
    alone = [name for name, value in given.items() if value is not None and value is not False]
    if alone:
        raise BadInput(f"{alone[0]} is for {option}: give {option} too")


def numbers(texts: Sequence[str]) -> list[float]:
    """Numbers, also several in one word: "1 5 3" or "1,5,3"."""
    if not texts:
        raise BadInput("missing argument 'NUMBER'; see online-softmax trace --help")
    found = []
    for text in texts:
        for each in text.strip("[]()").replace(",", " ").split():
            try:
                found.append(float(each))
            except ValueError:
                raise BadInput(f"{shown(each)!r} is not a number") from None
    if not found:
        raise BadInput("trace needs at least one number")
    return found


def nothing_beside(option: str, given: Mapping[str, object]) -> None:
    """Refuse options that would say nothing beside another."""
    ignored = [name for name, value in given.items() if value is not None and value is not False]
    if ignored:
        raise BadInput(f"{option} shows what was kept: {ignored[0]} cannot change it")


# ---- the input


def matrix(
    rows: str | None, cols: str | None, dtype: str | None, file: str | None, is_sample: bool
) -> Matrix:
    """The input that the options of `ladder` describe."""
    count, wide = whole("--rows", rows), whole("--cols", cols)
    path = word("--input", file, "a file")
    if path and is_sample:
        raise BadInput("give --input or --sample, not both")
    if wide and (path or is_sample):
        raise BadInput("--cols is for random input: a tensor's columns are its last dimension")
    wanted = None if dtype is None else inputs.dtype_of(dtype)
    if not path and not is_sample:
        count, wide = count or ROWS, wide or COLS
        if count * wide > ELEMENTS:
            raise BadInput(
                f"{count:,} x {wide:,} is past the {ELEMENTS:,} elements that a tensor can have: "
                "ask for fewer rows or columns"
            )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return inputs.random(count, wide, wanted or torch.float32, device)
    found = inputs.load(path, wanted) if path else inputs.sample(wanted)
    if path:
        found = replace(found, source=places.file_name(path))
    if count and count > found.rows:
        note = f"{count:,} rows were asked for; the tensor has {found.rows:,}, and all of them run"
        found = replace(found, notes=(*found.notes, note))
    if count and count < found.rows:
        note = f"the first {count:,} of {found.rows:,} rows, as asked"
        found = replace(found, rows=count, notes=(*found.notes, note))
    return found
