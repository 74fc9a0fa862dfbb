"""Compiling all that cells will run, in many processes, into the caches on disk: a later benchmark
spends its time on the GPU on measuring alone.

Ours needs no GPU: sources go through NVRTC; but of a loss, whose public function is timed, that is
called. A rival is called once on a cell's own shape, since torch.compile, quack and Triton
specialise on it; its caches are its own (TORCHINDUCTOR_CACHE_DIR,
TRITON_CACHE_DIR, QUACK_CACHE_DIR say where).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

from online_softmax import rowchoice, rowplan
from online_softmax.lab import (
    ceilings,
    contenders,
    fusedcells,
    gradients,
    linear,
    linearcells,
    losscontenders,
)
from online_softmax.lab.arena import Arena
from online_softmax.lab.contenders import makers
from online_softmax.lab.fusedsizes import LINEAR
from online_softmax.lab.grid import ITEM_BYTES, LOSS_OPS, WORKING_BYTES, WRITING, Cell
from online_softmax.lab.refusal import Refusal, one_line
from online_softmax.plan import Problem

CONTEXT_BYTES = 2**30  # of device memory that each process has for itself
# Rivals that compile when they are called.
COMPILED = ("compile", "quack", "liger", "tutorial", "cut-cross-entropy")
LOSS_CEILINGS = ("read", "copy")
BY_ROWS = ("compile",)  # of them, those whose code depends on the number of rows


@dataclass(frozen=True)
class Task:
    """One thing to compile: a kernel of ours, or a contender's call on a cell's shape."""

    name: str  # "ours" or a rival's
    kernel: tuple[str, str, str] = ("", "", "")  # of ours: file, symbol, architecture
    cell: Cell | None = None  # of a rival, and of a line of ours in a loss

    @property
    def text(self) -> str:
        return f"{self.name}: {self.cell.text if self.cell else self.kernel[1]}"


@dataclass(frozen=True)
class Prepared:
    """What became of the tasks."""

    compiled: int
    refused: tuple[str, ...]  # task: reason; of a rival the same reason will be its row
    left: int  # not begun, or not ended, when the seconds were over
    seconds: float


# ---- what there is to compile


def kernels(cell: Cell, arch: str) -> list[tuple[str, str]]:
    """The (file, symbol) of our launches on a cell's buffers, which begin on 16-byte boundaries,
    with batch invariance and without, and of its ceiling."""
    from online_softmax.cuda import row_launch

    x = torch.empty((cell.rows, cell.cols), dtype=getattr(torch, cell.dtype), device="meta")
    problem = Problem(cell.rows, cell.cols, cell.dtype, arch=arch)
    cuts = [rowchoice.chosen(cell.op, problem)]
    if further := rowchoice.few(cell.op, problem):
        cuts.append(further)
    is_lse = cell.op == "logsumexp"
    matrices = 1 if is_lse else 3 if cell.op in rowplan.BACKWARD else 2
    l2_bytes = problem.facts.l2_bytes
    streams = rowplan.leaves_l2(x.numel() * x.itemsize * matrices, l2_bytes)
    work = []
    for row in cuts:
        if cell.op in rowplan.BACKWARD:
            work += row_launch.backward(cell.op, x, x, x, 1.0, False, row, streams)
        else:
            y = x[:, :1] if is_lse else x
            work += row_launch.forward(cell.op, x, y, 1.0, False, row, streams)
    ceiling = ("read", "copy", "add")[matrices - 1]
    return [*((each.file, each.symbol) for each in work), (ceilings.FILE, ceiling)]


def tasks(cells: Iterable[Cell], rivals: Sequence[str], arch: str) -> list[Task]:
    """Everything that the cells run and that must be compiled, each once; ours first."""
    ours: dict[Task, None] = {}
    theirs: dict[tuple[Any, ...], Task] = {}
    for cell in cells:
        if cell.is_fused:
            for line in contenders.contenders(cell, tuple(rivals)):
                if line.kind == "ours" or line.name in COMPILED:
                    ours[Task(line.name, cell=cell)] = None
            continue
        compiled = [(ceilings.FILE, name) for name in LOSS_CEILINGS] if cell.is_loss else None
        for file, symbol in compiled or kernels(cell, arch):
            ours[Task("ours", (file, symbol, arch))] = None
        for name in losscontenders.ours_in(cell.op) if cell.is_loss else ():
            ours[Task(name, cell=cell)] = None
        for name in rivals:
            if name in COMPILED and cell.has_rivals and not _lacks(name, cell.op):
                rows = cell.rows if name in BY_ROWS else 0
                op = WRITING[0] if cell.op in WRITING else cell.op  # the same call of a rival
                theirs.setdefault((name, op, cell.dtype, cell.cols, rows), Task(name, cell=cell))
    # The longest first: what is left at the end is short.
    order = sorted(theirs.values(), key=lambda task: COMPILED.index(task.name))
    return [*ours, *order]


def _lacks(name: str, op: str) -> bool:
    if name == "tutorial":
        return op != "softmax"
    has = ("softmax", "softmax_backward", *(op for op in LOSS_OPS if op != "token_stats"))
    return name != "compile" and op not in has


# ---- one task, in a process of its own


def do(task: Task, device: str = "cuda") -> str:
    """Compile; "" or why a call failed, on one line. A kernel of ours that does not compile is an
    error."""
    if task.cell is None:
        from online_softmax import jit

        jit.compile(*task.kernel)
        return ""
    if task.cell.is_fused:
        return _said(lambda: _fused(task, torch.device(device)), device)
    cell, dtype = task.cell, getattr(torch, task.cell.dtype)
    tensors = [torch.zeros(cell.rows, cell.cols, dtype=dtype, device=device)]
    if cell.op in rowplan.BACKWARD:
        tensors.append(torch.zeros_like(tensors[0]))
    if cell.is_loss:
        tensors.append(torch.zeros(cell.rows, dtype=torch.int64, device=device))
    out = tensors[0].new_empty(cell.rows) if cell.op == "logsumexp" else tensors[0]
    _, ours, theirs = makers(cell.op)
    return _said(lambda: (ours if task.name in ours else theirs)[task.name](cell.op)(*tensors, out),
                 device)  # fmt: skip


def _said(call: Callable[[], Any], device: str) -> str:
    """Call; "" or why it failed, on one line."""
    try:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    except Refusal as refusal:
        return str(refusal)
    except Exception as error:  # noqa: BLE001  a call may fail in any way: its row will say so
        return one_line(error)
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
    return ""


def _fused(task: Task, device: torch.device) -> None:
    """Call a contender of a cell that is more than a matrix, once."""
    cell = task.cell
    assert cell is not None  # noqa: S101  for mypy: `do` has looked
    lines = contenders.contenders(cell, contenders.KNOWN)
    call = next(line for line in lines if line.name == task.name).make()
    if cell.op != LINEAR:
        call(*fusedcells.made(cell, Arena(), 1, device)[0])
        return
    x, weight, target = linear.inputs(linearcells.work_of(cell), device)
    gradients.of(lambda a, b: call(a, b, target), x, weight)


def _begin() -> None:
    """A process compiles by itself: it does not start further ones."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)


