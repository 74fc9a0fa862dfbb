"""Cells of losses without a GPU: how each contender is called, and what overwrites its input."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import online_softmax
from bench_kit import setting
from online_softmax.lab import buffersets, ceilings, contenders, grid, losscontenders, opbench
from online_softmax.lab.benchfile import Row
from online_softmax.lab.contenders import Contender
from online_softmax.lab.grid import Cell
from online_softmax.lab.refusal import Refusal
from online_softmax.lab.rotation import Overwrites


def cell(op: str, dtype: str = "float32") -> Cell:
    return Cell(op, dtype, 5, 40)


def measured(here: Cell, *names: str, **more) -> Row:
    """The cell with some of its contenders and a ceiling that does nothing."""
    found = [line for line in contenders.contenders(here, names) if line.kind != "ceiling"]
    ceiling = Contender("ceiling", "ceiling", lambda: lambda *tensors: None)
    return opbench.measure(here, [ceiling, *found], setting(**more))


@pytest.mark.parametrize("op", grid.LOSS_OPS)
@pytest.mark.parametrize("dtype", grid.DTYPES)
def test_ours_and_torch_are_right(op: str, dtype: str):
    row = measured(cell(op, dtype), "torch", us={"ours": 10.0, "torch": 30.0})
    for name, us in (("ours", 10.0), ("torch", 30.0)):
        entry = row.entry(name)
        assert entry.ok, entry.why
        assert (entry.median_us, entry.clock) == (us, "graph")
        assert 0 <= entry.share_mean <= entry.share_max < 0.01
    assert row.ideal_bytes == cell(op, dtype).ideal_bytes
    assert row.is_right


@pytest.mark.parametrize("op", grid.LOSS_OPS)
def test_a_cell_has_the_lines_that_it_should(op: str):
    found = contenders.contenders(cell(op), ("torch", "compile", "quack", "liger"))
    ours = ["ours", "ours, in place"] if op == "cross_entropy_in_forward" else ["ours"]
    names = ["ceiling", *ours, "torch", "compile", "quack", "liger"]
    assert [line.name for line in found] == names
    writes = op in ("cross_entropy_both", "cross_entropy_in_forward")
    assert [line.allocates for line in found] == [False] + [writes] * len(ours) + [True] * 4


def test_the_public_function_is_what_is_timed(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def cross_entropy(x, target, **options):
        seen.append((x.requires_grad, options))
        return functional.cross_entropy(x, target)

    monkeypatch.setattr(online_softmax, "cross_entropy", cross_entropy)
    for op in grid.LOSS_OPS[:3]:
        del seen[:]
        assert measured(cell(op)).entry("ours").ok
        in_forward = op == "cross_entropy_in_forward"
        wanted = {} if op == "cross_entropy" else {"grad_in_forward": in_forward}
        lines = [wanted, {**wanted, "overwrite_logits": True}][: 1 + in_forward]
        assert set(map(str, seen)) == {str((op != "cross_entropy", each)) for each in lines}


def test_ceilings(monkeypatch: pytest.MonkeyPatch):
    launched = []
    for name in ("read", "copy"):
        seen = lambda *tensors, name=name: launched.append(name)  # noqa: E731
        monkeypatch.setattr(ceilings, f"{name}_call", seen)
    wanted = {"cross_entropy": ["read"], "cross_entropy_both": ["read", "copy"],
              "cross_entropy_in_forward": ["copy"], "token_stats": ["read"]}  # fmt: skip
    for op, symbols in wanted.items():
        x, target, last = buffersets.buffers(cell(op), setting()).sets[0]
        losscontenders.CEILING[op](x, target, last)
        assert launched == symbols
        launched.clear()


def test_targets_are_classes_of_each_set_s_own():
    sets = buffersets.buffers(cell("cross_entropy"), setting()).sets
    targets = torch.stack([target for _, target, _ in sets])
    assert targets.dtype == torch.int64
    assert 0 <= int(targets.min()) < int(targets.max()) < 40
    assert not torch.equal(targets[0], targets[1])


# ---- what overwrites its input


def spoiling(op: str, seen: list[Tensor]) -> Overwrites:
    """The right gradient, written where the logits were."""
    right = losscontenders._torch(op)

    def call(x: Tensor, target: Tensor, dx: Tensor) -> Tensor:
        seen.append(x.clone())
        return x.copy_(right(x.clone(), target, dx))

    return Overwrites(call)


def test_input_that_is_overwritten_is_there_again_for_each_call_and_contender():
    here, seen, others = cell("cross_entropy_both"), [], []
    right = losscontenders._torch(here.op)

    def plain(x: Tensor, target: Tensor, dx: Tensor) -> Tensor:
        others.append(x.clone())
        return right(x, target, dx)

    lines = [
        Contender("ceiling", "ceiling", lambda: lambda *tensors: None),
        Contender("spoils", "rival", lambda: spoiling(here.op, seen)),
        Contender("ours", "ours", lambda: plain),
    ]
    room = setting(uncaptured=["spoils"])
    given = [tensors[0].clone() for tensors in buffersets.buffers(here, room).sets]
    row = opbench.measure(here, lines, room)
    assert [entry.ok for entry in row.entries[1:]] == [True, True], row
    assert row.entry("spoils").clock == "do_bench"
    judged, *rounds, by_do_bench = seen
    assert all(
        torch.equal(a, b) for a, b in zip([given[0], *given], [judged, *rounds], strict=True)
    )
    assert torch.equal(by_do_bench, given[0])
    assert all(any(torch.equal(x, each) for each in given) for x in others)
    left = buffersets.buffers(here, room).sets
    assert all(torch.equal(a, tensors[0]) for a, tensors in zip(given, left, strict=True))


def test_a_wrong_result_in_the_input_s_place_is_seen():
    here = cell("cross_entropy_both")

    def call(x: Tensor, target: Tensor, dx: Tensor) -> Tensor:
        return x.zero_()

    ceiling = Contender("ceiling", "ceiling", lambda: lambda *tensors: None)
    spoils = Contender("spoils", "rival", lambda: Overwrites(call))
    row = opbench.measure(here, [ceiling, spoils], setting())
    assert row.entry("spoils").why.startswith("wrong: from row 0 on [")


def test_in_place_gets_logits_that_are_no_leaf_and_no_view(monkeypatch: pytest.MonkeyPatch):
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, target):
            ctx.save_for_backward(dx := torch.softmax(x, -1))
            dx[torch.arange(len(x)), target] -= 1
            loss = functional.cross_entropy(x, target)
            x.detach().copy_(dx / len(x))
            ctx.made = x.detach()
            return loss

        @staticmethod
        def backward(ctx, dloss):
            return ctx.made * dloss, None

    def cross_entropy(x, target, *, grad_in_forward, overwrite_logits=False):
        assert grad_in_forward
        if not overwrite_logits:
            return functional.cross_entropy(x, target)
        assert x.requires_grad
        assert not x.is_leaf
        assert not x._is_view()
        return Loss.apply(x, target)

    monkeypatch.setattr(online_softmax, "cross_entropy", cross_entropy)
    row = measured(cell("cross_entropy_in_forward"), "torch")
    assert row.entry("ours, in place").ok, row.entry("ours, in place").why
    assert row.entry("torch").ok


# ---- rivals


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """quack and liger as torch's function; what was asked of them, and whether with a gradient."""
    found: list[tuple[str, bool]] = []

    def rival(name: str):
        def loss(x: Tensor, target: Tensor, reduction: str) -> Tensor:
            assert (x.dim(), target.dtype, reduction) == (2, torch.int64, "mean")
            found.append((name, x.requires_grad))
            return functional.cross_entropy(x, target)

        return loss

    functions = "liger_kernel.transformers.functional"
    modules: dict[str, dict] = {"quack": {}, "liger_kernel": {}, "liger_kernel.transformers": {}}
    modules |= {"quack.cross_entropy": {"cross_entropy": rival("quack")}}
    modules |= {functions: {"liger_cross_entropy": rival("liger")}}
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return found


