"""Compiling before measuring: what there is to compile, in how many processes, what is told."""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from online_softmax.cuda import row_launch
from online_softmax.lab import cli, contenders, grid, prepare
from online_softmax.lab.grid import Cell
from online_softmax.lab.prepare import Task

ARCH = "sm_90a"
BIG, FEW = Cell("softmax", "bfloat16", 32768, 4096), Cell("softmax", "bfloat16", 4, 1024)
RIVALS = ("torch", "compile", "quack", "liger")


@pytest.mark.parametrize("op", grid.OPS)
def test_kernels_are_those_that_a_launch_takes(op: str):
    """The widths of a tuning table, whole rows and others, few rows and many."""
    known = set(row_launch.instances(ARCH, (4096, 50257, 4194304), (torch.bfloat16,)))
    for cols in (4096, 50257, 4194304):
        *found, ceiling = prepare.kernels(Cell(op, "bfloat16", grid.WHOLE // cols, cols), ARCH)
        assert set(found) <= known, cols
        assert found
        assert ceiling[0] == "ceilings.cu"


def test_few_rows_stay_in_the_l2_and_take_another_kernel():
    big, few = (prepare.kernels(Cell("softmax", "float32", n, 4096), ARCH)[0] for n in (32768, 4))
    assert big != few
    assert "true" in big[1]


def test_few_rows_take_what_runs_with_batch_invariance_and_without():
    cells = [Cell("softmax", "bfloat16", rows, 32000) for rows in (4, 64)]
    (one, other, _), (alone, _) = (prepare.kernels(cell, ARCH) for cell in cells)
    assert [symbol.split(", ")[2] for _, symbol in (one, other, alone)] == ["8", "4", "8"]
    compiled = row_launch.instances(ARCH, (32000,), (torch.bfloat16,))  # of large matrices
    assert {(file, name.replace("false, E", "true, E")) for file, name in (one, other)} <= {
        *compiled
    }
    split = prepare.kernels(Cell("softmax", "float32", 1, 1048576), ARCH)
    assert [file for file, _ in split] == ["split.cu", "split.cu", "ceilings.cu"]


def test_tasks_are_each_once_and_torch_has_none():
    cells = [BIG, BIG, FEW, Cell("softmax", "bfloat16", 8, 1024)]
    todo = prepare.tasks(cells, RIVALS, ARCH)
    assert len(set(todo)) == len(todo)
    assert {task.name for task in todo} == {"ours", "compile", "quack", "liger"}
    assert [task.cell for task in todo if task.name == "compile"] == [
        BIG,
        FEW,
    ]  # 8 rows: torch alone
    kernels = [task.kernel[:2] for task in todo if task.name == "ours"]
    assert ("ceilings.cu", "copy") in kernels


def test_only_torch_compile_makes_code_for_a_number_of_rows():
    cells = [Cell("softmax", "float32", rows, 32001) for rows in (1, 2, 4)]
    names = [task.name for task in prepare.tasks(cells, RIVALS, ARCH)]
    assert (names.count("compile"), names.count("quack"), names.count("liger")) == (3, 1, 1)
    lse = [Cell("logsumexp", "float32", 1, 32001)]
    assert {task.name for task in prepare.tasks(lse, RIVALS, ARCH)} == {"ours", "compile"}


def test_of_losses_the_public_function_is_called_and_rivals_once_for_a_gradient():
    """quack and liger make the same code for any number of rows, and of one gradient one."""
    shapes = [(64, 4096), (32, 4096)]
    cells = grid.cells(grid.LOSS_OPS, ["float32"], shapes)
    todo = prepare.tasks(cells, RIVALS, ARCH)
    names = [(task.name, task.cell.op) for task in todo if task.cell]
    for op in grid.LOSS_OPS:
        assert names.count(("ours", op)) == 2
    assert names.count(("ours, in place", "cross_entropy_in_forward")) == 2
    of_rivals = {name: sorted(op for n, op in names if n == name) for name in RIVALS}
    assert of_rivals == {
        "torch": [],
        "compile": sorted([*grid.LOSS_OPS[:2], "token_stats"] * 2),
        "quack": ["cross_entropy", "cross_entropy_both"],
        "liger": ["cross_entropy", "cross_entropy_both"],
    }
    kernels = {task.kernel for task in todo if task.cell is None}
    assert kernels == {("ceilings.cu", name, ARCH) for name in ("read", "copy")}
    stats = next(task for task in todo if task.cell == Cell("token_stats", "float32", 64, 4096))
    assert prepare.task_bytes(stats) > prepare.CONTEXT_BYTES + 64 * 4096 * 48


def test_losses_are_called_with_logits_and_classes():
    for op in grid.LOSS_OPS:
        for name in ("ours", "torch"):
            assert prepare.do(Task(name, cell=Cell(op, "bfloat16", 3, 40)), "cpu") == ""
    refused = prepare.do(Task("quack", cell=Cell("token_stats", "bfloat16", 3, 40)), "cpu")
    assert refused == "quack has no token_stats"


def test_processes_are_bounded_by_memory():
    task = Task("compile", cell=BIG)  # 512 MiB of x and y, as much again, and a context
    assert prepare.task_bytes(task) == 2 * 2**30
    assert prepare.workers([task] * 9, 16, 8 * 2**30) == 4
    assert prepare.workers([task] * 9, 3, 8 * 2**30) == 3
    assert prepare.workers([task], 16, 2**40) == 1
    assert prepare.workers([Task("ours")] * 9, 4, 1) == 4
    assert prepare.workers([task], 16, 1) == 1


def test_what_refuses_is_told_and_the_rest_is_compiled():
    told: list[tuple[str, int, int]] = []
    todo = [Task("quack", cell=BIG), Task("liger", cell=BIG), Task("compile", cell=FEW)]

    def one(task: Task) -> str:
        return "not that wide" if task.name == "liger" else ""

    done = prepare.prepare(
        todo, 2, tell=lambda *each: told.append(each), make_pool=ThreadPoolExecutor, one=one
    )
    assert (done.compiled, done.left) == (2, 0)
    assert done.refused == ("liger: softmax bfloat16 32768 x 4096: not that wide",)
    assert [each[1:] for each in told] == [(1, 3), (2, 3), (3, 3)]


def test_seconds_end_it():
    todo = [Task("quack", cell=BIG)] * 5
    done = prepare.prepare(todo, 1, 0.0, make_pool=ThreadPoolExecutor, one=lambda task: "")
    assert (done.compiled, done.left) == (0, 5)


def test_a_process_that_dies_takes_its_neighbours_alone():
    class Dying(Executor):
        """The first pool's second task kills it."""

        pools = 0

        def __init__(self, count: int) -> None:
            Dying.pools += 1
            self.submitted = 0

        def submit(self, function, *arguments):
            self.submitted += 1
            future: Future = Future()
            if Dying.pools == 1 and self.submitted == 2:
                future.set_exception(BrokenProcessPool("killed"))
            elif Dying.pools > 1 or self.submitted == 1:
                future.set_result(function(*arguments))
            return future  # of the first pool, the third never ends

        def shutdown(self, wait=True, cancel_futures=False):
            pass

    todo = [Task("quack", cell=Cell("softmax", "float32", 1, 1000 + n)) for n in range(6)]
    done = prepare.prepare(todo, 2, make_pool=Dying, one=lambda task: "")
    assert Dying.pools == 2
    assert (done.compiled, done.left) == (3, 0)
    assert [why.rsplit(": ")[-1] for why in done.refused] == ["a process died"] * 3


def test_a_pool_that_is_found_dead_is_replaced():
    """With a task on its way, which then fails; and with none."""

    class Dead(ThreadPoolExecutor):
        pools, alive = 0, (1, 0)

        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.pool = Dead.pools
            self.left = (*Dead.alive, 99)[self.pool]  # tasks that it takes
            Dead.pools += 1

        def submit(self, function, *arguments):
            self.left -= 1
            if self.left < 0:
                raise BrokenProcessPool("killed")
            future: Future = Future()
            if self.pool == 0:
                future.set_exception(BrokenProcessPool("killed"))
            else:
                future.set_result(function(*arguments))
            return future

    todo = [Task("quack", cell=Cell("softmax", "float32", 1, 1000 + n)) for n in range(4)]
    done = prepare.prepare(todo, 2, make_pool=Dead, one=lambda task: "")
    assert Dead.pools == 3
    assert (done.compiled, done.left, len(done.refused)) == (3, 0, 1)


def test_a_rival_is_called_on_the_cell_s_shape(monkeypatch: pytest.MonkeyPatch):
    seen: list[list[tuple[int, ...]]] = []

    def make(op: str):
        return lambda *tensors: seen.append([tuple(t.shape) for t in tensors])

    monkeypatch.setitem(contenders.RIVALS, "compile", make)
    for op in ("softmax", "softmax_backward", "logsumexp"):
        assert prepare.do(Task("compile", cell=Cell(op, "bfloat16", 3, 40)), "cpu") == ""
    assert seen == [[(3, 40)] * 2, [(3, 40)] * 3, [(3, 40), (3,)]]

    def failing(op: str):
        raise ValueError("cols must\nbe even")

    monkeypatch.setitem(contenders.RIVALS, "quack", failing)
    assert prepare.do(Task("quack", cell=FEW), "cpu") == "ValueError: cols must be even"
    assert prepare.do(Task("quack", cell=Cell("logsumexp", "float32", 3, 40)), "cpu") != ""


def test_processes_for_real():
    """In a process of its own, torch.compile's threads off; what is returned comes back."""
    todo = [Task("absent", cell=Cell("softmax", "float32", 2, 8))]
    done = prepare.prepare(todo, 1, one=_threads)
    assert done.refused == ("absent: softmax float32 2 x 8: threads 1",)


def _threads(task: Task) -> str:
    import os

    return f"threads {os.environ['TORCHINDUCTOR_COMPILE_THREADS']}"


def test_a_rival_that_this_knows_not_compiles_nothing():
    idle = {name for name in contenders.KNOWN if name not in prepare.COMPILED}
    assert idle == {"torch", "flash-attn"}  # which are compiled when they are installed


def test_what_is_more_than_a_matrix_is_called_once():
    """Of a cell each line of ours, and each rival that compiles; a refusal is its row."""
    shapes = {"attention": "1x2x32x16", "attention_backward": "1x2x32x16", "merge": "2x4x16",
              "linear_cross_entropy": "8x8x20"}  # fmt: skip
    cells = [grid.named_cells([op], ["float32"], text)[0] for op, text in shapes.items()]
    todo = prepare.tasks(cells, ("torch", "compile", "liger"), "sm_90a")
    assert [(task.name, task.cell.op) for task in todo] == [
        ("ours", "attention"), ("compile", "attention"), ("ours", "attention_backward"),
        ("compile", "attention_backward"), ("ours", "merge"), ("compile", "merge"),
        ("ours, low", "linear_cross_entropy"), ("ours, fast", "linear_cross_entropy"),
        ("compile", "linear_cross_entropy"), ("liger", "linear_cross_entropy"),
    ]  # fmt: skip
    ours = [task for task in todo if task.name.startswith("ours")]
    assert [prepare.do(task, "cpu") for task in ours] == [""] * len(ours)
    assert prepare.task_bytes(ours[0]) > prepare.CONTEXT_BYTES
    (liger,) = [task for task in todo if task.name == "liger"]
    assert "liger" in prepare.do(liger, "cpu")


def test_preparing_is_told_and_measures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    todo = [prepare.Task("compile", cell=Cell("softmax", "float32", 3, 40))]
    asked = {}

    def here(cells, rivals, workers):
        asked.update(cells=len(cells), rivals=rivals, workers=workers)
        return todo, 3

    def done(todo, count, seconds, tell):
        asked.update(count=count, seconds=seconds)
        tell(todo[0].text, 1, 1)
        return prepare.Prepared(0, ("compile: softmax: too odd",), 2, 1.25)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(prepare, "here", here)
    monkeypatch.setattr(prepare, "prepare", done)
    words = ["bench", "softmax", "--cells", "3x40,2x64", "--dtype", "fp32", "--prepare"]
    words += ["--against", "compile"]
    said = CliRunner().invoke(cli.app, [*words, "--workers", "5", "--seconds", "9"])
    assert said.exit_code == 0, said.output
    assert asked == {"cells": 2, "rivals": ("torch", "compile"), "workers": 5, "count": 3,
                     "seconds": 9.0}  # fmt: skip
    assert said.stdout == ""
    assert said.stderr.splitlines() == [
        "1 things to compile, 3 processes",
        "[1/1] compile: softmax float32 3 x 40",
        "refused: compile: softmax: too odd",
        "0 compiled in 1.2 s, 1 refused, 2 left",
    ]
    saving = CliRunner().invoke(cli.app, [*words, "--save", str(tmp_path / "x.jsonl")])
    assert saving.exit_code == 2
    assert "keeps nothing in --save" in saving.output
