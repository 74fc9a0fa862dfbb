"""The definition in PyTorch: State as people use it, and every operation against float64."""

from __future__ import annotations

import doctest
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from online_softmax.reference import online, ops
from online_softmax.reference.online import State

INF, NAN = math.inf, math.nan
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OPS = (
    (ops.softmax, torch.softmax),
    (ops.log_softmax, torch.log_softmax),
    (ops.logsumexp, torch.logsumexp),
)
SHAPES = [(), (1,), (5,), (3, 4), (2, 3, 4), (2, 1, 5, 3, 2)]
SHAPES += [(0,), (0, 2), (10, 0), (4, 0, 5), (0, 0)]
SHAPES_AND_DIMS = [(s, d) for s in SHAPES for d in range(-max(len(s), 1), max(len(s), 1))]
ROWS = [[1.0, 2.0, -3.0], [-INF, -INF, -INF], [-INF, 0.5, 1.0], [INF, 0.0, 1.0], [NAN, INF, 1.0]]
ROWS += [[0.0, -95.0, -200.0], [-245000.0, -245010.0, -INF], [1e30, 1e30, -1e30]]


def near(y: Tensor, x: Tensor, want: Tensor) -> None:
    """Within one rounding of y's dtype of the float64 result, float32 arithmetic's share added."""
    double = x.dtype == torch.float64
    rtol = 1e-12 if double else 2e-6 + 0.5 * torch.finfo(x.dtype).eps
    atol = 1e-14 if double else 2e-7 + torch.finfo(x.dtype).smallest_normal
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.double(), want, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("module", [online, ops])
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


# ---- operations


