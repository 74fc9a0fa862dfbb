"""Decodes of the library on a GPU: what takes them, kept and captured; whose their gradient is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention_kit import PLAIN, Inputs, few, written_out
from online_softmax import attention, attention_state
from rows_kit import gpu

close = torch.testing.assert_close
BF16 = torch.bfloat16


@gpu
@pytest.mark.parametrize("sinks", [False, True])
def test_the_library_takes_it(sinks: bool) -> None:
    """By itself, by name, recorded, kept, in a graph: the same bits; Triton's are near."""
    given = few(2, 5000, 128, 4, sinks=sinks).cast(BF16, "cuda")
    q, k, v = given[:3]
    words: dict[str, Any] = {"causal": True, "sinks": given.sinks, "return_lse": True}
    out, lse = attention(q, k, v, **words, kernel="cuda")
    for _ in range(4):
        close(attention(q, k, v, **words), (out, lse), rtol=0, atol=0)
    theirs = attention(q, k, v, **words, kernel="triton")
    close(out, theirs[0], rtol=0, atol=2.0**-7)
    close(lse, theirs[1], rtol=1e-5, atol=1e-5)
    recorded = attention(q.clone().requires_grad_(), k, v, **words)
    close(tuple(t.detach() for t in recorded), (out, lse), rtol=0, atol=0)
    state = attention_state(q, k, v, causal=True)
    close(state.m + state.d.log(), lse, rtol=1e-5, atol=1e-5)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = attention(q, k, v, **words)
    k.copy_(torch.randn_like(k))
    graph.replay()
    torch.cuda.synchronize()
    close(captured, attention(q, k, v, **words), rtol=0, atol=0)


@gpu
def test_the_gradient_is_tritons() -> None:
    leaves = [t.requires_grad_() for t in few(1, 3000, 128, 4).cast(BF16, "cuda")[:3]]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out, _ = written_out(Inputs(*wide), PLAIN)
    upstream = torch.randn_like(out)
    want = torch.autograd.grad((out * upstream).sum(), wide)
    got = torch.autograd.grad((attention(*leaves).double() * upstream).sum(), leaves)
    for one, other in zip(got, want, strict=True):
        close(one.double(), other, rtol=2.0**-6, atol=2.0**-7)
