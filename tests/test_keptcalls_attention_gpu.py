"""Attention's calls started again on a GPU: the same bits as by Triton's own way of launching."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from online_softmax import attention, attention_state, attention_varlen, keptcalls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def forgetful() -> None:
    keptcalls.kept.clear()


def tokens(q_len: int, k_len: int, dim: int = 64, phase: int = 0) -> list[Tensor]:
    """Of no strides that tell where they lie: each begins `phase` elements into its memory."""
    shapes = (2, 8, q_len, dim), (2, 2, k_len, dim), (2, 2, k_len, dim)
    rooms = [torch.randn(torch.Size(s).numel() + 16, device="cuda", dtype=BF16) for s in shapes]
    return [r[phase : phase + r.numel() - 16].view(s) for r, s in zip(rooms, shapes, strict=True)]


@functools.cache
def ends(tokens: int) -> Tensor:
    return torch.tensor([0, tokens // 3, tokens], device="cuda", dtype=torch.int32)


def packed(*tensors: Tensor) -> Any:
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in tensors)
    most = q.shape[0], k.shape[0]
    return attention_varlen(q, k, v, *map(ends, most), *most, causal=True, return_lse=True)


@functools.cache
def one_each(tokens: int) -> Tensor:
    return torch.arange(tokens + 1, device="cuda", dtype=torch.int32)


def packed_decode(*tensors: Tensor) -> Any:
    """Sequences of one query, of unequal numbers of keys: in parts, each cut by its own."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in tensors)
    starts = one_each(q.shape[0]), ends(k.shape[0])
    return attention_varlen(q, k, v, *starts, 1, k.shape[0], return_lse=True)


CALLS: dict[str, tuple[tuple[int, int], Callable[..., Any]]] = {
    "causal": ((200, 333), lambda *t: attention(*t, causal=True, return_lse=True)),
    "window": ((64, 256), lambda *t: attention(*t, window=(50, 20), softcap=5.0)),
    "decode": ((1, 5000), lambda *t: attention(*t, causal=True, return_lse=True)),
    "short": ((1, 100), attention),
    "state": ((2, 3000), attention_state),
    "packed": ((60, 90), packed),
    "packed decode": ((1, 3000), packed_decode),
}


def flat(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def gradients(made: Any, leaves: list[Tensor]) -> list[Tensor]:
    outputs = [t for t in flat(made) if t.requires_grad]
    above = [torch.linspace(-1, 1, t.numel(), device="cuda").view_as(t).to(t) for t in outputs]
    return list(torch.autograd.grad(outputs, leaves, above))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits(name: str, recorded: bool) -> None:
    """First call and later ones; after those, one at another 16-byte phase, and back again."""
    lengths, call = CALLS[name]
    for phase in (0, 1, 8, 0):
        tensors = [t.requires_grad_(recorded) for t in (tokens(*lengths, phase=phase))]
        with torch.no_grad():
            others = [t + 1.0 for t in tensors]
        found = []
        for _ in range(4):
            made = call(*tensors)
            by = gradients(made, tensors) if recorded else []
            found.append([*(t.detach() for t in flat(made)), *by])
            call(*others)  # between: what is kept has nothing of one call
        for each in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], each, strict=True))
        if name != "state":  # whose m may lie elsewhere
            want = flat(call(*(t.detach().double() for t in tensors)))[0]
            torch.testing.assert_close(flat(made)[0].double(), want, rtol=2e-2, atol=2e-2)
    assert keptcalls.kept


@pytest.mark.parametrize("name", ["causal", "decode", "packed", "packed decode"])
def test_a_graph(name: str) -> None:
    """Captured from kept launches, and replayed on other values."""
    lengths, call = CALLS[name]
    tensors = [t.requires_grad_() for t in tokens(*lengths)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(call(*tensors), tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call(*tensors)
        by = gradients(made, tensors)
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for t in tensors:
                t.normal_()
        graph.replay()
        want = call(*tensors)
        want_by = gradients(want, tensors)
        for got, wanted in zip((*flat(made), *by), (*flat(want), *want_by), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_waits_for_the_device(name: str) -> None:
    """From the first call on: no check looks at values, packed lengths among them."""
    lengths, call = CALLS[name]
    tensors = [t.requires_grad_() for t in tokens(*lengths)]
    gradients(call(*tensors), tensors)  # Triton compiles
    keptcalls.kept.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            gradients(call(*tensors), tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_threads_on_streams_of_their_own() -> None:
    given = [tokens(1, 5000) for _ in range(2)]
    want = [attention(*each).clone() for each in given]
    for _ in range(2):
        attention(*given[0])
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(200):
                out = attention(*given[i])
            stream.synchronize()
            if not torch.equal(out, want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device, this GPU test needs two")
    here = [t.to("cuda:1") for t in tokens(1, 5000)]
    with torch.cuda.device(1):
        want = attention(*here)
        for _ in range(2):
            attention(*here)
    assert torch.equal(attention(*here), want)
    assert torch.cuda.current_device() == 0
