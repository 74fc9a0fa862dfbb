"""linear_cross_entropy beside rivals and the matrix products alone: time, memory, exactness.

One call takes tens of milliseconds and gigabytes, so each is timed as it stands: contenders take
turns, round by round, no graph, one leaf anew for each tensor. Nothing of the L2 outlives a call.
A GPU at its power limit runs at a clock that the last tenths of a second have earned, so a turn is
several calls of one contender, and the later ones count; who is first changes from round to round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import online_softmax
from online_softmax.lab import gradients
from online_softmax.lab.benchfile import Log
from online_softmax.lab.refusal import Refusal, one_line

ROUNDS, SEED = 5, 1
TURN_S, TURN_CALLS = 0.3, 4  # a contender's turn on a GPU: so long, and so many calls at least
CHUNK = 2**26  # float64 elements of logits, or of a gradient, at a time
EXACT = 1e-5  # a gradient's error that float32 arithmetic may have
OUR_EPS, RIVAL_EPS = 1, 16  # and units of rounding of the type: ours, a rival
Loss = Callable[[Tensor, Tensor, Tensor], Any]  # of input, weight and target; a number
Calls = dict[str, Callable[[], Any]]
Times = dict[str, list[float]]
Line = dict[str, Any]
Grads = tuple[Tensor, ...]  # by the input and by the weight


@dataclass(frozen=True)
class Work:
    """A size: (tokens, features) input, (classes, features) weight."""

    tokens: int = 8192
    features: int = 4096
    classes: int = 128256
    dtype: str = "bfloat16"

    @property
    def text(self) -> str:
        size = f"{self.tokens:,} tokens, {self.features:,} features, {self.classes:,} classes"
        return f"linear_cross_entropy {self.dtype}, {size}"


# ---- who runs


def _ours(memory: str) -> Loss:
    function = getattr(online_softmax, "linear_cross_entropy", None)
    if function is None:
        raise Refusal("the package has no linear_cross_entropy yet")
    return lambda x, weight, target: function(x, weight, target, memory=memory)


def _eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight), target)


def _chunked() -> Loss:
    """torch's own, with the options that it chooses itself."""
    function = getattr(functional, "linear_cross_entropy", None)
    if function is None:
        raise Refusal(f"torch {torch.__version__} has no linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda x, weight, target: function(x, weight, target, options=options)


def _compiled() -> Loss:
    torch.compiler.reset()
    compiled: Loss = torch.compile(_eager, dynamic=False)
    return compiled


def _liger() -> Loss:
    functions = import_module("liger_kernel.transformers.functional")
    loss: Loss = functions.liger_fused_linear_cross_entropy
    return loss


def _cut() -> Loss:
    """Without its filter, which leaves out the gradient of small probabilities: of logits at random
    nearly all of it."""
    function = import_module("cut_cross_entropy").linear_cross_entropy
    return lambda x, weight, target: function(x, weight, target, filter_eps=None)


PACKAGES = ("torch", "liger", "cut-cross-entropy")  # of contenders.PACKAGE
CONTENDERS: dict[str, Callable[[], Loss]] = {
    "ours, low": lambda: _ours("low"),
    "ours, fast": lambda: _ours("fast"),
    "torch": lambda: _eager,
    "torch, chunked": _chunked,
    "compile": _compiled,
    "liger": _liger,
    "cut-cross-entropy": _cut,
}


def products(x: Tensor, weight: Tensor) -> dict[str, Callable[[], None]]:
    """The matrix products alone, each whole and into memory that is there: logits, the input's
    gradient, the weight's; and with the logits twice."""
    logits = torch.mm(x, weight.t())
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)

    def run(times: int) -> None:
        for _ in range(times):
            torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=dx)
        torch.mm(logits.t(), x, out=dweight)

    return {"three products": lambda: run(1), "four products": lambda: run(2)}


# ---- what is right


