"""On a GPU, the kernels of token_stats on vocabularies: right, the same bits alone and among many,
in every run, in a CUDA graph, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from online_softmax import token_stats
from online_softmax.library import stats as library_stats
from rows_kit import gpu
from stats_kit import among_nan, check, orders, written_out

close = torch.testing.assert_close
COLS = pytest.mark.parametrize("cols", [4096, 32_001, 50_257, 128_256, 201_088, 1_048_576])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
RUNS = 20


def inputs(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = (torch.randn(rows, cols, device="cuda") * 3).to(dtype)
    return x, torch.randint(cols, (rows,), device="cuda")


@gpu
@COLS
@DTYPES
def test_vocabularies(dtype: torch.dtype, cols: int) -> None:
    x, target = inputs(9, cols, dtype)
    for top_k in (0, 1, 20, 50, 128, 200):
        stats = token_stats(x, target, top_k=top_k, temperature=0.7)
        check(stats, written_out(x, target, top_k, 1 / 0.7), f"top {top_k}")


@gpu
@COLS
@DTYPES
def test_orders_of_vocabularies(dtype: torch.dtype, cols: int) -> None:
    rows = orders(cols)
    x = torch.stack([*rows.values()]).to(dtype).cuda()
    target = torch.full((len(x),), cols // 3, device="cuda")
    for top_k in (1, 20, 128):
        stats = token_stats(x, target, top_k=top_k)
        want = written_out(x, target, top_k, 1.0)
        for at, name in enumerate(rows):
            check([t[at : at + 1] for t in stats], [t[at : at + 1] for t in want], name)


@gpu
@COLS
@DTYPES
def test_a_row_has_its_bits_anywhere(dtype: torch.dtype, cols: int) -> None:
    many = 4096 if cols <= 50_257 else 300
    x, target = inputs(many, cols, dtype)
    whole = token_stats(x, target, top_k=20)
    for row in (0, many // 2, many - 1):
        for start in range(0, 16 // dtype.itemsize, 3):
            alone = among_nan(x[row : row + 1], start, 0)
            got = token_stats(alone, target[row : row + 1], top_k=20)
            for a, b in zip(got, whole, strict=True):
                assert torch.equal(a[0], b[row])


@gpu
@DTYPES
def test_every_run_is_the_same(dtype: torch.dtype) -> None:
    x, target = inputs(300, 50_257, dtype)
    x[:100] = torch.round(x[:100])  # many equal ones
    want = token_stats(x, target, top_k=50)
    busy, load = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(RUNS):
        with torch.cuda.stream(busy):
            load @ load
        for a, b in zip(token_stats(x, target, top_k=50), want, strict=True):
            assert torch.equal(a, b)


def _gradient(function: Callable[..., Tensor], x: Tensor, target: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    stats = function(leaf, target)
    weights = torch.linspace(-1, 1, len(x), device="cuda")
    total = ((stats[0] + 2 * stats[1] - 3 * stats[2]) * weights).sum()
    return torch.autograd.grad(total, leaf)[0]


@gpu
@COLS
@DTYPES
def test_gradients_of_vocabularies(dtype: torch.dtype, cols: int) -> None:
    x, target = inputs(9, cols, dtype)
    got = _gradient(token_stats, x, target)
    want = _gradient(lambda x, t: library_stats._composed(x, t, 0, 1.0), x.double(), target)
    eps = torch.finfo(dtype).eps
    close(got.double(), want, rtol=1e-5 + eps, atol=5e-6)


@gpu
def test_a_cuda_graph_and_no_waiting() -> None:
    x, target = inputs(64, 128_256, torch.bfloat16)

    def step() -> list[Tensor]:
        return [*token_stats(x, target, top_k=20), _gradient(token_stats, x, target)]

    step()  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(kept, step(), strict=True):
        assert torch.equal(a, b)


@gpu
def test_no_tensor_of_their_size_is_held() -> None:
    x, target = inputs(512, 128_256, torch.bfloat16)
    token_stats(x, target, top_k=20)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_stats(x, target, top_k=20)
    assert torch.cuda.max_memory_allocated() - before < x.numel() * x.itemsize / 50
