"""The Triton kernels: two things that Triton tutorials get wrong, every edge of a row,
and the same bits wherever a row lies.

Without a GPU the kernels are interpreted, a few rows at a time; on one (make test-gpu) they run.
"""

import math

import pytest
import torch
from torch import Tensor

from triton_kit import BLOCK, DTYPES, EMITS, devices, kernels, padded, rows, run

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
online = pytest.importorskip("online_softmax.triton.online")

INF, NAN = math.inf, math.nan


# ---- two faults


@triton.jit
def carried(x_ptr, out_ptr, n, STEP: tl.constexpr):
    m, d, steps = -float("inf"), 0.0, 0
    for start in range(0, n, STEP):
        x = tl.load(x_ptr + start + tl.arange(0, STEP))
        larger = max(m, tl.max(x, 0))
        d = d * tl.exp(m - larger) + tl.sum(tl.exp(x - larger), 0)
        m = larger
        steps += 1
    tl.store(out_ptr, m)
    tl.store(out_ptr + 1, d)
    tl.store(out_ptr + 2, steps)


@devices
def test_loop_carried_values_persist(device: str):
    """Some tutorials say that they do not. Nor does Python's max lose anything but NaN."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 3
    out = torch.zeros(3, device=device)
    carried[(1,)](x.to(device), out, 64, 8)
    want = [float(x.max()), float(torch.exp(x - x.max()).sum()), 8.0]
    assert out.tolist() == pytest.approx(want, rel=1e-5)


@triton.jit
def maxima(x_ptr, out_ptr, n: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, n))
    first, second = tl.load(x_ptr), tl.load(x_ptr + 1)
    tl.store(out_ptr, tl.max(x, 0))
    tl.store(out_ptr + 1, tl.maximum(first, second))
    tl.store(out_ptr + 2, online.row_max(x))
    tl.store(out_ptr + 3, online.maximum(first, second))
    tl.store(out_ptr + 4, online.maximum(second, first))


@devices
@pytest.mark.parametrize("other", [2.0, INF, -INF])
def test_triton_drops_nan_and_ours_keeps_it(device: str, other: float):
    x = torch.tensor([NAN, other, *[-5.0] * 62], device=device)
    out = torch.zeros(5, device=device)
    maxima[(1,)](x, out, 64)
    assert out[:2].tolist() == [max(other, -5.0), other]  # should the default change, say so
    assert out[2:].isnan().all()


@triton.jit
def tutorial(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + i, tl.where(e == e, e, 0.0) / tl.sum(tl.where(e == e, e, 0.0), 0), mask=i < n)


@devices
@kernels
def test_a_nan_row_is_nan_in_all_of_it(device: str, kernel: str):
    """In any place, beside any infinity; and only that row, unlike where NaN is dropped."""
    x = torch.randn(8, 300)
    for row, place in enumerate((0, 1, 127, 128, 255, 299)):
        x[row, place] = NAN
    x[1, 200] = x[2, 5] = x[4, 299] = INF
    x[5, :299] = -INF
    run(x.to(device), kernel)
    dropped = torch.empty(300, device=device)
    tutorial[(1,)](x[0].to(device), dropped, 300, 512)
    assert not dropped.isnan().any()


@triton.jit
def lanes(m_ptr, d_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    m, d = online.merge_lanes(tl.load(m_ptr + i), tl.load(d_ptr + i), N)
    tl.store(out_ptr, m)
    tl.store(out_ptr + 1, d)
    tl.store(out_ptr + 2, online.lse(m, d))


@devices
def test_lanes_merge_to_one_state(device: str):
    """Most lanes of a short row are empty, and all of a row of -inf; NaN beats +inf."""
    x = torch.randn(7, 64) * 10
    x[1:3, 1:] = -INF
    x[2] = -INF
    x[3, 5] = INF
    x[4, 5], x[4, 40] = INF, NAN
    x[5, 40], x[5, 5] = INF, NAN
    x[6] = 300.0
    for row in x:
        d = torch.where(row == -INF, 0.0, 1.0)  # (-inf, 0) or the state of one element
        out = torch.zeros(3, device=device)
        lanes[(1,)](row.to(device), d.to(device), out, 64)
        m, d, lse = out.cpu()
        torch.testing.assert_close(m, row.amax(), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(lse, row.logsumexp(0), rtol=2e-6, atol=2e-7, equal_nan=True)
        if not m.isfinite():
            continue
        torch.testing.assert_close(d, torch.exp(row - m).sum(), rtol=4e-6, atol=0)


# ---- every edge


@devices
@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "cols", [1, 2, 31, 32, 33, 61, 64, 96, 97, 127, 128, 129, 255, 256, 257, 389, 1000, 1009]
)
def test_columns(device: str, kernel: str, dtype: torch.dtype, cols: int):
    """Two rows of each, among NaN, each row at another 16-byte phase."""
    x, _ = padded(torch.randn(2, cols) * 5, dtype, device, phase=cols % 5, gap=1 + cols % 2)
    block = BLOCK if cols < 500 else 1024
    run(x, kernel, block, phase=cols % 3, gap=cols % 4)


@devices
@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_awkward_values(device: str, kernel: str, dtype: torch.dtype):
    x = torch.randn(16, 300)
    x[0] = -INF
    x[1, 10:] = -INF
    x[2, :290] = -INF  # two whole blocks without a finite element
    x[3, 150] = INF
    x[4] = torch.where(torch.arange(300) == 299, INF, -INF)
    x[5] = 0
    x[6] = 300
    x[7] += 1e4
    x[8] = torch.linspace(-100, 100, 300)
    x[9] = x[8].flip(0)
    x[10] = x[10].sign() * 65504
    x[11, 137] = 60.0
    if dtype != torch.float16:
        x[12] = x[12].sign() * 1e30
        x[13] = 1e30
        x[14] = -245000 - 10 * (torch.arange(300) % 2)
        x[15] *= 3e6
    run(x.to(device).to(dtype), kernel)


@devices
@kernels
def test_every_block_size_and_a_row_shorter_than_it(device: str, kernel: str):
    x = torch.randn(2, 300, device=device) * 3
    for block in (8, 64, 512, 2048):
        run(x if block > 8 else x[:1, :60], kernel, block)


@devices
@kernels
def test_nothing_to_do(device: str, kernel: str):
    for shape in ((0, 5), (5, 0), (0, 0)):
        for ours, _ in EMITS:
            ours(torch.empty(shape, device=device), torch.empty(shape, device=device), kernel)


@devices
@kernels
def test_one_row_expanded(device: str, kernel: str):
    run(torch.randn(1, 200, device=device).expand(3, 200), kernel)


# ---- the same bits, wherever a row lies


def bits(x: Tensor, kernel: str, block: int, num_warps: int = 4) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows.softmax(x, y, kernel, block, num_warps)
    return y.view(torch.int32 if x.dtype == torch.float32 else torch.int16).cpu()


@devices
@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_the_row_alone(device: str, kernel: str, dtype: torch.dtype):
    """Not on its index, the rows beside it, its alignment or stride, nor on warps a row."""
    widths = (300,) if device == "cpu" else (300, 1009, 4096, 5000, 32001, 50257, 131072)
    for cols in widths:
        block = BLOCK if device == "cpu" else 4096
        row = (torch.randn(1, cols) * 5).to(dtype)
        want = bits(row.to(device), kernel, block)
        phases = (1, 2) if device == "cpu" else range(1, 9)
        for phase in phases:
            x, _ = padded(row, dtype, device, phase, gap=phase)
            assert torch.equal(bits(x, kernel, block), want), (cols, phase)
        batch, _ = padded(row.expand(3 if device == "cpu" else 4097, -1), dtype, device, 0, gap=1)
        assert (bits(batch, kernel, block) == want).all(), cols
        if device == "cuda":
            assert torch.equal(bits(row.to(device), kernel, block, num_warps=8), want), cols
            assert torch.equal(bits(row.to(device), kernel, block, num_warps=16), want), cols


# ---- what is asked for at the wrong place


def test_a_cpu_tensor_without_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows, "interpreted", lambda: False)
    with pytest.raises(RuntimeError, match=r"x is on cpu.*TRITON_INTERPRET=1"):
        rows.softmax(torch.zeros(2, 3), torch.zeros(2, 3))
