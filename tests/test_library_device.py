"""Threads and fork; on a GPU: streams, graphs, devices, no synchronisation, the same bits."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from online_softmax import log_softmax, softmax
from rows_kit import EACH, Variant, gpu

close = torch.testing.assert_close
COLS = pytest.mark.parametrize("cols", [33, 1024, 50257])


def _work(variant: Variant, x: Tensor) -> tuple[Tensor, Tensor]:
    """A result and a gradient, nothing read back."""
    leaf = x.detach().requires_grad_()
    y = variant.ours(leaf)
    (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y) * 0.5)
    return y.detach(), dx


@EACH
def test_threads(variant: Variant) -> None:
    xs = [torch.randn(5, 100) for _ in range(16)]
    want = [_work(variant, x) for x in xs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for got, expected in zip(pool.map(lambda x: _work(variant, x), xs), want, strict=True):
                for a, b in zip(got, expected, strict=True):
                    assert torch.equal(a, b)


def test_fork() -> None:  # S62
    """After the parent has used every operation a child may, and CUDA has not been started."""
    program = """
import os, torch
from online_softmax import log_softmax, logsumexp, softmax
torch.set_num_threads(1)  # GNU OpenMP's threads do not survive a fork: torch.softmax hangs too
def work():
    for function in (softmax, log_softmax, logsumexp):
        x = torch.zeros(2, 3, requires_grad=True)
        function(x).sum().backward()
    return softmax(torch.zeros(2)).tolist() == [0.5, 0.5] and not torch.cuda.is_initialized()
assert work()
child = os.fork()
if child == 0:
    os._exit(0 if work() else 1)
assert os.waitpid(child, 0)[1] == 0
assert work()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


# ---- on a GPU


@gpu
@COLS
@EACH
def test_current_stream_beside_a_busy_one(variant: Variant, cols: int) -> None:
    x = torch.randn(64, cols, device="cuda")
    want = _work(variant, x)
    side, busy = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(20_000_000)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = x * 1  # written only after the sleep: another stream would read too early
        got = _work(variant, late)
    side.synchronize()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    torch.cuda.synchronize()


@gpu
@COLS
@EACH
def test_several_streams_at_once(variant: Variant, cols: int) -> None:
    """A workspace belongs to a call: calls on other streams do not meet in it."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    xs = [torch.randn(2, cols, device="cuda") + i for i in range(len(streams))]
    want = [_work(variant, x) for x in xs]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                got.append(_work(variant, x))
    torch.cuda.synchronize()
    for i, pair in enumerate(got):
        for a, b in zip(pair, want[i % len(xs)], strict=True):
            assert torch.equal(a, b)


@gpu
@COLS
@EACH
def test_cuda_graph(variant: Variant, cols: int) -> None:  # S57
    x = torch.randn(16, cols, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            _work(variant, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = _work(variant, x)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        want = _work(variant, x)
        assert torch.equal(y, want[0])
        assert torch.equal(dx, want[1])


@gpu
@EACH
def test_no_synchronisation(variant: Variant) -> None:
    x = torch.randn(16, 1000, device="cuda")
    _work(variant, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _work(variant, x)
        variant.ours(x.t())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_in_place_in_a_graph(function) -> None:
    x = torch.randn(16, 1000, device="cuda")
    function(x.clone(), out=x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(x, out=x)
    x.copy_(torch.randn_like(x))
    want = function(x.clone())
    graph.replay()
    close(x, want)


@gpu
@COLS
@EACH
def test_the_same_bits_every_time(variant: Variant, cols: int) -> None:  # S56, S80
    x = torch.randn(32, cols, device="cuda")
    want = _work(variant, x)
    with torch.cuda.stream(torch.cuda.Stream()):
        noise = torch.randn(2048, 2048, device="cuda")
        for _ in range(50):
            noise = noise @ noise * 1e-3
    for _ in range(100):
        for a, b in zip(_work(variant, x), want, strict=True):
            assert torch.equal(a, b)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@EACH
def test_the_device_of_the_input(variant: Variant) -> None:
    x = torch.randn(16, 1000)
    want = _work(variant, x.cuda(0))
    with torch.cuda.device(0):
        got = _work(variant, x.cuda(1))
        assert torch.cuda.current_device() == 0
    for a, b in zip(got, want, strict=True):
        assert a.device.index == 1
        close(a.cpu(), b.cpu())
