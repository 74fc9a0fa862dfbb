"""Attention from its definition: tiles and states against the whole matrix of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import online_softmax
import sanitize_attention
from attention_kit import CASES, INF, NAN, PLAIN, Inputs, inputs, upstream, wanted
from online_softmax.attentionplan import Blocks, Options
from online_softmax.reference import attention, attention_gradient, packed
from online_softmax.reference.attention import visible
from online_softmax.reference.packed import Packed

close = torch.testing.assert_close


@pytest.mark.parametrize("blocks", [None, Blocks(1, 1, 4, 4), Blocks(2, 2, 3, 5)])
@pytest.mark.parametrize("name", CASES)
def test_every_option(name: str, blocks: Blocks | None) -> None:
    o, shapes = CASES[name]
    given = inputs(**shapes)
    above = upstream(given)
    out, lse, gradients = wanted(given, o, *above)
    got = attention.forward(*given, o, blocks=blocks)
    close(got.out, out, equal_nan=True)
    close(got.lse, lse)
    found = attention_gradient.backward(*above, *given, got.out, got.lse, o, blocks=blocks)
    close([t for t in found if t is not None], gradients)
    without = attention_gradient.backward(
        above.dout, None, *given, got.out, got.lse, o, blocks=blocks
    )
    close([t for t in without if t is not None], wanted(given, o, above.dout, None)[2])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "lay",
    [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),  # tokens before heads
        lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        lambda t: t[:1, :1].expand(t.shape),
        lambda t: torch.cat([t, t + NAN], -1)[..., : t.shape[-1]],
    ],
    ids=["tokens first", "turned", "expanded", "cut"],
)
def test_any_strides(lay: Callable[[Tensor], Tensor], kv_heads: int) -> None:
    """Of what is given and of what arrives from above, for several of a batch in a block."""
    given = inputs(3, 4, kv_heads, 9, 13)
    above = upstream(given)
    q, k, v, dout = (lay(t) for t in (*given[:3], above.dout))
    plain = [t.contiguous() for t in (q, k, v, dout)]
    found = []
    for tensors in ((q, k, v, dout), plain):
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        out = online_softmax.attention(*leaves, causal=True)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, tensors[3])])
    close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    """The inputs as they were rounded are the truth; sums are in float32."""
    o, shapes = CASES["all"]
    given = inputs(**shapes).cast(dtype)
    above = upstream(given)
    out, lse, gradients = wanted(given, o, *above)
    got = attention.forward(*given, o)
    assert got.out.dtype == dtype
    assert got.lse.dtype == torch.float32
    half = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    close(got.out.double(), out, rtol=1e-5 + half, atol=1e-5)
    close(got.lse.double(), lse, rtol=1e-5, atol=1e-5)
    found = [
        t for t in attention_gradient.backward(*above, *given, got.out, got.lse, o) if t is not None
    ]
    for one, want, of in zip(found, gradients, given.floats(), strict=True):
        assert one.dtype == of.dtype
        close(one.double(), want, rtol=1e-4 + 2 * half, atol=1e-5 + 4 * half)


def test_a_state_is_kept_beside_the_output() -> None:
    o, shapes = CASES["all"]
    given = inputs(**shapes).cast(torch.float16)
    got = attention.forward(*given, o, keeps_float=True, blocks=Blocks(1, 1, 4, 4))
    assert got.out.dtype == torch.float32
    close(got.m + got.d.log(), got.lse)
    none = attention.forward(*given._replace(sinks=None), o)
    close(got.lse, none.lse)  # the sink is not in it


def test_rows_without_a_key_have_no_gradient() -> None:  # S31
    """Not even where NaN arrives from above; and the other rows are as they were."""
    given = inputs(q_len=5, k_len=6, mask=(0, 1, 0, 0), sinks=True)
    given.mask[:, :, 1] = False
    above = upstream(given)
    out, lse = attention.forward(*given, PLAIN)[:2]
    assert (lse[:, :, 1] == -INF).all()
    assert not out[:, :, 1].any()
    clean = attention_gradient.backward(*above, *given, out, lse, PLAIN)
    above.dout[:, :, 1], above.dlse[:, :, 1] = NAN, NAN
    for got, want in zip(
        attention_gradient.backward(*above, *given, out, lse, PLAIN), clean, strict=True
    ):
        assert got is want or torch.equal(got, want)
    assert not clean.q[:, :, 1].any()


def test_a_row_of_nan_says_nothing_of_keys_that_it_does_not_see() -> None:
    """In one tile with them, by place and by a mask."""
    plain = inputs(q_len=6, k_len=6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    for o, given in ((PLAIN._replace(right=0), plain), (PLAIN, plain._replace(mask=mask))):
        above = upstream(given)
        spoilt = given._replace(q=given.q.clone())
        spoilt.q[:, :, 2] = NAN
        clean, got = (
            attention_gradient.backward(*above, *t, *attention.forward(*t, o)[:2], o)
            for t in (given, spoilt)
        )
        assert got.v[:, :, :3].isnan().all()
        close(got.v[:, :, 3:], clean.v[:, :, 3:])
        assert got.q[:, :, 2].isnan().all()
        close(got.q[:, :, [0, 1, 3, 4, 5]], clean.q[:, :, [0, 1, 3, 4, 5]])


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that an operation gave."""

    found = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.found = max(self.found, result.numel())
        return result


