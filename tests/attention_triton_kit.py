"""Attention's Triton kernels for tests: run on both devices, and checked against float64.

Without a GPU they are interpreted: small shapes, and tiles smaller than those, so that a row of
queries meets several.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_kit import Inputs, upstream, wanted
from online_softmax.attentionplan import Options, Tiles

launch = pytest.importorskip("online_softmax.triton.attention_launch")
back = pytest.importorskip("online_softmax.triton.attention_backward_launch")

close = torch.testing.assert_close
SMALL = Tiles(16, 16, 4, 1)
ARCH = "sm_90a"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Of results, and of gradients. bfloat16: the interpreter's stores truncate, a whole ulp.
BOUNDS = {F32: (2e-5, 1e-4), F16: (2e-3, 1e-2), BF16: (2e-2, 6e-2)}


def forward(
    given: Inputs, o: Options, tiles: Tiles | None = SMALL, ends: Any = (None, None), **options: Any
) -> Any:
    made = launch.forward(
        launch.Inputs(*given, *ends), o, ARCH, options.get("with_state", False), tiles
    )
    launch.run(made.launches, given.q.device)
    return made


def backward(
    above: Any, given: Inputs, out: Tensor, lse: Tensor, o: Options,
    tiles: Tiles | None = SMALL, ends: Any = (None, None),
) -> list[Tensor]:  # fmt: skip
    which = back.Wanted(True, True, True, given.bias is not None, given.sinks is not None)
    tensors = launch.Inputs(*given, *ends)
    made = back.backward(*above, tensors, out, lse, o, which, ARCH, tiles)
    launch.run(made.launches, given.q.device)
    dsinks = None
    if made.sinks is not None:
        dsinks = made.sinks.sum(0 if ends[0] is not None else (0, 2))
    return [t for t in (*made[:4], dsinks) if t is not None]


def near(got: Tensor, want: Tensor, bound: float) -> None:
    """Within a part of the largest, NaN and infinities in the same places."""
    got, want = got.double().cpu(), want.double().cpu()
    finite = want[want.isfinite()]
    most = float(finite.abs().max()) if finite.numel() else 0.0
    close(got, want, rtol=bound, atol=bound * (most + 0.1), equal_nan=True)


def check(given: Inputs, o: Options, tiles: Tiles | None = SMALL, gradients: bool = True) -> None:
    """Against float64 on the same values."""
    dtype, device = given.q.dtype, given.q.device
    bounds = BOUNDS[dtype]
    above = upstream(given)
    on_cpu = Inputs(*(t if t is None else t.cpu() for t in given))
    dout = above.dout.to(dtype)
    out, lse, by = wanted(on_cpu, o, dout, above.dlse)
    got = forward(given, o, tiles)
    near(got.out, out, bounds[0])
    near(got.lse, lse, 2e-5)
    if gradients:
        up = dout.to(device), above.dlse.to(device)
        found = backward(up, given, got.out, got.lse, o, tiles)
        assert len(found) == len(by)
        for one, want in zip(found, by, strict=True):
            near(one, want, bounds[1])
