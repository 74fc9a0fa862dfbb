"""How far results are from float64, ours beside torch's: on a GPU, or the reference on a CPU.

An error is a share of its row's size (opjudge.size), of softmax the row's largest probability. Ours
may be torch's and goals.EXACT more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from online_softmax.lab import cases, contenders, goals, opjudge
from online_softmax.lab.grid import Cell

COLS = (128, 1024, 4096, 32001, 131072, 1048576)
ELEMENTS, MOST_ROWS = 2**22, 4096
SCORES = "scores"  # attention scores of a real model, whatever the cell's size: lab/data
WIDE = 30.0  # standard deviations of 30: nearly one probability a row, the others far below it
INPUTS = ("normal", "wide", SCORES)
Line = dict[str, Any]


def shapes() -> list[tuple[int, int]]:
    """Rows and columns of a whole measurement.

    >>> shapes()[-1]
    (4, 1048576)
    """
    return [(min(ELEMENTS // cols, MOST_ROWS), cols) for cols in COLS]


def scores() -> Tensor:
    """The sample's scores as rows that have a finite maximum: (rows, 40) float32."""
    x = cases.sample().flatten(0, -2).float()
    return x[x.amax(-1).isfinite()]


def inputs(cell: Cell, values: str, device: torch.device) -> tuple[Tensor, ...]:
    """x, or dy and y of a backward, and the tensor for the result: what a contender is called with.

    The values are the same on every device: a CPU makes them.
    """
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, cell.dtype)

    def normal() -> Tensor:
        return torch.randn(cell.rows, cell.cols, generator=generator)

    x = scores() if values == SCORES else normal() * (WIDE if values == "wide" else 1.0)
    x = x.to(device, dtype)
    if cell.op == "logsumexp":
        return x, x.new_empty(len(x))
    if not cell.op.endswith("_backward"):
        return x, torch.empty_like(x)
    forward = torch.log_softmax if cell.op.startswith("log") else torch.softmax
    return normal().to(device, dtype), forward(x, -1), torch.empty_like(x)


def measure(cell: Cell, values: str, device: torch.device) -> Line:
    """The errors of ours and torch's on one input, as a line to keep."""
    line: Line = {"kind": "accuracy", **asdict(cell), "values": values, "device": device.type}
    tensors = inputs(cell, values, device)
    lines = (("ours", contenders.OURS["ours"], opjudge.OUR_ULPS),
             ("torch", contenders.RIVALS["torch"], opjudge.RIVAL_ULPS))  # fmt: skip
    for name, make, ulps in lines:
        tensors[-1].fill_(torch.nan)
        made = make(cell.op)(*tensors)
        result = made if isinstance(made, Tensor) else tensors[-1]
        found = opjudge.check(cell.op, tensors[:-1], result.reshape(tensors[-1].shape), ulps)
        line[name] = {"ok": found.ok, "why": found.why, "max": found.share_max,
                      "mean": found.share_mean, "max_error": found.max_error}  # fmt: skip
    return line


def each(cells: Iterable[Cell]) -> Iterator[tuple[Cell, str]]:
    """Every cell on normal and wide input; and each operation and type on the sample's scores."""
    seen: set[tuple[str, str]] = set()
    rows, cols = scores().shape
    for cell in cells:
        yield from ((cell, values) for values in INPUTS if values != SCORES)
        if (cell.op, cell.dtype) not in seen:
            seen.add((cell.op, cell.dtype))
            yield Cell(cell.op, cell.dtype, rows, cols), SCORES


def run(
    cells: Sequence[Cell],
    device: torch.device,
    write: Callable[[Line], None],
    progress: Callable[[str, int, int, float | None], None] | None = None,
) -> list[Line]:
    """Measure every cell on every input; each line is written when it is there."""
    found: list[Line] = []
    todo = list(each(cells))
    for done, (cell, values) in enumerate(todo):
        if progress:
            progress(f"{cell.text}, {values}", done, len(todo), None)
        found.append(measure(cell, values, device))
        write(found[-1])
    return found


def is_exact(line: Line) -> bool:
    """Whether ours is right and its largest error torch's at most, but for EXACT."""
    ours, torchs = line["ours"]["max"], line["torch"]["max"]
    is_known = line["ours"]["ok"] and None not in (ours, torchs)
    return bool(is_known and ours <= torchs + goals.EXACT)


def _largest(errors: Iterable[float | None]) -> str:
    """Of those that are known: a result of another shape has none."""
    known = [each for each in errors if each is not None]
    return f"{max(known):.2e}" if known else "—"


HEAD = ("operation", "type", "input", "columns", "largest error", "torch's", "mean error",
        "torch's mean", "at most torch's + 2⁻²³")  # fmt: skip


def table(lines: Iterable[Line]) -> tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...], int]:
    """Title, heading, rows and how many columns are words: a row for each operation, type and
    input, the largest over its sizes; each size once, as it was measured last."""
    latest: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        place = tuple(line[k] for k in ("op", "dtype", "values", "rows", "cols", "device"))
        latest[place] = line
    groups: dict[tuple[str, str, str], list[Line]] = {}
    for line in latest.values():
        values = line["values"] + ("" if line["device"] == "cuda" else f", {line['device']}")
        groups.setdefault((line["op"], line["dtype"], values), []).append(line)
    rows = []
    for (op, dtype, values), group in groups.items():
        cols = sorted({line["cols"] for line in group})
        wide = f"{cols[0]:,}" + (f" to {cols[-1]:,}" if len(cols) > 1 else "")
        figures = [
            _largest(line[name][key] for line in group)
            for key in ("max", "mean")
            for name in ("ours", "torch")
        ]
        wrong = [line for line in group if not line["ours"]["ok"]]
        late = [f"{line['cols']:,}" for line in group if not is_exact(line)]
        said = "WRONG" if wrong else f"NO: {', '.join(late)}" if late else "yes"
        rows.append((op, dtype, values, wide, *figures, said))
    return "Errors beside torch's, against float64", HEAD, tuple(rows), 4