def test_scores_are_never_whole() -> None:
    """2,048 by 2,048 of them: 4,194,304. A tile has 256 by 512."""
    given = inputs(batch=1, heads=1, kv_heads=1, q_len=2048, k_len=2048, dim=16)
    above = upstream(given)
    with Largest() as largest:
        got = attention.forward(*given, PLAIN)
        attention_gradient.backward(*above, *given, *got[:2], PLAIN)
    assert largest.found == 256 * 512


def test_infinite_and_missing_values_stay_in_their_row() -> None:
    given = inputs(batch=1, heads=1, kv_heads=1, q_len=4, k_len=6)
    clean, _ = attention.forward(*given, PLAIN)[:2]
    given.q[0, 0, 1] = NAN
    given.q[0, 0, 2, 0] = INF
    given.k[0, 0, :, 0] = 1.0
    given.k[0, 0, 3, 0] = -1.0
    got = attention.forward(*given, PLAIN, blocks=Blocks(1, 1, 3, 2))
    assert got.out[0, 0, 1:3].isnan().all()
    assert got.lse[0, 0].isnan().tolist() == [False, True, False, False]
    assert got.lse[0, 0, 2] == INF
    assert got.out[0, 0, [0, 3]].isfinite().all()
    assert clean.isfinite().all()


def test_scores_far_below_every_stand_in_for_infinity() -> None:  # S30
    """q = 448 u, k = -k0 u, k0 a little different a key."""
    u = torch.full((128,), 128**-0.5, dtype=torch.double)
    q = (448 * u).view(1, 1, 1, -1)
    k = (-(2000 + torch.arange(6.0).double()).view(1, 1, -1, 1) * u).contiguous()
    given = Inputs(q, k, torch.randn(1, 1, 6, 128, dtype=torch.double)).cast(torch.float32)
    assert float((given.q @ given.k.mT).max()) < -5e4
    out, lse, _ = wanted(given, PLAIN, torch.zeros(1, 1, 1, 128), None)
    got = attention.forward(*given, PLAIN, blocks=Blocks(1, 1, 3, 2))
    assert (out.abs() > 1e-3).any()
    close(got.out.double(), out, rtol=1e-2, atol=1e-2)
    close(got.lse.double(), lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("lengths", [(5, 2), (2, 5), (1, 17), (130, 64), (64, 130)])
def test_causal_alignment(lengths: tuple[int, int]) -> None:  # S32
    q_len, k_len = lengths
    corner = PLAIN._replace(right=0)
    queries, keys = slice(0, q_len), slice(0, k_len)
    seen = visible(queries, keys, q_len, k_len, corner, torch.device("cpu"))
    i, j = torch.arange(q_len).unsqueeze(1), torch.arange(k_len)
    assert torch.equal(seen, j <= i + k_len - q_len)
    top = visible(queries, keys, q_len, k_len, corner._replace(top_left=True), seen.device)
    assert torch.equal(top, j <= i)
    given = inputs(q_len=q_len, k_len=k_len)
    out, lse = attention.forward(*given, corner)[:2]
    gone = max(q_len - k_len, 0)
    assert not out[:, :, :gone].any()
    assert (lse[:, :, :gone] == -INF).all()
    assert lse[:, :, gone:].isfinite().all()


# ---- packed sequences


def sequences(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("o", [PLAIN, Options(0, 0, 0.4, 4, 1, True, 3.0, False)])
def test_packed_sequences(o: Options) -> None:
    """Of length 0 too, on either side, and with tokens behind the last."""
    q_lens, k_lens = [3, 0, 5, 4, 1], [4, 2, 0, 9, 1]
    lens = Packed(sequences(q_lens), sequences(k_lens))
    q = torch.randn(sum(q_lens) + 2, 4, 8, dtype=torch.double)
    k, v = (torch.randn(sum(k_lens) + 3, 2, n, dtype=torch.double) for n in (8, 6))
    sinks = torch.randn(4, dtype=torch.double)
    dout, dlse = torch.randn(q.shape[0], 4, 6).double(), torch.randn(q.shape[0], 4).double()
    got = packed.forward(q, k, v, sinks, lens, o)
    found = packed.backward(dout, dlse, q, k, v, sinks, lens, got.out, got.lse, o)
    dsinks = torch.zeros_like(sinks)
    for at_q, at_k in lens.slices():
        one = Inputs(*(t.transpose(0, 1)[None] for t in (q[at_q], k[at_k], v[at_k])), sinks=sinks)
        above = dout[at_q].transpose(0, 1)[None], dlse[at_q].t()[None]
        out, lse, gradients = wanted(one, o, *above)
        close(got.out[at_q], out[0].transpose(0, 1))
        close(got.lse[at_q], lse[0].t())
        for whole, at, want in zip(found[:3], (at_q, at_k, at_k), gradients[:3], strict=True):
            close(whole[at], want[0].transpose(0, 1))
        dsinks += gradients[3]
    close(found.sinks, dsinks)
    assert not got.out[-2:].any()
    assert (got.lse[-2:] == -INF).all()
    assert not any(t[-2:].any() for t in found[:3])


def test_what_sanitizers_run_is_judged() -> None:
    """sanitize_attention.py, whose kernels need a GPU, by the reference."""
    o, shapes = CASES["all"]
    given = inputs(**shapes).cast(torch.float32)
    assert sanitize_attention.is_right(given, o, "reference")
    assert not sanitize_attention.near(given.q, given.q + 1, 1e-4)
