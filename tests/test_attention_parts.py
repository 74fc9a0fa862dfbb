"""Attention's Triton kernels: states, keys in parts, packed sequences, and bits that stay."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attention_kit import CASES, INF, PLAIN, WORDS, Inputs, inputs, upstream
from attention_triton_kit import F16, F32, SMALL, backward, check, forward, near
from online_softmax import attention, attention_state, attentionplan
from online_softmax.attentionplan import PART_KEYS, Options, most_parts, part_keys
from online_softmax.reference import attention as reference
from online_softmax.reference import packed as packed_reference
from online_softmax.reference.packed import Packed
from online_softmax.triton.attention import own_part_keys
from triton_kit import devices

close = torch.testing.assert_close

# ---- a state, and keys in parts


@devices
@pytest.mark.parametrize("k_len", [40, 600])
def test_states(device: str, k_len: int) -> None:
    """Of few keys in one part, and of many in two; natural units, out in float32."""
    o, shapes = CASES["all"]
    given = inputs(**{**shapes, "k_len": k_len, "q_len": 3, "bias": (1, 0, 1, 0)})
    given = given._replace(sinks=None).cast(F16, device)
    got = forward(given, o._replace(left=-1), with_state=True)
    want = reference.forward(*given, o._replace(left=-1), keeps_float=True)
    assert len(got.launches) == (1 if k_len <= part_keys(k_len) else 2)
    assert got.out.dtype == F32
    near(got.out, want.out, 2e-3)
    for name in ("lse", "m", "d"):
        near(getattr(got, name), getattr(want, name), 2e-5)


@devices
@pytest.mark.parametrize(("name", "q_len"), [("plain", 1), ("window", 3), ("nan", 2)])
def test_parts_of_the_keys(device: str, name: str, q_len: int) -> None:
    """With a window the first parts are empty; heads that share keys are read together."""
    o = CASES[name][0]
    if name == "window":
        o = o._replace(left=300, right=0)
    shapes = {"batch": 2, "heads": 3, "kv_heads": 1, "q_len": q_len, "k_len": 1300, "dim": 8}
    given = inputs(**shapes, sinks=name == "nan").cast(F32, device)
    assert -(-1300 // part_keys(1300)) == 3
    assert len(forward(given, o, None).launches) == 2
    check(given, o, None, gradients=False)


@devices
def test_many_parts_are_merged_in_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the output; the first piece's program has the lse and the state."""
    monkeypatch.setattr(attentionplan, "part_keys", lambda k_len: 64)
    given = inputs(1, 2, 1, 1, 2200, 64).cast(F16, device)
    o = CASES["plain"][0]
    got = forward(given, o, with_state=True)
    merge = got.launches[1]
    assert (merge.arguments["parts"], merge.programs) == (35, 2 * 2)
    want = reference.forward(*given, o, keeps_float=True)
    near(got.out, want.out, 2e-3)
    for name in ("lse", "m", "d"):
        near(getattr(got, name), getattr(want, name), 2e-5)


@devices
def test_a_decode_has_the_same_bits_in_any_batch(device: str) -> None:
    given = inputs(2, 2, 1, 1, 530, 16).cast(F16, device)
    whole = forward(given, PLAIN, None)
    for at in range(2):
        alone = forward(Inputs(*(t[at : at + 1] for t in given[:3])), PLAIN, None)
        assert torch.equal(alone.out[0], whole.out[at])
        assert torch.equal(alone.lse[0], whole.lse[at])


@devices
def test_no_keys_at_all(device: str) -> None:  # S55
    given = inputs(q_len=3, k_len=0).cast(F32, device)
    got = forward(given, PLAIN, None, with_state=True)
    assert not got.out.any()
    assert (got.lse == -INF).all()
    assert (got.m == -INF).all()
    assert not got.d.any()


# ---- packed sequences


def packed(device: str, dtype: torch.dtype = F32) -> tuple[Inputs, Packed]:
    q_lens, k_lens = [3, 0, 21, 4, 1], [4, 2, 0, 19, 35]
    ends = Packed(
        *(torch.tensor([0, *n]).cumsum(0).to(device, torch.int32) for n in (q_lens, k_lens))
    )
    q = torch.randn(sum(q_lens) + 2, 4, 8)
    k, v = (torch.randn(sum(k_lens) + 3, 2, n) for n in (8, 6))
    q, k, v, sinks = (t.to(device, dtype) for t in (q, k, v, torch.randn(4)))
    return Inputs(q, k, v, sinks=sinks), ends


@devices
@pytest.mark.parametrize("o", [PLAIN._replace(right=0), Options(0, 0, 0.4, 4, 1, True, 3.0, False)])
def test_packed_sequences(device: str, o: Options) -> None:
    given, ends = packed(device)
    o = o._replace(max_q=21, max_k=35)
    rest = given.q, given.k, given.v, given.sinks, ends
    want = packed_reference.forward(*rest, o)
    got = forward(given, o, SMALL, ends)
    near(got.out, want.out, 2e-5)
    near(got.lse, want.lse, 2e-5)
    above = torch.randn_like(got.out), torch.randn_like(got.lse)
    found = backward(above, given, got.out, got.lse, o, SMALL, ends)
    by = packed_reference.backward(*above, *rest, want.out, want.lse, o)
    for one, other in zip(found, (by.q, by.k, by.v, by.sinks), strict=True):
        near(one, other, 1e-4)


