"""The command `bench`: cells asked for, measured, resumed, listed, tuned, or shown again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from online_softmax.lab import benchoptions as options

if TYPE_CHECKING:
    from online_softmax.lab.benchclock import Setting
    from online_softmax.lab.benchfile import Header, Log, Part, Row
    from online_softmax.lab.benchrun import Progress
    from online_softmax.lab.grid import Cell

WRONG = 1  # exit code: a result of ours is wrong
NO_GPU = (
    "bench needs a CUDA GPU, and torch sees none here: --list shows the cells, --from FILE shows "
    "kept results"
)


def bench(
    ops: options.Ops = None,
    grid: options.Grid = "big",
    shapes: options.Cells = None,
    dtype: options.Types = "bf16,fp16,fp32",
    against: options.Against = "torch,compile,quack,liger",
    values: options.Values = "normal",
    shard: options.Shard = "0/1",
    seconds: options.Seconds = float("inf"),
    resume: options.Resume = False,
    as_json: options.Json = False,
    save: options.Save = None,
    listed: options.Listed = False,
    stored: options.Stored = None,
    tune: options.Tune = None,
    host: options.Host = None,
) -> None:
    """Measure cells, or show what was measured."""
    from online_softmax.lab import arguments, benchclock, benchfile, contenders
    from online_softmax.lab import grid as grids
    from online_softmax.lab.inputs import BadInput

    texts = {"--cells": shapes, "--tune": tune, "--host": host, "--save": save, "--grid": grid}
    texts |= {"--dtype": dtype, "--against": against, "--values": values, "--shard": shard}
    for option, text in (*texts.items(), *(("--from", each) for each in stored or ())):
        arguments.word(option, text, options.WANTED[option])
    if stored:
        parts = benchfile.read(map(Path, (*stored, *(ops or ()))))
        _show(parts, as_json)
        _end(benchfile.latest(parts))
        return
    if sum((bool(ops), bool(tune), bool(host))) != 1:
        raise BadInput("bench takes operations, or --tune OP, or --host ROWS,COLS, or --from FILE")
    if resume and not save:
        raise BadInput("--resume goes on with a file: give --save FILE")
    cells = [] if host else _cells(ops or [tune or ""], grid, shapes or "", dtype, shard)
    rivals = contenders.rivals(against)
    grids.named([values], benchclock.VALUES, "--values")
    if listed:
        _list(cells, rivals, as_json)
        return
    kept = Path(save) if save else None
    _measure(cells, rivals, values, resume, as_json, kept, bool(tune), host or "", seconds)


def _measure(
    cells: list[Cell],
    rivals: tuple[str, ...],
    values: str,
    resume: bool,
    as_json: bool,
    save: Path | None,
    is_tuning: bool,
    host: str,
    seconds: float,
) -> None:
    import torch

    from online_softmax.lab import benchclock, benchfile, hostcost, places
    from online_softmax.lab.inputs import BadInput

    size = hostcost.parse(host) if host else (0, 0)
    if not torch.cuda.is_available():
        raise BadInput(NO_GPU)
    if save:
        places.place("--save", str(save))
    log = benchfile.Log(save, resume)
    header = _header(rivals, values)
    others = log.sources - {header.versions.get("sources")}
    if others:
        typer.echo(f"note: {save} has results of other kernel sources; they stay", err=True)
    setting = benchclock.gpu_setting(values)
    parts: list[Part] = list(log.kept)
    try:
        if host:
            parts.append(_host(size, rivals, log, header, as_json))
        else:
            parts.append(_run(cells, rivals, setting, log, header, is_tuning, as_json, seconds))
    except benchclock.Broken as error:
        typer.echo(f"error: {error}; what was measured before is kept", err=True)
        raise typer.Exit(WRONG) from None
    if not as_json:
        _show(parts, as_json=False)
    if save:
        typer.echo(f"{save} written", err=True)
    _end(benchfile.latest(parts))


def _run(
    cells: Sequence[Cell],
    rivals: tuple[str, ...],
    setting: Setting,
    log: Log,
    header: Header,
    is_tuning: bool,
    as_json: bool,
    seconds: float,
) -> Part:
    from online_softmax.lab import benchfile, benchrun, contenders, tune

    emit = _emit if as_json else None

    def make(cell: Cell) -> list[contenders.Contender]:
        return contenders.contenders(cell.op, cell.has_rivals, rivals)

    with _progress() as progress:
        outlet = benchrun.Outlet(log, header, progress, emit, seconds)
        if is_tuning:
            found, left = tune.run(cells, setting, outlet)
            part = benchfile.Part(header, (), tuple(found))
        else:
            rows, left = benchrun.run(cells, make, setting, outlet)
            part = benchfile.Part(header, tuple(rows))
    if left:
        typer.echo(f"note: the seconds are over, {left} cells are left: --resume", err=True)
    return part


def _host(
    size: tuple[int, int], rivals: tuple[str, ...], log: Log, header: Header, as_json: bool
) -> Part:
    from online_softmax.lab import benchfile, hostcost

    found = hostcost.measure(*size, rivals)
    text = benchfile.header_line(header) + benchfile.line("host", found)
    log.write(text)
    if as_json:
        _emit(text)
    return benchfile.Part(header, (), (found,))


def _emit(text: str) -> None:
    typer.echo(text, nl=False)


def _end(rows: Sequence[Row]) -> None:
    wrong = [row for row in rows if not row.is_right]
    for row in wrong:
        for entry in row.entries:
            if entry.kind != "rival" and entry.ok is False:
                typer.echo(f"WRONG: {row.cell.text}: {entry.name}: {entry.why}", err=True)
    if wrong:
        raise typer.Exit(WRONG)


# ---- what was asked for


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _cells(ops: Sequence[str], name: str, shapes: str, dtype: str, shard: str) -> list[Cell]:
    from online_softmax.lab import grid, inputs

    ops = grid.named(ops, grid.OPS, "operation")
    types = [inputs.short_name(inputs.dtype_of(each)) for each in _listed(dtype)]
    if shapes:
        matrices = grid.parse_shapes(shapes)
    else:
        matrices = grid.shapes(grid.named([name], grid.GRIDS, "--grid")[0])
    return grid.shard(grid.cells(ops, dict.fromkeys(types), matrices), shard)


def _header(rivals: tuple[str, ...], values: str) -> Header:
    import torch

    from online_softmax.lab import bench, benchfile, contenders, info, ladder, places

    return benchfile.Header(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=places.recorded(sys.argv[1:]),
        device=torch.cuda.get_device_name(),
        versions=info.versions(),
        machine=bench.machine(),
        clock=ladder.CLOCK,
        rivals=contenders.versions(rivals),
        values=values,
    )


# ---- what is shown


def _list(cells: Sequence[Cell], rivals: tuple[str, ...], as_json: bool) -> None:
    """The cells, with the bytes that each moves and takes; nothing runs."""
    from online_softmax import plan
    from online_softmax.lab import bench, contenders

    l2_bytes = plan.ARCHES[plan.DEFAULT_ARCH].l2_bytes
    lines: list[dict[str, Any]] = []
    for cell in cells:
        sets, _ = bench.set_count(cell.ideal_bytes, l2_bytes)
        names = rivals if cell.has_rivals else rivals[:1]
        found = contenders.contenders(cell.op, cell.has_rivals, rivals)
        memory = cell.memory_bytes(sets, sum(line.allocates(cell.op) for line in found))
        lines.append({**asdict(cell), "rivals": names, "moves": cell.ideal_bytes, "takes": memory})
    if as_json:
        typer.echo(json.dumps(lines))
        return
    for cell, line in zip(cells, lines, strict=True):
        typer.echo(
            f"{cell.text}: moves {_bytes(line['moves'])}, takes {_bytes(line['takes'])}, "
            f"beside {', '.join(line['rivals'])}"
        )
    most = max((line["takes"] for line in lines), default=0)
    typer.echo(f"{len(lines)} cells; the largest takes {_bytes(most)} of device memory")


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


def _show(parts: Sequence[Part], as_json: bool) -> None:
    from rich.console import Console

    from online_softmax.lab import benchfile, benchpage

    if not as_json:
        console = Console(highlight=False)
        console.width = max(console.width, options.NARROWEST)
        benchpage.render(parts, console)
        return
    for part in parts:
        _emit(benchfile.header_line(part.header))
        for row in part.rows:
            _emit(benchfile.line("cell", row))
        for other in part.others:
            _emit(benchfile.line(other["kind"], other))


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return (
        f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """On standard error: a bar that goes away on a terminal, else a line a cell."""
    if not sys.stderr.isatty():
        yield lambda text, done, total, left: typer.echo(
            f"[{done + 1}/{total}] {text}{_left(left)}", err=True
        )
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting")
        update: Callable[..., None] = bars.update
        yield lambda text, done, total, left: update(
            task,
            description=f"{done + 1} of {total}: {text}{_left(left)}",
            completed=done,
            total=total,
        )