# ---- all of them


def task_bytes(task: Task) -> int:
    """Device memory that a task takes, its process's share included."""
    if task.cell is None:
        return 0
    if task.cell.is_fused:
        return CONTEXT_BYTES + task.cell.memory_bytes(1, 0)
    elements = task.cell.rows * task.cell.cols
    working = 2 * ITEM_BYTES[task.cell.dtype] + WORKING_BYTES.get(task.cell.op, 0)
    return CONTEXT_BYTES + task.cell.ideal_bytes + elements * working


def workers(todo: Sequence[Task], asked: int, free_bytes: int) -> int:
    """How many processes: as many as asked for, fewer where device memory would run out."""
    most = max(map(task_bytes, todo), default=0)
    fit = free_bytes // most if most else asked
    return max(min(asked, fit, len(todo)), 1)


def pool(count: int) -> Executor:
    """Processes that share nothing with this one: CUDA does not survive a fork."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin)


def prepare(
    todo: Sequence[Task],
    count: int,
    seconds: float = float("inf"),
    tell: Callable[[str, int, int], None] | None = None,
    make_pool: Callable[[int], Executor] = pool,
    one: Callable[[Task], str] = do,
) -> Prepared:
    """Do tasks in `count` processes, and begin none after so many seconds.

    Args:
        todo: what to compile.
        count: processes.
        seconds: the limit.
        tell: is told the next task's text, how many are done, how many there are.
        make_pool: the processes; a test has its own.
        one: does a task and returns why it refused, or "".

    Raises:
        CompileError: a kernel of ours does not compile.
    """
    begun = time.perf_counter()
    refused: list[str] = []
    done = 0
    executor = make_pool(count)
    waiting = list(reversed(todo))
    running: dict[Future[str], Task] = {}
    try:
        while waiting or running:
            left = seconds - (time.perf_counter() - begun)
            if left <= 0:
                break
            # Two tasks a process: none waits, and few have begun when the seconds are over.
            while waiting and len(running) < 2 * count:
                try:
                    running[executor.submit(one, waiting[-1])] = waiting[-1]
                except BrokenProcessPool:  # since the last look: what runs will say so
                    if running:
                        break
                    executor = make_pool(count)
                else:
                    waiting.pop()
            found, _ = wait(running, min(left, 5.0), return_when="FIRST_COMPLETED")
            for each in found:
                task = running.pop(each)
                try:
                    why = each.result()
                except BrokenProcessPool:  # and what ran beside it, which later runs compile
                    why = "a process died"
                done += 1
                if why:
                    refused.append(f"{task.text}: {why}")
                if tell:
                    tell(task.text, done, len(todo))
            if any(isinstance(each.exception(), BrokenProcessPool) for each in found):
                for task in running.values():
                    refused.append(f"{task.text}: a process died")
                done, running = done + len(running), {}
                executor = make_pool(count)
    finally:
        executor.shutdown(wait=not running, cancel_futures=True)
    spent = time.perf_counter() - begun
    return Prepared(done - len(refused), tuple(refused), len(todo) - done, spent)


def here(cells: Sequence[Cell], rivals: Sequence[str], asked: int) -> tuple[list[Task], int]:
    """The tasks of cells for the GPU that is here, and how many processes should do them."""
    from online_softmax import jit

    todo = tasks(cells, rivals, jit.device_arch())
    return todo, workers(todo, asked or os.cpu_count() or 1, torch.cuda.mem_get_info()[0])
