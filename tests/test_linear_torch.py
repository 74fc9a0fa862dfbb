"""linear_cross_entropy inside torch: opcheck, gradcheck, compile, autocast, and what it refuses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.autograd import forward_ad, gradcheck
from torch.library import opcheck
from torch.nn import functional

from linear_kit import EVERY, MEMORY, by_logits, cut_finely, example, gradients
from losses_kit import IGNORED
from online_softmax import cross_entropy, linear_cross_entropy, linearparts
from rows_kit import DEVICES, Tagged

close = torch.testing.assert_close
OPS = torch.ops.online_softmax
NAME = "linear_cross_entropy"


@pytest.fixture(autouse=True)
def _fine_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_finely(monkeypatch)
    torch._dynamo.reset()


@DEVICES
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool, device: str) -> None:
    x, w, b, target = example(device=device)
    for dtype, bias, weight in (
        (torch.float64, b, torch.rand_like(b)),
        (torch.bfloat16, None, None),
    ):
        leaves = [None if t is None else t.to(dtype) for t in (x, w, bias)]
        leaves = [None if t is None else t.detach().requires_grad_(grad) for t in leaves]
        options = (dtype, IGNORED, 0.1, 0.1, 3.0, 1.3)
        given = (*leaves, target, weight)
        needs = [grad, grad, grad and bias is not None]
        opcheck(getattr(OPS, NAME).default, (*given, *options, False, ""))
        loss, lse, rest = getattr(OPS, NAME).default(*given, *options, False, "")
        dloss = torch.ones_like(loss)
        back = (dloss, *given, lse.detach(), rest, *options, [True, True, bias is not None], "")
        checks = ("test_schema", "test_faketensor")  # it has no derivative
        opcheck(getattr(OPS, f"{NAME}_backward").default, back, test_utils=checks)
        for is_mean in (False, True):
            at_once = (*given, *options, is_mean, False, needs, "")
            opcheck(getattr(OPS, f"{NAME}_with_gradient").default, at_once)
        made = torch.rand(5, device=device)
        args = (made, torch.tensor(0.5, device=device), target, 77, IGNORED, dtype)
        opcheck(getattr(OPS, f"{NAME}_rescale").default, args, test_utils=checks)


@DEVICES
@MEMORY
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction: str, memory: str, device: str) -> None:
    x, w, b, target = example(6, 3, 9, device=device)
    leaves = tuple(t.requires_grad_() for t in (x, w, b))
    weight = torch.rand(9, dtype=torch.double, device=device)
    function = lambda x, w, b: linear_cross_entropy(  # noqa: E731
        x, w, target, linear_bias=b, weight=weight, reduction=reduction, memory=memory, **EVERY
    )
    assert gradcheck(function, leaves)


@DEVICES
@MEMORY
@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_compile(dynamic: bool, memory: str, device: str) -> None:
    call = functools.partial(linear_cross_entropy, memory=memory, **EVERY)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens, dtype in ((12, torch.float32), (15, torch.float32), (12, torch.bfloat16)):
        x, w, b, target = example(tokens, dtype=dtype, device=device)
        leaves = [t.requires_grad_() for t in (x, w, b)]
        for reduction in ("mean", "none"):
            given = {"linear_bias": b, "reduction": reduction}
            calls = [functools.partial(f, x, w, target, **given) for f in (compiled, call)]
            results = [gradients(each, leaves) for each in calls]
            close(*results)


@MEMORY
def test_dynamic_sizes_do_not_recompile(memory: str) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    call = functools.partial(linear_cross_entropy, memory=memory)
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (4, 7, 12, 33):
        x, w, _, target = example(tokens)
        close(compiled(x.requires_grad_(), w, target), by_logits(x, w, target))
    assert counter.frame_count == 1


@DEVICES
@MEMORY
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(dtype: torch.dtype, compiled: bool, memory: str, device: str) -> None:
    """Products in bfloat16 whatever the types, the loss in float32, and the gradient of a float32
    weight is not rounded to 16 bits on its way."""
    function = linear_cross_entropy
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, w, b, target = example(96, 33, 257, torch.float32, device)
    x = x.to(dtype)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = function(x, w, target, linear_bias=b, memory=memory)
    assert loss.dtype == torch.float32
    found = torch.autograd.grad(loss, leaves)
    assert [g.dtype for g in found] == [dtype, torch.float32, torch.float32]
    half = [t.detach().to(torch.bfloat16).double().requires_grad_() for t in leaves[:2]]
    wide = [*half, b.detach().double().requires_grad_()]
    true = gradients(lambda: by_logits(wide[0], wide[1], target, linear_bias=wide[2]), wide)
    close(loss.double(), true[0], rtol=1e-5, atol=1e-6)
    for mine, wanted in zip(found, true[1:], strict=True):
        assert (mine.double() - wanted).norm() <= 2.0**-8 * wanted.norm()
    assert not torch.equal(found[1], found[1].to(torch.bfloat16).float())


def test_float64_is_not_autocast() -> None:
    x, w, _, target = example()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, w, target)
    close(loss, by_logits(x, w, target).to(loss.dtype))


def _twice(x: Tensor, function: Any) -> None:
    (dx,) = torch.autograd.grad(function(x), x, create_graph=True)
    dx.sum().backward()


@MEMORY
def test_what_has_no_derivative_says_so(memory: str) -> None:
    """Each error names the call that has it, and that call has it."""
    x, w, _, target = example()
    x.requires_grad_()
    instead = (
        r".*: cross_entropy\(linear\(input, linear_weight, linear_bias\), target, \.\.\.\) can"
    )
    call = lambda x: linear_cross_entropy(x, w, target, memory=memory)  # noqa: E731
    by_name = lambda x: cross_entropy(functional.linear(x, w), target)  # noqa: E731
    with pytest.raises(RuntimeError, match=rf"no second derivative \(create_graph{instead}"):
        _twice(x, call)
    _twice(x, by_name)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(RuntimeError, match=f"no derivative in forward mode{instead}"):
            call(dual)
        assert forward_ad.unpack_dual(by_name(dual)).tangent is not None
    several, labels = x.detach().expand(3, *x.shape), target.expand(3, *target.shape)
    for transformed in (
        lambda f: torch.func.grad(f)(x.detach()),
        lambda f: torch.func.hessian(f)(x.detach()),
        lambda f: torch.func.jvp(f, (x.detach(),), (torch.ones_like(x),)),
        lambda f: torch.vmap(f)(several),
    ):
        with pytest.raises(NotImplementedError, match=rf"torch\.func's transforms{instead}"):
            transformed(call)
        transformed(by_name)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):  # by the target alone
        torch.vmap(lambda t: linear_cross_entropy(x.detach(), w, t, memory=memory))(labels)


def test_modes_and_subclasses_see_the_op() -> None:
    seen: list[str] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, w, _, target = example()
    want = by_logits(x, w, target)
    with Mode():
        close(linear_cross_entropy(x, w, target), want)
    assert "online_softmax.linear_cross_entropy.default" in seen
    tagged = linear_cross_entropy(x.as_subclass(Tagged), w, target)
    close(tagged.as_subclass(Tensor), want)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
            return linear_cross_entropy(x, w, target, memory="fast")

    traced = torch.fx.symbolic_trace(Model())
    (node,) = (node for node in traced.graph.nodes if node.target is linear_cross_entropy)
    assert node.kwargs["memory"] == "fast"
    close(traced(x, w, target), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_without_elements(dtype: torch.dtype) -> None:
    """On meta, of which torch does not say whether autocast is on."""
    x, w = (
        torch.empty(*n, dtype=dtype, device="meta", requires_grad=True) for n in ((4, 3), (7, 3))
    )
    target = torch.empty(4, dtype=torch.int64, device="meta")
    for memory in ("low", "fast"):
        loss = linear_cross_entropy(x, w, target, memory=memory)
        grads = torch.autograd.grad(loss, (x, w))
        assert (loss.shape, loss.dtype) == ((), dtype)
        assert [(g.shape, g.dtype) for g in grads] == [(x.shape, dtype), (w.shape, dtype)]
    logits = x @ w.t()
    for of in (target, torch.softmax(logits, -1)):
        assert cross_entropy(logits, of).dtype == dtype


def test_products_that_mix_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called on CUDA, on tensors without elements: 16-bit factors, a float32 result, into
    the memory that is given."""
    asked: list[str] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            asked.append(str(function))
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(linearparts, "_mixes", lambda a: True)
    empty = functools.partial(torch.empty, device="meta")
    a, b = empty(4, 6, dtype=torch.bfloat16), empty(6, 9, dtype=torch.bfloat16)
    sums, same = empty(4, 9), empty(4, 9, dtype=torch.bfloat16)
    with Mode():
        assert linearparts.put_product(a, b, sums) is sums
        assert linearparts.add_product(a, b, sums) is sums
        assert linearparts.put_product(a, b, same) is same
    assert asked == ["aten.mm.dtype_out", "aten.addmm.dtype_out", "aten.mm.out"]


