"""token_stats inside torch: opcheck, gradients of the op, compile, vmap, autocast, graphs."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from online_softmax import statskernels, statsops, token_stats
from rows_kit import DEVICES, INF, NAN, double, gpu

close = torch.testing.assert_close
OP = torch.ops.online_softmax.token_stats.default
BACKWARD = torch.ops.online_softmax.token_stats_backward.default
FLOATS = [torch.float64, torch.float32, torch.bfloat16]
SUBSETS = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]


def _target(*shape: int, device: str = "cpu") -> Tensor:
    return torch.arange(torch.Size(shape).numel(), device=device).reshape(shape) % 5


@DEVICES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool, dtype: torch.dtype, device: str) -> None:
    x = double(4, 3, 5, device=device).to(dtype)
    target = _target(4, 3, device=device)
    strided = x.transpose(0, -1).contiguous().transpose(0, -1)
    for view, given, top_k in ((x, target, 2), (x[0, 0], None, 0), (strided, target, 5)):
        leaf = view.detach().requires_grad_(grad)
        given = given if given is None or view.dim() > 1 else given[0, 0]
        opcheck(OP, (leaf, given, top_k, 0.7))
        _, entropy, *_, state = OP(view, given, top_k, 0.7)
        one = torch.ones_like(entropy)
        for places in SUBSETS if given is not None else SUBSETS[:2]:
            upstream = [one if i in places else None for i in range(3)]
            opcheck(BACKWARD, (*upstream, leaf, given, entropy, state, 0.7))


def test_what_was_not_asked_for_has_no_element() -> None:
    fields = OP(torch.zeros(2, 3, 5), None, 0, 1.0)
    assert [tuple(t.shape) for t in fields] == [(2, 3), (2, 3), (0,), (0,), (0,), (0,), (2, 3, 2)]
    types = [t.dtype for t in fields]
    assert types == [*[torch.float32] * 3, torch.int64, torch.float32, torch.int64, torch.float32]


@DEVICES
def test_gradients_of_the_op(device: str) -> None:
    """All three differentiable fields; a target that is no class has none."""
    x, target = double(4, 5, device=device, grad=True), torch.tensor([0, 4, 2, -1], device=device)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        lse, entropy, log_prob, *_ = OP(x, target, 2, 0.7)
        return lse, entropy, torch.where(target >= 0, log_prob, 0.0)

    assert gradcheck(function, (x,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, (x,), check_fwd_over_rev=True)
    flags = [t.requires_grad for t in OP(x, target, 2, 0.7)]
    assert flags == [True, True, True, False, False, False, False]
    assert not OP(x, None, 0, 0.7)[2].requires_grad


def test_third_derivatives() -> None:
    x, target = double(2, 4, grad=True), torch.tensor([1, 3])
    stats = OP(x, target, 0, 1.3)
    upstream = torch.ones(2, dtype=torch.double, requires_grad=True)
    total = ((stats[0] + 2 * stats[1] - stats[2]) * upstream).sum()
    (dx,) = torch.autograd.grad(total, x, create_graph=True)

    def again(x: Tensor, upstream: Tensor) -> Tensor:
        return BACKWARD(upstream, 2 * upstream, -upstream, x, target, stats[1], stats[6], 1.3)

    close(again(x, upstream), dx)
    log_p = torch.log_softmax(1.3 * x, -1)
    lse, entropy = torch.logsumexp(1.3 * x, -1), -(log_p.exp() * log_p).sum(-1)
    written = ((lse + 2 * entropy - log_p.gather(-1, target[:, None])[:, 0]) * upstream).sum()
    (want,) = torch.autograd.grad(written, x, create_graph=True)
    close(dx, want)
    second = [torch.autograd.grad(d.pow(3).sum(), x, create_graph=True)[0] for d in (dx, want)]
    close(*second)
    close(*(torch.autograd.grad(d.pow(3).sum(), x)[0] for d in second))


@DEVICES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_are_not_normal(dtype: torch.dtype, device: str) -> None:
    """The op gives what eager mode gives, gradients too: by lse 0 but at inf, else NaN."""
    rows = [[-INF] * 3, [INF, 0.0, -INF], [NAN, 0.0, 1.0], [0.0, -INF, 0.0]]
    x = torch.tensor(rows, device=device).to(dtype).requires_grad_()
    target = torch.tensor([0, 1, 1, 0], device=device)
    eager, fields = token_stats(x, target, top_k=3), OP(x, target, 3, 1.0)
    for got, want in zip(fields[:6], eager, strict=True):
        close(got, want, equal_nan=True)
    nan = [NAN] * 3
    wanted = (
        [nan, [NAN, 0.0, 0.0], nan, [0.5, 0.0, 0.5]],
        [nan, nan, nan, [0.0] * 3],
        [nan, nan, nan, [0.5, 0.0, -0.5]],
    )
    for got, want, values in zip(fields[:3], eager[:3], wanted, strict=True):
        for result in (got, want):
            (dx,) = torch.autograd.grad(result.sum(), x, retain_graph=True)
            exact = torch.tensor(values, device=device).to(dtype)
            close(dx, exact, rtol=0, atol=1e-6, equal_nan=True)


# ---- torch.compile


@DEVICES
@pytest.mark.parametrize("fields", SUBSETS, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_compile(dynamic: bool, fields: tuple[int, ...], device: str) -> None:
    torch._dynamo.reset()
    call = lambda x, t: token_stats(x, t, top_k=3, temperature=0.5)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows, classes, dtype in ((3, 6, torch.float32), (4, 9, torch.float32),
                                 (5, 700, torch.bfloat16)):  # fmt: skip
        x = double(rows, classes, device=device).to(dtype).requires_grad_()
        target = _target(rows, device=device)
        stats, eager = compiled(x, target), call(x, target)
        assert [t.requires_grad for t in stats] == [True] * 3 + [False] * 3
        for got, want in zip(stats, eager, strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            close(got, want)
        wide = x.detach().double().requires_grad_()  # eager mode rounds a part of dx before a sum
        got, want = (
            torch.autograd.grad(sum((each[i] * (i + 1)).sum() for i in fields), of)[0]
            for each, of in ((stats, x), (call(wide, target), wide))
        )
        assert got.dtype == dtype
        rough = torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 0.0
        close(got.double(), want, rtol=rough + 3e-6, atol=1e-5)


@pytest.mark.parametrize("with_target", [False, True])
def test_dynamic_sizes_do_not_recompile(with_target: bool) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    call = lambda x, t: token_stats(x, t, top_k=x.shape[-1] // 2)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for rows, classes in ((4, 6), (5, 7), (9, 33), (12, 100)):
        x, target = torch.randn(rows, classes), _target(rows) if with_target else None
        for got, want in zip(compiled(x, target), call(x, target), strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                close(got, want)
    assert counter.frame_count == 1


def test_inductor() -> None:
    torch._dynamo.reset()

    def call(x: Tensor, target: Tensor) -> Tensor:
        stats = token_stats(2 * x.t(), target, top_k=2)
        return stats.entropy.exp() * stats.target_log_prob + stats.top_log_probs.sum(-1)

    compiled = torch.compile(call, fullgraph=True)
    x, target = torch.randn(7, 5, requires_grad=True), _target(5)
    results = [f(x, target) for f in (compiled, call)]
    close(*results)
    close(*(torch.autograd.grad(each.square().sum(), x)[0] for each in results))


def test_an_exported_program_keeps_the_op() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return token_stats(x, top_k=2).entropy

    x = torch.randn(3, 4)
    program = torch.export.export(Module(), (x,))
    assert OP in {node.target for node in program.graph.nodes}
    close(program.module()(x), token_stats(x).entropy)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 3, 7, dtype=torch.float16, requires_grad=True)
        stats = token_stats(x, torch.zeros(4, 3, dtype=torch.int64), top_k=2)
        stats.entropy.sum().backward()
    assert [tuple(t.shape) for t in stats] == [(4, 3)] * 4 + [(4, 3, 2)] * 2
    assert [t.dtype for t in stats[3:]] == [torch.int64, torch.float32, torch.int64]
    assert {type(t) for t in (*stats, x.grad)} == {FakeTensor}
    assert (x.grad.shape, x.grad.dtype) == (x.shape, torch.float16)


# ---- batches and autocast


def test_vmap() -> None:
    """Of the op, over any of its tensors; and inside torch.compile."""
    torch._dynamo.reset()
    x, target = double(4, 3, 5), _target(4, 3)
    cases = (((1, 1), x, target), ((0, None), x, target[0]), ((None, 0), x[0], target))
    for in_dims, of, at in cases:
        got = torch.vmap(lambda x, t: tuple(OP(x, t, 2, 0.7)), in_dims)(of, at)
        moved = [t if d is None else t.movedim(d, 0) for t, d in zip((of, at), in_dims)]  # noqa: B905
        for i in range(len(got[0])):
            one = [t if d is None else t[i] for t, d in zip(moved, in_dims)]  # noqa: B905
            for batch, want in zip(got, OP(*one, 2, 0.7), strict=True):
                close(batch[i], want)
    entropy = torch.vmap(lambda x: OP(x, None, 0, 0.7)[1])(x)
    close(entropy, OP(x, None, 0, 0.7)[1])
    call = lambda x, t: tuple(token_stats(x, t, top_k=2))  # noqa: E731
    compiled = torch.compile(torch.vmap(call), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x, target), call(x, target), strict=True):
        close(got, want)
    _, entropy, *_, state = OP(x, target, 0, 0.7)
    back = lambda g, x, t, h, s: BACKWARD(g, None, g, x, t, h, s, 0.7)  # noqa: E731
    given = (entropy, x, target, entropy, state)
    close(torch.vmap(back)(*given), back(*given))
    scaled = torch.vmap(back, (0, *[None] * 4))(torch.stack((entropy, 2 * entropy)), *given[1:])
    close(scaled, torch.stack((back(*given), 2 * back(*given))))


@DEVICES
@pytest.mark.parametrize("compiles", [False, True])
def test_autocast(compiles: bool, device: str) -> None:
    torch._dynamo.reset()
    x, target = double(3, 5, device=device).bfloat16().requires_grad_(), _target(3, device=device)
    call = lambda x: token_stats(x, target, top_k=2)  # noqa: E731
    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiles else call
    with torch.autocast(device, dtype=torch.bfloat16):
        stats = function(x)
    for got, want in zip(stats, call(x), strict=True):
        assert got.dtype == want.dtype
        close(got, want)
    (dx,) = torch.autograd.grad(stats.entropy.sum(), x)
    close(dx, torch.autograd.grad(call(x).entropy.sum(), x)[0])


# ---- on a GPU


@gpu
def test_nothing_of_the_size_of_the_logits_when_compiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, t: token_stats(x, t, top_k=20), fullgraph=True)
    x = torch.randn(512, 32000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = _target(512, device="cuda")
    assert statskernels.takes(x)
    compiled(x, target).entropy.sum().backward()
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    entropy = compiled(x, target).entropy
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < x.nbytes // 4
    entropy.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < x.nbytes + x.nbytes // 4  # the gradient


@gpu
def test_the_op_in_a_cuda_graph() -> None:
    x, target = torch.randn(64, 5000, device="cuda"), _target(64, device="cuda")
    ones = torch.ones(64, device="cuda")

    def step() -> tuple[Tensor, ...]:
        found = OP(x, target, 5, 0.7)
        return *found, BACKWARD(ones, ones, None, x, target, found[1], found[6], 0.7)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)


@gpu
def test_the_reference_and_the_kernels_agree() -> None:
    x = torch.randn(32, 3000, device="cuda")
    target = _target(32, device="cuda")
    kernels, torchs = (f(x, target, 5, 0.7) for f in (statsops.forward, statsops._by_torch))
    for got, want in zip(kernels, torchs, strict=True):
        close(got, want, rtol=2e-6, atol=5e-6)
