"""jit.launch on a GPU: results, streams, capture, clusters, shared memory, and what goes wrong."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Any

import pytest
import torch

import jit_kit
from jit_kit import Work, run
from online_softmax import jit, jit_cache, jit_compile

cu_file, fresh_cache, nvrtc = jit_kit.cu_file, jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
SCALE, REVERSE = "scale<float>", "reverse<0>"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def needs_sm90() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters and dependent launches need sm_90")


def scale(file: str, x: torch.Tensor, by: float = 1.0, **numbers: Any) -> tuple[Work, torch.Tensor]:
    y = torch.full_like(x, float("nan"))
    grid = -(-x.numel() // 256)
    return Work(file, SCALE, (x, y, x.numel(), by), grid, 256, **numbers), y


def test_result_default_stream_and_no_private_name_gone(cu_file: str):
    assert hasattr(torch._C, "_cuda_getCurrentRawStream")
    assert torch._C._cuda_getDevice() == torch.cuda.current_device()
    x = torch.randn(100_001, device="cuda")
    work, y = scale(cu_file, x, 1.5)
    jit.launch(work, x.device)
    torch.testing.assert_close(y, x * 3, rtol=0, atol=0)


def test_streams_keep_order(cu_file: str):
    """Each stream sleeps before the input is written: a launch elsewhere would read NaN."""
    for explicit in (False, True):
        x = torch.full((1000,), float("nan"), device="cuda")
        work, y = scale(cu_file, x)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.fill_(2.0)
            if not explicit:
                jit.launch(work, x.device)
        if explicit:
            jit.launch(work, x.device, stream=side.cuda_stream)
        side.synchronize()
        assert torch.all(y == 4.0)


def test_fresh_threads_have_a_context(cu_file: str):
    x = torch.ones(1000, device="cuda")
    jobs = [scale(cu_file, x, float(i)) for i in range(8)]
    errors: list[Exception] = []

    def job(work: Work) -> None:
        try:
            jit.launch(work, 0, stream=0)
        except Exception as error:  # noqa: BLE001 a thread's error is the test's
            errors.append(error)

    threads = [threading.Thread(target=job, args=(work,)) for work, _ in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert errors == []
    assert [y[-1].item() for _, y in jobs] == [2.0 * i for i in range(8)]


def test_second_device_and_the_current_one_stays(cu_file: str):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.ones(1000, device="cuda:1")
    work, y = scale(cu_file, x)
    jit.launch(work, x.device)
    assert torch.cuda.current_device() == 0
    assert torch.all(y == 2.0)


def test_graph_capture_even_of_the_first_launch(cu_file: str):
    x = torch.zeros(1000, device="cuda")
    work, y = scale(cu_file, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # compiled and loaded in here
        jit.launch(work, x.device)
        jit.launch(Work(cu_file, SCALE, (y, y, 1000, 1.0), 4, 256), x.device)
    jit.clear_cache()  # the graph holds its kernels
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.all(y == 4 * value)


@pytest.mark.parametrize("kilobytes", [1, 48, 100, 160])
def test_dynamic_shared_memory(cu_file: str, kilobytes: int):
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    if kilobytes * 1024 > limit:
        pytest.skip(f"a block has at most {limit} bytes")
    n = kilobytes * 256
    y = torch.zeros(n, dtype=torch.int32, device="cuda")
    work = Work(cu_file, REVERSE, (y, n), block=128, shared_bytes=4 * n)
    jit.launch(work, y.device)
    assert torch.equal(y, torch.arange(n, dtype=torch.int32, device="cuda").flip(0))


@pytest.mark.parametrize("cluster", [1, 2, 8, 16])
def test_clusters(cu_file: str, cluster: int):
    needs_sm90()
    y = torch.zeros(64, dtype=torch.int32, device="cuda")
    jit.launch(Work(cu_file, "cluster_shape<1000>", (y,), 64, 32, cluster), y.device)
    assert y.tolist() == [1000 * cluster + i % cluster for i in range(64)]


def test_cooperative_blocks_live_at_once(cu_file: str):
    grid = torch.cuda.get_device_properties(0).multi_processor_count
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    y = torch.zeros(grid, dtype=torch.int32, device="cuda")
    jit.launch(Work(cu_file, "meet<1>", (arrived, y), grid, 32, cooperative=True), y.device)
    assert y.sum().item() == arrived.item() == grid
    too_many = Work(cu_file, "meet<1>", (arrived, y), grid * 100, 1024, cooperative=True)
    with pytest.raises(ValueError, match="exceeds"):
        jit.launch(too_many, y.device)


@pytest.mark.parametrize("captured", [False, True])
def test_dependent_launches_wait_where_they_say(cu_file: str, captured: bool):
    needs_sm90()
    n = 1 << 20
    y = torch.zeros(n, dtype=torch.int32, device="cuda")
    links = [
        Work(cu_file, f"add<{i % 2}>", (y, n), n // 256, 256, dependent=i > 0) for i in range(20)
    ]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph) if captured else contextlib.nullcontext():
        for link in links:
            jit.launch(link, y.device)
    if captured:
        graph.replay()
    expected = 0
    for i in range(20):
        expected = (expected + i % 2) % 1000003 * 3
    assert y.unique().tolist() == [expected]


def test_launch_errors_are_raised(cu_file: str):
    x = torch.ones(8, device="cuda")
    work, y = scale(cu_file, x)
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID"):
        jit.launch(Work(cu_file, SCALE, work.args, 1, 2048), x.device)
    with pytest.raises(ValueError, match="a tensor on cpu"):
        jit.launch(Work(cu_file, SCALE, (x.cpu(), *work.args[1:])), x.device)
    jit.launch(work, x.device)
    assert torch.all(y == 2.0)


def test_refuses_code_of_another_machine_and_heals(cu_file: str):
    arch = jit.device_arch(0)
    source = jit_compile.CUDA_DIR / cu_file
    other = jit.compile(cu_file, SCALE, "sm_75" if arch != "sm_75" else "sm_80")
    jit_cache.write(jit_compile._key(source, SCALE, arch), other)
    x = torch.ones(8, device="cuda")
    work, y = scale(cu_file, x)
    jit.launch(work, x.device)
    assert torch.all(y == 2.0)


def test_ptx_is_finished_by_the_driver(cu_file: str, monkeypatch):
    version = jit_compile.compiler()
    old = tuple(number for number in version.known if number <= 80)
    monkeypatch.setattr(jit_compile, "compiler", lambda: version._replace(known=old))
    x = torch.ones(8, device="cuda")
    work, y = scale(cu_file, x)
    jit.launch(work, x.device)
    assert torch.all(y == 2.0)


def test_forked_child_gets_torchs_message(cu_file: str):
    said = run(
        "import os, sys, torch\n"
        "from jit_kit import Work\n"
        "from online_softmax import jit\n"
        "x = torch.ones(256, device='cuda')\n"
        f"work = Work({cu_file!r}, 'scale<float>', (x, x, 256, 1.0), 1, 256)\n"
        "jit.launch(work, x.device); torch.cuda.synchronize()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    assert not jit._loaded and not jit._ready\n"
        f"    jit.compile({cu_file!r}, 'plain', 'sm_80')\n"
        "    try: jit.launch(work, 0)\n"
        "    except RuntimeError as error: os.write(1, str(error).encode())\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "jit.launch(work, x.device)\n"
        "assert x.tolist() == [4.0] * 256\n"
    )
    assert "forked subprocess" in said


def test_launch_costs_microseconds(cu_file: str):
    x = torch.ones(256, device="cuda")
    work, _ = scale(cu_file, x)
    for _ in range(100):
        jit.launch(work, x.device)
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in itertools.repeat(None, 200):
            jit.launch(work, x.device)
        best = min(best, (time.perf_counter() - start) / 200)
    print(f"jit.launch: {best * 1e6:.2f} us of host time")  # noqa: T201 shown by pytest -s
    assert best < 30e-6  # about 6 is expected; 30 means that something is made anew each time
