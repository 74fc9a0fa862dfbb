"""Attention's Triton kernels: every option, odd sizes, and rows without keys."""

from __future__ import annotations

import pytest
import torch

from attention_kit import CASES, INF, NAN, PLAIN, Inputs, inputs, upstream
from attention_triton_kit import BF16, F16, F32, backward, check, forward, near
from online_softmax.reference import attention as reference
from triton_kit import devices

close = torch.testing.assert_close


@devices
@pytest.mark.parametrize("name", CASES)
def test_every_option(device: str, name: str) -> None:
    o, shapes = CASES[name]
    check(inputs(**shapes).cast(F32, device), o)


@devices
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["causal", "all"])
def test_half_types(device: str, name: str, dtype: torch.dtype) -> None:
    o, shapes = CASES[name]
    check(inputs(**shapes).cast(dtype, device), o)


@devices
def test_the_planned_tiles(device: str) -> None:
    """Larger than the whole, and of decode as well, in one part."""
    check(inputs(1, 2, 1, 17, 21).cast(F16, device), PLAIN._replace(right=0), None)
    check(inputs(1, 2, 1, 3, 21).cast(F32, device), PLAIN._replace(right=0), None)


# ---- K11: sizes


@devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("k_len", [1, 15, 16, 17, 33])
def test_lengths_beside_the_tiles(device: str, k_len: int, causal: bool) -> None:  # S33
    for more in (0, 1, 7):
        o = PLAIN._replace(right=0) if causal else PLAIN
        shapes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": k_len + more, "k_len": k_len}
        given = inputs(**shapes, dim=4).cast(F32, device)
        check(given, o)
        ones = Inputs(*(torch.ones_like(t) for t in given[:3]))
        out = forward(ones, o).out
        empty = more if causal else 0
        assert not out[:, :, :empty].any()
        close(out[:, :, empty:], torch.ones_like(out[:, :, empty:]), rtol=1e-6, atol=0)


@devices
@pytest.mark.parametrize("lengths", [(5, 2), (2, 5), (1, 17), (40, 20), (20, 40)])
def test_causal_alignment(device: str, lengths: tuple[int, int]) -> None:  # S32
    shapes = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": lengths[0], "k_len": lengths[1]}
    given = inputs(**shapes).cast(F32, device)
    for o in (PLAIN._replace(right=0), PLAIN._replace(right=0, top_left=True)):
        check(given, o)


@devices
@pytest.mark.parametrize("top_left", [False, True])
def test_scores_far_below_zero(device: str, top_left: bool) -> None:
    """S54, thinned: scores near -200, and tiles in which a query sees no key at all."""
    drawn = inputs(1, 7, 1, 11, 56, 16)
    given = Inputs(torch.full_like(drawn.q, 10.0), -5.0 * (1 + 0.01 * drawn.k), drawn.v)
    o = PLAIN._replace(right=0, top_left=top_left)
    check(given.cast(F32, device), o, gradients=device == "cpu")  # a GPU's: with the reports
    made = forward(given.cast(F32, device), o, with_state=True)
    assert (made.lse - -200).abs().max() < 10
    assert made.out.abs().amax(-1).min() > 1e-3
    assert (made.m - -200).abs().max() < 10


@devices
@pytest.mark.parametrize("dim", [1, 8, 16, 40, 64, 72, 80, 96, 128, 192, 256])
def test_head_dims(device: str, dim: int) -> None:  # S73
    check(inputs(1, 2, 1, 5, 19, dim).cast(F32, device), PLAIN._replace(right=0))


@devices
def test_layouts_and_what_lies_around(device: str) -> None:  # S79, S33
    """Views cut out of NaN, and (batch, length, heads, dim) seen transposed; lse has no padding."""
    given = inputs(2, 2, 2, 17, 21, 24).cast(F32, device)
    o = PLAIN._replace(right=0)
    want = forward(given, o)
    assert want.lse.shape == (2, 2, 17)
    views = []
    for t in given[:3]:
        base = torch.full((2, t.shape[2] + 2, 3, t.shape[3] + 5), NAN, device=device)
        views.append(base[:, 1:-1, 1:, 2:-3].transpose(1, 2).copy_(t))
    strided = Inputs(*views)
    got = forward(strided, o)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    above = [t.to(device, F32) for t in upstream(given)]
    for one, other in zip(
        backward(above, strided, got.out, got.lse, o),
        backward(above, given, want.out, want.lse, o),
        strict=True,
    ):
        assert torch.equal(one, other)


# ---- values


@devices
def test_scores_far_below_every_stand_in_for_infinity(device: str) -> None:  # S30
    given = inputs(1, 1, 1, 2, 40, 16)
    given.q[:] = 100.0
    given.k[:] = -200.0 - torch.arange(40).view(1, 1, -1, 1) / 64
    check(given.cast(F32, device), PLAIN._replace(scale=1.0), gradients=False)
    assert float((given.q @ given.k.mT).max()) < -5e4


@devices
def test_rows_without_a_key(device: str) -> None:  # S31
    """Whatever arrives from above; the rest as if they were not there."""
    given = inputs(1, 2, 1, 20, 24, mask=(1, 1, 0, 0), sinks=True).cast(F32, device)
    given.mask[:, :, 3] = False
    o = PLAIN._replace(right=0)
    above = [t.to(device, F32) for t in upstream(given)]
    got = forward(given, o)
    assert not got.out[:, :, 3].any()
    assert (got.lse[:, :, 3] == -INF).all()
    clean = backward(above, given, got.out, got.lse, o)
    assert not clean[0][:, :, 3].any()
    above[0][:, :, 3], above[1][:, :, 3] = NAN, NAN
    for one, other in zip(backward(above, given, got.out, got.lse, o), clean, strict=True):
        assert torch.equal(one, other)


@devices
def test_infinite_and_missing_values_stay_in_their_row(device: str) -> None:
    given = inputs(1, 1, 1, 20, 24).cast(F32, device)
    given.q[0, 0, 1] = NAN
    given.k[0, 0, :, 0], given.k[0, 0, 3, 0] = 1.0, -1.0
    given.q[0, 0, 2, 0] = INF
    got = forward(given, PLAIN)
    want = reference.forward(*given, PLAIN)
    near(got.lse, want.lse, 2e-5)
    assert got.out[0, 0].isnan().all(-1).nonzero().flatten().tolist() == [1, 2]
