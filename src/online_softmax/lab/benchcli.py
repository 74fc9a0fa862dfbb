"""The command `bench`: cells measured, resumed, listed, tuned, shown again, or compared."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from online_softmax.lab import benchoptions as options
from online_softmax.lab import benchshow, fitting
from online_softmax.lab.benchask import Asked, Words, header_now, lacks_gpu, limit_of, needs_gpu

if TYPE_CHECKING:
    from online_softmax.lab.benchclock import Setting
    from online_softmax.lab.benchfile import Header, Log, Part
    from online_softmax.lab.contender import Contender
    from online_softmax.lab.grid import Cell

WRONG = 1  # exit code: a result of ours is wrong, slower than it was, or there is none
DEFAULTED = ("--values", "--shard")  # options that have a text though none was given


def bench(
    ops: options.Ops = None,
    grid: options.Grid = None,
    shapes: options.Cells = None,
    dtype: options.Types = None,
    against: options.Against = None,
    values: options.Values = "normal",
    shard: options.Shard = "0/1",
    repeat: options.Repeat = None,
    seconds: options.Seconds = None,
    resume: options.Resume = False,
    as_json: options.Json = False,
    save: options.Save = None,
    listed: options.Listed = False,
    stored: options.Stored = None,
    compare: options.Compare = None,
    tune: options.Tune = None,
    host: options.Host = None,
    prepare: options.Prepare = False,
    workers: options.Workers = None,
    accuracy: options.Accuracy = False,
) -> None:
    """Measure cells, or show what was measured."""
    from online_softmax.lab import arguments, benchclock, benchlist, contenders
    from online_softmax.lab import grid as grids
    from online_softmax.lab.inputs import BadInput

    texts = {"--cells": shapes, "--tune": tune, "--host": host, "--save": save, "--grid": grid}
    texts |= {"--dtype": dtype, "--against": against, "--values": values, "--shard": shard}
    texts["--compare"] = compare
    for option, text in (*texts.items(), *(("--from", each) for each in stored or ())):
        arguments.word(option, text, options.WANTED[option])
    limit = arguments.seconds("--seconds", seconds, 0.0)
    count = arguments.whole("--workers", workers)
    times = arguments.whole("--repeat", repeat) or 1
    kept = Path(save) if save else None
    if compare or stored:
        given: dict[str, object] = {**texts, "--seconds": limit, "--workers": count}
        given |= {"--repeat": repeat, "--resume": resume, "--list": listed, "--prepare": prepare}
        given |= {"--accuracy": accuracy, "--values": None if values == "normal" else values}
        given |= {"--shard": None if shard == "0/1" else shard, "--compare": None}
        if compare:
            arguments.nothing_beside("--compare", {**given, "--from": stored})
            _compare([compare, *(ops or ())], as_json)
        else:
            arguments.nothing_beside("--from", {**given, "--save": None})
            _stored([*(stored or ()), *(ops or ())], as_json, kept)
        return
    alone = [text for name, text in texts.items() if name not in DEFAULTED]
    if listed and not any((ops, prepare, accuracy, resume, repeat, seconds, workers, *alone)):
        benchlist.overview(as_json)
        return
    if sum((bool(ops), bool(tune), bool(host))) != 1:
        raise BadInput(options.NOTHING)
    if resume and not save:
        raise BadInput("--resume goes on with a file: give --save FILE")
    if (prepare or accuracy) and (not ops or (prepare and accuracy)):
        raise BadInput("--prepare and --accuracy, one of them, stand beside operations")
    # Losses have no cuts of their own to rank, and are compared with float64 in their cells alone.
    known = grids.OPS if tune or accuracy else grids.EVERY_OP
    named = [] if host else grids.named(ops or [tune or ""], known, "operation")
    is_cpu = not (prepare or accuracy or tune or host) and lacks_gpu()
    words = Words(grid, shapes, dtype, against, values, shard).filled(is_cpu, bool(host))
    cells = words.cells(named, accuracy)
    grids.named([values], benchclock.VALUES, "--values")
    asked = Asked(cells, contenders.rivals(words.against or ""), values, limit_of(limit, is_cpu),
                  as_json, kept, resume, times, is_cpu, not (grid or shapes))  # fmt: skip
    if listed:
        benchlist.cells(cells, asked.rivals, as_json)
    elif prepare:
        _prepare(asked, count or 0)
    elif accuracy:
        _accuracy(asked)
    else:
        _measure(asked, bool(tune), host or "")


# ---- what is done


def _stored(names: Sequence[str], as_json: bool, save: Path | None) -> None:
    from online_softmax.lab import benchfile, places
    from online_softmax.lab.inputs import BadInput

    parts = benchfile.read(map(Path, names), _note)
    if not any(part.rows or part.others for part in parts):
        raise BadInput(f"{', '.join(names)}: no cell was measured before the run ended")
    if save:
        places.place("--save", str(save))
        log = benchfile.Log(save)
        for text in benchfile.merged(parts):
            log.write(text)
        fitting.say(f"{save} written", err=True)
    if not (save and as_json):
        benchshow.show(parts, as_json)
    _end(parts)


def _compare(names: Sequence[str], as_json: bool) -> None:
    from online_softmax.lab import benchcompare, benchfile
    from online_softmax.lab.inputs import BadInput

    if len(names) != 2:
        raise BadInput(f"--compare takes two files, OLD and NEW; there are {len(names)}")
    old, new = (benchcompare.times(benchfile.read([Path(name)], _note)) for name in names)
    found = benchcompare.compare(old, new)
    if not found.changes:
        raise BadInput(f"--compare: {names[0]} and {names[1]} have no timed cell in common")
    if as_json:
        typer.echo(json.dumps(benchcompare.as_json(found), allow_nan=False))
    else:
        benchshow.tables(benchcompare.tables(found))
    fitting.say(benchcompare.summary(found), err=as_json)
    if found.regressions:
        raise typer.Exit(WRONG)


def _prepare(asked: Asked, workers: int) -> None:
    from online_softmax.lab import prepare
    from online_softmax.lab.inputs import BadInput

    needs_gpu("--prepare")
    if asked.save:
        raise BadInput("--prepare fills the compilers' own caches: it keeps nothing in --save")
    todo, count = prepare.here(asked.filled, asked.rivals, workers)
    fitting.say(f"{len(todo)} things to compile, {count} processes", err=True)
    with benchshow.progress() as progress:

        def tell(text: str, done: int, total: int) -> None:
            progress(text, done - 1, total, None)

        done = prepare.prepare(todo, count, asked.seconds, tell)
    for each in done.refused:
        fitting.say(f"refused: {each}", err=True)
    said = f"{done.compiled} compiled in {done.seconds:.1f} s, {len(done.refused)} refused"
    fitting.say(f"{said}, {done.left} left", err=True)


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
        found = accuracy.run(asked.filled, device, write, progress)
    if not asked.as_json:
        benchshow.show([*log.kept, benchfile.Part(header, (), tuple(found))])
    for line in found:
        if not line["ours"]["ok"]:
            cell = f"{line['op']} {line['dtype']} {line['rows']} x {line['cols']}"
            fitting.say(f"WRONG: {cell}, {line['values']}: {line['ours']['why']}", err=True)
    if not all(line["ours"]["ok"] for line in found):
        raise typer.Exit(WRONG)


def _note(text: str) -> None:
    fitting.say(f"note: {text}", err=True)


def _log(asked: Asked) -> tuple[Log, Header]:
    """The file of a run, and what stands above its lines."""
    from online_softmax.lab import benchfile, places

    if asked.save:
        places.place("--save", str(asked.save))
    log = benchfile.Log(asked.save, asked.resume)
    if log.torn_bytes:
        _note(f"{asked.save} ended within a line: its {log.torn_bytes} bytes are dropped")
    header = header_now(asked.rivals, asked.values)
    if log.sources - {header.versions.get("sources")}:
        _note(f"{asked.save} has results of other kernel sources; they stay")
    return log, header


def _measure(asked: Asked, is_tuning: bool, host: str) -> None:
    from online_softmax.lab import benchclock, cpuclock, hostcost

    size = hostcost.parse(host) if host else (0, 0)
    if is_tuning or host:
        needs_gpu("--tune" if is_tuning else "--host")
    log, header = _log(asked)
    setting = (cpuclock.setting if asked.is_cpu else benchclock.gpu_setting)(asked.values)
    for text in (cpuclock.NOTE if asked.is_cpu else "", setting.note):
        if text:
            _note(text)
    parts: list[Part] = list(log.kept)
    try:
        if host:
            parts.append(_host(size, asked, log, header))
        else:
            parts.append(_run(asked, setting, log, header, is_tuning))
    except benchclock.Broken as error:
        fitting.say(f"error: {error}; what was measured before is kept", err=True)
        raise typer.Exit(WRONG) from None
    if not asked.as_json:
        benchshow.show(parts)
    if asked.save:
        fitting.say(f"{asked.save} written", err=True)
    _end(parts)


def _run(asked: Asked, setting: Setting, log: Log, header: Header, is_tuning: bool) -> Part:
    from online_softmax.lab import benchfile, benchrun, contenders, cpufit, tune

    begun, fit = time.perf_counter(), cpufit.Fit(asked.cells)
    if asked.is_cpu:
        fit = cpufit.chosen(asked, setting, log)
        if fit.said:
            _note(fit.said)

    def make(cell: Cell) -> list[Contender]:
        return contenders.contenders(cell, asked.rivals)

    with benchshow.progress() as progress:
        emit = benchshow.emit if asked.as_json else None
        outlet = benchrun.Outlet(log, header, progress, emit, asked.seconds, fit.price, fit.share)
        if is_tuning:
            found, left = tune.run(asked.filled, setting, outlet)
            part = benchfile.Part(header, (), tuple(found))
        else:
            run = benchrun.run(fit.cells, make, setting, outlet, asked.repeat)
            part, left = benchfile.Part(header, run.rows, run.others), run.left
    if said := benchshow.spent(part.rows, time.perf_counter() - begun):
        _note(said)
    if left:
        _note(f"the seconds are over, {left} cells are left: {asked.way_on}, or more --seconds")
    return part


def _host(size: tuple[int, int], asked: Asked, log: Log, header: Header) -> Part:
    from online_softmax.lab import benchfile, hostcost

    say = lambda text: fitting.say(f"{text} ...", err=True)  # noqa: E731
    found = hostcost.measure(*size, asked.rivals, say=say)
    text = benchfile.header_line(header) + benchfile.line("host", found)
    log.write(text)
    if asked.as_json:
        benchshow.emit(text)
    return benchfile.Part(header, (), (found,))


def _end(parts: Sequence[Part]) -> None:
    """Say what is wrong or missing in results, and leave with an exit code for it."""
    from online_softmax.lab import benchfile, linearcells

    rows = [row for row in benchfile.latest(parts) if not row.cell.is_empty]
    wrong = [
        f"{row.cell.text}: {entry.name}: {entry.why}"
        for row in rows
        for entry in row.entries
        if entry.kind != "rival" and entry.ok is False
    ]
    others = [line for part in parts for line in part.others]
    for line in others:
        wrong += linearcells.wrong(line) if line["kind"] == "linear" else []
    for text in wrong:
        fitting.say(f"WRONG: {text}", err=True)
    empty = rows and not others and not any(e.median_us for row in rows for e in row.entries)
    if empty:
        why = next((e.why for row in rows for e in row.entries if e.why), rows[0].why)
        fitting.say(f"error: nothing was timed in {len(rows)} cells: {why}", err=True)
    if wrong or empty:
        raise typer.Exit(WRONG)
