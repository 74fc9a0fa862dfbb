"""What a call costs the host: microseconds of an eager call and its pieces; and a fresh process.

Calls are counted in batches shorter than a GPU's queue of launches, nothing synchronised within, so
that the host alone is timed. Contenders take turns, batch by batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from itertools import repeat
from statistics import median
from typing import Any

import torch
from torch import Tensor

import online_softmax
from online_softmax import arguments, catalogue, jit, jit_launch, keptcalls, rowkernels
from online_softmax.lab import freshcost, overridecost
from online_softmax.lab.freshcost import Say
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.refusal import one_line
from online_softmax.library import routes

CALLS = 400  # a batch: fewer than the 1,024 launches that a stream's queue holds
BATCHES = 25

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
    if unknown := [name for name in rivals if name not in known]:
        raise BadInput(f"--host has no call of {unknown[0]}: there are {', '.join(known)}")
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


def _whole(
    x: Tensor, rivals: tuple[str, ...], synchronize: Plain, say: Say
) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for recorded in (False, True):
        given = x.clone().requires_grad_(recorded)
        calls: dict[str, Plain] = {}
        for name, make in _makers(rivals).items():
            say(f"first call of {name}{', a gradient recorded' if recorded else ''}")
            try:
                function = make()
                function(given)
                synchronize()
            except Exception as error:
                if name == "ours":
                    raise
                lines.append({"name": name, "recorded": recorded, "why": one_line(error)})
                continue
            calls[name] = lambda function=function, given=given: function(given)  # type: ignore[misc]
        say(f"eager calls of {', '.join(calls)}")
        for name, per_batch in batches_us(calls, synchronize).items():
            lines.append({"name": name, "recorded": recorded, **_figures(per_batch)})
    return lines


def _figures(per_batch: list[float]) -> dict[str, float]:
    every = sorted(per_batch)
    return {"median_us": median(every), "p20_us": every[len(every) // 5],
            "p80_us": every[len(every) * 4 // 5]}  # fmt: skip


# ---- its pieces

ROUTE = "choice of the route"
OPTIONS = (-1, None, 1.0, False, "")  # of softmax(x), as rowops passes them on


def _pieces(x: Tensor) -> tuple[dict[str, Plain], dict[str, Plain]]:
    """What can be called alone: the parts of our eager call; and what stands beside them.

    The one place that names them.
    """

    def check() -> None:
        arguments.check_input("softmax", x)
        arguments.check_dim("softmax", x, -1)
        arguments.check_scale("softmax", 1.0)

    parts: dict[str, Plain] = {
        "checks of the arguments": check,
        ROUTE: lambda: (routes.takes_op(x), routes.is_recorded(x)),
        "allocation": lambda: torch.empty_like(x),
    }
    if not rowkernels.takes(x, None, 1.0):  # on a CPU, or without CUDA's libraries

        def planning() -> object:
            seen = catalogue.problem_of(x)
            return catalogue.choose(seen)[0].numbers(seen)

        return {**parts, "planning": planning}, {}

    from online_softmax.cuda import row_launch

    y, row = torch.empty_like(x), rowkernels.numbers("softmax", x)
    streams = catalogue.streams(x, 2)

    def records() -> list[Any]:
        return [*row_launch.forward("softmax", x, y, 1.0, False, row, streams)]

    beside: dict[str, Plain] = {
        "of a call unlike those before: planning": lambda: (
            rowkernels.numbers("softmax", x),
            catalogue.streams(x, 2),
        ),
        "of a call unlike those before: launch records": records,
    }

    found = keptcalls.find("softmax", OPTIONS, (x,))
    if found is None:
        return parts, beside
    call, given, _ = found
    (start,), ((shape, stride, dtype, _),), _, _, _, index, _, current_device, raw_stream = call
    empty, addresses = keptcalls.empty_strided, (*given, y.data_ptr())

    def launch() -> None:
        if current_device() == index:
            start(raw_stream(index), addresses)

    def allocate() -> Tensor:
        if empty is None:
            return torch.empty_strided(shape, stride, dtype=dtype, device=x.device)
        made: Tensor = empty(shape, stride, dtype)
        return made

    new = "of a call unlike those before: "  # which a call like one before passes by
    passed = {f"{new}{name}": parts[name] for name in ("checks of the arguments", ROUTE)}
    parts = {
        f"{ROUTE}, look-up of the launch": lambda: routes.again("no operation", x, OPTIONS),
        "allocation": allocate,
        "launch": launch,
    }
    driver = {"of the launch: the driver": _driver_launch(records()[0], x.get_device())}
    return parts, {**passed, **beside, **driver}


def _driver_launch(work: Any, index: int) -> Plain:
    """The driver's launch alone: nothing of it is made anew."""
    kind = jit.kind_of(work, index)
    if kind is None:
        raise RuntimeError(f"{work.symbol} has not run on device {index}")
    laid = kind.lay(jit_launch.words(work.args, index))
    jit_launch.turn(kind.driver, laid, jit.raw_stream(index))
    launch, function = kind.driver.cuLaunchKernelEx, kind.function
    return lambda: launch(laid.config, function, laid.address, 0)


def _apart(x: Tensor, whole_us: float, synchronize: Plain) -> list[dict[str, Any]]:
    parts, beside = _pieces(x)
    found = batches_us({**parts, **beside}, synchronize)
    lines: list[dict[str, Any]] = [
        {"name": name, **_figures(per_batch)} for name, per_batch in found.items()
    ]
    rest = whole_us - sum(line["median_us"] for line in lines if line["name"] in parts)
    lines.insert(len(parts), {"name": "Python's rest", "median_us": rest})
    return lines


# ---- all of it


def measure(
    rows: int,
    cols: int,
    rivals: tuple[str, ...],
    device: str = "cuda",
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Everything about the host's cost of float32 softmax, as a line to keep."""
    x = torch.randn(rows, cols, device=device, generator=torch.Generator(device).manual_seed(0))
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    calls = _whole(x, rivals, synchronize, say)
    ours = next(each for each in calls if each["name"] == "ours" and not each["recorded"])
    say("the pieces of a call")
    pieces = _apart(x, ours["median_us"], synchronize)
    say("torch's functions, with override_torch and without")

    def timed(each: dict[str, Plain]) -> dict[str, dict[str, float]]:
        return {name: _figures(us) for name, us in batches_us(each, synchronize).items()}

    return {
        "kind": "host", "op": "softmax", "dtype": "float32", "rows": rows, "cols": cols,
        "calls": calls, "pieces": pieces, "override": overridecost.measure(x, timed),
        "fresh": freshcost.fresh(rows, cols, device, say),
    }  # fmt: skip


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
    named = [(text, line["fresh"].get(key)) for key, text in freshcost.NAMES.items()]
    first = [(text, f"{ms:.1f}") for text, ms in named if ms is not None]
    if "why" in line["fresh"]:
        first.append((f"a process failed: {line['fresh']['why']}", "—"))
    found = [
        (f"Host cost of an eager call, {size}", head, tuple(rows)),
        ("Of which, ours without a gradient", ("piece", "µs"), pieces),
    ]
    if line.get("override"):  # runs stored before it was measured have none
        found.append((f"Under override_torch, {size}", *overridecost.table(line["override"])))
    return [*found, ("In a fresh process", ("step", "ms"), tuple(first))]
