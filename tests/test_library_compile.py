"""The row operations under torch.compile and autocast."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from online_softmax import log_softmax, logsumexp, rowops, softmax
from online_softmax.library import operations, traced
from online_softmax.library.override import Override
from rows_kit import DEVICES, EACH, Variant, double, gpu

close = torch.testing.assert_close
ALONG = pytest.mark.parametrize("function", [softmax, log_softmax])


@EACH
def test_dynamic_sizes_do_not_recompile(variant: Variant) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(variant.ours, fullgraph=True, backend=counter, dynamic=True)
    for rows, cols in ((4, 6), (5, 7), (9, 33), (12, 100)):
        x = torch.randn(rows, cols)
        close(compiled(x), variant.torchs(x))
    assert counter.frame_count == 1


def test_a_dynamic_scale() -> None:
    """A float argument that changes: the right values, whether recompiled or not."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, scale: softmax(x, scale=scale), fullgraph=True, backend="aot_eager"
    )
    x = torch.randn(3, 4)
    for scale in (1.0, 0.5, 0.25, 2.0):
        close(compiled(x, scale), torch.softmax(x * scale, -1))


@DEVICES
@pytest.mark.parametrize("dynamic", [False, True])
@EACH
def test_fullgraph_compile(variant: Variant, dynamic: bool, device: str) -> None:  # S58
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: variant.ours(x) * 2, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for cols, dtype in ((6, torch.float32), (7, torch.float32), (9, torch.float16)):
        x = torch.randn(4, cols, device=device).to(dtype).requires_grad_()
        y = compiled(x)
        assert y.dtype == dtype
        y.square().sum().backward()
        wide = x.detach().double().requires_grad_()
        (want,) = torch.autograd.grad((variant.torchs(wide) * 2).square().sum(), wide)
        rough = dtype == torch.float16
        close(x.grad.double(), want, rtol=1e-2 if rough else 1e-5, atol=0.1 if rough else 1e-6)


@pytest.mark.parametrize("transform", ["grad", "jvp"])
@EACH
def test_functorch_inside_compile_raises(variant: Variant, transform: str) -> None:
    """Refused rather than answered wrongly: a traced op's tangents could be silent zeros."""
    torch._dynamo.reset()
    x = torch.randn(4, 5)

    def inner(v: Tensor) -> Tensor:
        if transform == "grad":
            return torch.func.grad(lambda v: (variant.ours(v) ** 2).sum())(v)
        return torch.func.jvp(variant.ours, (v,), (v,))[1]

    compiled = torch.compile(inner, fullgraph=True, backend="aot_eager")
    try:
        got = compiled(x)
    except Exception:  # noqa: BLE001  any refusal will do
        return
    close(got, inner(x))  # a torch that can do it must do it right


@EACH
def test_vmap_inside_compile(variant: Variant) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.vmap(variant.ours), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 4, 5)
    close(compiled(x), torch.vmap(variant.torchs)(x))


def test_inductor() -> None:
    """Between operations that Inductor compiles, forward and backward, strides of its choice."""
    torch._dynamo.reset()

    def function(x: Tensor) -> Tensor:
        y = softmax(x.t() * 2, scale=0.5) + log_softmax(x.t().exp(), 0, dtype=torch.float64)
        return y * logsumexp(x.t().cos(), 0, True)

    def want(x: Tensor) -> Tensor:
        y = torch.softmax(x.t(), -1) + torch.log_softmax(x.t().exp(), 0, dtype=torch.float64)
        return y * torch.logsumexp(x.t().cos(), 0, keepdim=True)

    x = torch.randn(5, 7, requires_grad=True)
    compiled = torch.compile(function, fullgraph=True)
    close(compiled(x), want(x), rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, want))
    close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_backends_that_run_aten_see_an_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Inductor (tests/test_override.py): it takes softmax apart."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.softmax(x, -1), backend="aot_eager")
    x = torch.randn(3, 4)
    want = compiled(x)
    monkeypatch.setattr(rowops, "forward", lambda *_: torch.zeros(3, 4))
    with Override("CPU", lambda *_: True):
        close(compiled(x), torch.zeros(3, 4))
    close(compiled(x), want)


@ALONG
def test_out_inside_compile(function) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, out: function(x, out=out), fullgraph=True, backend="aot_eager"
    )
    x, out = torch.randn(3, 4), torch.empty(3, 4)
    compiled(x, out)
    close(out, function(x))
    compiled(x, x)  # in place
    close(x, out)
    with pytest.raises(Exception, match=r"out must have shape \(3, 4\)"):
        compiled(x, torch.empty(3, 5))
    with pytest.raises(Exception, match="does not support automatic differentiation"):
        compiled(x.requires_grad_(), torch.empty(3, 4))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_an_exported_program_keeps_the_op(name: str) -> None:
    function = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp}[name]

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x, scale=0.5)

    x = torch.randn(3, 4)
    program = torch.export.export(Module(), (x,))
    targets = {str(node.target) for node in program.graph.nodes}
    assert f"online_softmax.{name}.default" in targets
    close(program.module()(x), function(x, scale=0.5))


# ---- autocast


@EACH
def test_autocast_kernel_reads_the_half_input(variant: Variant) -> None:
    """The kernel at AutocastCUDA, called by hand on the CPU: float32 from the input as it is."""
    operation = next(o for o in operations.OPERATIONS if o.name == variant.op)
    kernel = traced.autocast_kernel(operation)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = double(4, 100).to(dtype).requires_grad_()
        y = kernel(None, x, *variant.arguments, "")
        assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        close(y.double(), variant.torchs(x.detach().double()), rtol=1e-5, atol=1e-6)
        y.square().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
    asked = [each if each is not None else torch.float16 for each in variant.arguments]
    assert kernel(None, double(4, 8).half(), *asked, "").dtype == torch.float16
    name = f"online_softmax::{variant.op}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@EACH
def test_cpu_autocast_changes_nothing(variant: Variant, dtype: torch.dtype) -> None:
    """As torch has it: on the CPU none of the three is in autocast's lists."""
    x = torch.randn(3, 5).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.softmax(x, -1).dtype == dtype
        assert variant.ours(x).dtype == dtype


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [False, True])
@EACH
def test_autocast_gives_float32(variant: Variant, dtype, compiled) -> None:  # S71
    torch._dynamo.reset()
    function = variant.ours
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    for cast_to in (torch.float16, torch.bfloat16):
        x = torch.randn(4, 100, device="cuda", dtype=dtype, requires_grad=True)
        with torch.autocast("cuda", dtype=cast_to):
            y = function(x)
        assert y.dtype == torch.float32
        y.square().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        with torch.autocast("cuda", dtype=cast_to):
            assert softmax(x.detach(), dtype=torch.float16).dtype == torch.float16
            assert softmax(x.detach(), kernel="v2_vectorized").dtype == torch.float32
            softmax(x.detach(), out=torch.empty_like(x))  # in x's dtype, as torch's out= is
