"""The command `profile`: what the GPU's own counters say of each kernel."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from online_softmax.lab.options import Json, option

if TYPE_CHECKING:
    from online_softmax.lab.profile import Asked
    from online_softmax.lab.profilefile import Profile

ROWS, COLS = 4096, 4096
HELP = """Count what each kernel moves and waits for, by the GPU's own counters.

KERNEL: ladder (every rung), a rung by how its name starts, registers, landed, streamed, split \
(the row kernels that ship), production (what is chosen here) or torch; or, without any of \
these, whole operations: attention (queries and keys are --rows and --cols), decode (32 rows a \
sequence), merge, token_stats, cross_entropy. Runs Nsight Compute (ncu) over a small driver. \
Without ncu, a GPU or permission it says what to install or allow, and \
reports registers, spills, occupancy and the widths of loads and stores instead.

\b
Examples:
  online-softmax profile ladder
  online-softmax profile ladder torch --cols 65536 --save kept.jsonl
  online-softmax profile v3 registers --rows 64 --cols 131072 --dtype bf16
  online-softmax profile registers split --op softmax_backward
  online-softmax profile v2 --arch sm_80
  online-softmax profile attention decode merge --dtype bf16
  online-softmax profile ladder --raw ncu.csv
  online-softmax profile ladder --from ncu.csv
  online-softmax profile --from kept.jsonl"""

Names = Annotated[list[str] | None, typer.Argument(metavar="KERNEL", hidden=True)]
Rows = Annotated[str | None, option(f"Rows. Default: {ROWS}.", "N")]
Cols = Annotated[str | None, option(f"Columns. Default: {COLS}.", "N")]
Type = Annotated[str | None, option("float32, float16 or bfloat16. Default: float32.", "TYPE")]
Op = Annotated[
    str | None,
    option(
        "softmax, log_softmax, softmax_backward, log_softmax_backward, logsumexp; of production "
        "and torch also cross_entropy, cross_entropy_both, cross_entropy_in_forward, token_stats. "
        "Default: softmax.",
        "OP",
        "--op",
    ),
]
Arch = Annotated[
    str | None, option("Whose code the static report shows. Default: the GPU's, or sm_90a.", "SM")
]
Save = Annotated[str | None, option("Keep the figures in a file, as JSON lines.", "FILE")]
Raw = Annotated[str | None, option("Keep ncu's CSV as it came.", "FILE", "--raw")]
Stored = Annotated[
    str | None,
    option(
        "Run nothing; show what --save kept, or read the CSV that --raw kept.", "FILE", "--from"
    ),
]


def profile(
    names: Names = None,
    rows: Rows = None,
    cols: Cols = None,
    dtype: Type = None,
    op: Op = None,
    arch: Arch = None,
    as_json: Json = False,
    save: Save = None,
    raw: Raw = None,
    stored: Stored = None,
) -> None:
    """Profile kernels, or show what was kept; then show and save it."""
    from online_softmax.lab import arguments, places, profilefile
    from online_softmax.lab import profile as profiling
    from online_softmax.lab.inputs import BadInput

    for word, path in (("--save", save), ("--raw", raw), ("--from", stored)):
        arguments.word(word, path, "a file")
    if stored and not names:
        given: dict[str, object] = {"--rows": rows, "--cols": cols, "--dtype": dtype, "--op": op}
        given |= {"--arch": arch, "--raw": raw}
        arguments.nothing_beside("--from", given)
        asked = None
    else:
        asked = _asked(names or (), (rows, cols), dtype, op, arch)
    kept = places.place("--save", save) if save else None
    csv = places.place("--raw", raw) if raw else None
    places.apart({"--from": Path(stored) if stored else None, "--save": kept, "--raw": csv})
    if stored:
        runs = _read(Path(stored), asked)
    elif asked:
        from online_softmax.lab import waiting

        given_csv: list[str] = []

        def write(text: str) -> None:
            given_csv.append(text)
            if csv:
                places.kept("--raw", csv, lambda: csv.write_text(text, encoding="utf-8"))

        with waiting.progress(not as_json) as progress:
            runs = [profiling.run(asked, write if csv else None, progress)]
        if all(line.reasons for line in runs[0].lines):
            reasons = dict.fromkeys(reason for line in runs[0].lines for reason in line.reasons)
            raise BadInput(f"nothing to profile: {'; '.join(reasons)}")
        if csv and not given_csv:
            typer.echo(f"--raw {raw} is not written: there were no counters", err=True)
    show(runs, as_json)
    if kept:
        places.kept("--save", kept, lambda: profilefile.save(runs[-1], kept))


def show(runs: Sequence[Profile], as_json: bool) -> None:
    """Print runs as tables, or the last as JSON."""
    from rich.console import Console

    from online_softmax.lab import profilepage

    if as_json:
        typer.echo(json.dumps(runs[-1].to_json(), indent=2, allow_nan=False))
        return
    for each in runs:
        profilepage.render(each, Console(highlight=False))


def _asked(
    names: Sequence[str],
    size: tuple[str | None, str | None],
    dtype: str | None,
    op: str | None,
    arch: str | None,
) -> Asked:
    from online_softmax.lab import arguments, grid, inputs, places, profilecalls, profiledriver
    from online_softmax.lab import profile as profiling
    from online_softmax.lab.inputs import BadInput

    there = ", ".join((profiling.LADDER, *profiling.NAMES))
    if not names:
        raise BadInput(f"profile takes kernels: give one of {there}, or several")
    grid.named([op or "softmax"], profiledriver.EVERY_OP, "--op")
    found: list[str] = []
    for word in names:
        start = word.strip().lower()
        matching = [name for name in profiling.NAMES if start and name.startswith(start)]
        if start == profiling.LADDER:
            matching = [*profiling.RUNGS]
        elif start in profiling.NAMES:
            matching = [start]
        if not matching:
            raise BadInput(f"kernel {arguments.shown(word)}: there are {there}")
        found += matching
    found = list(dict.fromkeys(found))
    whole = [name for name in found if name in profilecalls.NAMES]
    on_rows = [name for name in found if name not in whole]
    if whole and on_rows:
        raise BadInput(
            f"{', '.join(whole)}: whole operations, which have no size and no unit in common with "
            f"kernels on rows ({', '.join(on_rows)}): profile them apart"
        )
    if op and whole:
        raise BadInput(f"--op {op} is of kernels on rows; {', '.join(whole)}: whole operations")
    op = ", ".join(whole) or op or "softmax"
    rows = arguments.whole("--rows", size[0]) or ROWS
    cols = arguments.whole("--cols", size[1]) or COLS
    kind = inputs.short_name(inputs.dtype_of(dtype or "float32"))
    known = tuple(arguments.arches(arch))
    command = places.recorded(sys.argv[1:])
    return profiling.Asked(tuple(found), rows, cols, kind, op, known, command)


def _read(path: Path, asked: Asked | None) -> list[Profile]:
    """The runs of a file of --save; or of --raw, if it was said what ran."""
    from online_softmax.lab import profile as profiling
    from online_softmax.lab import profilefile
    from online_softmax.lab.inputs import BadInput

    try:
        if asked is None:
            return profilefile.read(path)
        return [profiling.from_csv(asked, path.read_text(encoding="utf-8"))]
    except OSError as error:
        raise BadInput(f"--from {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        said = str(error) if asked is None else f"{path}: {error}"
        raise BadInput(f"--from {said}") from None
