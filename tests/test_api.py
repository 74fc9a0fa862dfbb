"""The public functions: every rank, dim and stride; errors of torch's types, saying what to do."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import online_softmax
from online_softmax import State, catalogue, explain, plan, rowplan, softmax
from online_softmax.catalogue import DTYPES, KERNELS
from online_softmax.cuda import host
from online_softmax.lab import cases, judge

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device")])  # fmt: skip
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", cases.VIEWS, ids=lambda view: view.name)
def test_every_view(view: cases.View, dtype: torch.dtype, device: str) -> None:
    x = judge.lay_out_view(view, dtype, device)
    before = x.clone()
    for dim in view.dims:
        y = softmax(x, dim)
        assert y.is_contiguous()
        assert y.device == x.device
        verdict = judge.check(y, x, dim)
        assert verdict.ok, f"dim {dim}: {verdict.why}"
        assert torch.equal(x, before)


@pytest.mark.skipif(host.compiler() is None, reason="host execution needs g++ or clang++")
@pytest.mark.parametrize("view", cases.VIEWS, ids=lambda view: view.name)
def test_every_view_reaches_a_kernel_as_rows(
    view: cases.View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the matrix that softmax makes of a view is what a kernel can read by address."""
    on_the_cpu = catalogue.problem_of
    monkeypatch.setattr(catalogue, "problem_of", lambda x: replace(on_the_cpu(x), device="cuda"))
    monkeypatch.setattr(catalogue, "lacks", lambda backend: None)
    x = judge.lay_out_view(view, torch.float32)
    for dim in view.dims:
        verdict = judge.check(softmax(x, dim, kernel="v2_vectorized"), x, dim)
        assert verdict.ok, f"dim {dim}: {verdict.why}"


@DEVICES
def test_reported_values(device: str) -> None:
    def close(got: torch.Tensor, want: list[float]) -> None:
        torch.testing.assert_close(
            got.cpu().double(), torch.tensor(want).double(), atol=1e-7, rtol=0
        )

    transposed = torch.arange(1.0, 13, device=device).view(3, 4).t()
    close(softmax(transposed, 1)[0], [0.0003293, 0.0179803, 0.9816904])  # S05
    close(
        softmax(torch.tensor([-245000.0, -245010.0], device=device)), [0.9999546, 0.0000454]
    )  # S30
    one = torch.full((1, 100000), -torch.inf, device=device)
    one[0, 50000] = 10
    assert softmax(one)[0, 50000] == 1  # S01
    assert softmax(one).sum() == 1
    zeros = torch.zeros(1, 4096, dtype=torch.float16, device=device)
    assert (softmax(zeros) == 1 / 4096).all()  # S11


@pytest.mark.parametrize("dim", [-1, 0])
def test_one_element_and_none(dim: int) -> None:  # S15, S17
    assert softmax(torch.tensor(3.0), dim) == 1
    assert softmax(torch.tensor([3.0]), dim) == 1
    assert softmax(torch.empty(0), dim).shape == (0,)


