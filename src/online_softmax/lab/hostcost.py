"""What a call costs the host: microseconds of an eager call and its pieces; and a fresh process.

Calls are counted in batches shorter than a GPU's queue of launches, nothing synchronised within, so
that the host alone is timed. Contenders take turns, batch by batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from itertools import repeat
from statistics import median
from typing import Any

import torch
from torch import Tensor

import online_softmax
from online_softmax import catalogue, jit, rowkernels
from online_softmax.cuda.launch import Launch
from online_softmax.lab import opbench
from online_softmax.lab.inputs import BadInput

CALLS = 400  # a batch: fewer than the 1,024 launches that a stream's queue holds
BATCHES = 25
FRESH = 5  # processes with the compiled kernels on disk
FRESH_SECONDS = 300

Plain = Callable[[], Any]


def parse(text: str) -> tuple[int, int]:
    """Rows and columns of "[8,1024]", "8,1024" or "8x1024".

    >>> parse("[8,1024]")
    (8, 1024)
    """
    parts = [part.strip() for part in text.strip("[]() ").replace("x", ",").split(",")]
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise BadInput(f"--host {text}: give ROWS,COLS, such as 8,1024")
    return int(parts[0]), int(parts[1])


# ---- whole calls


def _makers(rivals: tuple[str, ...]) -> dict[str, Callable[[], Callable[[Tensor], Any]]]:
    """What makes each contender's function of x; an import may fail there."""
    known: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
        "torch": lambda: lambda x: torch.softmax(x, -1),
        "compile": lambda: torch.compile(lambda x: torch.softmax(x, -1), dynamic=False),
        "quack": lambda: import_module("quack.softmax").softmax,
        "liger": lambda: import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply,
    }
    return {"ours": lambda: online_softmax.softmax, **{name: known[name] for name in rivals}}


def batches_us(
    calls: dict[str, Plain], synchronize: Plain, batches: int = 0, count: int = 0
) -> dict[str, list[float]]:
    """Host microseconds a call in each batch, contenders taking turns; warmed up by one batch.

    `batches` of `count` calls; 0: BATCHES, CALLS.
    """
    batches, count = batches or BATCHES, count or CALLS
    found: dict[str, list[float]] = {name: [] for name in calls}
    for batch in range(batches + 1):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            for _ in repeat(None, count):
                call()
            spent = time.perf_counter() - start
            if batch:
                found[name].append(spent * 1e6 / count)
    synchronize()
    return found


def _whole(x: Tensor, rivals: tuple[str, ...], synchronize: Plain) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for recorded in (False, True):
        given = x.clone().requires_grad_(recorded)
        calls: dict[str, Plain] = {}
        for name, make in _makers(rivals).items():
            try:
                function = make()
                function(given)
                synchronize()
            except Exception as error:
                if name == "ours":
                    raise
                lines.append({"name": name, "recorded": recorded, "why": opbench.said(error)})
                continue
            calls[name] = lambda function=function, given=given: function(given)  # type: ignore[misc]
        for name, per_batch in batches_us(calls, synchronize).items():
            lines.append({"name": name, "recorded": recorded, **_figures(per_batch)})
    return lines


