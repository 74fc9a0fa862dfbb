"""The baselines after Triton's tutorials are right: they are timed beside ours, not against it."""

from __future__ import annotations

import pytest
import torch

from online_softmax.lab.refusal import Refusal

tutorial = pytest.importorskip("online_softmax.lab.tutorial")
rows = pytest.importorskip("online_softmax.triton.rows")

needs_interpreter = pytest.mark.skipif(not rows.interpreted(), reason="Triton compiles here")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=needs_interpreter),
        pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]),
    ],
)


@devices
@pytest.mark.parametrize("cols", [1, 100, 256])
def test_softmax(device: str, cols: int):
    x = torch.randn(3, cols, device=device)
    y = torch.full_like(x, torch.nan)
    tutorial.softmax(x, y)
    torch.testing.assert_close(y, torch.softmax(x, -1), rtol=1e-5, atol=1e-7)


@devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [32, 41])
def test_attention(device: str, causal: bool, length: int):
    q, k, v = torch.randn(3, 1, 2, length, 16, device=device).unbind()
    blocks = (16, 16) if device == "cpu" else (tutorial.BLOCK_Q, tutorial.BLOCK_K)
    out = tutorial.attention(q, k, v, causal, *blocks)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_what_it_does_not_have_is_refused():
    x = torch.empty(1, tutorial.MOST_COLS + 1)
    with pytest.raises(Refusal, match="at most 65,536 columns"):
        tutorial.softmax(x, x)
    q = torch.empty(1, 2, 8, 48)
    with pytest.raises(Refusal, match="takes head_dim 16, 32, 64, 128"):
        tutorial.attention(q, q, q, False)
    with pytest.raises(Refusal, match="as many keys as queries"):
        tutorial.attention(q, q[:, :1], q[:, :1], False)