def test_errors_are_torchs() -> None:
    x = torch.randn(2, 3)
    for dim in (2, -3, 7):
        with pytest.raises(IndexError, match=r"dim must be in \[-2, 1\].*got"):
            softmax(x, dim)
        with pytest.raises(IndexError):
            torch.softmax(x, dim)
    for dtype in (torch.int64, torch.bool):  # S68
        with pytest.raises(NotImplementedError, match="floating-point"):
            softmax(x.to(dtype))
        with pytest.raises((NotImplementedError, RuntimeError)):
            torch.softmax(x.to(dtype), -1)
    with pytest.raises(NotImplementedError, match=r"must be one of.*float8_e5m2, got.*e4m3fnuz"):
        softmax(x.to(torch.float8_e4m3fnuz))
    with pytest.raises(NotImplementedError, match="dense tensor, got one of layout"):
        softmax(x.to_sparse())
    with pytest.raises(NotImplementedError, match="dense tensor, got a nested"):
        softmax(torch.nested.nested_tensor([x[0], x[1, :2]]))
    with pytest.raises(TypeError, match="dim must be an int, got True"):
        softmax(x, True)
    torch.testing.assert_close(softmax(x, np.int64(0)), torch.softmax(x, 0))
    with pytest.raises(TypeError, match="must be a Tensor, got list"):
        softmax([1.0, 2.0])
    with pytest.raises(TypeError, match=r"dim must be an int, got 1\.0"):
        softmax(x, 1.0)
    with pytest.raises(ValueError, match=r"no kernel is named 'fast'; there are safe"):
        softmax(x, kernel="fast")
    with pytest.raises(ValueError, match="safe runs on CUDA tensors; this one is on cpu"):
        softmax(x, kernel="safe")
    with pytest.raises(ValueError, match="triton_online runs on CUDA tensors"):
        softmax(x, kernel="triton_online")


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 4)])
def test_a_forced_kernel_is_checked_on_empty_tensors_too(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="safe runs on CUDA tensors"):
        softmax(torch.empty(shape), kernel="safe")
    for name in ("torch", "reference"):
        assert softmax(torch.empty(shape), kernel=name).shape == shape


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cuda-bindings to Triton, without that to torch, each with what mends it."""
    problem = plan.Problem(4096, 4096)
    monkeypatch.setattr(
        catalogue, "lacks", lambda backend: "no NVRTC" if backend == "cuda" else None
    )
    kernel, why = catalogue.choose(problem)
    assert (kernel.name, why) == (
        "triton_online",
        "triton_online in place of registers: no NVRTC",
    )
    assert "not v3_register_cache: no NVRTC" in explain(4096, 4096)
    with pytest.raises(ValueError, match="no NVRTC"):
        catalogue.forced("safe", problem)
    monkeypatch.setattr(
        catalogue, "lacks", lambda b: f"no {b}" if b in ("cuda", "triton") else None
    )
    kernel, why = catalogue.choose(problem)
    assert (kernel.name, why) == ("torch", "torch in place of registers: no cuda")
    with pytest.raises(ValueError, match="no triton"):
        catalogue.forced("triton_online", problem)


def test_block_sizes_are_checked() -> None:
    problem = plan.Problem(64, 4096)
    for name in catalogue.KERNELS:
        if catalogue.KERNELS[name].backend == "cuda" and catalogue.KERNELS[name].rung:
            with pytest.raises(ValueError, match="block must be one of"):
                KERNELS[name].numbers(problem, 48)
    (why,) = KERNELS["v3_register_cache"].reasons(problem, 32)
    assert "at most 1024 columns (32 threads" in why
    assert KERNELS["v3_register_cache"].reasons(problem, 128) == []
    assert {n.block for n in plan.sweep("v3_register_cache", problem)} == {128, 256, 512, 1024}


@pytest.mark.parametrize("name", [k for k in KERNELS if KERNELS[k].rung])
def test_more_blocks_than_a_grid_has_are_refused(name: str) -> None:
    most = {"v0_thread": plan.MAX_GRID * plan.WARP, "v4_grid_stride": 2**60}.get(
        name, plan.MAX_GRID
    )
    assert KERNELS[name].reasons(plan.Problem(most, 1)) == []
    if name != "v4_grid_stride":
        (why,) = KERNELS[name].reasons(plan.Problem(most + 1, 1))
        assert f"{name} would need 2147483648 blocks" in why


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_says_which_operations_it_lacks(name: str) -> None:
    record, problem = KERNELS[name], plan.Problem(4, 4)
    for op in (*rowplan.OPERATIONS, "cumsum"):
        why = record.reasons(problem, op=op)
        if op in record.operations:
            assert why == []
        else:
            computes = ", ".join(record.operations)
            assert why == [f"{name} computes {computes}, not {op}"]


def test_an_architecture_without_clusters_is_named() -> None:
    (why,) = KERNELS["landed"].reasons(plan.Problem(4, 4, arch="sm_80"))
    assert why.endswith("planned for sm_90a and sm_100a, this is sm_80")


def test_an_unknown_architecture_is_called_unmeasured() -> None:
    assert not plan.Problem(4, 4, arch="sm_121").facts.measured
    assert plan.Problem(4, 4).facts.measured


def test_kernels_by_name_on_the_cpu() -> None:
    x = torch.randn(3, 5)
    for name in ("torch", "reference"):
        torch.testing.assert_close(softmax(x, kernel=name), torch.softmax(x, -1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_by_name_on_the_gpu(name: str) -> None:
    x = torch.randn(5, 300, device="cuda")
    assert judge.check(softmax(x, kernel=name), x).ok


def test_other_devices_take_the_reference() -> None:
    y = softmax(torch.empty(3, 4, device="meta"))  # it has no values: only the route shows
    assert (y.shape, y.device.type) == ((3, 4), "meta")
    kernel, why = catalogue.choose(plan.Problem(3, 4, device="meta"))
    assert (kernel.name, "no kernel of ours" in why) == ("reference", True)


def test_explain() -> None:
    assert explain(1, 1_048_576).startswith("split: two kernels, a block for each of 128 parts")
    assert "of the ladder's rungs, v5_split_row: 1 row cannot fill" in explain(1, 1_048_576)
    assert "nobody has measured sm_80" in explain(64, 64, "bfloat16", "sm_80")
    assert explain(64, 64, "float64").startswith("reference")
    for wrong in ({"arch": "sm_1"}, {"dtype": "int8"}):
        with pytest.raises(ValueError, match="explain"):
            explain(64, 64, **wrong)
    with pytest.raises(ValueError, match="at least 0"):
        explain(-1, 64)
    for size in (1.5, "4", None, True):
        with pytest.raises(TypeError, match=rf"^explain\(\): rows must be an int, got {size!r}"):
            explain(size, 2)
        with pytest.raises(TypeError, match=rf"^explain\(\): cols must be an int, got {size!r}"):
            explain(2, size)
    assert explain(np.int64(64), torch.tensor(64)) == explain(64, 64)
    lines = explain(4096, 4096).splitlines()
    named = {line.split("not ")[1].split(":")[0] for line in lines if line.startswith("  not ")}
    ours = {k.name for k in KERNELS.values() if k.backend in ("cuda", "triton")}
    assert named == ours - {"registers"}


@pytest.mark.skipif(
    bool(catalogue.lacks("cuda") or catalogue.lacks("triton")),
    reason="explain says what is missing instead",
)
def test_the_pages_show_what_explain_says() -> None:
    said, root = explain(1, 1_048_576), Path(__file__).resolve().parents[1]
    assert said in (root / "docs" / "api.md").read_text(encoding="utf-8")
    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()
    begin = lines.index("$ online-softmax explain 1 1048576") + 1
    shown = [line for line in lines[begin : lines.index("```", begin)] if line != "  ..."]
    assert len(shown) > 5
    assert set(shown) <= set(said.splitlines())


def test_state_is_public() -> None:
    x = torch.tensor([1.0, 5, 3, 9, 2])
    state = State.of(x[:3]).merge(State.of(x[3:]))
    torch.testing.assert_close(state.lse(), torch.logsumexp(x, 0))
    torch.testing.assert_close(state.softmax(x), torch.softmax(x, 0))


def test_import_starts_nothing() -> None:  # S39, S62
    code = (
        "import sys, torch, online_softmax as o; o.softmax(torch.randn(3, 4));"
        "assert not torch.cuda.is_initialized();"
        "assert 'triton' not in sys.modules or 'online_softmax.triton.rows' not in sys.modules;"
        "assert not any(name.startswith('online_softmax.lab') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version() -> None:
    assert online_softmax.__version__ == "0.1.0"