def inputs(work: Work, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and target; logits are about normal."""
    generator, dtype = torch.Generator(device).manual_seed(SEED), getattr(torch, work.dtype)

    def normal(rows: int, scale: float) -> Tensor:
        made = torch.empty((rows, work.features), dtype=dtype, device=device)
        return made.normal_(0.0, scale, generator=generator)

    x, weight = normal(work.tokens, 1.0), normal(work.classes, work.features**-0.5)
    target = torch.randint(work.classes, (work.tokens,), generator=generator, device=device)
    return x, weight, target


def exact(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss and its gradients by input and weight in float64, by chunks of tokens."""
    wide, count = weight.double(), len(x)
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    dx = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    dweight = torch.zeros_like(wide)
    step = max(CHUNK // len(weight), 1)
    for start in range(0, count, step):
        part = slice(start, start + step)
        x_part, place = x[part].double(), target[part, None]
        log_p = torch.log_softmax(x_part @ wide.t(), -1)
        loss -= log_p.gather(-1, place).sum() / count
        dz = log_p.exp_()
        dz.scatter_add_(-1, place, torch.full_like(place, -1.0, dtype=torch.float64))
        dz /= count
        dx[part] = dz @ wide
        dweight.addmm_(dz.t(), x_part)
    return loss, dx, dweight


def error(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over the norm of what is right, by chunks."""
    off = size = 0.0
    step = max(CHUNK // max(want[0].numel(), 1), 1)
    for start in range(0, len(want), step):
        some = slice(start, start + step)
        off += float((got[some].double() - want[some]).square().sum())
        size += float(want[some].square().sum())
    return math.sqrt(off / size) if size else math.sqrt(off)


# ---- one contender


def memory_bytes(call: Callable[[], Grads], device: torch.device) -> int | None:
    """The most that a call has allocated at once beyond what was there and the gradients that it
    gives; None: nothing counts it here."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    given = sum(made.numel() * made.element_size() for made in call())
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - given


def _entry(
    name: str, loss: Loss, given: tuple[Tensor, Tensor, Tensor], wanted: tuple[Tensor, ...]
) -> Line:
    """Run a contender twice: what its errors are, whether they are too large, what memory it
    takes. The first call compiles."""
    x, weight, target = given
    losses: list[Tensor] = []

    def whole(x: Tensor, weight: Tensor) -> Any:
        made = loss(x, weight, target)
        losses.append(made.detach())
        return made

    found = gradients.of(whole, x, weight)
    value, (right, *grads) = float(losses.pop()), wanted
    entry: Line = {"loss_error": abs(value - float(right)) / abs(float(right))}
    errors = [error(got, want) for got, want in zip(found, grads, strict=True)]
    entry |= {"dx_error": errors[0], "dweight_error": errors[1]}
    units = OUR_EPS if name.startswith("ours") else RIVAL_EPS
    allowed = EXACT + units * torch.finfo(x.dtype).eps
    for what in ("loss_error", "dx_error", "dweight_error"):
        if not entry[what] <= allowed:  # NaN is wrong too
            return entry | {"why": f"wrong: {what} is {entry[what]:.3g}, over {allowed:.3g}"}
    del found
    call = lambda: gradients.of(lambda a, b: loss(a, b, target), x, weight)  # noqa: E731
    return entry | {"memory_bytes": memory_bytes(call, x.device)}


def once_us(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of one call, by the GPU's events or the CPU's clock."""
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def settled_us(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of a call among its like: the median of a turn's later half."""
    if device.type != "cuda":
        return once_us(call, device)
    spent: list[float] = []
    while len(spent) < TURN_CALLS or sum(spent) < TURN_S * 1e6:
        spent.append(once_us(call, device))
    return median(spent[len(spent) // 2 :])


def measure(
    work: Work,
    device: torch.device,
    rounds: int = ROUNDS,
    clock: Callable[..., float] = settled_us,
    say: Callable[[str], None] = lambda text: None,
    names: Iterable[str] | None = None,
    failed: Callable[[str, Exception], None] = lambda name, error: None,
    timed: Callable[[Calls], Times] | None = None,
) -> Line:
    """Check and time contenders, all or those named, as a line to keep. Who raises is told to
    `failed`, which may raise too. Of a CPU's rounds, from `timed`, `median_us` is the least."""
    given = inputs(work, device)
    say("float64")
    wanted = exact(*given)
    entries: dict[str, Line] = {}
    calls: Calls = {}
    for name in CONTENDERS if names is None else names:
        say(name)
        entries[name] = {"name": name, "why": ""}
        try:
            loss = CONTENDERS[name]()
            entries[name] |= _entry(name, loss, given, wanted)
        except Refusal as refusal:
            entries[name]["why"] = str(refusal)
        except Exception as failure:  # noqa: BLE001  a row
            failed(name, failure)
            entries[name]["why"] = one_line(failure)
        if not entries[name]["why"]:
            calls[name] = _step(loss, *given)
    del wanted
    calls |= products(*given[:2])
    say("rounds")
    spent = timed(calls) if timed else _rounds(calls, device, rounds, clock)
    for name, us in spent.items():
        entries.setdefault(name, {"name": name, "why": ""})
        entries[name] |= {"median_us": min(us) if timed else median(us), "rounds_us": us}
    return {"kind": "linear", **asdict(work), "device": device.type, "entries": [*entries.values()]}


def _rounds(calls: Calls, device: torch.device, rounds: int, clock: Callable[..., float]) -> Times:
    """So many times of each, in turn; who is first changes."""
    spent: Times = {name: [] for name in calls}
    for call in calls.values():
        clock(call, device)  # each once more: what the others left of the allocator is settled
    turns = [*calls]
    for _ in range(rounds):
        for name in turns:
            spent[name].append(clock(calls[name], device))
        turns = turns[1:] + turns[:1]
    return spent


def _step(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> Callable[[], Grads]:
    return lambda: gradients.of(lambda a, b: loss(a, b, target), x, weight)


def is_kept(log: Log, work: Work) -> bool:
    """Whether the log has this size."""
    lines = (e for part in log.kept for e in part.others if e["kind"] == "linear")
    return any(all(e[key] == value for key, value in asdict(work).items()) for e in lines)
