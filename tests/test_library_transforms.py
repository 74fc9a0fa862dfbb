"""Transforms within transforms, whatever is around them; derivatives of half types to the last bit;
what overrides torch's functions."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from online_softmax import log_softmax, logsumexp, softmax
from rows_kit import EACH, VARIANTS, Tagged, Variant, double

ALL = pytest.mark.parametrize("function", [softmax, log_softmax, logsumexp])


def _compose(*transforms: Callable[..., Any]) -> Callable[..., Any]:
    return lambda f: functools.reduce(lambda inner, outer: outer(inner), transforms, f)


AROUND: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "nothing": contextlib.nullcontext,
    "default device": lambda: torch.device("cpu"),
    "function mode": BaseTorchFunctionMode,
    "subclass": contextlib.nullcontext,
    "trace": contextlib.nullcontext,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    "transforms",
    [*itertools.product((func.jacfwd, func.jacrev), repeat=2),
     (func.jacrev, func.jacfwd, func.jacfwd), (func.jacfwd,) * 3, (func.grad, torch.vmap)],
    ids=lambda transforms: "-".join(t.__name__ for t in transforms),
)  # fmt: skip
@EACH
def test_transforms_nest(
    variant: Variant, transforms: tuple[Callable[..., Any], ...], around: str
) -> None:
    """Also with a default device set, in other modes, in a subclass and under make_fx."""
    x = double(2, 2, 3) if torch.vmap in transforms else double(2, 3)
    ours = _compose(*transforms)(lambda v: (variant.ours(v) ** 3).sum())
    want = _compose(*transforms)(lambda v: (variant.torchs(v) ** 3).sum())(x)
    if around == "trace":
        ours = make_fx(ours)(x)
        names = {str(node.target) for node in ours.graph.nodes}
        assert f"online_softmax.{variant.op}.default" in names
    with AROUND[around]():
        got = ours(x.as_subclass(Tagged) if around == "subclass" else x)
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(got.as_subclass(Tensor), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transform", [func.jacfwd, func.jacrev])
@EACH
def test_half_types_below_transforms(variant: Variant, transform: Any, dtype: torch.dtype) -> None:
    """The op, which a subclass must see, is no worse there than the kernels themselves."""
    x = double(3, 5).to(dtype)
    got = transform(variant.ours)(x.as_subclass(Tagged)).as_subclass(Tensor)
    assert got.dtype == dtype
    assert torch.equal(got, transform(variant.ours)(x))


# ---- rounding


def _derivatives(op: str, x: Tensor, y: Tensor, w: Tensor, v: Tensor) -> dict[str, list[Tensor]]:
    """The tangent of v; of the gradient dx, upstream w, those by w and by x, upstream v.

    In float64 from what backward starts from; each as terms that are rounded one by one.
    """

    def total(t: Tensor) -> Tensor:
        return t.sum(-1, keepdim=True)

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).double()

    dtype = y.dtype
    x, y, w, v = (t.detach().double() for t in (x, y, w, v))
    if op == "logsumexp":  # lse is kept before it is rounded
        p = torch.softmax(x, -1)
        tangent = (v * p).sum(-1)
        terms = [v * p * w[:, None], -p * total(v * p * w[:, None])]
        return {"tangent": [tangent], "by_w": [tangent], "by_x": terms}
    if op == "log_softmax":
        p = y.exp()
        tangent = v - total(v * p)
        by_y = rounded(-v * p * total(w))
        return {"tangent": [tangent], "by_w": [tangent], "by_x": [by_y - p * total(by_y)]}
    tangent = y * (v - total(v * y))
    by_y = rounded(v * (w - total(w * y)) - w * total(v * y))
    return {"tangent": [tangent], "by_w": [tangent], "by_x": [y * (by_y - total(by_y * y))]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp"])
def test_half_derivatives_are_rounded_once(op: str, dtype: torch.dtype) -> None:
    """Forward mode and double backward against the same formulas in float64."""
    function = VARIANTS[op].ours
    for cols in (7, 33, 500):
        x, w, v = (double(3, cols).roll(i, 1).mul(1 + i).to(dtype) for i in range(3))
        w = (w[:, 0] if op == "logsumexp" else w).requires_grad_()
        y = function(x.requires_grad_())
        (dx,) = torch.autograd.grad(y, x, w, create_graph=True)
        by_w, by_x = torch.autograd.grad(dx, (w, x), v)
        tangent = func.jvp(function, (x.detach(),), (v,))[1]
        wanted = _derivatives(op, x, y, w, v)
        for name, got in (("tangent", tangent), ("by_w", by_w), ("by_x", by_x)):
            assert got.dtype == dtype
            # An ulp where float64 and float32 round to different sides, and what they cancel.
            terms = wanted[name]
            want, size = sum(terms), sum(term.abs() for term in terms)
            info = torch.finfo(dtype)
            allowed = info.eps * (size + info.smallest_normal) + 1e-6 * size.max()
            assert ((got.double() - want).abs() <= allowed).all(), (name, cols)


# ---- the backward below autograd


@EACH
def test_a_backward_that_a_mode_must_see(variant: Variant) -> None:
    """The forward ran without the mode: it is the gradient alone that the mode sees."""
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = double(3, 4, grad=True)
    y = variant.ours(x)
    (want,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert seen == []
    with Mode():
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert f"online_softmax.{variant.op}_backward.default" in seen
    assert torch.equal(dx, want)


# ---- what overrides torch's functions


@ALL
def test_what_overrides_torch_functions_is_asked(function: Callable[..., Tensor]) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x, 0, scale=0.5, empty="zero", kernel="reference") * 2

    traced = torch.fx.symbolic_trace(Model())
    (node,) = (node for node in traced.graph.nodes if node.target is function)
    assert node.args[1] == 0
    wanted = {"scale": 0.5, "empty": "zero", "kernel": "reference"}
    assert {name: node.kwargs[name] for name in wanted} == wanted
    x = torch.randn(3, 4)
    torch.testing.assert_close(traced(x), Model()(x))
    with torch.device("cpu"), pytest.raises(TypeError, match="must be a Tensor, got list"):
        function([1.0])


def test_every_argument_reaches_what_overrides() -> None:
    class Recorder:
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function, args[1:], kwargs

    given = {"dtype": torch.float16, "scale": 2.0, "out": None, "empty": "zero", "kernel": "torch"}
    for function in (softmax, log_softmax):
        assert function(Recorder(), 1, **given) == (function, (1,), given)
    given = {"scale": 2.0, "empty": "zero", "kernel": "torch"}
    got = logsumexp(Recorder(), (0, 1), True, **given)
    assert got == (logsumexp, ((0, 1), True), given)
