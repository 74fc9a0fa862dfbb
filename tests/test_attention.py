"""attention, attention_varlen and attention_state as people call them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional

from attention_kit import CASES, INF, WORDS, call, inputs, upstream, wanted
from online_softmax import OutputState, attention, attention_state, attention_varlen, merge
from rows_kit import gpu

close = torch.testing.assert_close


@pytest.mark.parametrize("name", WORDS)
def test_options(name: str) -> None:
    o, shapes = CASES[name]
    given = inputs(**shapes)
    above = upstream(given)
    out, lse, gradients = wanted(given, o, *above)
    leaves = given.leaves()
    got = call(name, *leaves)
    close(got[0], out, equal_nan=True)
    close(got[1], lse)
    clean = [torch.where(lse.unsqueeze(-1) == -INF, 0.0, above.dout), above.dlse]
    close(list(torch.autograd.grad(got, leaves.floats(), clean)), gradients)


def test_it_is_torchs_own_where_torch_has_it() -> None:
    """Also the mask that a bool means, and torch's causal."""
    given = inputs(heads=4, kv_heads=2, q_len=6, k_len=6, mask=(0, 1, 0, 0))
    given.mask[..., 0] = True
    want = functional.scaled_dot_product_attention
    close(attention(*given[:3]), want(*given[:3], enable_gqa=True))
    masked = want(*given[:3], attn_mask=given.mask, enable_gqa=True)
    close(attention(*given[:3], mask=given.mask), masked)
    shorter = given.k[:, :, :4], given.v[:, :, :4]
    top = want(given.q, *shorter, is_causal=True, enable_gqa=True)
    close(attention(given.q, *shorter, causal="top_left"), top)


def test_a_mask_without_a_row() -> None:  # S31
    q, k, v = (torch.randn(1, 1, 4, 2, requires_grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    gradients = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), (q, k, v))
    assert not out[0, 0, 1].any()
    assert lse[0, 0, 1] == -INF
    assert not gradients[0][0, 0, 1].any()
    assert not any(t.isnan().any() for t in (out, *gradients))
    both = attention(q, k, v, mask=torch.ones(4, 4, dtype=torch.bool).triu(), causal=True)
    close(both, v)  # each sees its own key alone
    none = attention(q, k, v, mask=torch.ones(4, 4, dtype=torch.bool).triu(1), causal=True)
    assert not none.any()


@pytest.mark.parametrize("k_len", [1, 64, 3072])
def test_lse_is_a_natural_logarithm(k_len: int) -> None:  # S29
    given = inputs(1, 2, 1, 3, k_len, 16)
    _, lse = attention(*given[:3], return_lse=True)
    z = given.q @ given.k.repeat_interleave(2, 1).mT / 4
    close(lse, torch.logsumexp(z, -1))


# ---- states


def test_states_of_parts_merge_to_the_whole() -> None:
    _, shapes = CASES["all"]
    given = inputs(**shapes)
    options = {"scale": 0.4, "softcap": 3.0}

    def part(keys: slice) -> OutputState:
        q, k, v, bias, mask, _ = given
        return attention_state(
            q, k[:, :, keys], v[:, :, keys], bias=bias[..., keys], mask=mask[..., keys], **options
        )

    sink = given.sinks.view(-1, 1).expand(given.q.shape[:3])
    nothing = torch.zeros((*sink.shape, given.v.shape[-1]), dtype=sink.dtype)
    beside = OutputState(sink, torch.ones_like(sink), nothing)
    whole = merge(part(slice(0, 5)), part(slice(5, 5)), beside, part(slice(5, 13)))
    want, lse = call_whole(given, options)
    close(whole.output(), want)
    close(whole.lse(), torch.logaddexp(lse, sink))
    assert part(slice(5, 5)).m.eq(-INF).all()


