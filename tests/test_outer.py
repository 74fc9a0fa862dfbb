"""The kernels that take x as it lies, by host execution: gradients along a dim that is not the
last, results wider than x there, and the gradient of logsumexp."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from host_kit import MIXES, outer_kernels, poisoned
from online_softmax import rowkernels, rowplan
from online_softmax.cuda import host, outer_launch
from online_softmax.reference import ops

INF, NAN = math.inf, math.nan
ALONG = pytest.mark.parametrize("op", ["softmax", "log_softmax"])
compiled_together = pytest.fixture(scope="module", autouse=True)(outer_kernels)
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)
SHAPES = ((2, 3, 8), (3, 7, 1), (1, 33, 64), (2, 150, 24), (5, 1100, 3), (1, 2100, 8))
REFERENCE = {"softmax": ops.softmax_backward, "log_softmax": ops.log_softmax_backward}


def normal(*shape: int, dtype: torch.dtype = torch.float32, size: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return (torch.randn(shape, generator=generator) * size).to(dtype)


def close(got: Tensor, want: Tensor, size: Tensor | float = 1.0) -> None:
    """Half a unit of got's type, float32's share, and 1e-6 of the terms that were subtracted."""
    half_unit = 0.0 if got.dtype == torch.float32 else 0.5 * torch.finfo(got.dtype).eps
    error = (got.double() - want).abs()
    allowed = (half_unit + 2e-6) * want.abs() + 1e-6 * size + 6e-8
    right = (error <= allowed) | (got.double() == want) | (got.isnan() & want.isnan())
    assert bool(right.all()), f"{int((~right).sum())} wrong, by up to {float(error[~right].max())}"


def upstream(op: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
    """dy and y, among y slices that are empty, and one with NaN."""
    x = normal(*shape)
    x[0, :, 0] = -INF
    y = torch.softmax(x, 1) if op == "softmax" else torch.log_softmax(x, 1)
    y[0, :, 0] = 0.0 if op == "softmax" else -INF
    y[0, 1, -1] = NAN if shape[2] > 1 else y[0, 1, -1]
    return [normal(*shape, size=1.0).flip(1).to(dtypes[0]), y.to(dtypes[1])]


@pytest.mark.parametrize("dtypes", MIXES, ids=lambda mix: "-".join(str(t)[6:] for t in mix))
@ALONG
def test_backward_agrees_with_float64(op: str, dtypes: tuple[torch.dtype, ...]) -> None:
    for shape, (scale, zero_empty) in zip(
        SHAPES, itertools.cycle(((1.0, False), (0.5, True))), strict=False
    ):
        dy, y = upstream(op, shape, dtypes)
        dx = poisoned(*shape, dtype=dtypes[2])
        name = f"{op}_backward"
        host.launch(outer_launch.outer_backward(name, dy, y, dx, 1, scale, zero_empty))
        g, o = dy.double(), y.double()
        want = REFERENCE[op](g, o, 1, scale=scale, zero_empty=zero_empty)
        if op == "softmax":
            size = o * (g.abs() + (g * o).abs().sum(1, keepdim=True))
        else:
            size = g.abs() + o.exp() * g.abs().sum(1, keepdim=True)
        close(dx, want, size.nan_to_num(posinf=0.0))


@pytest.mark.parametrize("dtypes", MIXES[:3], ids=["float", "half", "mixed"])
@pytest.mark.parametrize("cols", [5, 70, 600, 2100])
def test_backward_bits_follow_from_the_length(cols: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Not from where the inner rows lie, how many there are, or what stands beside them."""
    dy, y = upstream("softmax", (2, cols, 16), dtypes)

    def result(dy: Tensor, y: Tensor) -> tuple[Tensor, str]:
        dx = poisoned(*y.shape, dtype=dtypes[2])
        work = outer_launch.outer_backward("softmax_backward", dy, y, dx, 1, 1.0, False)
        host.launch(work)
        return dx, work.symbol

    def moved(t: Tensor) -> Tensor:
        return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)

    want, whole = result(dy, y)
    at_odds, narrow = result(moved(dy), moved(y))
    assert whole != narrow  # 16 bytes a thread, and one element
    assert torch.equal(at_odds.nan_to_num(7.0), want.nan_to_num(7.0))
    for cut in ((slice(1, 2),), (slice(None), slice(None), slice(0, 3))):
        some, _ = result(dy[cut].contiguous(), y[cut].contiguous())
        assert torch.equal(some.nan_to_num(7.0), want[cut].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@ALONG
def test_float32_of_half(op: str, dtype: torch.dtype) -> None:
    function = getattr(torch, op)
    for shape in ((3, 33, 16), (2, 300, 5)):
        x, y = normal(*shape, dtype=dtype), poisoned(*shape)
        x[0, 0, 0], x[0, :, 1] = NAN, -INF
        host.launch(outer_launch.outer(op, x, y, 1, 0.5, False))
        close(y, function(x.double() * 0.5, 1))


@pytest.mark.parametrize("shape", [(7, 3, 2), (3, 5, 8)])
def test_no_backward_has_more_blocks_than_a_grid(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowkernels, "has_kernels", lambda x: True)
    counts: list[int] = []

    def run(work: list, device: torch.device) -> None:
        counts.append(len(work))
        for launch in work:
            assert launch.grid <= rowplan.MAX_GRID
            host.launch(launch)

    monkeypatch.setattr(rowkernels, "_run", run)
    dy, y = upstream("softmax", shape, MIXES[0])
    arguments = ("softmax", dy, y, 1, None, 1.0, False)
    want = rowkernels.backward(*arguments)
    monkeypatch.setattr(rowplan, "MAX_GRID", 5)
    got = rowkernels.backward(*arguments)
    assert want is not None
    assert got is not None
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert counts[0] == 1
    assert counts[1] > 1


# ---- the gradient of logsumexp


def slices(x: Tensor, inner: int) -> Tensor:
    """(outer, cols x inner) as (outer, cols, inner)."""
    return x.reshape(len(x), -1, inner)


def lse_gradient(
    x: Tensor, lse: Tensor, dlse: Tensor, inner: int, scale: float = 1.0, zero_empty: bool = False
) -> Tensor:
    """Through the kernel, into memory that must stay as it was on both sides."""
    lead = x.storage_offset() % 3  # any phase
    room = torch.full((x.numel() + lead + 5,), 7.0, dtype=x.dtype)
    dx = room[lead : lead + x.numel()]
    dx.fill_(NAN)
    host.launch(outer_launch.lse_backward(dlse, x, lse, dx, inner, scale, zero_empty))
    assert bool((room[:lead] == 7).all())
    assert bool((room[lead + x.numel() :] == 7).all())
    return dx.view(x.shape)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inner", [1, 5, 16])
def test_lse_backward_agrees_with_float64(inner: int, dtype: torch.dtype) -> None:
    """Every kind of alignment: where x starts, the gap between its rows, how a row ends."""
    for cols, start, gap in ((1, 0, 0), (3, 1, 0), (64, 0, 0), (64, 0, 8), (33, 2, 5), (70, 4, 1)):
        base = normal(4, cols * inner + gap + start, dtype=dtype)
        base[1], base[2, start], base[3, start] = -INF, NAN, INF
        x = base[:, start : start + cols * inner]
        wide = slices(x, inner).double()
        for scale, zero_empty, g_dtype in ((1.0, False, dtype), (0.5, True, torch.float32)):
            lse = torch.logsumexp(wide * scale, 1).float().flatten()
            for dlse in (
                normal(lse.numel(), dtype=g_dtype, size=1.0),
                torch.full((1,), 0.5, dtype=g_dtype).expand(lse.numel()),
                normal(2 * lse.numel(), dtype=g_dtype, size=1.0)[::2],
            ):
                got = lse_gradient(x, lse, dlse, inner, scale, zero_empty)
                rows = (4, 1, inner)
                want = ops.logsumexp_backward(
                    dlse.double().view(rows), wide, lse.double().view(rows), (1,), True,
                    scale=scale, zero_empty=zero_empty,
                )  # fmt: skip
                close(slices(got, inner), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lse_backward_bits_follow_from_the_element(dtype: torch.dtype) -> None:
    x = normal(6, 35, dtype=dtype)
    lse, dlse = torch.logsumexp(x.float(), 1), normal(6, dtype=dtype)
    want = lse_gradient(x, lse, dlse, 1)
    for start in range(8):
        base = torch.zeros(6, 35 + start, dtype=dtype)
        base[:, start:] = x
        assert torch.equal(lse_gradient(base[:, start:], lse, dlse, 1), want)
    assert torch.equal(lse_gradient(x[2:3], lse[2:3], dlse[2:3], 1), want[2:3])
    turned = lse_gradient(x.t().reshape(1, -1), lse, dlse, 6)  # along the first dim instead
    assert torch.equal(turned.view(35, 6).t(), want)


def test_lse_backward_far_from_zero() -> None:
    """The subtraction goes first: as near as torch's own exponential of the same difference, to a
    unit of 1."""
    for base in (1e4, 1e6, -1e6, 3e37):
        x = base + normal(4, 64, size=1.0 if abs(base) < 1e7 else 1e30)
        lse, dlse = torch.logsumexp(x, 1), torch.ones(4)
        wide = torch.exp(x.double() - lse.double()[:, None])
        torchs = torch.exp(x - lse[:, None])
        got = lse_gradient(x, lse, dlse, 1)
        allowed = (torchs.double() - wide).abs() + 2.0**-23
        assert bool(((got.double() - wide).abs() <= allowed * wide.clamp(min=1.0)).all())
    x = torch.tensor([[3.2e38, -3.2e38, 3.2e38]])
    got = lse_gradient(x, torch.logsumexp(x, 1), torch.ones(1), 1)
    assert got.tolist() == [[1.0, 0.0, 1.0]]  # lse is rounded: what is left of log 2 is nothing


# ---- under the host sanitizers


def test_sanitizers() -> None:
    """No access outside a tensor and nothing undefined, off 16-byte boundaries; and no race."""
    types = (torch.float32,) * 3
    dy, y = upstream("log_softmax", (2, 21, 3), types)
    dx, name = torch.empty_like(y), "log_softmax_backward"
    outer = outer_launch.outer_backward(name, dy, y, dx, 1, 1.0, False)
    rows = normal(5, 43, dtype=torch.float16)[:, 2:]  # words of two rows, with a gap between
    lse, out = torch.logsumexp(rows.float(), 1), torch.empty(5, 41, dtype=torch.float16)
    of_rows = outer_launch.lse_backward(lse, rows, lse, out, 1, 1.0, False)
    for launch, sanitizer in ((of_rows, "address,undefined"), (outer, "thread")):
        report = host.sanitize([launch], sanitizer=sanitizer)
        assert report.ok, report.text
