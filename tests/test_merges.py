"""merge and merge_outputs inside torch: routes, gradients of both orders, opcheck, compile,
transforms, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, func
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from ce_kit import needs_compiler, ran  # noqa: F401  the fixture
from merge_kit import BASE, INF, KINDS, NAN, Given, kernels, parts, same, upstream
from online_softmax import OutputState, State, library, merge, merge_outputs
from online_softmax.library import merges
from online_softmax.reference import parts as reference
from online_softmax.reference.parts import Merged, Parts
from rows_kit import GPU, Tagged, gpu

F32, F64 = torch.float32, torch.float64
close = torch.testing.assert_close
OP = torch.ops.online_softmax.merge.default
BACKWARD = torch.ops.online_softmax.merge_backward.default


def by_public(given: Parts) -> Merged:
    """The same by the functions that people call."""
    ms, ds, os, base = given
    none = torch.empty(0)
    if base:
        out, lse = merge_outputs(*zip(os, ms, strict=True), base=base)
        return Merged(lse, none, out)
    if os:
        return Merged(*merge(*(OutputState(*each) for each in zip(ms, ds, os, strict=True))))
    return Merged(*merge(*(State(*each) for each in zip(ms, ds, strict=True))), none)


def leaves(given: Parts) -> list[Tensor]:
    """Its tensors, to be differentiated by; the parts hold them."""
    return [t.requires_grad_() for each in given[:3] for t in each]


def finite(merged: Merged) -> list[Tensor]:
    """What means something: rows without a key have no gradient."""
    there = merged.m != -INF
    return [t[there] for t in merged if t.numel()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_op", [False, True])
def test_gradients_of_both_orders(kind: str, by_op: bool) -> None:
    """In float64, by torch operations and by the op."""
    dim = 0 if kind == "states_alone" else 2
    given = parts(kind, 3, (4,), dim, F64, "cpu").double()
    ms = [torch.where(m == -INF, m, torch.randn(4, dtype=F64)) for m in given.ms]
    given = Given(ms, *given[1:])
    are_empty = [m == -INF for m in given.ms]
    floats = leaves(given.each(lambda t: t.nan_to_num(1.0, 0.0, 0.0)))

    def function(*tensors: Tensor) -> list[Tensor]:
        moved = merges._parts(3, given.base, tensors)
        ms = [torch.where(gone, -INF, m) for gone, m in zip(are_empty, moved.ms, strict=True)]
        moved = moved._replace(ms=ms)
        found = Merged(*OP(*moved)) if by_op else by_public(moved)
        m, *rest = finite(found)
        # m alone has a corner where two parts meet; what is made of a state has none.
        return [m, *rest] if given.base else [m + rest[0].log(), *rest]

    assert gradcheck(function, floats)
    assert gradgradcheck(function, floats)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_by_formula_is_torchs(kind: str) -> None:
    dim = 0 if kind == "states_alone" else 3
    given = parts(kind, 4, (9,), dim, F32, "cpu").double()
    given = Given(*([torch.where(t.isnan(), 7.0, t) for t in each] for each in given[:3]),
                  given.base)  # fmt: skip
    floats = leaves(given)
    whole = reference.forward(given)
    above = upstream(whole)
    there = whole.m != -INF
    loss = sum(
        (t[there] * g[there]).sum() for t, g in zip(whole, above, strict=True) if g is not None
    )
    by = torch.autograd.grad(loss, floats)
    zeroed = [g if g is None else torch.where(there if g.shape == there.shape else there[..., None],
                                              g, 0.0) for g in above]  # fmt: skip
    found = merges._split(reference.backward(*zeroed, given))
    for one, want in zip(found, by, strict=True):
        close(one.detach(), want)


def test_equal_parts_have_equal_shares_of_the_maximum() -> None:
    m = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=F64)
    one = torch.ones(1, dtype=F64)
    given = Parts([m[i : i + 1] for i in range(4)], [one] * 4, [], "")
    found = reference.backward(one, None, None, given)
    close(found.m.flatten(), torch.tensor([1 / 3, 1 / 3, 0, 1 / 3], dtype=F64))


@kernels
@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_the_public_functions_take_the_kernels(kind: str, place: str, ran: list[str]) -> None:  # noqa: F811
    """Values and gradients are the reference's; the second order is torch's."""
    dim = 0 if kind == "states_alone" else 8
    given = parts(kind, 3, (7,), dim, F32, place, empties=kind in BASE)
    if kind in BASE:
        given = given._replace(os=[o.nan_to_num(0.0) for o in given.os])
    floats = leaves(given)
    found, want = by_public(given), reference.forward(given)
    if place == "cpu":
        assert ran == ["merge_forward"]
    same(found, want, given, 1e-5)
    above = [g for g in upstream(found) if g is not None]
    results = [
        torch.autograd.grad(finite(each), floats, [g[want.m != -INF] for g in above],
                            create_graph=True)
        for each in (found, want)
    ]  # fmt: skip
    for one, other in zip(*results, strict=True):
        close(one, other, rtol=1e-4, atol=1e-5)
    seconds = [torch.autograd.grad(sum(g.square().sum() for g in each), floats) for each in results]
    for one, other in zip(*seconds, strict=True):
        close(one, other, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert not by_public(given).m.requires_grad


@needs_compiler
def test_an_ordinary_backward_takes_the_kernel(ran: list[str]) -> None:  # noqa: F811
    given = parts("pairs_e", 3, (7,), 8, torch.float16, "cpu", empties=False)
    floats = leaves(given)
    out, _ = merge_outputs(*zip(given.os, given.ms, strict=True), base="e")
    out.sum().backward()
    assert ran == ["merge_forward", "merge_backward"]
    assert [t.grad.dtype for t in floats] == [F32] * 3 + [torch.float16] * 3


@needs_compiler
def test_any_number_of_states(ran: list[str]) -> None:  # noqa: F811
    """Past what a launch takes, in groups; of one, itself."""
    given = parts("states", 131, (3,), 4, F32, "cpu")
    found = by_public(given)
    same(found, reference.forward(given.double()), given, 1e-5)
    assert ran == ["merge_forward"] * 4
    pairs = parts("pairs_e", 66, (3,), 4, F32, "cpu")
    same(by_public(pairs), reference.forward(pairs.double()), pairs, 1e-5)
    one = State.of(torch.tensor([1.0, 5.0]))
    assert merge(one) == one


@pytest.mark.parametrize(("kind", "grad"), [("states", True), ("states_alone", False),
                                            ("pairs_2", True)])  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_opcheck(kind: str, device: str, grad: bool) -> None:
    given = parts(kind, 3, (4, 2), 0 if kind == "states_alone" else 5, F32, device, empties=False)
    lists = [[t.requires_grad_(grad) for t in each] for each in given[:3]]
    opcheck(OP, (*lists, given.base))
    above = upstream(OP(*given))
    names = ("test_schema", "test_faketensor", "test_autograd_registration")
    opcheck(BACKWARD, (*above, *lists, given.base), test_utils=names)
    if kind == "pairs_2":
        opcheck(BACKWARD, (*above, *lists, given.base), test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("kind", ["states", "pairs_e"])
def test_fullgraph_compile(kind: str, device: str) -> None:
    """By the public functions; and the op itself, which CUDA tensors take."""
    torch._dynamo.reset()
    given = parts(kind, 3, (7,), 8, F32, device, empties=False)
    floats = leaves(given)
    for function in (by_public, lambda p: Merged(*OP(*p))):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        results = [f(given) for f in (compiled, reference.forward)]
        close(*([t for t in each if t.numel()] for each in results), rtol=1e-5, atol=1e-5)
        sums = [sum(t.square().sum() for t in each) for each in results]
        close(*(torch.autograd.grad(each, floats) for each in sums), rtol=1e-4, atol=1e-4)


def test_transforms() -> None:
    """The public functions in all of them; the op in batches."""
    given = parts("pairs_e", 3, (5, 4), 3, F64, "cpu", empties=False).double()
    flat = merges._flat(given)

    def function(call: Callable[..., Any], *tensors: Tensor) -> Tensor:
        return Merged(*call(merges._parts(3, "e", tensors))).o

    ours = lambda *t: function(by_public, *t)  # noqa: E731
    each = torch.stack([ours(*(t[i] for t in flat)) for i in range(5)])
    close(torch.vmap(ours)(*flat), each)
    by_op = lambda *t: function(lambda p: OP(*p), *t)  # noqa: E731
    close(torch.vmap(by_op)(*flat), each)
    some = (None, *(0,) * 5)
    close(torch.vmap(by_op, some)(flat[0][0], *flat[1:]),
          torch.vmap(ours, some)(flat[0][0], *flat[1:]))  # fmt: skip
    loss = lambda *t: ours(*t).square().sum()  # noqa: E731
    got = torch.vmap(func.grad(loss, (0, 4)))(*flat)
    want = torch.autograd.grad(loss(*(leaf := [t.detach().requires_grad_() for t in flat])),
                               (leaf[0], leaf[4]))  # fmt: skip
    close(got, want)
    _, tangent = func.jvp(ours, flat, flat)
    assert tangent.isfinite().all()
    hessian = func.hessian(loss)(*flat)
    assert hessian.isfinite().all()


@needs_compiler
def test_a_batch_of_gradients(ran: list[str]) -> None:  # noqa: F811
    given = parts("pairs_e", 3, (4,), 3, F32, "cpu", empties=False)
    floats = leaves(given)
    out, lse = merge_outputs(*zip(given.os, given.ms, strict=True), base="e")
    above = torch.randn(2, *out.shape), torch.randn(2, *lse.shape)
    got = torch.autograd.grad((out, lse), floats, above, is_grads_batched=True, retain_graph=True)
    for at in range(2):
        one = torch.autograd.grad((out, lse), floats, [g[at] for g in above], retain_graph=True)
        close([g[at] for g in got], list(one), rtol=1e-5, atol=1e-6)


def test_subclasses_and_what_nothing_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    state = OutputState(*(t.as_subclass(Tagged) for t in (torch.zeros(2), torch.ones(2),
                                                            torch.ones(2, 3))))  # fmt: skip
    assert type(merge(state, state).o) is Tagged
    none = OutputState(torch.full((2,), -INF), torch.full((2,), NAN), torch.full((2, 3), NAN))
    plain = OutputState(*(t.as_subclass(Tensor) for t in state))
    for merged in (merge(plain, none), merge(none, plain)):
        assert all(torch.equal(a, b) for a, b in zip(merged, plain, strict=True))
    seen: list[Parts] = []
    monkeypatch.setattr(merges, "merge", lambda p: (seen.append(p), reference.forward(p))[1])
    outs, lses = torch.randn(3, 2, 4), torch.randn(3, 2)
    library.merge_pairs(list(zip(outs, lses, strict=True)), "2")
    assert seen[0].os[1].data_ptr() == outs[1].data_ptr()  # stacked: no copy


@gpu
def test_a_graph() -> None:
    given = parts("pairs_e", 3, (40,), 64, torch.bfloat16, "cuda", empties=False)
    floats = leaves(given)

    def step() -> tuple[Tensor, ...]:
        merged = by_public(given)
        return merged.o, *torch.autograd.grad(merged.o.float().square().sum(), floats)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in floats:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    close(captured, step(), rtol=0, atol=0)