@devices
@pytest.mark.parametrize("max_q", [16, 21])
def test_a_packed_sequence_has_the_same_bits_alone(device: str, max_q: int) -> None:
    """With the same max_q, whatever is beside it and whatever max_k is; keys in parts or not."""
    given, ends = packed(device, F16)
    o = PLAIN._replace(right=0, max_q=max_q, max_k=35)
    whole = forward(given, o, SMALL, ends)
    for at_q, at_k in list(ends.slices())[2:4]:
        lens = (at_q.stop - at_q.start, at_k.stop - at_k.start)
        alone = Inputs(given.q[at_q], given.k[at_k], given.v[at_k], sinks=given.sinks)
        one = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in lens]
        for max_k in (lens[1], 600):
            got = forward(alone, o._replace(max_k=max_k), SMALL, one)
            assert len(got.launches) == (2 if max_k == 600 and max_q == 16 else 1)
            assert torch.equal(got.out, whole.out[at_q])
            assert torch.equal(got.lse, whole.lse[at_q])


@devices
def test_the_parts_of_a_packed_sequence(device: str) -> None:
    """Long ones are cut by their own number of keys: right, and the same bits as alone, with any
    max_k. Sequences without keys, without queries, and tokens of none."""
    k_lens, q_lens = [600, 0, 1, 256, 530, 257], [1, 2, 3, 1, 0, 2]
    ends = Packed(*(torch.tensor([0, *n], device=device).cumsum(0).int() for n in (q_lens, k_lens)))
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(sum(q_lens) + 1, 4, 8, generator=generator)
    k, v = (torch.randn(sum(k_lens) + 5, 2, n, generator=generator) for n in (8, 6))
    q, k, v, sinks = (t.to(device, F32) for t in (q, k, v, torch.randn(4, generator=generator)))
    given, o = Inputs(q, k, v, sinks=sinks), PLAIN._replace(right=0, left=400, max_q=3, max_k=600)
    got = forward(given, o, None, ends, with_state=True)
    assert len(got.launches) == 2
    want = packed_reference.forward(q, k, v, sinks, ends, o, keeps_float=True)
    for name in ("out", "lse", "m", "d"):
        near(getattr(got, name), getattr(want, name), 2e-5)
    for at_q, at_k in list(ends.slices())[::3]:
        alone = Inputs(q[at_q], k[at_k], v[at_k], sinks=sinks)
        lens = (at_q.stop - at_q.start, at_k.stop - at_k.start)
        one = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in lens]
        for max_k in (lens[1], 2000):
            same = forward(alone, o._replace(max_k=max_k), None, one, with_state=True)
            for name in ("out", "lse", "m", "d"):
                assert torch.equal(getattr(same, name), getattr(got, name)[at_q])


@triton.jit
def write_part_keys(k_len_ptr: tl.tensor, out_ptr: tl.tensor) -> None:
    at = tl.program_id(0)
    tl.store(out_ptr + at, own_part_keys(tl.load(k_len_ptr + at)))


@devices
def test_the_kernel_cuts_as_the_plan_does(device: str) -> None:
    lengths = [1, 256, 257, 8192, 8193, 65536, 65537, 200_000, 1 << 20, (1 << 31) - 1000]
    given = torch.tensor(lengths, dtype=torch.int32, device=device)
    found = torch.empty_like(given)
    write_part_keys[(len(lengths),)](given, found)
    assert found.tolist() == [part_keys(n) for n in lengths]
    for n in lengths[:-2]:
        some = {*range(1, n + 1, 255), n, *(limit for limit, _ in PART_KEYS if limit <= n)}
        assert most_parts(n) == max(-(-k // part_keys(k)) for k in some)


# ---- the same bits twice


@devices
def test_gradients_are_deterministic(device: str) -> None:
    o, shapes = CASES["all"]
    given = inputs(**{**shapes, "bias": (1, 1, 0, 0)}).cast(F16, device)
    got = forward(given, o)
    above = [t.to(device) for t in upstream(given)]
    above[0] = above[0].half()
    first = backward(above, given, got.out, got.lse, o)
    for one, other in zip(first, backward(above, given, got.out, got.lse, o), strict=True):
        assert torch.equal(one, other)
    alone = Inputs(*(t if t is None else t[:1] for t in given[:3]), given.bias,
                   given.mask[:1], given.sinks)  # fmt: skip
    part = backward([t[:1] for t in above], alone, got.out[:1], got.lse[:1], o)
    for one, other in zip(part[:3], first[:3], strict=True):
        assert torch.equal(one, other[:1])  # whatever the batch


# ---- the Triton kernels by name


@devices
def test_the_kernels_by_name(device: str) -> None:
    _, shapes = CASES["all"]
    given = inputs(**{**shapes, "batch": 1}).cast(torch.float32, device)
    words = {**WORDS["all"], "bias": given.bias, "mask": given.mask, "sinks": given.sinks}
    results = []
    for kernel in ("triton", "reference"):
        leaves = [t.detach().clone().requires_grad_() for t in given[:3]]
        out, lse = attention(*leaves, **words, return_lse=True, kernel=kernel)
        loss = out.square().sum() + lse[lse.isfinite()].sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves)))
    close(*results, rtol=1e-4, atol=1e-4)
    state = attention_state(*given[:3], kernel="triton")
    close(state.output(), attention(*given[:3]), rtol=1e-4, atol=1e-4)
