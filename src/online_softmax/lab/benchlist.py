"""What `bench --list` says: the operations there are, or the cells of some; nothing runs.

Contenders are named and not made, so torch.compile does not start and no rival is imported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from online_softmax import plan
from online_softmax.lab import (
    attentioncontenders,
    benchshow,
    buffersets,
    contenders,
    cpuclock,
    fitting,
    grid,
)
from online_softmax.lab.benchtable import Table
from online_softmax.lab.grid import Cell

MEANS = {  # what an operation's name does not say
    "cross_entropy_both": "the loss and its gradient",
    "cross_entropy_in_forward": "the same, made in the forward",
    "attention_decode": "one query a sequence",
    "merge": "of parts of the keys",
    "logsumexp_backward": "the gradient by the input",
    "softmax_outer": "along a dim that is not the last, as all that end so",
    "softmax_fp8": "of float8_e4m3fn, into the type that --dtype names",
    "token_stats_both": "log-probability and entropy, and the gradient of their sum",
    "attention_varlen": "of packed sequences of many lengths",
}
NARROWEST = 80  # columns of a list that is piped; of its sentences everywhere at most
DTYPE = "bfloat16"  # whose cells are counted: each type has the same shapes


def _bytes(count: float) -> str:
    """A size for people.

    >>> _bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def cells(found: Sequence[Cell], rivals: tuple[str, ...], as_json: bool) -> None:
    """Print the cells, with the bytes that each moves and takes."""
    l2_bytes = plan.ARCHES[plan.DEFAULT_ARCH].l2_bytes
    lines: list[dict[str, Any]] = []
    for cell in found:
        sets, _ = buffersets.set_count(cell, l2_bytes)
        every = contenders.contenders(cell, rivals)
        names = tuple(line.name for line in every if line.kind == "rival")
        memory = cell.memory_bytes(sets, sum(line.allocates for line in every))
        lines.append({**asdict(cell), "rivals": names, "moves": cell.ideal_bytes, "takes": memory})
    if as_json:
        typer.echo(json.dumps(lines))
        return
    for cell, line in zip(found, lines, strict=True):
        fitting.say(
            f"{cell.text}: moves {_bytes(line['moves'])}, takes {_bytes(line['takes'])}, "
            f"beside {', '.join(line['rivals'])}"
        )
    most = max((line["takes"] for line in lines), default=0)
    count = "1 cell" if len(lines) == 1 else f"{len(lines)} cells"
    fitting.say(f"{count}; the largest takes {_bytes(most)} of memory.")
    _say(
        "moves: what the operation must read and write at the least. takes: what measuring it may "
        "need, rotating buffers, results, and a GiB or two for the comparison with float64."
    )


# ---- the operations


def operations() -> dict[str, Any]:
    """Every operation: cells of each grid and contenders; packages; where a run would be timed."""
    import torch

    rivals, ops = contenders.KNOWN, []
    for op in grid.EVERY_OP:
        grids = {name: grid.grid_cells([op], [DTYPE], name) for name in grid.GRIDS}
        most = [contenders.contenders(cell, rivals) for cell in grids["all"]]
        named = (x for lines in most for x in lines if x.kind != "ceiling")
        names = dict.fromkeys(x.name for x in named if contenders.has(x.name, op))
        counts = {name: len(found) for name, found in grids.items()}
        ops.append({"op": op, "grids": counts, "contenders": list(names)})
    is_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if is_gpu else "cpu"
    return {"device": device, "operations": ops, "installed": contenders.versions(rivals)}


def overview(as_json: bool) -> None:
    """Print the operations, their grids and contenders, and what is installed here."""
    found = operations()
    if as_json:
        typer.echo(json.dumps(found))
        return
    rows = tuple(
        (each["op"], "; ".join(each["contenders"]), *map(str, each["grids"].values()))
        for each in found["operations"]
    )
    head = ("operation", "contenders", *grid.GRIDS)
    title = "Operations of bench; cells of each --grid in one type"
    benchshow.tables([Table(title, head, rows, 2)], NARROWEST)
    for name, text in MEANS.items():
        fitting.say(f"  {name}: {text}")
    by = ", ".join(name.removeprefix("torch, ") for name in attentioncontenders.BACKENDS)
    _say(f"In attention torch on a GPU is a line for each of its backends: {by}.")
    here = [f"{name} {version}" for name, version in found["installed"].items() if version]
    missing = [name for name, version in found["installed"].items() if not version]
    absent = [f"{name} (pip install {contenders.PACKAGE[name]})" for name in missing]
    _say(f"Installed: {', '.join(here)}. Not installed: {', '.join(absent) or 'none'}.")
    _say(
        "A contender that is not installed is a row that says so. The ceiling, a copy, an "
        "addition, a read or products alone, is timed in every cell."
    )
    if found["device"] == "cpu":
        _say(
            f"No CUDA GPU is here: `bench OP` times the grid {cpuclock.GRID} in "
            f"{cpuclock.TYPES} beside {cpuclock.AGAINST}."
        )
    else:
        _say(f"`bench OP` times the grid big on {found['device']}.")
    _say("`bench OP --list` shows an operation's cells.")


def _say(text: str) -> None:
    """Lines as long as a narrow terminal's."""
    width = min(fitting.columns() or NARROWEST, NARROWEST)
    typer.echo(fitting.wrapped(text, width, 0))
