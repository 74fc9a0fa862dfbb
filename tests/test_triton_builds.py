"""The Triton kernels: builds without a GPU, and what only a GPU can show."""

import pytest
import torch

import online_softmax.triton as builds
from online_softmax import jit
from online_softmax.triton import Build
from triton_kit import DTYPES, NAN, check, kernels, needs_gpu, rows, run

ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")


# ---- builds without a GPU


@pytest.fixture(scope="module")
def figures() -> dict[Build, jit.Resources | str]:
    wanted = [Build(kernel, torch.float32, arch) for arch in ARCHES for kernel in rows.KERNELS]
    wanted += [Build(k, dtype, "sm_90a") for dtype in DTYPES[1:] for k in rows.KERNELS]
    wanted += [Build("online", torch.bfloat16, "sm_75"), Build("two_pass", torch.float16, "sm_80")]
    wanted += [Build(k, torch.float32, "sm_90a", 1024, 4, "log_softmax") for k in rows.KERNELS]
    wanted += [Build(k, torch.float32, "sm_90a", is_whole=False) for k in rows.KERNELS]
    wanted += [Build("online", torch.float32, "sm_999")]  # LLVM ends the process over this one
    return dict(zip(wanted, builds.compile_all(wanted), strict=True))


def test_every_architecture_builds_without_local_memory(figures: dict):
    for build, figure in figures.items():
        if build.arch == "sm_999":
            assert "sm_999" in figure
            assert "\n" not in figure
            continue
        assert not isinstance(figure, str), figure
        assert not figure.has_local_memory, build
        assert 16 <= figure.registers <= 64, build  # 2,048 threads of 32, 1,024 of 64: enough
        assert figure.shared_bytes <= 1024, build
    for kernel in rows.KERNELS:  # rows of other lengths are built apart, and take more
        whole, other = (Build(kernel, torch.float32, "sm_90a", is_whole=w) for w in (True, False))
        assert figures[whole].registers < figures[other].registers


def test_a_refused_build_raises():
    with pytest.raises(jit.Unavailable, match=r"does not build online for sm_80.*power of 2"):
        builds.compile("online", torch.float32, "sm_80", block=100)


# ---- on a GPU only


@pytest.mark.gpu
@needs_gpu
@kernels
def test_more_than_2_31_elements(kernel: str):
    """Rows whose offsets need 33 bits, more rows than 65,535, and a row stride above 2^31."""
    ends = [0, 1, 2_097_151, 2_097_152, 2_097_215]
    x = torch.randn(1, 1024, device="cuda").half().expand(2_097_216, -1).contiguous()
    y = torch.full_like(x, NAN)
    rows.softmax(x, y, kernel, 1024, 4)
    assert torch.equal(y[ends], y[:1].expand(5, -1))
    check(x[:1], y[:1], torch.softmax)
    apart = torch.as_strided(x, (2, 1000), (2**31 - 1000, 1))
    run(apart, kernel)


@pytest.mark.gpu
@needs_gpu
@kernels
def test_long_rows(kernel: str):
    for cols in (50257, 131072, 1_048_577):
        for dtype in DTYPES:
            run((torch.randn(3, cols, device="cuda") * 3).to(dtype), kernel, 4096)


@pytest.mark.gpu
@needs_gpu
def test_current_stream_and_graph():
    x = torch.full((64, 1000), NAN, device="cuda")
    y = torch.zeros_like(x)
    rows.softmax(x, y)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.normal_()
        rows.softmax(x, y)
    side.synchronize()
    check(x, y, torch.softmax)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.softmax(x, y)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    check(x, y, torch.softmax)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_of_the_tensor():
    x = torch.randn(5, 300, device="cuda:1")
    run(x, "online")
    assert torch.cuda.current_device() == 0
