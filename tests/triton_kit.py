"""The Triton kernels for tests: run on both devices, checked, and watched for writes outside."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
rows = pytest.importorskip("online_softmax.triton.rows")

NAN = math.nan
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EMITS = ((rows.softmax, torch.softmax), (rows.log_softmax, torch.log_softmax))
BLOCK = 128  # columns a step: small, so that short rows take several

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
needs_interpreter = pytest.mark.skipif(not rows.interpreted(), reason="Triton compiles here")
on_gpu = [pytest.mark.gpu, needs_gpu]
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_interpreter), pytest.param("cuda", marks=on_gpu)]
)
kernels = pytest.mark.parametrize("kernel", rows.KERNELS)


def padded(
    values: Tensor, dtype: torch.dtype, device: str, phase: int = 0, gap: int = 0
) -> tuple[Tensor, Tensor]:
    """The values cut out of a larger tensor that is NaN elsewhere, and that tensor."""
    height, cols = values.shape
    base = torch.full((height + 2, phase + cols + gap), NAN, dtype=dtype, device=device)
    x = base[1 : height + 1, phase : phase + cols]
    return x.copy_(values), base


def check(x: Tensor, y: Tensor, theirs: object) -> None:
    want = theirs(x.double().cpu(), -1)
    want = torch.where(want.to(x.dtype).isinf(), want.to(x.dtype).double(), want)  # past float16
    interpreted = x.dtype == torch.bfloat16 and not x.is_cuda  # whose stores truncate
    rtol = (1 if interpreted else 0.5) * torch.finfo(x.dtype).eps
    rtol += 0 if x.dtype != torch.float32 else 1e-5 if theirs is torch.softmax else 2e-6
    # log_softmax subtracts log d from x - m, each rounded to float32: half an ulp of one that is
    # below 16 is up to 4.8e-7.
    atol = 1e-8 if theirs is torch.softmax else 5e-7
    atol = max(atol, torch.finfo(x.dtype).smallest_normal)
    torch.testing.assert_close(y.double().cpu(), want, rtol=rtol, atol=atol, equal_nan=True)


def run(x: Tensor, kernel: str, block: int = BLOCK, phase: int = 0, gap: int = 0) -> None:
    """Both operations, checked, and nothing written but the result."""
    for ours, theirs in EMITS:
        y, base = padded(torch.full_like(x, NAN), x.dtype, str(x.device), phase, gap)
        ours(x, y, kernel, block, num_warps=4)
        check(x, y, theirs)
        y.fill_(NAN)
        assert base.isnan().all(), "written outside the result"