@pytest.mark.parametrize(("ours", "theirs"), OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_and_dim(ours, theirs, dtype: torch.dtype):
    for shape, dim in SHAPES_AND_DIMS:
        x = (torch.randn(shape) * 5).to(dtype)
        y = ours(x, dim)
        near(y, x, theirs(x.double(), dim))
        if ours is ops.logsumexp:
            assert torch.equal(ours(x, dim, keepdim=True).reshape(y.shape), y)
            assert ours(x, dim, keepdim=True).shape == theirs(x, dim, keepdim=True).shape


@pytest.mark.parametrize(("ours", "theirs"), OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_rows(ours, theirs, dtype: torch.dtype):
    x = torch.tensor(ROWS).to(dtype)
    for view, dim in (
        (x, 1),
        (x.t(), 0),
        (x.t().contiguous(), 0),
        (x[:, None].expand(-1, 2, -1), 2),
    ):
        near(ours(view, dim), view, theirs(view.double(), dim))


@pytest.mark.parametrize(("ours", "theirs"), OPS)
def test_half_types_accumulate_in_float32(ours, theirs):
    for dtype, cols in ((torch.float16, 8192), (torch.bfloat16, 4096), (torch.bfloat16, 512)):
        for x in (torch.zeros(2, cols), torch.randn(2, cols), 250 + 50 * torch.rand(2, cols)):
            near(ours(x.to(dtype), -1), x.to(dtype), theirs(x.to(dtype).double(), -1))


def test_log_sum_is_not_lost_beside_a_large_maximum():
    y = ops.log_softmax(torch.tensor([0.0, 1.0, -1.0, 0.0]) - 1e7)
    assert y.tolist() == pytest.approx([-1.6265234, -0.6265234, -2.6265234, -1.6265234], rel=1e-6)


# ---- State


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_as_good_as_the_whole(dtype: torch.dtype):
    x = (torch.randn(3, 101, 2) * 5).to(dtype)
    x[0, 40:70] = -INF
    whole = State.of(x, 1)
    assert (
        whole.m.dtype
        == whole.d.dtype
        == (torch.float64 if dtype == torch.float64 else torch.float32)
    )
    assert whole.m.shape == whole.d.shape == (3, 2)
    parts = x.split([1, 0, 39, 30, 31], dim=1)
    merged = State.of(parts[0], 1).merge(*(State.of(part, 1) for part in parts[1:]))
    absorbed = State.empty((3, 2), whole.m.dtype)
    for part in reversed(parts):
        absorbed = online.absorb(absorbed, part, 1)
    for state in (merged, absorbed):
        assert torch.equal(state.m, whole.m)
        torch.testing.assert_close(state.d, whole.d)
        y = torch.cat([state.softmax(part, 1) for part in parts], 1)
        near(y, x, torch.softmax(x.double(), 1))


def test_nothing_is_empty_and_changes_nothing():
    for state in (State.of(torch.empty(2, 0)), State.of(torch.full((2, 3), -INF)), State.empty(2)):
        assert state.m.tolist() == [-INF, -INF]
        assert state.d.tolist() == [0.0, 0.0]
        assert state.lse().tolist() == [-INF, -INF]
    assert State.empty().m.shape == ()
    assert State.empty((2, 0), torch.float64).d.dtype == torch.float64
    for shape in (np.int64(3), np.array([3]), torch.Size([3]), [3]):
        assert State.empty(shape).m.shape == (3,)
    row = State.of(torch.tensor([[1.0, 2.0], [INF, NAN]]))
    for merged in (
        row.merge(State.empty(2)),
        State.empty(2).merge(State.empty(2), row),
        row.merge(),
    ):
        torch.testing.assert_close(merged, row, rtol=0, atol=0, equal_nan=True)


# ---- transforms


def halves(x: Tensor) -> State:
    return State.of(x[..., :2]).merge(State.of(x[..., 2:]))


def test_vmap():
    x = torch.randn(7, 5, 3)
    state = torch.vmap(State.of)(x)
    assert isinstance(state, State)
    torch.testing.assert_close(state, State.of(x))
    torch.testing.assert_close(torch.vmap(halves, in_dims=1)(x).lse(), x.logsumexp(-1).t())
    shared = torch.vmap(State.merge, in_dims=(0, None))(State.of(x), State.of(x[0]))
    torch.testing.assert_close(shared.lse(), torch.logaddexp(x.logsumexp(-1), x[0].logsumexp(-1)))
    torch.testing.assert_close(torch.vmap(State.softmax)(state, x), x.softmax(-1))


@pytest.mark.parametrize(
    "row",
    [[0.3, -1.0, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 0.0, 2.0], [-INF, -INF, 1.0, -INF]],
)
def test_derivatives(row: list[float]):
    """Also at ties between the parts, where each part's maximum takes its share of the gradient."""
    x, v = torch.tensor(row, dtype=torch.float64), torch.tensor([1.0, -2.0, 0.5, 3.0]).double()
    for ours, theirs in (
        (lambda x: halves(x).lse(), lambda x: torch.logsumexp(x, -1)),
        (lambda x: halves(x).softmax(x)[1:] @ v[1:], lambda x: torch.softmax(x, -1)[1:] @ v[1:]),
    ):
        torch.testing.assert_close(torch.func.grad(ours)(x), torch.func.grad(theirs)(x))
        torch.testing.assert_close(
            torch.func.jvp(ours, (x,), (v,)), torch.func.jvp(theirs, (x,), (v,))
        )


@pytest.mark.parametrize("ours", [pair[0] for pair in OPS])
def test_second_derivatives(ours):
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, (x,))


@pytest.mark.parametrize(("ours", "theirs"), OPS)
def test_a_spoiled_row_spoils_no_other_gradient(ours, theirs):
    grads = []
    for op in (ours, theirs):
        x = torch.tensor(ROWS[:5], dtype=torch.float64, requires_grad=True)
        y = op(x, -1)
        (y * torch.arange(1.0, 1 + y.shape[-1])).sum().backward()
        grads.append(x.grad)
    for row in (0, 2):
        torch.testing.assert_close(grads[0][row], grads[1][row])
    assert grads[0][[1, 4]].isnan().all()


def test_compiles_whole():
    x = torch.randn(4, 6)
    compiled = torch.compile(lambda x: halves(x).softmax(x), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x.softmax(-1))


def test_traced_with_a_symbolic_size():
    trace = make_fx(
        lambda x: State.empty(x.shape[0]).merge(State.of(x)).lse(), tracing_mode="symbolic"
    )
    x = torch.randn(5, 4)
    torch.testing.assert_close(trace(torch.randn(3, 4))(x), x.logsumexp(-1))


# ---- refusals


def test_what_is_refused():
    state = State.of(torch.zeros(3, 2))
    whole = (torch.arange(3), torch.tensor([True]), torch.zeros(2, dtype=torch.complex64))
    for x, call in itertools.product(whole, (State.of, ops.softmax, ops.logsumexp, online.lift)):
        with pytest.raises(NotImplementedError, match=rf"float32.*; got {x.dtype}"):
            call(x)
    with pytest.raises(TypeError, match="must be a Tensor, got list"):
        State.of([1.0])
    for x, dim in ((torch.zeros(2, 3), 2), (torch.zeros(2, 0), -3), (torch.zeros(()), 1)):
        for call in (State.of, ops.softmax, ops.logsumexp):
            with pytest.raises(IndexError):
                call(x, dim)
    with pytest.raises(NotImplementedError, match=r"float32 or float64, got torch\.float16"):
        State.empty(3, torch.float16)
    with pytest.raises(TypeError, match="argument 2 must be a State, got Tensor"):
        state.merge(torch.zeros(3))
    with pytest.raises(TypeError, match="at least one"):
        online.merge()
    for other, message in (
        (State.empty(4), r"shape \(3,\), argument 3 has \(4,\)"),
        (State.empty(3, torch.float64), r"dtype torch\.float32, argument 3 has torch\.float64"),
        (State.empty(3, device="meta"), "device cpu, argument 3 has meta"),
        (State(state.m, state.d[:1]), r"shape \(3,\), argument 3 has \(1,\)"),
        (State(state.m, state.d.double()), r"torch\.float32, argument 3 has torch\.float64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            state.merge(state, other)
    with pytest.raises(RuntimeError, match=r"argument 1 has shape \(3,\), argument 1 has \(1,\)"):
        State(state.m, state.d[:1]).merge(state)
    with pytest.raises(TypeError, match=r"State.softmax\(\): x must be a Tensor, got list"):
        state.softmax([1.0])
    with pytest.raises(RuntimeError, match=r"shape \(2, 5\) has rows \(2,\) along dim 1.*\(3,\)"):
        state.softmax(torch.zeros(2, 5), 1)
    with pytest.raises(IndexError):
        state.softmax(torch.zeros(3, 5), 2)
    with pytest.raises(RuntimeError, match="shape"):
        online.absorb(state, torch.zeros(2, 5))
