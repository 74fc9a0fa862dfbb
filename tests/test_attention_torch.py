"""attention inside torch: gradients, opcheck, compile, autocast, transforms, modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.fx
from torch import Tensor, func
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from attention_kit import CASES, INF, PLAIN, call, inputs, written_out
from online_softmax import attention, attention_state, attention_varlen, merge
from rows_kit import DEVICES, Tagged, gpu

close = torch.testing.assert_close
OP = torch.ops.online_softmax.attention.default
BACKWARD = torch.ops.online_softmax.attention_backward.default


@pytest.mark.parametrize("name", ["plain", "all", "nan", "bias_of_keys"])
def test_gradients(name: str) -> None:
    o, shapes = CASES[name]
    shapes = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 3, "k_len": 4, "dim": 2} | {
        n: s for n, s in shapes.items() if n in ("bias", "mask", "sinks")
    }
    given = inputs(**shapes)
    seen = written_out(given, o._replace(nan_empty=False))[1] != -INF
    floats = given.floats()

    def function(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        values = iter(leaves)
        tensors = [t if t is None or t.dtype == torch.bool else next(values) for t in given]
        out, lse = call(name, *tensors)
        return out[seen], lse[seen]

    assert gradcheck(function, [t.requires_grad_() for t in floats])


def op_arguments(name: str, device: str) -> tuple[Any, ...]:
    o, shapes = CASES[name]
    return (*inputs(**shapes).cast(torch.float32, device), None, None, *o)


@DEVICES
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_opcheck(name: str, grad: bool, device: str) -> None:
    arguments = op_arguments(name, device)
    leaves = tuple(
        t.requires_grad_(grad) if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in arguments
    )
    kernel = "reference" if device == "cpu" else ""
    opcheck(OP, (*leaves, name == "plain", kernel))
    out, lse, _, _ = OP(*arguments, False, kernel)
    above = torch.ones_like(out), None if name == "plain" else torch.ones_like(lse)
    wants = [t is not None for t in (*arguments[:4], arguments[5])]
    saved = (*arguments[:8], out.detach(), lse.detach(), *arguments[8:], wants, kernel)
    opcheck(BACKWARD, (*above, *(t.detach() if isinstance(t, Tensor) else t for t in saved)))


@DEVICES
@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_compile(dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def function(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = call("all", *tensors)
        state = attention_state(*tensors[:3], causal=True)
        return out, lse, merge(state, state).output()

    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    counts = []
    for q_len in (9, 12, 17):
        given = inputs(**{**CASES["all"][1], "q_len": q_len}).cast(torch.float32, device)
        leaves = [t.requires_grad_() for t in given.floats()]
        results = [f(*given) for f in (compiled, function)]
        close(*results)
        sums = [sum(t[t.isfinite()].square().sum() for t in each) for each in results]
        close(*(torch.autograd.grad(each, leaves) for each in sums))
        counts.append(counter.frame_count)
    assert not dynamic or len(set(counts)) == 1  # no length compiles it again


def test_varlen_compiles() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
    q, ends = torch.randn(6, 2, 4), torch.tensor([0, 2, 6], dtype=torch.int32)
    close(compiled(q, q, q, ends, ends, 4, 4), attention_varlen(q, q, q, ends, ends, 4, 4))


@DEVICES
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool, device: str) -> None:
    """As torch's own: q, k and v in autocast's dtype; lse in float32."""
    torch._dynamo.reset()
    function = attention
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    given = inputs().cast(torch.float32, device)
    q = given.q.requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        out, lse = function(q, given.k, given.v, return_lse=True)
        theirs = functional.scaled_dot_product_attention(q, given.k, given.v, enable_gqa=True)
    assert out.dtype == theirs.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    want = attention(*(t.bfloat16() for t in given[:3]))
    close(out, want, rtol=0, atol=0)
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32


@gpu
def test_a_graph() -> None:
    """Forward and backward captured, replayed on other values: nothing waits for the device."""
    given = inputs(2, 4, 2, 40, 56, 32).cast(torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in given[:3]]

    def step() -> tuple[Tensor, ...]:
        out, lse = attention(*leaves, causal=True, return_lse=True)
        decoded = attention(leaves[0][:, :, :1], *leaves[1:])
        loss = out.float().square().sum() + lse.sum() + decoded.float().sum()
        return out, *torch.autograd.grad(loss, leaves)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    close(captured, step(), rtol=0, atol=0)


def test_meta_tensors() -> None:
    q, ends = torch.empty(2, 4, 5, 8, device="meta"), torch.empty(3, device="meta").int()
    out, lse = attention(q, q, q, return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == (q.shape, q.shape[:3], "meta")
    packed = attention_varlen(q[0], q[0], q[0], ends, ends, 3, 3)
    assert packed.shape == q[0].shape


def test_transforms() -> None:
    given = inputs(batch=6)
    q, k, v = (t.unflatten(0, (3, 2)) for t in given[:3])
    each = torch.stack([attention(*one, causal=True) for one in zip(q, k, v, strict=True)])
    close(torch.vmap(lambda *t: attention(*t, causal=True))(q, k, v), each)
    close(torch.vmap(lambda q: attention(q, k[0], v[0]), 1, 1)(q.transpose(0, 1)),
          torch.vmap(lambda q: attention(q, k[0], v[0]))(q).transpose(0, 1))  # fmt: skip
    loss = lambda q, k, v: attention(q, k, v, causal=True).square().sum()  # noqa: E731
    whole = lambda q, k, v: (  # noqa: E731
        written_out(given._replace(q=q, k=k, v=v), PLAIN._replace(right=0))[0].square().sum()
    )
    for got, want in zip(
        torch.vmap(func.grad(loss, (0, 1, 2)))(q, k, v),
        torch.vmap(func.grad(whole, (0, 1, 2)))(q, k, v),
        strict=True,
    ):
        close(got, want)


def test_what_is_not_there_is_an_error() -> None:
    """No forward mode, rather than a wrong number."""
    q = torch.randn(1, 1, 3, 2, dtype=torch.double)
    with pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
        func.jvp(lambda q: attention(q, q, q), (q,), (q,))


def test_modes_and_subclasses_take_the_op() -> None:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    with Mode():
        out = attention(q, q, q)
        torch.autograd.grad(out.sum(), q)
    assert "online_softmax.attention.default" in seen
    assert "online_softmax.attention_backward.default" in seen
    assert type(attention(q.as_subclass(Tagged), q, q)) is Tagged


def test_what_overrides_torch_functions_is_asked() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return attention(q, k, k, causal=True)

    traced = torch.fx.symbolic_trace(Model())
    (node,) = (node for node in traced.graph.nodes if node.target is attention)
    assert node.kwargs["causal"] is True
    q = torch.randn(1, 2, 3, 4)
    close(traced(q, q), Model()(q, q))


def test_what_overrides_is_asked_about_parts_and_packed_sequences() -> None:
    def of_part(q: Tensor, ends: Tensor) -> Tensor:
        return attention_state(q, q, q, softcap=2.0).output()

    def packed(q: Tensor, ends: Tensor) -> Tensor:
        return attention_varlen(q[0], q[0], q[0], ends, ends, 3, 3, window_size=(1, 0))

    q, ends = torch.randn(1, 4, 3, 4), torch.tensor([0, 1, 4])
    for made, function in ((of_part, attention_state), (packed, attention_varlen)):
        traced = torch.fx.symbolic_trace(made)
        (node,) = (node for node in traced.graph.nodes if node.target is function)
        assert {"softcap": 2.0, "window_size": (1, 0)}.items() & node.kwargs.items()
        close(traced(q, ends), made(q, ends))


def test_gradients_that_nobody_asked_for() -> None:
    q, k, v = torch.randn(3, 1, 2, 3, 4).unbind()
    bias = torch.randn(3, 3, requires_grad=True)
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    (dbias,) = torch.autograd.grad(lse.sum(), bias)
    assert dbias.shape == (3, 3)
    close(dbias.sum(-1), torch.full((3,), 2.0))  # of two heads, each row sums to 1
    assert not attention(q, k, v).requires_grad
    with torch.no_grad():
        assert not attention(q, k, v, bias=bias).requires_grad
    assert out.requires_grad
