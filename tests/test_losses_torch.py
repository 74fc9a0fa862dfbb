"""cross_entropy inside torch: opcheck, gradients of every kind, vmap, compile, autocast, modes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.fx
from torch import Tensor, func
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import ce_kit
from losses_kit import IGNORED, example, written_out
from online_softmax import cross_entropy
from rows_kit import DEVICES, Tagged

ran, place = ce_kit.ran, ce_kit.place  # fixtures
close = torch.testing.assert_close
OP = torch.ops.online_softmax.cross_entropy.default
BACKWARD = torch.ops.online_softmax.cross_entropy_backward.default
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {
        "label_smoothing": 0.1,
        "z_loss": 0.1,
        "softcap": 3.0,
        "scale": 1.3,
        "return_lse": True,
    },
    "rows": {"reduction": "none", "z_loss": 0.2},
}
EACH = pytest.mark.parametrize("name", OPTIONS)


def _call(name: str, function: Callable = cross_entropy, device: str = "cpu") -> Callable:
    """(x, target) -> results, with a weight if the options are many."""
    weight = example(4, classes=5, device=device)[2] if name == "all" else None
    return lambda x, target: function(x, target, weight=weight, **OPTIONS[name])


@DEVICES
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool, device: str) -> None:
    x, target, weight = example(4, classes=5, device=device)
    plain, all_ = (1, IGNORED, 0.0, 0.0, None, 1.0), (1, IGNORED, 0.1, 0.1, 3.0, 1.3)
    strided, half = x.t().contiguous().t(), x.to(torch.bfloat16)
    for view, given, options in ((half, None, plain), (strided, weight, all_)):
        leaf = view.detach().requires_grad_(grad)
        opcheck(OP, (leaf, target, given, *options, False, ""))
        loss, lse, rest = OP(view, target, given, *options, False, "")
        dlse = None if given is None else torch.ones_like(lse)
        saved = (leaf, target, lse, rest, given)
        opcheck(BACKWARD, (torch.ones_like(loss), dlse, *saved, *options))


@DEVICES
@EACH
def test_gradients(name: str, device: str) -> None:  # S60
    x, target, _ = example(4, classes=5, device=device)
    x.requires_grad_()
    function = functools.partial(_call(name, device=device), target=target)
    batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(function, (x,), check_forward_ad=True, **batched)
    assert gradgradcheck(function, (x,), check_fwd_over_rev=True, check_batched_grad=True)


@EACH
def test_gradients_of_the_op(name: str) -> None:
    x, target, weight = example(4, classes=5)
    options = (
        (1, IGNORED, 0.1, 0.2, 3.0, 1.3) if name == "all" else (1, IGNORED, 0.0, 0.0, None, 1.0)
    )
    function = lambda x: OP(x, target, weight, *options, False, "")[:2]  # noqa: E731
    x.requires_grad_()
    assert gradcheck(function, (x,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, (x,), check_fwd_over_rev=True)


def test_gradients_of_probabilities() -> None:
    x, _, weight = example(3, classes=4)
    p = torch.softmax(x.flip(0), 1)
    leaves = tuple(t.requires_grad_() for t in (x, p, weight))
    function = lambda x, p, w: cross_entropy(  # noqa: E731
        x, p, weight=w, label_smoothing=0.1, z_loss=0.1, softcap=3.0, return_lse=True
    )
    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_second_derivatives_of_half_types(dtype: torch.dtype) -> None:
    x, target, _ = example(4, classes=33)
    x = x.to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    second = []
    for function, leaf in ((cross_entropy, x), (functional.cross_entropy, wide)):
        loss = function(leaf, target, reduction="sum")
        (dx,) = torch.autograd.grad(loss, leaf, create_graph=True)
        second.append(torch.autograd.grad(dx.square().sum(), leaf)[0])
    assert second[0].dtype == dtype
    close(second[0].double(), second[1], rtol=0.05, atol=0.01)


@EACH
def test_transforms(name: str) -> None:
    x, target, _ = example(3, 4, classes=5)
    x = x.movedim(1, -1)  # (3, 4, 5): a batch of matrices
    ours, want = _call(name), _call(name, written_out)

    def cubed(function: Callable, target: Tensor) -> Callable:
        def scalar(x: Tensor) -> Tensor:
            results = function(x, target)
            results = (results,) if isinstance(results, Tensor) else results
            return sum((each**3).sum() for each in results)

        return scalar

    close(torch.vmap(ours)(x, target), torch.vmap(want)(x, target))
    first = lambda f: torch.vmap(lambda x, t: func.grad(cubed(f, t))(x))(x, target)  # noqa: E731
    close(first(ours), first(want))
    pairs = itertools.product((func.jacfwd, func.jacrev), repeat=2)
    for transforms in (*pairs, (func.jacrev, func.jacfwd, func.jacfwd), (func.jacfwd,) * 3):
        got, wanted = cubed(ours, target[0]), cubed(want, target[0])
        for transform in transforms:
            got, wanted = transform(got), transform(wanted)
        close(got(x[0]), wanted(x[0]))


def test_vmap_of_any_arguments() -> None:
    """Also over the weight, over rows alone, and with one side shared."""
    x, target, _ = example(3, 4, classes=5)
    x = x.movedim(1, -1)
    weight = torch.rand(3, 5, dtype=torch.double)
    call = lambda x, t, w: cross_entropy(x, t, weight=w, z_loss=0.1)  # noqa: E731
    want = lambda x, t, w: written_out(x, t, weight=w, z_loss=0.1)  # noqa: E731
    each = torch.stack([want(*one) for one in zip(x, target, weight, strict=True)])
    close(torch.vmap(call)(x, target, weight), each)
    close(torch.vmap(call, (0, None, None))(x, target[0], weight[0]),
          torch.stack([want(one, target[0], weight[0]) for one in x]))  # fmt: skip
    dx = torch.vmap(func.grad(call))(x, target, weight)
    close(dx, torch.stack([func.grad(want)(*one) for one in zip(x, target, weight, strict=True)]))
    rows = torch.vmap(cross_entropy)(x[0], target[0].clamp(min=0))
    close(rows, cross_entropy(x[0], target[0].clamp(min=0), reduction="none"))
    op = lambda x, t, w: OP(x, t, w, 1, IGNORED, 0.1, 0.1, None, 1.0, False, "")  # noqa: E731
    for got, one in zip(
        torch.vmap(op)(x, target, weight), op(x[1], target[1], weight[1]), strict=True
    ):
        close(got[1], one)


def test_weight_has_no_gradient_in_any_mode() -> None:
    x, target, weight = example(4)
    call = lambda w: cross_entropy(x, target, weight=w)  # noqa: E731
    for attempt in (
        lambda: func.grad(call)(weight),
        lambda: func.jvp(call, (weight,), (weight,)),
        lambda: call(weight.requires_grad_()),
    ):
        with pytest.raises(RuntimeError, match="not differentiable by weight"):
            attempt()


def test_the_gradient_in_forward_gives_way_to_transforms() -> None:
    x, target, _ = example(4)
    call = lambda x: cross_entropy(x, target, grad_in_forward=True)  # noqa: E731
    want = lambda x: functional.cross_entropy(x, target)  # noqa: E731
    close(func.hessian(call)(x), func.hessian(want)(x))
    close(func.jvp(call, (x,), (x,)), func.jvp(want, (x,), (x,)))


# ---- what must see the op


@EACH
def test_modes_and_subclasses_take_the_op(name: str) -> None:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, target, _ = example(4, classes=5)
    want = _call(name)(x, target)
    with Mode():
        close(_call(name)(x, target), want)
    assert "online_softmax.cross_entropy.default" in seen
    tagged = _call(name)(x.as_subclass(Tagged), target)
    close([t.as_subclass(Tensor) for t in (tagged if isinstance(tagged, tuple) else (tagged,))],
          list(want if isinstance(want, tuple) else (want,)))  # fmt: skip
    loss = cross_entropy(x.requires_grad_(), target)
    seen.clear()
    with Mode():
        torch.autograd.grad(loss, x)
    assert "online_softmax.cross_entropy_backward.default" in seen


def test_what_overrides_torch_functions_is_asked() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return cross_entropy(x, target, z_loss=0.5, reduction="sum")

    traced = torch.fx.symbolic_trace(Model())
    (node,) = (node for node in traced.graph.nodes if node.target is cross_entropy)
    assert (node.kwargs["z_loss"], node.kwargs["reduction"]) == (0.5, "sum")
    x, target, _ = example(4)
    close(traced(x, target), Model()(x, target))


# ---- torch.compile


@EACH
def test_dynamic_sizes_do_not_recompile(name: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    call = lambda x, t: cross_entropy(x, t, **OPTIONS[name])  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for rows, classes in ((4, 6), (5, 7), (9, 33), (12, 100)):
        x, target, _ = example(rows, classes=classes)
        close(compiled(x, target), written_out(x, target, **OPTIONS[name]))
    assert counter.frame_count == 1


@DEVICES
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_fullgraph_compile(kind: str, dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    options = {**OPTIONS["all"], "grad_in_forward": True}
    call = lambda x, t, w: cross_entropy(x, t, weight=w, **options)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows, dtype in ((4, torch.float32), (6, torch.float32), (6, torch.bfloat16)):
        x, target, weight = example(rows, classes=9, device=device)
        x, weight = x.to(dtype).requires_grad_(), weight.float()
        target = target if kind == "classes" else torch.softmax(x.detach().flip(0), 1)
        results = [f(x, target, weight) for f in (compiled, call)]
        close(*results)
        gradients = [torch.autograd.grad(loss + lse.sum(), x) for loss, lse in results]
        close(*gradients)


def test_a_wrong_target_inside_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match="got 9 at index"):
        compiled(torch.zeros(2, 3), torch.tensor([0, 9]))


# ---- autocast


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_gives_float32(compiled: bool, dtype: torch.dtype, device: str) -> None:
    torch._dynamo.reset()
    function = cross_entropy
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, target, _ = example(4, classes=50, device=device)
    x = x.to(dtype).requires_grad_()
    for each in (target, torch.softmax(x.detach(), 1)):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = function(x, each)
            assert functional.cross_entropy(x, each).dtype == torch.float32
        assert loss.dtype == torch.float32
        close(loss.double(), written_out(x.detach().double(), each if each is target
              else each.double()), rtol=1e-5, atol=1e-6)  # fmt: skip
        (dx,) = torch.autograd.grad(loss, x)
        assert dx.dtype == dtype


@pytest.mark.parametrize("in_forward", [False, True])
def test_batches_of_gradients(in_forward: bool, place: str) -> None:
    """`is_grads_batched`, whose tensors have no memory that a kernel could read."""
    x, target, _ = example(4, classes=9, device=place)
    x = x.float().requires_grad_()
    loss = cross_entropy(x, target, reduction="none", grad_in_forward=in_forward)
    upstream = torch.randn(3, 4, device=place)
    options: dict[str, Any] = {"retain_graph": True}
    (got,) = torch.autograd.grad(loss, x, upstream, is_grads_batched=True, **options)
    want = [torch.autograd.grad(loss, x, each, **options)[0] for each in upstream]
    close(got, torch.stack(want))
