"""Host execution for tests: its kernels, poisoned memory; skips whoever imports it without g++."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from online_softmax import rowplan
from online_softmax.cuda import host, outer_launch
from online_softmax.cuda.launch import Launch

KERNELS = Path(__file__).with_name("host_kernels.cu")
NAN = float("nan")
MIXES = (  # types of dy, y and dx
    (torch.float32,) * 3,
    (torch.bfloat16,) * 3,
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float16, torch.float32, torch.float16),
)

if host.compiler() is None:
    REASON = "no C++ compiler (apt-get install g++)"
    if os.environ.get("CI") == "true":
        pytest.fail(REASON, pytrace=False)
    pytest.skip(REASON, allow_module_level=True)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, NAN if dtype.is_floating_point else -1, dtype=dtype)


def softmax_launch(x: Tensor, y: Tensor, block: int = 256) -> Launch:
    rows, cols = x.shape
    name = {torch.float32: "float", torch.float16: "half_t", torch.bfloat16: "bfloat16_t"}[x.dtype]
    args = (x, y, rows, cols, x.stride(0))
    return Launch("ladder/v1_warp_shuffle.cu", f"v1_warp_shuffle<{name}>", args, rows, block)


def outer_kernels() -> None:
    """Compile what takes x as it lies, in MIXES: together it takes a tenth of one by one."""
    found = outer_launch.instances((torch.float32, torch.bfloat16))
    for op, inner, cols in itertools.product(rowplan.BACKWARD, (16, 3), (5, 2100)):
        dy, y, dx = (torch.empty((1, cols, inner), dtype=t, device="meta") for t in MIXES[-1])
        work = outer_launch.outer_backward(op, dy, y, dx, 1, 1.0, False)
        found.append((work.file, work.symbol))
    for file in ("outer.cu", "lse_backward.cu"):
        host.build(file, [symbol for each, symbol in found if each == file])