@pytest.mark.parametrize("op", grid.LOSS_OPS[:3])
def test_how_quack_and_liger_are_called(op: str, asked: list[tuple[str, bool]]):
    row = measured(cell(op), "quack", "liger")
    assert [(name, row.entry(name).ok) for name in ("quack", "liger")] == [
        ("quack", True), ("liger", True)
    ]  # fmt: skip
    wants_gradient = op != "cross_entropy"
    assert set(asked) == {("quack", wants_gradient), ("liger", wants_gradient)}
    call = losscontenders.RIVALS["liger"](op)
    assert isinstance(call, Overwrites) is wants_gradient


def test_what_rivals_lack_is_a_sentence():
    for name in ("quack", "liger"):
        with pytest.raises(Refusal, match=f"{name} has no token_stats"):
            losscontenders.RIVALS[name]("token_stats")


def test_a_rival_that_refuses_is_a_row(monkeypatch: pytest.MonkeyPatch, asked: list):
    def refusing(*given, **options):
        raise AssertionError("Input N 50257 is not divisible by vector size 8")

    monkeypatch.setattr(sys.modules["quack.cross_entropy"], "cross_entropy", refusing)
    row = measured(cell("cross_entropy_both"), "torch", "quack")
    quack = row.entry("quack")
    assert (quack.ok, quack.median_us) == (None, None)
    assert quack.why == "AssertionError: Input N 50257 is not divisible by vector size 8"
    assert row.entry("torch").ok


def test_what_torch_compile_is_given(monkeypatch: pytest.MonkeyPatch):
    given = []

    def compiled(function, **options):
        given.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    for op in grid.LOSS_OPS:
        assert measured(cell(op), "compile").entry("compile").ok
    assert given == [{"dynamic": False}] * len(grid.LOSS_OPS)
