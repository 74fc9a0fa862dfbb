"""Numbers beyond float32, or once they are in base 2: scales, caps, sinks, biases."""

from __future__ import annotations

import pytest
import torch

from attention_kit import PLAIN, Inputs, inputs, written_out
from attention_triton_kit import BF16, F16, F32, backward, forward
from online_softmax import attention, cross_entropy, decodekernels, decodeplan
from online_softmax.attentionplan import Options
from online_softmax.cuda import launch
from triton_kit import devices

close = torch.testing.assert_close
CAUSAL = PLAIN._replace(right=0)
FAR = {
    **{f"scale {x:g}": CAUSAL._replace(scale=x) for x in (1e-40, 1e-46, 1e-300, -1e-46)},
    **{f"softcap {x:g}": CAUSAL._replace(softcap=x) for x in (1e-40, 1e-46, 1e-300, 1e39, 1e300)},
    "both": CAUSAL._replace(scale=1e6, softcap=1e-300),
}
LARGEST = {"largest": 1.0, "least": -1.0}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short parts of a decode."""
    planned = decodeplan.cut
    monkeypatch.setattr(decodeplan, "cut", lambda *sizes: planned(*sizes)._replace(keys=64))
    monkeypatch.setattr(decodekernels, "multiprocessors_of", lambda x: 2)


def few(sinks: bool = False) -> Inputs:
    given = inputs(1, 4, 2, 4, 131, 64, sinks=sinks).cast(BF16)
    given.q[:, 1] = 0  # scores of 0, which a cap of 0 would make NaN
    return given


def decode(given: Inputs, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    made, work = decodekernels.launches(
        (*given, None, None), o, True, lambda shape, dtype, device: torch.empty(shape, dtype=dtype)
    )
    launch.run(work, given.q.device)
    return made[0], made[1]


def wide(given: Inputs) -> Inputs:
    return Inputs(*(t if t is None else t.double() for t in given))


@pytest.mark.parametrize("name", FAR)
@pytest.mark.usefixtures("small")
def test_a_decode_with_numbers_beyond_float32(name: str) -> None:
    given = few()
    got, want = decode(given, FAR[name]), written_out(wide(given), FAR[name])
    close(got[0].double(), want[0], rtol=0, atol=2.0**-6)
    close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("small")
def test_a_scale_beyond_float32_is_infinite() -> None:
    """And no error of the packing of arguments."""
    out, _ = decode(few(), PLAIN._replace(scale=1e39))
    assert out.isnan().all()


@pytest.mark.parametrize("sign", LARGEST.values(), ids=LARGEST)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.usefixtures("small")
def test_a_decode_with_the_largest_sinks(dtype: torch.dtype, sign: float) -> None:
    given = few(sinks=True)
    sinks = torch.full((4,), sign * torch.finfo(dtype).max, dtype=dtype)
    out, _ = decode(given._replace(sinks=sinks), PLAIN)
    close(out.double(), written_out(wide(given._replace(sinks=sinks)), PLAIN)[0], rtol=0, atol=2e-2)


@devices
@pytest.mark.parametrize("name", FAR)
def test_the_kernels_with_numbers_beyond_float32(device: str, name: str) -> None:
    o = FAR[name]
    given = inputs(1, 2, 1, 9, 24).cast(F32, device)
    given.q[:, 1] = 0
    want = written_out(Inputs(*(t.double().cpu() for t in given[:3])), o)
    got = forward(given, o)
    close(got.out.double().cpu(), want[0], rtol=0, atol=1e-5)
    close(got.lse.double().cpu(), want[1], rtol=1e-5, atol=1e-5)
    by = backward((torch.ones_like(got.out), None), given, got.out, got.lse, o)
    assert all(t.isfinite().all() for t in by)


@devices
@pytest.mark.parametrize("sign", LARGEST.values(), ids=LARGEST)
def test_the_kernels_with_the_largest_sinks(device: str, sign: float) -> None:
    given = inputs(1, 2, 1, 9, 24, sinks=True).cast(F32, device)
    sinks = torch.full((2,), sign * torch.finfo(F32).max, device=device)
    given = given._replace(sinks=sinks)
    want, _ = written_out(Inputs(*(t if t is None else t.double().cpu() for t in given)), PLAIN)
    close(forward(given, PLAIN).out.double().cpu(), want, rtol=0, atol=1e-5)


@devices
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("sign", LARGEST.values(), ids=LARGEST)
def test_a_bias_of_the_largest_numbers(device: str, sign: float, dtype: torch.dtype) -> None:
    """A query all of whose keys are hidden by the least number there is sees them all alike; one
    key with the largest number is all that is seen. Gradients stay finite."""
    given = inputs(1, 2, 1, 9, 24).cast(F32, device)
    bias = torch.zeros(1, 1, 9, 24, device=device, dtype=dtype)
    bias[:, :, 1, slice(None) if sign < 0 else 3] = sign * torch.finfo(dtype).max
    given = given._replace(bias=bias)
    got = forward(given, PLAIN)
    value = given.v.mean(2) if sign < 0 else given.v[:, :, 3]
    close(got.out[:, :, 1], value.expand(1, 2, -1), rtol=0, atol=1e-5)
    assert got.lse.isfinite().all()
    dout = torch.ones_like(got.out)
    by = backward((dout, None), given, got.out, got.lse, PLAIN)
    assert all(t.isfinite().all() for t in by)


@pytest.mark.parametrize("softcap", [1e-46, 1e-300, 1e39, 1e300])
def test_softcaps_beyond_float32(softcap: float) -> None:
    """Of the reference, and of a loss, to the second derivative: as in float64."""
    q, k, v = (t.float() for t in inputs(1, 2, 1, 9, 24)[:3])
    q[:, 1] = 0
    wanted = attention(q.double(), k.double(), v.double(), softcap=softcap)
    close(attention(q, k, v, softcap=softcap).double(), wanted, rtol=0, atol=1e-5)
    found = []
    for dtype in (F32, torch.float64):
        x = torch.tensor([[0.0, 1.0, -2.0], [0.5, 0.25, 3.0]], dtype=dtype, requires_grad=True)
        loss = cross_entropy(x, torch.tensor([0, 2]), softcap=softcap)
        (by,) = torch.autograd.grad(loss, x, create_graph=True)
        (again,) = torch.autograd.grad(by[0, 1] + by[1, 0], x)
        found.append([loss.double(), again.double()])
    close(*found, rtol=1e-5, atol=1e-5)
    assert all(t.isfinite().all() for t in found[0])
