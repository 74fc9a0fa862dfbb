"""The row operations inside torch: opcheck, gradients of every kind, vmap, routes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.library import opcheck

from online_softmax import log_softmax, logsumexp, softmax
from online_softmax.library import private
from rows_kit import DEVICES, EACH, Tagged, Variant, double

close = torch.testing.assert_close


def _backward_arguments(variant: Variant, x: Tensor) -> tuple:
    y = variant.op_call(x).detach()
    saved = (x, y) if variant.op == "logsumexp" else (y,)
    return (torch.ones_like(y), *saved, *variant.arguments)


@DEVICES
@pytest.mark.parametrize("grad", [False, True])
@EACH
def test_opcheck(variant: Variant, grad: bool, device: str) -> None:  # S84
    op = getattr(torch.ops.online_softmax, variant.op).default
    backward = getattr(torch.ops.online_softmax, f"{variant.op}_backward").default
    x = double(3, 5, device=device)
    half = x.to(torch.bfloat16)
    for view in (x, x.t(), half[:, 1:], x[:, ::2], half[:0]):
        leaf = view.detach().requires_grad_(grad)
        opcheck(op, (leaf, *variant.arguments, ""))
    for view in (x, x.t(), half[:, 1:]):
        leaf = view.detach().requires_grad_(grad)
        opcheck(backward, _backward_arguments(variant, leaf))


@EACH
def test_opcheck_of_other_dtypes(variant: Variant) -> None:
    op = getattr(torch.ops.online_softmax, variant.op).default
    *rest, scale, zero_empty = variant.arguments
    for dtype, wanted in (
        (torch.float8_e4m3fn, None),
        (torch.float8_e5m2, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
    ):
        x = double(3, 5).to(dtype)
        arguments = (*rest[:-1], wanted, scale, zero_empty)
        opcheck(op, (x, *arguments, ""), test_utils="test_faketensor")


@DEVICES
@EACH
def test_gradients(variant: Variant, device: str) -> None:  # S60
    x = double(3, 4, device=device, grad=True)
    for function in (variant.ours, variant.op_call):
        batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
        assert gradcheck(function, (x,), check_forward_ad=True, **batched)
        assert gradgradcheck(function, (x,), check_fwd_over_rev=True)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@EACH
def test_backward_agrees_with_torch(variant: Variant, dtype: torch.dtype, device: str) -> None:
    x = double(7, 33, device=device).to(dtype).requires_grad_()
    y = variant.ours(x)
    weights = double(*y.shape, device=device).to(dtype)
    (ours,) = torch.autograd.grad((y * weights).sum(), x)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad((variant.torchs(wide) * weights.double()).sum(), wide)
    assert (y.dtype, ours.dtype) == (dtype, dtype)
    assert ours.is_contiguous()
    # One rounding of dx and one of each saved probability; a log-probability errs by its size.
    size = 16 if variant.op == "log_softmax" else 4
    close(ours.double(), want, rtol=torch.finfo(dtype).eps, atol=size * torch.finfo(dtype).eps)


@EACH
def test_higher_derivatives_of_half_types(variant: Variant) -> None:
    """Sums in float32, each derivative in the dtype of what it is of."""
    x = double(3, 257).to(torch.bfloat16).requires_grad_()
    (dx,) = torch.autograd.grad(variant.ours(x).square().sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.square().sum(), x)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(variant.torchs(wide).square().sum(), wide, create_graph=True)
    (second,) = torch.autograd.grad(want.square().sum(), wide)
    assert ddx.dtype == torch.bfloat16
    close(ddx.double(), second, rtol=0.1, atol=0.05 * float(second.abs().max()))


def test_logsumexp_keeps_its_result_before_rounding() -> None:
    """In bfloat16 exp(x - lse) from the rounded lse is off by a per cent."""
    x = (50 + double(64)).to(torch.bfloat16).requires_grad_()
    y = logsumexp(x)
    (dx,) = torch.autograd.grad(y, x)
    close(dx.double(), torch.softmax(x.detach().double(), -1), rtol=2**-8, atol=1e-6)
    (dy, v) = torch.func.jvp(logsumexp, (x.detach(),), (torch.ones_like(x),))
    assert (dy.dtype, v.dtype) == (torch.bfloat16, torch.bfloat16)
    assert v == 1


@DEVICES
@EACH
def test_transforms(variant: Variant, device: str) -> None:
    x = double(4, 5, 3, device=device)

    def ours(v: Tensor) -> Tensor:
        return (variant.ours(v) ** 2).sum()

    def want(v: Tensor) -> Tensor:
        return (variant.torchs(v) ** 2).sum()

    for function in (variant.ours, variant.op_call):
        for batch_dim in (0, 1, -1):
            close(torch.vmap(function, batch_dim)(x), torch.vmap(variant.torchs, batch_dim)(x))
    two = double(2, 4, 5, 3, device=device)
    close(torch.vmap(torch.vmap(variant.ours))(two), torch.vmap(torch.vmap(variant.torchs))(two))
    close(torch.vmap(torch.func.grad(ours))(x), torch.vmap(torch.func.grad(want))(x))
    close(
        torch.func.jvp(variant.ours, (x,), (x * x,))[1],
        torch.func.jvp(variant.torchs, (x,), (x * x,))[1],
    )
    close(torch.func.hessian(ours)(x[0]), torch.func.hessian(want)(x[0]))
    close(torch.func.jacfwd(variant.ours)(x[0]), torch.func.jacrev(variant.torchs)(x[0]))


@EACH
def test_transforms_of_half_types(variant: Variant) -> None:
    x = double(4, 5, 3).to(torch.float16)
    y = torch.vmap(variant.ours)(x)
    assert y.dtype == torch.float16
    close(y.double(), torch.vmap(variant.torchs)(x.double()), rtol=2e-3, atol=1e-6)
    dx = torch.vmap(torch.func.grad(lambda v: variant.ours(v).square().sum()))(x)
    want = torch.vmap(torch.func.grad(lambda v: variant.torchs(v).square().sum()))(x.double())
    assert dx.dtype == torch.float16
    close(dx.double(), want, rtol=1e-2, atol=1e-2)


@EACH
def test_vmap_with_one_side_shared(variant: Variant) -> None:
    """A batch of upstream gradients against one saved result, as check_batched_grad does."""
    x = double(4, 3, grad=True)
    y = variant.ours(x)
    upstream = double(6, *y.shape)
    batched = torch.autograd.grad(y, x, upstream, is_grads_batched=True, retain_graph=True)[0]
    single = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in upstream]
    close(batched, torch.stack(single))


@pytest.mark.parametrize("dim", [0, -1])
def test_vmap_over_scalars(dim: int) -> None:
    """Each example is a row of one element: ones, and a gradient of zero; lse is x itself."""
    x = double(5)
    ops = torch.ops.online_softmax
    close(torch.vmap(lambda v: softmax(v, dim))(x), torch.ones_like(x))
    close(torch.vmap(lambda v: log_softmax(v, dim))(x), torch.zeros_like(x))
    for keepdim in (False, True):
        close(torch.vmap(lambda v: logsumexp(v, dim, keepdim))(x), x)  # noqa: B023
        options = ((dim,), keepdim, None, 2.0, False)
        close(torch.vmap(lambda v: ops.logsumexp(v, *options, ""))(x), 2 * x)  # noqa: B023
        backward = torch.vmap(lambda v: ops.logsumexp_backward(v, v, 2 * v, *options))  # noqa: B023
        close(backward(x), 2 * x)
    close(torch.vmap(lambda v: ops.softmax(v, dim, None, 1.0, False, ""))(x), torch.ones_like(x))
    close(torch.vmap(torch.func.grad(lambda v: softmax(v, dim) * 3))(x), torch.zeros_like(x))
    close(torch.vmap(torch.func.grad(lambda v: logsumexp(v, dim) * 3))(x), 3 * torch.ones_like(x))
    gradient = torch.vmap(
        lambda v: ops.softmax_backward(v, torch.ones_like(v), dim, None, 1.0, False)
    )
    close(gradient(x), torch.zeros_like(x))


@EACH
def test_forward_mode_by_hand(variant: Variant) -> None:
    x = double(3, 4)
    for function in (variant.ours, variant.op_call):
        with forward_ad.dual_level():
            y = function(forward_ad.make_dual(x, x * x))
            tangent = forward_ad.unpack_dual(y).tangent
        close(tangent, torch.func.jvp(variant.torchs, (x,), (x * x,))[1])


@EACH
def test_modes_and_subclasses_take_the_op(variant: Variant) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    want = variant.torchs(torch.randn(3, 4))
    with FakeTensorMode() as mode:
        y = variant.ours(mode.from_tensor(torch.randn(3, 4)))
    assert (y.shape, y.dtype) == (want.shape, want.dtype)

    assert type(variant.ours(torch.randn(3, 4).as_subclass(Tagged))) is Tagged


@EACH
def test_which_modes_see_the_op(variant: Variant) -> None:
    """A default device is a mode too, but of factories: it does not slow every call down."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    name = f"online_softmax.{variant.op}.default"
    x = torch.randn(3, 4)
    for mode in (Functions(), Dispatches()):
        seen.clear()
        with mode:
            close(variant.ours(x), variant.torchs(x))
        assert name in seen
    with torch.device("cpu"):
        assert private.function_mode_count() == 1
        assert not private.function_modes()
        close(variant.ours(x), variant.torchs(x))


def test_a_result_says_where_it_comes_from() -> None:
    x = torch.randn(3, requires_grad=True)
    for function in (softmax, log_softmax, logsumexp):
        assert function.__name__ in str(function(x).grad_fn)


@pytest.mark.parametrize("name", [name for name in vars(private) if not name.startswith("_")])
def test_private_names_of_torch(name: str) -> None:
    """A torch that lacks one fails to import the package: then this list says which it was."""
    assert getattr(private, name) is not None
    assert private.is_forward_mode() is False
    assert not private.functorch_active()
    assert not private.function_modes()
    assert not private.dispatch_modes()
