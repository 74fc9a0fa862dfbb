"""Public bug reports about numbers of columns, in full: every width, not those near an end alone.

`_widths` of lab/cases.py has them thinned for every kernel; here the operations run as people call
them. On the CPU a few of the widths. Verdicts stay on the device until the last width.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from online_softmax import log_softmax, logsumexp, softmax
from rows_kit import DEVICES

OPS = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp}
TORCHS = {"softmax": torch.softmax, "log_softmax": torch.log_softmax, "logsumexp": torch.logsumexp}
ALONG = pytest.mark.parametrize("op", ["softmax", "log_softmax"])
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
POWERS = sorted({2**k + more for k in range(16) for more in (-1, 0, 1, 2)} - {0} | {1400})


def sampled(widths: Iterable[int], device: str, step: int) -> list[int]:
    """All of them on a GPU."""
    every = list(widths)
    return every if device == "cuda" else sorted({*every[::step], every[-1]})


class Verdict:
    """Which widths are wrong, by how much of what is allowed."""

    def __init__(self) -> None:
        self.worst: dict[int, list[Tensor]] = {}

    def note(self, cols: int, got: Tensor, want: Tensor, relative: float, absolute: float) -> None:
        """Half a unit of a 16-bit type is allowed beside `relative`, near 0 the spacing of what
        the type has there; NaN where none should be is infinitely wrong."""
        kind = torch.finfo(got.dtype)
        half_unit = 0.5 * kind.eps if got.dtype.itemsize == 2 else 0.0
        allowed = (relative + half_unit) * want.abs() + absolute + kind.smallest_normal * kind.eps
        share = ((got.double() - want).abs() / allowed).nan_to_num(nan=torch.inf).max()
        self.worst.setdefault(cols, []).append(share)

    def check(self, count: int) -> None:
        shares = torch.stack([torch.stack(each).max() for each in self.worst.values()]).cpu()
        wrong = {w: float(s) for w, s in zip(self.worst, shares, strict=True) if s > 1}
        assert not wrong, f"{len(wrong)} widths, errors as shares of the bound: {wrong}"
        assert len(self.worst) == count


@DEVICES
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_s02_every_width_to_2048(dtype: torch.dtype, device: str) -> None:
    """64 rows: lanes and threads that load nothing are the identity."""
    widths, verdict = sampled(range(1, 2049), device, 79), Verdict()
    whole = torch.randn(64, 2048, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    for cols in widths:
        x = whole[:, :cols].contiguous()
        verdict.note(cols, log_softmax(x), torch.log_softmax(x.double(), -1), 3e-6, 1e-6)
    verdict.check(len(widths))


@DEVICES
@ALONG
@pytest.mark.parametrize("dtype", [F64, F32, F16], ids=str)
def test_s10_every_width_to_4096(op: str, dtype: torch.dtype, device: str) -> None:
    """Two rows of zeros: each element 1 / cols, and their sum 1."""
    widths, verdict = sampled(range(2, 4097), device, 151), Verdict()
    bound = 1e-13 if dtype == F64 else 2e-6
    absolute = 1e-6 if op == "log_softmax" and dtype != F64 else 0.0
    zeros = torch.zeros(2, 4096, dtype=dtype, device=device)
    for cols in widths:
        y = OPS[op](zeros[:, :cols].contiguous())
        share = torch.full((2, cols), 1 / cols, dtype=F64, device=device)
        verdict.note(cols, y, share if op == "softmax" else share.log(), bound, absolute)
        if op == "softmax" and dtype == F64:
            verdict.note(cols, y.sum(-1), torch.ones(2, dtype=F64, device=device), 1e-12, 0.0)
    verdict.check(len(widths))


@DEVICES
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_s67_around_powers_of_two(op: str, dtype: torch.dtype, device: str) -> None:
    """Forward and backward, to 32,770 columns; 8 rows."""
    widths, verdict = sampled(POWERS, device, 5), Verdict()
    generator = torch.Generator().manual_seed(67)
    whole, above = (
        torch.randn(8, POWERS[-1], generator=generator).to(device, dtype) for _ in range(2)
    )
    for cols in widths:
        x = whole[:, :cols].contiguous().requires_grad_()
        wide = x.detach().double().requires_grad_()
        y, want = OPS[op](x), TORCHS[op](wide, -1)
        verdict.note(cols, y.detach(), want.detach(), 3e-6, 1e-6)
        dy = above[:, :cols].reshape(want.shape) if want.dim() == 2 else above[:, 0]
        (dx,) = torch.autograd.grad(y, x, dy)
        # The gradient is of the y that was rounded: so are p and what is subtracted.
        o = y.detach().double()
        p = {"softmax": o, "log_softmax": o.exp()}.get(op, torch.softmax(wide.detach(), -1))
        g = dy.double() if want.dim() == 2 else dy.double()[:, None]
        terms = {"softmax": p * (g * p).abs().sum(-1, keepdim=True) + (g * p).abs(),
                 "log_softmax": g.abs() + p * g.abs().sum(-1, keepdim=True)}  # fmt: skip
        true = {"softmax": p * (g - (g * p).sum(-1, keepdim=True)),
                "log_softmax": g - p * g.sum(-1, keepdim=True)}.get(op, p * g)  # fmt: skip
        size = float(terms[op].max()) if op in terms else 1.0
        verdict.note(cols, dx, true, 4e-6, 2e-6 * size)
    verdict.check(len(widths))
