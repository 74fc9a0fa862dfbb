"""softmax inside torch: opcheck, gradients of every kind, vmap, compile, autocast, routes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.fx
from torch import func
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from online_softmax import library, softmax

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device")])  # fmt: skip
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])


def _double(*shape: int, device: str = "cpu", grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator, dtype=torch.double).to(device)
    return x.requires_grad_(grad)


@DEVICES
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
def test_opcheck(device: str, grad: bool, dim: int) -> None:
    x = _double(3, 5, device=device, grad=grad)
    opcheck(torch.ops.online_softmax.softmax.default, (x, dim, ""))
    transposed = x.detach().t().requires_grad_(grad)
    opcheck(torch.ops.online_softmax.softmax.default, (transposed, dim, ""))
    opcheck(torch.ops.online_softmax.softmax_backward.default, (x.t(), x.t(), dim))
    half = x.detach().float()[:, 1:].requires_grad_(grad)
    opcheck(torch.ops.online_softmax.softmax.default, (half, dim, ""))


@DEVICES
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients(device: str, dim: int) -> None:
    x = _double(3, 4, device=device)
    gradcheck(
        lambda x: softmax(x, dim),
        (x,),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )
    gradgradcheck(lambda x: softmax(x, dim), (x,), check_fwd_over_rev=True)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_backward_agrees_with_torch(device: str, dtype: torch.dtype) -> None:
    x = _double(7, 33, device=device, grad=False).to(dtype).requires_grad_()
    weights = _double(7, 33, device=device, grad=False).to(dtype)
    (ours,) = torch.autograd.grad((softmax(x) * weights).sum(), x)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad((torch.softmax(wide, -1) * weights.double()).sum(), wide)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), want, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_stride_zero_upstream() -> None:  # S08: sum() sends an expanded gradient
    for x in (_double(32, 32, grad=False), _double(32, 32, grad=False).t()):
        x = x.detach().requires_grad_()
        softmax(x).sum().backward()
        assert x.grad is not None
        assert x.grad.abs().max() < 1e-15


@pytest.mark.parametrize("dim", [0, 1])
def test_writing_into_the_result(dim: int) -> None:
    """Allowed as in torch; what backward needs was overwritten, so that raises, as in torch."""
    x = _double(3, 1 + 4 * dim)
    for function in (softmax, torch.softmax):
        y = function(x, dim)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@DEVICES
def test_vmap_jvp_hessian(device: str) -> None:
    x = _double(4, 5, device=device, grad=False)

    def ours(v: torch.Tensor) -> torch.Tensor:
        return (softmax(v) ** 2).sum()

    def want(v: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(v, -1) ** 2).sum()

    close = torch.testing.assert_close
    close(torch.vmap(softmax)(x), torch.softmax(x, -1))
    close(torch.vmap(softmax, in_dims=1)(x), torch.softmax(x.t(), -1))
    close(torch.vmap(torch.func.grad(ours))(x), torch.vmap(torch.func.grad(want))(x))
    close(
        torch.func.jvp(softmax, (x,), (x * x,))[1],
        torch.func.jvp(lambda v: torch.softmax(v, -1), (x,), (x * x,))[1],
    )
    close(torch.func.hessian(ours)(x[0]), torch.func.hessian(want)(x[0]))


class Tagged(torch.Tensor):
    """A subclass that does nothing."""


def _compose(*transforms: Callable[..., Any]) -> Callable[..., Any]:
    return lambda f: functools.reduce(lambda inner, outer: outer(inner), transforms, f)


@pytest.mark.parametrize("around", ["nothing", "function mode", "subclass", "trace"])
@pytest.mark.parametrize(
    "transforms",
    [*itertools.product((func.jacfwd, func.jacrev), repeat=2),
     (func.jacrev, func.jacfwd, func.jacfwd), (func.jacfwd,) * 3, (func.grad, torch.vmap)],
    ids=lambda transforms: "-".join(t.__name__ for t in transforms),
)  # fmt: skip
def test_transforms_nest(transforms: tuple[Callable[..., Any], ...], around: str) -> None:
    """Also with a default device set, which is a function mode, in a subclass and under make_fx."""
    x = _double(2, 4, grad=False) if torch.vmap in transforms else _double(4, grad=False)
    ours = _compose(*transforms)(lambda v: (softmax(v) ** 3).sum())
    want = _compose(*transforms)(lambda v: (torch.softmax(v, -1) ** 3).sum())(x)
    if around == "trace":
        ours = make_fx(ours)(x)
    with torch.device("cpu") if around == "function mode" else contextlib.nullcontext():
        got = ours(x.as_subclass(Tagged) if around == "subclass" else x)
    assert want.abs().max() > 0.01
    torch.testing.assert_close(got.as_subclass(torch.Tensor), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_derivatives_are_rounded_once(dtype: torch.dtype) -> None:
    """Forward mode and double backward against the same formula in float64, from the same y."""
    for cols in (7, 33, 500):
        x, w, v = (_double(3, cols, grad=False).roll(i, 1).mul(1 + i).to(dtype) for i in range(3))
        x, w = x.requires_grad_(), w.requires_grad_()
        y = softmax(x)
        (dx,) = torch.autograd.grad(y, x, w, create_graph=True)
        by_w, by_x = torch.autograd.grad(dx, (w, x), v)
        tangent = func.jvp(softmax, (x.detach(),), (v,))[1]
        y64, w64, v64 = (t.detach().double() for t in (y, w, v))
        want_by_w = y64 * (v64 - (v64 * y64).sum(-1, keepdim=True))
        dot_w, dot_v = (w64 * y64).sum(-1, keepdim=True), (v64 * y64).sum(-1, keepdim=True)
        by_y = (v64 * (w64 - dot_w) - w64 * dot_v).to(dtype).double()
        want_by_x = y64 * (by_y - (by_y * y64).sum(-1, keepdim=True))
        for got, want in ((tangent, want_by_w), (by_w, want_by_w), (by_x, want_by_x)):
            assert got.dtype == dtype
            # An ulp where float64 and float32 round to different sides, and what they cancel.
            info = torch.finfo(dtype)
            allowed = info.eps * (want.abs() + info.smallest_normal) + 1e-6 * want.abs().max()
            assert ((got.double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("dim", [0, -1])
def test_vmap_over_scalars(dim: int) -> None:
    """Each example is a row of one element: ones, and a gradient of zero."""
    x = _double(5, grad=False)
    close = torch.testing.assert_close
    op = torch.ops.online_softmax.softmax.default
    close(torch.vmap(lambda v: softmax(v, dim))(x), torch.ones_like(x))
    close(torch.vmap(lambda v: op(v, dim, ""))(x), torch.ones_like(x))
    close(torch.vmap(torch.func.grad(lambda v: softmax(v, dim) * 3))(x), torch.zeros_like(x))
    backward = torch.ops.online_softmax.softmax_backward.default
    close(torch.vmap(lambda v: backward(v, torch.ones_like(v), dim))(x), torch.zeros_like(x))
    close(torch.vmap(torch.vmap(softmax))(_double(2, 3, grad=False)), torch.ones(2, 3).double())


def test_dynamic_sizes_do_not_recompile() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(softmax, fullgraph=True, backend=counter, dynamic=True)
    for rows, cols in ((4, 6), (5, 7), (9, 33), (12, 100)):
        x = torch.randn(rows, cols)
        torch.testing.assert_close(compiled(x), torch.softmax(x, -1))
    assert counter.frame_count == 1


@DEVICES
@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_compile(device: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: softmax(x, 0) * 2, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for cols in (6, 7, 9):
        x = torch.randn(4, cols, device=device, requires_grad=True)
        compiled(x).square().sum().backward()
        (want,) = torch.autograd.grad((torch.softmax(x, 0) * 2).square().sum(), x)
        torch.testing.assert_close(x.grad, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_functorch_inside_compile_raises(transform: str) -> None:
    """A traced op has no forward-mode rule: it must say so, not return zeros."""
    torch._dynamo.reset()
    x = torch.randn(4, 5)
    if transform == "grad":
        inner = torch.func.grad(lambda v: (softmax(v) ** 2).sum())
    else:
        inner = lambda v: torch.func.jvp(softmax, (v,), (v,))[1]  # noqa: E731
    compiled = torch.compile(inner, fullgraph=True, backend="aot_eager")
    try:
        got = compiled(x)
    except Exception:  # noqa: BLE001  any refusal will do
        return
    torch.testing.assert_close(got, inner(x))  # a torch that can do it must do it right


def test_forward_mode_by_hand() -> None:
    import torch.autograd.forward_ad as forward_ad

    x = _double(3, 4, grad=False)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(softmax(forward_ad.make_dual(x, x * x))).tangent
    want = torch.func.jvp(lambda v: torch.softmax(v, -1), (x,), (x * x,))[1]
    torch.testing.assert_close(tangent, want)


def test_modes_and_subclasses_take_the_op() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        y = softmax(mode.from_tensor(torch.randn(3, 4)))
    assert y.shape == (3, 4)

    assert type(softmax(torch.randn(3, 4).as_subclass(Tagged))) is Tagged


def test_what_overrides_torch_functions_is_asked() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return softmax(x, 0, kernel="reference") * 2

    traced = torch.fx.symbolic_trace(Model())
    (node,) = (node for node in traced.graph.nodes if node.target is softmax)
    assert (node.args[1:], dict(node.kwargs)) == ((0,), {"kernel": "reference"})
    x = torch.randn(3, 4)
    torch.testing.assert_close(traced(x), torch.softmax(x, 0) * 2)
    with torch.device("cpu"), pytest.raises(TypeError, match="must be a Tensor, got list"):
        softmax([1.0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_gives_float32(dtype: torch.dtype) -> None:  # S71
    x = torch.randn(4, 100, device="cuda", dtype=dtype, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.float16):
        y = softmax(x)
    assert y.dtype == torch.float32
    y.square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype


@pytest.mark.parametrize(
    "name",
    ["_functorch_active", "_below_autograd", "_after_autograd", "_torch_function_modes",
     "_torch_dispatch_modes", "_SingleLevelFunction", "_is_forward_mode", "_set_forward_mode"],
)  # fmt: skip
def test_private_names_of_torch(name: str) -> None:
    assert getattr(library, name, None) is not None, f"this torch has no {name} any more"
    assert library._is_forward_mode() is False