def _figures(per_batch: list[float]) -> dict[str, float]:
    every = sorted(per_batch)
    return {"median_us": median(every), "p20_us": every[len(every) // 5],
            "p80_us": every[len(every) * 4 // 5]}  # fmt: skip


# ---- its pieces


def _pieces(x: Tensor) -> dict[str, Plain]:
    """The parts of our eager call that can be called alone: the one place that names them."""
    parts: dict[str, Plain] = {"empty_like": lambda: torch.empty_like(x)}
    if not rowkernels.takes(x, None, 1.0):  # on a CPU, or without cuda-core

        def planning() -> object:
            seen = catalogue.problem_of(x)
            return catalogue.choose(seen)[0].numbers(seen)

        return {**parts, "planning": planning}

    from online_softmax.cuda import row_launch

    y, row = torch.empty_like(x), rowkernels.numbers("softmax", x)
    streams = catalogue.streams(x, 2)

    def records() -> list[Launch]:
        return row_launch.forward("softmax", x, y, 1.0, False, row, streams)

    parts["planning"] = lambda: (rowkernels.numbers("softmax", x), catalogue.streams(x, 2))
    parts["launch records"] = records
    if x.is_cuda:
        drivers = [_driver_launch(work, x) for work in records()]
        parts["driver launch"] = lambda: [driver() for driver in drivers]
    return parts


def _driver_launch(work: Any, x: Tensor) -> Plain:
    """cuda.core's launch alone, with its arguments made before."""
    index = x.get_device()
    jit.launch(work, index)
    start, config, kernel = next(
        ready for key, ready in jit._ready.items() if key[:3] == (index, work.file, work.symbol)
    )
    stream = jit._stream(jit._raw_stream(index))
    arguments = [
        value if type(value) is int else jit._argument(value, index) for value in work.args
    ]
    return lambda: start(stream, config, kernel, *arguments)


def _apart(x: Tensor, whole_us: float, synchronize: Plain) -> list[dict[str, Any]]:
    found = batches_us(_pieces(x), synchronize)
    lines: list[dict[str, Any]] = [
        {"name": name, **_figures(per_batch)} for name, per_batch in found.items()
    ]
    rest = whole_us - sum(line["median_us"] for line in lines)
    return [*lines, {"name": "Python's rest", "median_us": rest}]


# ---- a fresh process

PROGRAM = """
import json, sys, time
import torch
device = sys.argv[1]
def took(work):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000
def load():
    import online_softmax
found = {"import_ms": took(load)}
import online_softmax
rows, cols = int(sys.argv[2]), int(sys.argv[3])
x = torch.randn(rows, cols, device=device)
half = x.half()
found["first_ms"] = took(lambda: online_softmax.softmax(x))
found["further_ms"] = took(lambda: online_softmax.softmax(half))
found["again_ms"] = took(lambda: online_softmax.softmax(x))
print(json.dumps(found))
"""


def fresh(rows: int, cols: int, device: str, processes: int = FRESH) -> dict[str, float]:
    """Milliseconds of the import and the first calls in processes of their own, torch imported and
    the GPU in use before: the first with an empty cache ("cold_..."), then medians of others that
    find their kernels on disk."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "ONLINE_SOFTMAX_CACHE_DIR": cache}
        command = [sys.executable, "-c", PROGRAM, device, str(rows), str(cols)]
        runs = []
        for _ in range(processes + 1):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=FRESH_SECONDS,
                check=False,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"a fresh process failed: {done.stderr[-500:]}")
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    later = {name: median(run[name] for run in runs[1:]) for name in runs[0]}
    return {**later, **{f"cold_{name}": ms for name, ms in runs[0].items() if name != "import_ms"}}


# ---- all of it


def measure(rows: int, cols: int, rivals: tuple[str, ...], device: str = "cuda") -> dict[str, Any]:
    """Everything about the host's cost of float32 softmax, as a line to keep."""
    x = torch.randn(rows, cols, device=device, generator=torch.Generator(device).manual_seed(0))
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    calls = _whole(x, rivals, synchronize)
    ours = next(each for each in calls if each["name"] == "ours" and not each["recorded"])
    return {
        "kind": "host", "op": "softmax", "dtype": "float32", "rows": rows, "cols": cols,
        "calls": calls, "pieces": _apart(x, ours["median_us"], synchronize),
        "fresh": fresh(rows, cols, device),
    }  # fmt: skip


FRESH_NAMES = {
    "import_ms": "import online_softmax, beyond torch",
    "first_ms": "first call, kernel on disk",
    "further_ms": "a further kernel, on disk",
    "again_ms": "a later call",
    "cold_first_ms": "first call, nothing on disk",
    "cold_further_ms": "a further kernel, nothing on disk",
}


def tables(line: dict[str, Any]) -> list[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]]:
    """A kept line as tables: title, heading, rows."""
    by_name: dict[str, dict[bool, dict[str, Any]]] = {}
    for each in line["calls"]:
        by_name.setdefault(each["name"], {})[each["recorded"]] = each
    torch_us = {kind: each.get("median_us") for kind, each in by_name.get("torch", {}).items()}
    rows = []
    for name, kinds in by_name.items():
        cells = [name]
        for recorded in (False, True):
            us, base = kinds.get(recorded, {}).get("median_us"), torch_us.get(recorded)
            cells += [f"{us:.1f}" if us else "refuses", f"{us / base:.2f}" if us and base else "—"]
        rows.append(tuple(cells))
    size = f"{line['op']} {line['rows']:,} x {line['cols']:,} {line['dtype']}"
    head = ("call", "µs", "of torch", "gradient recorded, µs", "of torch's")
    pieces = tuple((each["name"], f"{each['median_us']:.2f}") for each in line["pieces"])
    named = [(text, line["fresh"].get(key)) for key, text in FRESH_NAMES.items()]
    first = tuple((text, f"{ms:.1f}") for text, ms in named if ms is not None)
    return [
        (f"Host cost of an eager call, {size}", head, tuple(rows)),
        ("Of which, ours without a gradient", ("piece", "µs"), pieces),
        ("In a fresh process", ("step", "ms"), first),
    ]
