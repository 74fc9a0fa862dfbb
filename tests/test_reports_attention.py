"""Public bug reports as inputs of attention and of merging, by the public calls.

Kinds K10 and K11. On the CPU the Triton kernels are interpreted, so what runs there is thinned; on
a GPU all of it runs, with the tiles that are planned. Values are float64's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_kit import INF, PLAIN, Inputs, inputs, upstream, wanted
from online_softmax import attention, attention_state, attention_varlen, merge, merge_outputs
from rows_kit import DEVICES, GPU, gpu
from triton_kit import needs_interpreter

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BOUNDS = {F32: (2e-5, 1e-4), F16: (2e-3, 1e-2), BF16: (2e-2, 6e-2)}
KERNELS = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_interpreter), pytest.param("cuda", marks=GPU)]
)


def near(got: Tensor, want: Tensor, bound: float) -> None:
    """Within a part of the largest, NaN and infinities in the same places."""
    got, want = got.detach().double().cpu(), want.double()
    finite = want[want.isfinite()].abs()
    most = float(finite.max()) if finite.numel() else 0.0
    torch.testing.assert_close(got, want, rtol=bound, atol=bound * (most + 0.1), equal_nan=True)


def agree(
    given: Inputs,
    causal: Any = False,
    mask: Tensor | None = None,
    kernel: str = "triton",
    slack: float = 1.0,
) -> None:
    """out, lse and gradients of a call by the kernels; slack: that many times the bounds."""
    dtype, device = given.q.dtype, given.q.device
    bounds = [slack * bound for bound in BOUNDS[dtype]]
    o = PLAIN._replace(right=0 if causal else -1, top_left=causal == "top_left")
    cpu = Inputs(*(t.cpu() for t in given[:3]), mask=None if mask is None else mask.cpu())
    above = upstream(cpu)
    dout = above.dout.to(dtype)
    out, lse, by = wanted(cpu, o, dout, above.dlse.float())
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    got = attention(*leaves, causal=causal, mask=mask, return_lse=True, kernel=kernel)
    near(got[0], out, bounds[0])
    near(got[1], lse, 2e-5)
    assert got[1].shape == given.q.shape[:3]  # no padding
    up = [dout.to(device), above.dlse.to(device, F32)]
    for one, want in zip(torch.autograd.grad(got, leaves, up), by, strict=True):
        near(one, want, bounds[1])


@KERNELS
def test_s31_causal_and_mask_together_leave_a_row_empty(device: str) -> None:
    given = inputs(1, 1, 1, 4, 4, 2).cast(F32, device)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=device)
    mask[..., 1, :2] = False  # what causal leaves of row 1
    agree(given, True, mask)
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    out, lse = attention(*leaves, causal=True, mask=mask, return_lse=True, kernel="triton")
    by = torch.autograd.grad(out.sum(), leaves)
    assert not out[0, 0, 1].any()
    assert lse[0, 0, 1] == -INF
    assert not by[0][0, 0, 1].any()
    assert not any(t.isnan().any() for t in (out, *by))


@pytest.mark.parametrize(
    ("kernel", "device", "dtype"),
    [
        ("reference", "cpu", F32),
        *(pytest.param("triton", "cuda", dtype, marks=GPU) for dtype in (F32, F16, BF16)),
        pytest.param("reference", "cuda", F32, marks=GPU),
    ],
    ids=str,
)
def test_s54_scores_far_below_zero(kernel: str, device: str, dtype: torch.dtype) -> None:
    """All scores near -200, 7 heads a head of keys, and causal, so that a tile of keys may hold
    none for a query: a maximum that begins at 0 stays there, and the head gives 0. Interpreted:
    tests/test_attention_triton.py."""
    drawn = inputs(1, 7, 1, 88, 448, 64)
    q = torch.full_like(drawn.q, 5.0)  # u of 64 elements of 1/8, times 40: q k / 8 is -200
    given = Inputs(q, -5.0 * (1 + 0.02 * drawn.k), drawn.v).cast(dtype, device)
    for causal in (True, "top_left"):
        # float32 has scores of 200 to 10^-5 or so, by which an exponential is wrong.
        agree(given, causal, kernel=kernel, slack=10 if dtype == F32 else 1)
        out, lse = attention(*given[:3], causal=causal, return_lse=True, kernel=kernel)
        assert (lse - -200).abs().max() < 10
        assert out.abs().amax(-1).min() > 1e-3
    state = attention_state(*given[:3], kernel=kernel)
    assert (state.m - -200).abs().max() < 3


@gpu
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("causal", [True, "top_left"])
@pytest.mark.parametrize("lengths", [(5, 2), (2, 5), (1, 17), (130, 64), (64, 130), (17, 300)])
def test_s32_alignment(lengths: tuple[int, int], causal: Any, dtype: torch.dtype) -> None:
    agree(inputs(1, 2, 1, *lengths, 32).cast(dtype, "cuda"), causal)


@gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("k_len", [*range(1, 18), 31, 33, 63, 65, 127, 129, 200])
def test_s33_lengths_beside_the_tiles(k_len: int, dtype: torch.dtype) -> None:
    for more in (0, 1, 7):
        for causal in (False, True):
            given = inputs(1, 1, 1, k_len + more, k_len, 64).cast(dtype, "cuda")
            agree(given, causal)
            ones = attention(*(torch.ones_like(t) for t in given[:3]), causal=causal)
            empty = more if causal else 0
            assert not ones[:, :, :empty].any()
            assert (ones[:, :, empty:] - 1).abs().max() <= torch.finfo(dtype).eps


@gpu
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("dim", [1, 8, 16, 40, 64, 72, 80, 96, 128, 192, 256])
def test_s73_head_dims(dim: int, dtype: torch.dtype) -> None:
    agree(inputs(1, 4, 2, 150, 170, dim).cast(dtype, "cuda"), True)


@KERNELS
@pytest.mark.parametrize("q_len", [1, 16, 17])
def test_s79_lse_of_either_layout(q_len: int, device: str) -> None:
    """[batch, length, heads, dim] seen transposed; with long keys they are split up to 16."""
    k_len = 600 if device == "cuda" or q_len == 1 else 40
    given = inputs(2, 2, 1, q_len, k_len, 16).cast(F32, device)
    agree(given)
    want = attention(*given[:3], return_lse=True, kernel="triton")
    views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given[:3]]
    assert not views[0].is_contiguous() or q_len == 1
    got = attention(*views, return_lse=True, kernel="triton")
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


# ---- sizes past the limits of a grid, and past 32 bits


@gpu
def test_s16_many_heads_and_many_queries() -> None:
    q = torch.randn(1024, 64, 1, 8, device="cuda")  # 65,536 heads in all
    k, v = (torch.randn(1024, 64, 3, 8, device="cuda") for _ in range(2))
    out, lse = attention(q, k, v, return_lse=True)
    last = slice(-3, None)
    want = wanted(
        Inputs(*(t[last].cpu() for t in (q, k, v))), PLAIN, torch.zeros(3, 64, 1, 8), None
    )
    near(out[last], want[0], 2e-5)
    near(lse[last], want[1], 2e-5)
    q = torch.randn(1, 1, 65_536, 16, device="cuda")
    k, v = (torch.randn(1, 1, 33, 16, device="cuda") for _ in range(2))
    out = attention(q, k, v)
    want = wanted(Inputs(*(t.cpu() for t in (q[:, :, -40:], k, v))), PLAIN,
                  torch.zeros(1, 1, 40, 16), None)  # fmt: skip
    near(out[:, :, -40:], want[0], 2e-5)


@gpu
def test_s72_a_backward_of_many_sequences() -> None:
    leaves = [
        torch.randn(8300, 16, 1, 128, device="cuda", dtype=F16).requires_grad_() for _ in range(3)
    ]
    out = attention(*leaves)
    by = torch.autograd.grad(out.float().square().sum(), leaves)
    assert all(t.isfinite().all() for t in by)
    alone = [t[-5:].detach().requires_grad_() for t in leaves]
    last = attention(*alone)
    assert torch.equal(last, out[-5:])
    for one, whole in zip(torch.autograd.grad(last.float().square().sum(), alone), by, strict=True):
        assert torch.equal(one, whole[-5:])


@gpu
def test_s72_more_than_2_31_elements() -> None:
    """17 GB in all: the last queries as they are alone, forward and backward."""
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GiB of device memory")
    q = torch.randn(1, 1, (1 << 24) + 40, 128, device="cuda", dtype=BF16).requires_grad_()
    assert q.numel() > 2**31
    k, v = (torch.randn(1, 1, 20, 128, device="cuda", dtype=BF16) for _ in range(2))
    out = attention(q, k, v)
    (dq,) = torch.autograd.grad(out, q, out.detach())
    some = q.detach()[:, :, -300:].clone().requires_grad_()
    last = attention(some, k, v)
    near(last, out.detach()[:, :, -300:].cpu(), BOUNDS[BF16][0])
    (part,) = torch.autograd.grad(last, some, last.detach())
    near(part, dq[:, :, -300:].cpu(), BOUNDS[BF16][1])


# ---- merging


@DEVICES
def test_s29_s55_the_lse_of_attention_merges(device: str) -> None:
    """Parts of the keys, one of them empty, in both orders, are the whole; the base is natural."""
    given = inputs(1, 2, 1, 5, 3072, 16).cast(F32, device)
    q, k, v = given[:3]
    want = attention(q, k, v, return_lse=True)
    near(want[1], torch.logsumexp((q @ k.mT / 4).double().cpu(), -1), 2e-5)
    cuts = (slice(0, 1000), slice(0, 0), slice(1000, 3072))
    pairs = [attention(q, k[:, :, c], v[:, :, c], return_lse=True) for c in cuts]
    assert (pairs[1][1] == -INF).all()
    assert not pairs[1][0].any()
    for order in (pairs, pairs[::-1]):
        out, lse = merge_outputs(*order, base="e")
        near(out, want[0].double().cpu(), 2e-5)
        near(lse, want[1].double().cpu(), 2e-6)
    for order in (pairs[:2], pairs[1::-1]):  # the other unchanged
        out, lse = merge_outputs(*order, base="e")
        assert torch.equal(out, pairs[0][0])
        assert torch.equal(lse, pairs[0][1])
    states = [attention_state(q, k[:, :, c], v[:, :, c]) for c in cuts]
    near(merge(*states).output(), want[0].double().cpu(), 2e-5)


@DEVICES
def test_s29_a_logarithm_in_base_2_is_another_number(device: str) -> None:
    first = torch.tensor([1.0], device=device), torch.tensor(8.0, device=device)
    second = torch.tensor([-1.0], device=device), torch.tensor(4.1, device=device)
    out, lse = merge_outputs(first, second, base="e")
    near(out, torch.tensor([0.9603194]), 1e-6)
    near(lse, torch.tensor(8.0200398), 1e-6)
    ratio = 2.0**-3.9
    out, lse = merge_outputs(first, second, base="2")
    near(out, torch.tensor([(1 - ratio) / (1 + ratio)]), 1e-6)


@DEVICES
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_s04_positions_without_keys_among_others(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def pair() -> tuple[Tensor, Tensor]:
        out = torch.randn(613, 16, 64, generator=generator).to(device, dtype)
        return out, torch.randn(613, 16, generator=generator).to(device)

    first, second = pair(), pair()
    is_gone = (torch.rand(613, 16, generator=generator) < 0.25).to(device)
    empty = (
        torch.where(is_gone[..., None], 0.0, first[0]).to(dtype),
        first[1].masked_fill(is_gone, -INF),
    )
    want = merge_outputs(first, second, base="e")
    for got in (merge_outputs(empty, second, base="e"), merge_outputs(second, empty, base="e")):
        for one, whole, alone in zip(got, want, second, strict=True):
            assert torch.equal(one[is_gone], alone[is_gone])
            near(one[~is_gone], whole[~is_gone].double().cpu(), BOUNDS[dtype][0])


@gpu
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("dim", [1, 3, 32, 48, 65, 80, 96, 192, 512])
def test_s74_heads_that_lie_beside_each_other(dim: int, dtype: torch.dtype) -> None:
    outs = torch.randn(2, 613, 16, dim, device="cuda").to(dtype)
    lses = torch.randn(2, 613, 16, device="cuda") * 3
    out, lse = merge_outputs(*zip(outs, lses, strict=True), base="2")
    w = torch.softmax(lses.double() * torch.log(torch.tensor(2.0).double()), 0).cpu()
    near(out, (w[..., None] * outs.double().cpu()).sum(0), BOUNDS[dtype][0])
    near(lse, torch.logaddexp2(*lses.double()).cpu(), 2e-6)


@KERNELS
def test_packed_decodes_with_keys_in_parts(device: str) -> None:
    """As `attention` of each; sequences without keys give 0 and -inf."""
    k_lens = [600, 0, 3, 530]
    ends = torch.arange(5, device=device).int()
    k_ends = torch.tensor([0, *k_lens], device=device).cumsum(0).int()
    q = torch.randn(4, 4, 16, device=device)
    k, v = (torch.randn(sum(k_lens), 2, 16, device=device) for _ in range(2))
    tokens, options = (q, k, v, ends, k_ends, 1, 600), {"return_lse": True, "kernel": "triton"}
    out, lse = attention_varlen(*tokens, causal=True, **options)
    for at, (first, last) in enumerate(zip(k_ends.tolist(), k_ends.tolist()[1:], strict=False)):
        one = [t.transpose(0, 1)[None] for t in (q[at : at + 1], k[first:last], v[first:last])]
        alone = attention(*one, causal=True, **options)
        near(out[at], alone[0][0, :, 0].double().cpu(), 1e-5)
        near(lse[at], alone[1][0, :, 0].double().cpu(), 1e-6)
    assert not out[1].any()
    assert (lse[1] == -INF).all()