def call_whole(given: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    q, k, v, bias, mask, sinks = given
    return attention(q, k, v, bias=bias, mask=mask, sinks=sinks, return_lse=True, **options)


def test_gradients_through_states() -> None:
    given = inputs(1, 2, 1, 3, 7, 4, mask=(1, 1, 0, 0))
    given.mask[..., 1, :4] = False  # a part of nothing
    given.mask[..., 2, :] = False
    leaves = given.leaves()

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cuts = (slice(0, 4), slice(4, 7))
        parts = (attention_state(q, k[:, :, c], v[:, :, c], mask=given.mask[..., c]) for c in cuts)
        state = merge(*parts)
        return state.output(), state.lse()[..., :2]

    assert gradcheck(function, leaves[:3])
    state = attention_state(*leaves[:3])
    assert not state.m.requires_grad
    assert state.d.requires_grad
    half = attention_state(*(t.half() for t in given[:3]))
    assert half.o.dtype == torch.float32


# ---- packed sequences


def test_varlen_is_attention_of_each() -> None:
    ends_q, ends_k = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 4, 9, 9])
    q = torch.randn(8, 4, 6, dtype=torch.double, requires_grad=True)
    k, v = (torch.randn(9, 2, 6, dtype=torch.double, requires_grad=True) for _ in range(2))
    sinks = torch.randn(4, dtype=torch.double, requires_grad=True)
    out, lse = attention_varlen(
        q, k, v, ends_q.int(), ends_k.int(), 5, 5,
        causal=True, window_size=(2, -1), softcap=2.0, sinks=sinks, return_lse=True,
    )  # fmt: skip
    assert lse.shape == (8, 4)
    one = [t.transpose(0, 1)[None] for t in (q[:3], k[:4], v[:4])]
    want = attention(*one, causal=True, window=(2, -1), softcap=2.0, sinks=sinks, return_lse=True)
    close(out[:3], want[0][0].transpose(0, 1))
    close(lse[:3], want[1][0].t())
    assert not out[3:].any()
    got = torch.autograd.grad(out.square().sum() + lse[:3].sum(), (q, k, v, sinks))
    by = torch.autograd.grad(want[0].square().sum() + want[1].sum(), (q, k, v, sinks))
    close(got, by)
    bare = attention_varlen(q, k, v, ends_q, ends_k, 5, 5)
    assert isinstance(bare, Tensor)


def varlen_attn() -> Any:
    """torch's own, or a skip."""
    varlen = pytest.importorskip(
        "torch.nn.attention.varlen", reason="this torch has no varlen_attn (a GPU test)"
    )
    return varlen.varlen_attn


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_varlen_is_torchs_own_where_torch_has_it(is_causal: bool, dtype: torch.dtype) -> None:
    """By the same names and convention: tokens, where sequences begin, causal at the bottom right
    as windows of (-1, 0), gradients; heads that share keys where torch takes them."""
    theirs = varlen_attn()
    known = inspect.signature(theirs).parameters
    q_lens, k_lens = (100, 1, 333, 64), (100, 200, 333, 70)
    q_ends, k_ends = (
        torch.tensor([0, *lens], device="cuda").cumsum(0).int() for lens in (q_lens, k_lens)
    )
    if is_causal and "window_size" not in known:  # it may be at the top left for other lengths
        k_lens, k_ends = q_lens, q_ends
    words: dict[str, Any] = {}
    if is_causal:
        words = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    heads = 2
    if "enable_gqa" in known:
        heads, words = 6, {**words, "enable_gqa": True}
    given = [
        torch.randn(sum(lens), count, 64, device="cuda").to(dtype)
        for lens, count in ((q_lens, heads), (k_lens, 2), (k_lens, 2))
    ]
    ours, torchs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    sizes = (q_ends, k_ends, max(q_lens), max(k_lens))
    out = attention_varlen(*ours, *sizes, causal=is_causal)
    want = theirs(*torchs, *sizes, **words)
    bound = 4 * torch.finfo(dtype).eps
    close(out, want, rtol=bound, atol=bound)
    above = torch.randn_like(out)
    found = torch.autograd.grad(out, ours, above)
    for mine, other in zip(found, torch.autograd.grad(want, torchs, above), strict=True):
        close(mine, other, rtol=bound, atol=4 * bound)
