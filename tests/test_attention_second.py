"""The second derivative of attention, by every route, and the third."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, func
from torch.autograd import gradcheck, gradgradcheck

from attention_kit import CASES, INF, PLAIN, Inputs, call, inputs, written_out
from online_softmax import attention, attention_state, attention_varlen, merge
from rows_kit import GPU

F64 = torch.double
close = torch.testing.assert_close
OP = torch.ops.online_softmax.attention.default


def ours(q: Tensor, k: Tensor) -> Tensor:
    return attention(q, k, k, causal=True).square().sum()


def theirs(q: Tensor, k: Tensor) -> Tensor:
    return written_out(Inputs(q, k, k), PLAIN._replace(right=0))[0].square().sum()


@pytest.fixture
def two() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 2, 3, 2, dtype=F64, generator=generator)
    return q, torch.randn(1, 1, 4, 2, dtype=F64, generator=generator)


@pytest.mark.parametrize("by_op", [False, True])
@pytest.mark.parametrize("name", ["all", "nan", "bias_of_keys"])
def test_gradgradcheck(name: str, by_op: bool) -> None:
    """By out and lse, by every tensor, and by what arrives; among rows without a key."""
    o, shapes = CASES[name]
    small = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 3, "k_len": 3, "dim": 2}
    given = inputs(**small, **{n: shapes[n] for n in ("bias", "mask", "sinks") if n in shapes})
    seen = written_out(given, o._replace(nan_empty=False))[1] != -INF
    assert seen.any()

    def function(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        values = iter(leaves)
        tensors = [t if t is None or t.dtype == torch.bool else next(values) for t in given]
        if by_op:
            out, lse, _, _ = OP(*tensors, None, None, *o, False, "")
        else:
            out, lse = call(name, *tensors)
        return out[seen], lse[seen]

    assert gradgradcheck(function, [t.requires_grad_() for t in given.floats()])


def test_no_row_has_a_key() -> None:
    q, k = torch.ones(1, 1, 2, 2, requires_grad=True), torch.ones(1, 1, 0, 2, requires_grad=True)
    (dq,) = torch.autograd.grad(attention(q, k, k).sum(), q, create_graph=True)
    by = torch.autograd.grad(dq.sum(), q, allow_unused=True)
    assert by[0] is None or not by[0].any()


def test_states_and_packed_sequences(two: tuple[Tensor, Tensor]) -> None:
    q, k = (t.requires_grad_() for t in two)

    def states(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cuts = (slice(0, 1), slice(1, 4))
        whole = merge(*(attention_state(q, k[:, :, c], k[:, :, c]) for c in cuts))
        return whole.output(), whole.lse()

    assert gradgradcheck(states, (q, k))
    ends, k_ends = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 3, 4, 4])

    def packed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        tokens = q[0].transpose(0, 1), k[0].transpose(0, 1)
        out, lse = attention_varlen(*tokens, tokens[1], ends, k_ends, 2, 3, return_lse=True)
        return out, lse[:2]

    assert gradcheck(packed, (q, k))
    assert gradgradcheck(packed, (q, k))


def test_transforms_and_the_third_order(two: tuple[Tensor, Tensor]) -> None:
    q, k = two
    both = (0, 1)
    hessians = [func.jacrev(func.jacrev(f, both), both)(q, k) for f in (ours, theirs)]
    close(*hessians)
    several = torch.stack([q, 2 * q])
    batches = [
        torch.vmap(func.grad(lambda q, f=f: func.grad(f)(q, k).square().sum()))(several)
        for f in (ours, theirs)
    ]
    close(*batches)

    def third(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k)]
        found: tuple[Tensor, ...] = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
        for _ in range(2):
            loss = sum(t.square().sum() for t in found)
            found = torch.autograd.grad(loss, leaves, create_graph=True)
        return tuple(t.detach() for t in found)

    close(third(ours), third(theirs))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, device: str, two: tuple[Tensor, Tensor]) -> None:
    """Of the rounded values, in float32; on a GPU the first order is by the kernels."""
    leaves = [t.to(device, dtype).requires_grad_() for t in two]
    wide = [t.detach().cpu().double().requires_grad_() for t in leaves]
    seconds = []
    for f, given in ((ours, leaves), (theirs, wide)):
        (dq,) = torch.autograd.grad(f(*given), given[:1], create_graph=True)
        seconds.append(torch.autograd.grad(dq.square().sum(), given))
    for got, want in zip(*seconds, strict=True):
        assert got.dtype == dtype
        bound = 1e-4 if dtype == torch.float32 else 5e-2
        most = float(want.abs().max())
        close(got.cpu().double(), want, rtol=bound, atol=bound * most)