@DEVICES
def test_a_wrong_target(device: str) -> None:
    """On a GPU: NaN and no gradient of that row, or an error on request."""
    x, w, _, target = example(dtype=torch.float32, device=device)
    target[0] = 77
    if device == "cpu":
        with pytest.raises(IndexError, match="got 77 at index"):
            linear_cross_entropy(x, w, target)
        return
    for memory in ("low", "fast"):
        loss = linear_cross_entropy(x.requires_grad_(), w, target, memory=memory, reduction="sum")
        assert loss.isnan()
        (dx,) = torch.autograd.grad(loss, x)
        assert torch.equal(dx[0], torch.zeros(5, device=device))
        assert dx.isfinite().all()
    with pytest.raises(IndexError, match="got 77 at index"):
        linear_cross_entropy(x, w, target, check_target=True)


def test_nothing_is_kept_without_a_gradient() -> None:
    """Under no_grad, and where nothing requires one, the quick way makes no gradient either."""
    x, w, _, target = example()
    loss = linear_cross_entropy(x, w, target, memory="fast")
    assert loss.grad_fn is None
    with torch.no_grad():
        again = linear_cross_entropy(x.requires_grad_(), w, target, memory="fast")
    assert torch.equal(loss, again)
    close(loss, functional.cross_entropy(functional.linear(x, w), target).detach())
