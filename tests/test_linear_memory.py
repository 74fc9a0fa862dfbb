"""linear_cross_entropy takes the memory that linearplan says, far below that of whole logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ce_kit import needs_compiler
from linear_kit import MEMORY, cut_finely, example, gradients, take_kernels
from online_softmax import linear_cross_entropy, linearparts, linearplan
from rows_kit import gpu

MB = 10**6


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most that torch's allocator for the CPU had given out at once, above the beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = function()
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    steps = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    assert kept is not None
    return max(itertools.accumulate(steps))


@needs_compiler
@MEMORY
@pytest.mark.parametrize(
    ("dtype", "features"),
    [(torch.float32, 96), (torch.bfloat16, 96), (torch.bfloat16, 24), (torch.float16, 96)],
    ids=str,
)
def test_the_bound_holds(
    dtype: torch.dtype, features: int, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels. 16-bit products and the last scaling are left out: a CPU has them in
    float32, with copies."""
    cut_finely(monkeypatch, 64 * 512)
    take_kernels(monkeypatch)
    tokens, classes = 64, 4000
    x, w, _, target = example(tokens, features, classes, dtype)
    if dtype != torch.float32:
        for name in ("put_product", "add_product"):
            monkeypatch.setattr(linearparts, name, lambda a, b, out: out.zero_())
        monkeypatch.setattr(linearparts, "copy_times", lambda sums, _, out: out.copy_(sums))
    leaves = [t.requires_grad_() for t in (x, w)]
    call = lambda: linear_cross_entropy(x, w, target, memory=memory)  # noqa: E731
    given = gradients(call, leaves)  # compiles
    sizes = (tokens, features, classes, 4, dtype.itemsize)
    bound = linearplan.most_bytes(memory, *sizes, dtype == torch.float16)
    own = sum(t.nbytes for t in given)
    peak = peak_bytes(lambda: gradients(call, leaves)) - own
    assert peak <= bound
    assert peak >= bound / 3  # so that the formula says something
    if memory == "low":
        assert bound < 2 * tokens * classes * 4 / 3
    loss_alone = peak_bytes(lambda: linear_cross_entropy(x.detach(), w.detach(), target))
    assert loss_alone <= bound


def test_the_size_that_counts() -> None:
    """8,192 tokens, 4,096 features, a vocabulary of 128,256, bfloat16: whole logits in float32
    alone are 4.2 GB."""
    sizes = (8192, 4096, 128_256, 4, 2)
    assert linearplan.most_bytes("low", *sizes) < 800 * MB
    assert linearplan.most_bytes("low", *sizes, rescales=True) < 800 * MB
    assert linearplan.most_bytes("fast", *sizes) < 2700 * MB
    assert linearplan.most_bytes("fast", *sizes, rescales=True) < 3200 * MB


def test_pieces_are_whole_tiles_of_about_one_size() -> None:
    for tokens, classes in itertools.product((1, 128, 8192, 65_536, 10**6), (10, 50_257, 262_144)):
        cols = linearplan.block_cols(tokens, classes, 4, 2)
        assert cols == classes or (cols % linearplan.TILE == 0 and cols >= linearplan.LEAST_COLS)
        blocks = -(-classes // cols)
        assert blocks * cols - classes < blocks * linearplan.TILE
        fits = 6 * tokens * cols <= linearplan.LOW_BLOCK_BYTES
        assert fits or cols <= linearplan.LEAST_COLS


def test_groups_and_chunks() -> None:
    """One group where its gradient takes no more than sums would; else groups of about one size, in
    chunks that leave room for the sums."""
    every = itertools.product((1, 128, 8192, 65_536, 10**6), (64, 4096), (10, 50_257, 262_144))
    for tokens, features, classes in every:
        for item, sums in ((2, 4), (2, 0), (0, 0)):
            group, chunk = linearplan.fast_cut(tokens, features, classes, 4, item, sums)
            a_token = classes * (item or 4)
            most = max(linearplan.FAST_GROUP_BYTES, classes * features * sums)
            assert (group == tokens) == (tokens * a_token <= most or group == tokens)
            assert group * a_token <= most or group <= linearplan.LEAST_TOKENS
            assert group == tokens or group % linearplan.TILE == 0
            groups = -(-tokens // group)
            assert groups * group - tokens < groups * linearplan.TILE
            assert chunk <= group
            assert (
                chunk == group
                if not item
                else 4 * chunk * classes <= (linearplan.FAST_CHUNK_BYTES)
                or chunk <= linearplan.LEAST_TOKENS
            )


# ---- on a GPU


def _large() -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16) / 8
    w = torch.randn(128_256, 4096, device="cuda", dtype=torch.bfloat16) / 8
    target = torch.randint(128_256, (8192,), device="cuda")
    return [x.requires_grad_(), w.requires_grad_()], target


@gpu
@pytest.mark.parametrize(("memory", "most"), [("low", 800 * MB), ("fast", 2700 * MB)])
def test_the_bound_holds_on_a_gpu(memory: str, most: int) -> None:
    leaves, target = _large()
    for _ in range(2):  # the first makes what torch keeps for its products
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = linear_cross_entropy(*leaves, target, memory=memory)
        found = torch.autograd.grad(loss, leaves)
        torch.cuda.synchronize()
        beside = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in found)
        assert beside < most
        assert beside < linearplan.most_bytes(memory, 8192, 4096, 128_256, 4, 2) + 64 * MB
        del loss, found


@gpu
@MEMORY
def test_a_cuda_graph_can_hold_it(memory: str) -> None:
    x, w, b, target = example(256, 64, 3000, torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in (x, w, b)]
    call = lambda: linear_cross_entropy(x, w, target, linear_bias=b, memory=memory)  # noqa: E731
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(call, leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(call, leaves)
    with torch.no_grad():
        x.copy_(x.flip(0))
        target.copy_(target.flip(0))
    graph.replay()
    for mine, want in zip(found, gradients(call, leaves), strict=True):
        torch.testing.assert_close(mine, want)


@gpu
@MEMORY
def test_the_products_on_a_gpu_are_float32s(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over many blocks are rounded once: no worse than few blocks, against float64."""
    from linear_kit import by_logits

    cut_finely(monkeypatch, 64 * 64)
    monkeypatch.setattr(linearplan, "TILE", 64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, w, b, target = example(192, 64, 1000, dtype, "cuda")
        leaves = [t.requires_grad_() for t in (x, w, b)]
        wide = [t.detach().double().requires_grad_() for t in leaves]
        call = lambda: linear_cross_entropy(x, w, target, linear_bias=b, memory=memory)  # noqa: B023, E731
        true = gradients(lambda: by_logits(*wide[:2], target, linear_bias=wide[2]), wide)  # noqa: B023
        most = 2 * torch.finfo(dtype).eps + 1e-5
        for mine, want in zip(gradients(call, leaves), true, strict=True):
            assert (mine.double() - want).norm() <= most * want.norm()
