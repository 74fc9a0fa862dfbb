"""Public bug reports of sizes past 32 bits, in full, and a decode of a million keys: GPU tests.

The smoke tests of the same stand in lab/cases.py (`_large`) and tests/test_decode.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attention_kit import few
from online_softmax import attention, log_softmax
from rows_kit import gpu

close = torch.testing.assert_close
GIB = 2**30
ROWS, ONE = 1_100_000_000, 2_200_000_000  # of two columns, and of one: past 2^31 elements both
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _given_back() -> Iterator[None]:
    """What a test held is for others again, in other processes too."""
    yield
    torch.cuda.empty_cache()


def needs(gibibytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < gibibytes * GIB:
        pytest.skip(f"needs {gibibytes} GiB of free device memory")


def checked_rows(x: Tensor, y: Tensor, dx: Tensor, count: int) -> None:
    """The first, middle and last `count` rows, and those around element 2^31 and row 2^30; x is
    also what arrived for the gradient."""
    rows = len(x)
    past = 2**31 // x.shape[1]
    starts = (0, rows // 2, rows - count, past - count // 2, min(2**30, rows - count))
    for start in starts:
        part = slice(start, start + count)
        wide, got = x[part].double(), y[part].double()
        want = torch.log_softmax(wide, -1)
        # Half a unit of float16, of values of size up to 10 or so.
        close(got, want, rtol=2.0**-11 + 2e-6, atol=1e-6)
        true = wide - got.exp() * wide.sum(-1, keepdim=True)
        close(dx[part].double(), true, rtol=2.0**-11 + 4e-6, atol=1e-5)


def log_softmax_both(rows: int, cols: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    """log_softmax of float16 and its gradient, x itself the upstream: three tensors in all."""
    x = torch.empty(rows, cols, dtype=torch.float16, device=device)
    x.normal_(generator=torch.Generator(device).manual_seed(24))
    leaf = x.requires_grad_()
    y = log_softmax(leaf)
    (dx,) = torch.autograd.grad(y, leaf, x.detach())
    y = y.detach()
    checked_rows(x.detach(), y, dx, count)
    return y, dx


@gpu
def test_s24_pairs_past_2_to_the_31() -> None:
    needs(16)
    log_softmax_both(ROWS, 2, 1000, "cuda")


@gpu
def test_s24_one_column_past_2_to_the_31() -> None:
    needs(16)
    y, dx = log_softmax_both(ONE, 1, 1000, "cuda")
    assert not y.any()
    assert not dx.any()


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, of one query; a head of keys at a time."""
    pairs = []
    for head in range(k.shape[1]):
        wide = k[:, head].double()
        z = q[:, 2 * head : 2 * head + 2, 0].double() @ wide.mT / 8
        wide = v[:, head].double()
        pairs.append((torch.softmax(z, -1) @ wide, torch.logsumexp(z, -1)))
    out, lse = (torch.cat(each, 1) for each in zip(*pairs, strict=True))
    return out.unsqueeze(2), lse.unsqueeze(2)


def decode(k_len: int, kernel: str | None, device: str) -> None:
    """A query that all keys share in, whose lse misses a part that is left out; then one whose
    weight lies on three of the keys, the first, the last and one past the middle."""
    q = few(1, 16, 64, 2, batch=1).cast(BF16, device).q
    generator = torch.Generator(device).manual_seed(20)
    k, v = (
        torch.randn(1, 2, k_len, 64, generator=generator, dtype=BF16, device=device)
        for _ in range(2)
    )
    bound = 2e-5 if kernel == "triton" else 2e-6  # of lse, as docs/accuracy.md has them
    for is_peaked in (False, True):
        if is_peaked:
            for at in (0, k_len // 2 + 1, k_len - 1):
                k[:, :, at] = 2.5 * q[:, ::2].sign()[:, :, 0]  # of the first head of each pair
        out, lse = attention(q, k, v, return_lse=True, kernel=kernel)
        want, want_lse = exact(q, k, v)
        close(lse.double(), want_lse, rtol=bound, atol=bound)
        for mine, true in zip(out[0].double(), want[0], strict=True):
            close(mine, true, rtol=0, atol=2.0**-6 * float(true.abs().max()))
        again = attention(q, k, v, return_lse=True, kernel=kernel)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


@gpu
@pytest.mark.parametrize("kernel", [None, "cuda", "triton"])
def test_a_decode_of_a_million_keys(kernel: str | None) -> None:
    needs(4)
    decode(1 << 20, kernel, "cuda")
