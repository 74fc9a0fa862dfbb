"""The recurrence in three languages, as tests ask for it: an op and float32 arrays go in.

Without a GPU Triton is interpreted and CUDA runs compiled for the CPU; a call there costs
milliseconds, so each handles many states.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from online_softmax.cuda import host
from online_softmax.cuda.launch import Launch
from online_softmax.reference import online as reference

try:
    import triton
    import triton.language as tl

    from online_softmax.triton import online, rows
except ImportError:
    triton = None

NAN = math.nan
LAWS = Path(__file__).with_name("laws.cu")
# The functions, and how many arrays each returns. A block is of four elements.
OPS = {"empty": 2, "lift": 2, "join": 3, "merge": 2, "of": 2, "absorb": 2}
OPS |= {"prob": 1, "log_prob": 1, "lse": 1}

# ---- a language: an op and its arguments (arguments, n) in, its results (results, n) out, float32


def pytorch(op: str, x: Tensor) -> Tensor:
    n, state = x.shape[1], reference.State
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "empty": lambda: state.empty(n, device=x.device),
        "lift": lambda: reference.lift(x[0]),
        "join": lambda: reference.join(x[0], x[1]),
        "merge": lambda: state(x[0], x[1]).merge(state(x[2], x[3])),
        "of": lambda: state.of(x, 0),
        "absorb": lambda: reference.absorb(state(x[0], x[1]), x[2:], 0),
        "prob": lambda: reference.prob(x[:1], state(x[1], x[2]), 0),
        "log_prob": lambda: reference.log_prob(x[:1], state(x[1], x[2]), 0),
        "lse": lambda: (state(x[0], x[1]).lse(),),
    }
    return torch.stack([result.reshape(n) for result in calls[op]()])


if triton:

    @triton.jit
    def law(in_ptr, out_ptr, n, OP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        a = tl.load(in_ptr + i, mask=i < n)
        b = tl.load(in_ptr + min(1, ROWS - 1) * n + i, mask=i < n)
        c = tl.load(in_ptr + min(2, ROWS - 1) * n + i, mask=i < n)
        e = tl.load(in_ptr + min(3, ROWS - 1) * n + i, mask=i < n)
        f = tl.load(in_ptr + min(4, ROWS - 1) * n + i, mask=i < n)
        g = tl.load(in_ptr + min(5, ROWS - 1) * n + i, mask=i < n)
        r = (a, b)
        if OP == "empty":
            r = online.empty(BLOCK)
        elif OP == "lift":
            r = online.lift(a)
        elif OP == "join":
            r = online.join(a, b)
        elif OP == "merge":
            r = online.merge(a, b, c, e)
        elif OP == "of":
            r = online.of((a, b, c, e))
        elif OP == "absorb":
            r = online.absorb(a, b, (c, e, f, g))
        elif OP == "prob":
            r = (online.prob(a, b, c),)
        elif OP == "log_prob":
            r = (online.log_prob(a, b, c),)
        elif OP == "lse":
            r = (online.lse(a, b),)
        for k in tl.static_range(len(r)):
            tl.store(out_ptr + k * n + i, r[k], mask=i < n)


def in_triton(op: str, x: Tensor) -> Tensor:
    out, n = torch.full((OPS[op], x.shape[1]), NAN, device=x.device), x.shape[1]
    block = min(triton.next_power_of_2(n), 4096)
    with np.errstate(all="ignore"):  # numpy, which interprets, tells of inf - inf
        law[(-(-n // block),)](x, out, n, op, len(x), block, enable_fp_fusion=False)
    return out


def in_cuda(op: str, x: Tensor) -> Tensor:
    out, n = torch.full((OPS[op], x.shape[1]), NAN, device=x.device), x.shape[1]
    launch = Launch(str(LAWS), f"law_{op}", (x, out, n), -(-n // 128), 128)
    if x.is_cuda:
        from online_softmax import jit

        jit.launch(launch, x.device)
    else:
        host.build(str(LAWS), [f"law_{name}" for name in OPS])
        host.launch(launch)
    return out


LANGUAGES = {"pytorch": pytorch, "triton": in_triton, "cuda": in_cuda}


class Speaker:
    """A language on a device; called with an op and float32 arrays, returns float32 arrays."""

    def __init__(self, language: str, device: str) -> None:
        self.language, self.device = language, device

    def __call__(self, op: str, *arguments: Tensor | list[float]) -> list[Tensor]:
        lacks = self.lacks()
        if lacks and os.environ.get("CI"):
            pytest.fail(lacks)
        if lacks:
            pytest.skip(lacks)
        x = torch.stack([torch.as_tensor(a, dtype=torch.float32) for a in arguments])
        return list(LANGUAGES[self.language](op, x.to(self.device)).cpu())

    def lacks(self) -> str | None:
        if self.language == "triton" and triton is None:
            return "Triton is not installed"
        if self.language == "triton" and self.device == "cpu" and not rows.interpreted():
            return "Triton compiles here; TRITON_INTERPRET=1 makes it run on the CPU"
        if self.language == "cuda" and self.device == "cpu" and host.compiler() is None:
            return "host execution needs g++ or clang++"
        return None


on_gpu = [pytest.mark.gpu]
on_gpu += [pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]
in_every_language = pytest.mark.parametrize(
    "say",
    [
        pytest.param(Speaker(name, device), id=f"{name}-{device}", marks=marks)
        for device, marks in (("cpu", []), ("cuda", on_gpu))
        for name in LANGUAGES
    ],
)
