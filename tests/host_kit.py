"""Host execution for tests: its kernels, poisoned memory; skips whoever imports it without g++."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from online_softmax.cuda import host
from online_softmax.cuda.launch import Launch

KERNELS = Path(__file__).with_name("host_kernels.cu")
NAN = float("nan")

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
