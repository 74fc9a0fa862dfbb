"""The command `bench`: cells asked for, measured, resumed, listed, tuned, or shown again."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from online_softmax.lab import benchoptions as options
from online_softmax.lab import benchshow

if TYPE_CHECKING:
    from online_softmax.lab.benchclock import Setting
    from online_softmax.lab.benchfile import Header, Log, Part, Row
    from online_softmax.lab.contenders import Contender
    from online_softmax.lab.grid import Cell

WRONG = 1  # exit code: a result of ours is wrong
NO_GPU = (
    "bench needs a CUDA GPU, and torch sees none here: --list shows the cells, --from FILE shows "
    "kept results, --accuracy compares with float64 on a CPU"
)


@dataclass(frozen=True)
class Asked:
    """What a person asked for, checked."""

    cells: list[Cell]
    rivals: tuple[str, ...]
    values: str
    seconds: float  # of the whole run
    as_json: bool
    save: Path | None
    resume: bool


def bench(
    ops: options.Ops = None,
    grid: options.Grid = "big",
    shapes: options.Cells = None,
    dtype: options.Types = "bf16,fp16,fp32",
    against: options.Against = None,
    values: options.Values = "normal",
    shard: options.Shard = "0/1",
    seconds: options.Seconds = None,
    resume: options.Resume = False,
    as_json: options.Json = False,
    save: options.Save = None,
    listed: options.Listed = False,
    stored: options.Stored = None,
    tune: options.Tune = None,
    host: options.Host = None,
    prepare: options.Prepare = False,
    workers: options.Workers = None,
    accuracy: options.Accuracy = False,
) -> None:
    """Measure cells, or show what was measured."""
    from online_softmax.lab import arguments, benchclock, contenders
    from online_softmax.lab import grid as grids
    from online_softmax.lab.inputs import BadInput

    texts = {"--cells": shapes, "--tune": tune, "--host": host, "--save": save, "--grid": grid}
    if against is None:  # a compiled call is no eager one
        against = "torch,quack" if host else "torch,compile,quack,liger"
    texts |= {"--dtype": dtype, "--against": against, "--values": values, "--shard": shard}
    for option, text in (*texts.items(), *(("--from", each) for each in stored or ())):
        arguments.word(option, text, options.WANTED[option])
    limit = arguments.seconds("--seconds", seconds, 0.0)
    count = arguments.whole("--workers", workers)
    kept = Path(save) if save else None
    if stored:
        _stored([*stored, *(ops or ())], as_json, kept)
        return
    if sum((bool(ops), bool(tune), bool(host))) != 1:
        raise BadInput("bench takes operations, or --tune OP, or --host ROWS,COLS, or --from FILE")
    if resume and not save:
        raise BadInput("--resume goes on with a file: give --save FILE")
    if (prepare or accuracy) and (not ops or (prepare and accuracy)):
        raise BadInput("--prepare and --accuracy, one of them, stand beside operations")
    # Losses have no cuts of their own to rank, and are compared with float64 in their cells alone.
    known = grids.OPS if tune or accuracy else grids.EVERY_OP
    named = [] if host else grids.named(ops or [tune or ""], known, "operation")
    cells = _cells(named, grid, shapes or "", dtype, shard, accuracy)
    grids.named([values], benchclock.VALUES, "--values")
    asked = Asked(cells, contenders.rivals(against), values,
                  float("inf") if limit is None else limit, as_json, kept, resume)  # fmt: skip
    if listed:
        benchshow.list_cells(cells, asked.rivals, as_json)
    elif prepare:
        _prepare(asked, count or 0)
    elif accuracy:
        _accuracy(asked)
    else:
        _measure(asked, bool(tune), host or "")


# ---- what is done


def _stored(names: Sequence[str], as_json: bool, save: Path | None) -> None:
    from online_softmax.lab import benchfile, places

    parts = benchfile.read(map(Path, names))
    if save:
        places.place("--save", str(save))
        log = benchfile.Log(save)
        for text in benchfile.merged(parts):
            log.write(text)
        typer.echo(f"{save} written", err=True)
    if not (save and as_json):
        benchshow.show(parts, as_json)
    _end(benchfile.latest(parts))


def _prepare(asked: Asked, workers: int) -> None:
    from online_softmax.lab import prepare
    from online_softmax.lab.inputs import BadInput

    _needs_gpu()
    if asked.save:
        raise BadInput("--prepare fills the compilers' own caches: it keeps nothing in --save")
    todo, count = prepare.here(asked.cells, asked.rivals, workers)
    typer.echo(f"{len(todo)} things to compile, {count} processes", err=True)
    with benchshow.progress() as progress:

        def tell(text: str, done: int, total: int) -> None:
            progress(text, done - 1, total, None)

        done = prepare.prepare(todo, count, asked.seconds, tell)
    for each in done.refused:
        typer.echo(f"refused: {each}", err=True)
    said = f"{done.compiled} compiled in {done.seconds:.1f} s, {len(done.refused)} refused"
    typer.echo(f"{said}, {done.left} left", err=True)


def _accuracy(asked: Asked) -> None:
    import torch

    from online_softmax.lab import accuracy, benchfile

    log, header = _log(asked)
    log.write(text := benchfile.header_line(header))
    if asked.as_json:
        benchshow.emit(text)

    def write(line: accuracy.Line) -> None:
        log.write(text := benchfile.line("accuracy", line))
        if asked.as_json:
            benchshow.emit(text)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with benchshow.progress() as progress:
        found = accuracy.run(asked.cells, device, write, progress)
    if not asked.as_json:
        benchshow.show([*log.kept, benchfile.Part(header, (), tuple(found))])
    for line in found:
        if not line["ours"]["ok"]:
            cell = f"{line['op']} {line['dtype']} {line['rows']} x {line['cols']}"
            typer.echo(f"WRONG: {cell}, {line['values']}: {line['ours']['why']}", err=True)
    if not all(line["ours"]["ok"] for line in found):
        raise typer.Exit(WRONG)


def _needs_gpu() -> None:
    import torch

    from online_softmax.lab.inputs import BadInput

    if not torch.cuda.is_available():
        raise BadInput(NO_GPU)


def _log(asked: Asked) -> tuple[Log, Header]:
    """The file of a run, and what stands above its lines."""
    from online_softmax.lab import benchfile, places

    if asked.save:
        places.place("--save", str(asked.save))
    log = benchfile.Log(asked.save, asked.resume)
    header = _header(asked.rivals, asked.values)
    if log.sources - {header.versions.get("sources")}:
        typer.echo(f"note: {asked.save} has results of other kernel sources; they stay", err=True)
    return log, header


def _measure(asked: Asked, is_tuning: bool, host: str) -> None:
    from online_softmax.lab import benchclock, benchfile, hostcost

    size = hostcost.parse(host) if host else (0, 0)
    _needs_gpu()
    log, header = _log(asked)
    setting = benchclock.gpu_setting(asked.values)
    parts: list[Part] = list(log.kept)
    try:
        if host:
            parts.append(_host(size, asked, log, header))
        else:
            parts.append(_run(asked, setting, log, header, is_tuning))
    except benchclock.Broken as error:
        typer.echo(f"error: {error}; what was measured before is kept", err=True)
        raise typer.Exit(WRONG) from None
    if not asked.as_json:
        benchshow.show(parts)
    if asked.save:
        typer.echo(f"{asked.save} written", err=True)
    _end(benchfile.latest(parts))


def _run(asked: Asked, setting: Setting, log: Log, header: Header, is_tuning: bool) -> Part:
    from online_softmax.lab import benchfile, benchrun, contenders, tune

    begun = time.perf_counter()

    def make(cell: Cell) -> list[Contender]:
        return contenders.contenders(cell, asked.rivals)

    with benchshow.progress() as progress:
        emit = benchshow.emit if asked.as_json else None
        outlet = benchrun.Outlet(log, header, progress, emit, asked.seconds)
        if is_tuning:
            found, left = tune.run(asked.cells, setting, outlet)
            part = benchfile.Part(header, (), tuple(found))
        else:
            rows, left = benchrun.run(asked.cells, make, setting, outlet)
            part = benchfile.Part(header, tuple(rows))
    if said := benchshow.spent(part.rows, time.perf_counter() - begun):
        typer.echo(f"note: {said}", err=True)
    if left:
        typer.echo(f"note: the seconds are over, {left} cells are left: --resume", err=True)
    return part


def _host(size: tuple[int, int], asked: Asked, log: Log, header: Header) -> Part:
    from online_softmax.lab import benchfile, hostcost

    say = lambda text: typer.echo(f"{text} ...", err=True)  # noqa: E731
    found = hostcost.measure(*size, asked.rivals, say=say)
    text = benchfile.header_line(header) + benchfile.line("host", found)
    log.write(text)
    if asked.as_json:
        benchshow.emit(text)
    return benchfile.Part(header, (), (found,))


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


def _cells(
    ops: list[str], name: str, shapes: str, dtype: str, shard: str, is_accuracy: bool
) -> list[Cell]:
    from online_softmax.lab import accuracy, grid, inputs

    types = dict.fromkeys(inputs.short_name(inputs.dtype_of(each)) for each in _listed(dtype))
    grid.named([name], grid.GRIDS, "--grid")
    cells = grid.grid_cells(ops, types, name)
    if shapes or is_accuracy:
        matrices = grid.parse_shapes(shapes) if shapes else accuracy.shapes()
        cells = grid.cells(ops, types, matrices)
    return grid.shard(cells, shard)


def _header(rivals: tuple[str, ...], values: str) -> Header:
    import torch

    from online_softmax.lab import bench, benchfile, contenders, info, ladder, places

    return benchfile.Header(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=places.recorded(sys.argv[1:]),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        versions=info.versions(),
        machine=bench.machine(),
        clock=ladder.CLOCK,
        rivals=contenders.versions(rivals),
        values=values,
    )
