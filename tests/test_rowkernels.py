"""The way from a tensor to a row kernel and back, by host execution: what else only a GPU runs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from host_kit import MIXES, outer_kernels, poisoned
from online_softmax import log_softmax, rowkernels, rowops, softmax
from online_softmax.cuda import launch as launches
from online_softmax.reference import ops

INF = math.inf
TORCHS = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
ALONG = pytest.mark.parametrize("op", TORCHS)
compiled_together = pytest.fixture(scope="module", autouse=True)(outer_kernels)


class _Ran:
    """How many launches there were, and of which kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.symbols: list[str] = []
        original = launches.run

        def run(work: list[launches.Launch], device: torch.device) -> object:
            self.symbols += [each.symbol for each in work]
            return original(work, device)

        monkeypatch.setattr(launches, "run", run)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> _Ran:
    """CPU tensors take the way of CUDA tensors, to host execution."""
    monkeypatch.setattr(rowkernels, "has_kernels", lambda x: x.device.type == "cpu")
    return _Ran(monkeypatch)


def views() -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 5)
    return {
        "scalar": torch.randn(()),
        "contiguous": x,
        "permuted": x.permute(2, 0, 1),
        "one value a row": torch.randn(4, 6, 1).expand(4, 6, 5),
        "rows repeated": torch.randn(4, 1, 5).expand(4, 6, 5),
        "steps": torch.randn(8, 12, 10)[::2, ::2, ::2],
        "overlapping": torch.randn(20).unfold(0, 6, 2),
        "one column": torch.randn(5, 7)[:, 3:4],
        "trailing ones": torch.randn(4, 6, 1),
        "negated": torch.complex(x, x).conj().imag,
    }


def backwards(x: Tensor) -> Tensor:
    """As x in shape, its strides the other way round."""
    order = tuple(reversed(range(x.dim())))
    return poisoned(*(x.shape[d] for d in order)).permute(order)


def close(got: Tensor, want: Tensor) -> None:
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=4e-6, atol=2e-6)


@ALONG
def test_every_view_along_every_dim(op: str, ran: _Ran) -> None:
    for x in views().values():
        for dim in range(-max(x.dim(), 1), max(x.dim(), 1)):
            want = TORCHS[op](x.double() * 0.5, dim)
            arguments = (op, x, dim, None, 0.5, False, "")
            close(rowops.forward(*arguments), want)
            for out in (poisoned(*x.shape), backwards(x)):
                assert rowops.forward(*arguments, out) is out
                close(out.contiguous(), want)
            inside = x.clone(memory_format=torch.contiguous_format)
            rowops.forward(op, inside, dim, None, 0.5, False, "", inside)
            close(inside, want)
    assert ran.symbols


@ALONG
@pytest.mark.parametrize("kernel", rowkernels.NAMES)
def test_a_kernel_by_name_and_float32_of_half(op: str, kernel: str, ran: _Ran) -> None:
    x = views()["contiguous"].half()
    for dim in (0, -1):
        y = rowops.forward(op, x, dim, torch.float32, 1.0, False, kernel)
        assert y.dtype == torch.float32
        close(y, TORCHS[op](x.double(), dim))
    assert len(ran.symbols) == (4 if kernel in ("streamed", "split") else 2)


@pytest.mark.parametrize("kernel", ["", "split"])
def test_logsumexp_over_any_dims(kernel: str, ran: _Ran) -> None:
    for x in views().values():
        rank = max(x.dim(), 1)
        for count in range(1, rank + 1):
            for dims in itertools.permutations(range(-rank, 0), count):
                for keepdim in (False, True):
                    y = rowops.logsumexp(x, dims, keepdim, None, 0.5, kernel)
                    close(y, torch.logsumexp(x.double() * 0.5, dims, keepdim))
    assert ran.symbols


@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_an_inference_tensor_is_written_in_inference_mode_alone(function, ran: _Ran) -> None:
    x = torch.randn(3, 4)
    with torch.inference_mode():
        out = torch.zeros(3, 4)
        assert function(x, out=out) is out
    before = out.clone()
    with pytest.raises(RuntimeError, match="out is an inference tensor"):
        function(-x, out=out)
    assert torch.equal(out, before)
    assert len(ran.symbols) == 1


@ALONG
def test_gradients_of_every_stride(op: str, ran: _Ran) -> None:
    for x in views().values():
        y = TORCHS[op](x, -1)
        for dy in (torch.randn(x.shape), torch.randn(()).expand(x.shape), backwards(x).normal_()):
            got, g, o = rowops.backward(op, dy, y, -1, None, 0.5, False), dy.double(), y.double()
            if op == "softmax":
                close(got, 0.5 * o * (g - (g * o).sum(-1, keepdim=True)))
            else:
                close(got, 0.5 * (g - o.exp() * g.sum(-1, keepdim=True)))
    assert len(ran.symbols) == 3 * len(views())
    wide = rowops.backward(op, dy.double(), y, -1, None, 0.5, False)  # float64: no kernel
    assert wide.dtype == y.dtype
    close(wide, got.double())
    assert len(ran.symbols) == 3 * len(views())


@ALONG
def test_gradients_along_every_dim(op: str, ran: _Ran) -> None:
    """Of every mix of types: half dy, y or dx beside float32; into `out` where it is given."""
    count = 0  # launches
    for name, x in views().items():
        for dim in range(x.dim()):
            y = TORCHS[op](x, dim)
            dy = torch.randn(x.shape) if dim % 2 else torch.randn(()).expand(x.shape)
            for types in MIXES:
                g, o = dy.to(types[0]), y.to(types[1])
                out = poisoned(*x.shape, dtype=types[2])
                got = rowops.backward(op, g, o, dim, types[2], 0.5, False, out)
                assert got is out
                assert torch.equal(got, rowops.backward(op, g, o, dim, types[2], 0.5, False))
                want = ops.softmax_backward if op == "softmax" else ops.log_softmax_backward
                exact = want(g.double(), o.double(), dim, scale=0.5)
                eps = 0.0 if types[2] == torch.float32 else torch.finfo(types[2]).eps / 2
                assert got.dtype == types[2]
                torch.testing.assert_close(
                    got.double(), exact, rtol=4e-6 + eps, atol=2e-6, msg=f"{name} {dim} {types}"
                )
                count += 2
    assert len(ran.symbols) == count


def test_gradients_of_logsumexp_over_any_dims(ran: _Ran) -> None:
    """Dims together and apart, kept or not; an upstream of one value, and of another dtype."""
    count = 0
    for name, x in views().items():
        rank = max(x.dim(), 1)
        for size in range(1, rank + 1):
            for dims in itertools.combinations(range(-rank, 0), size):
                for keepdim, dtype in ((False, torch.float32), (True, torch.bfloat16)):
                    given = x.to(dtype)
                    lse, saved = rowops.logsumexp_saving(given, dims, keepdim, None, 0.5, "")
                    ones = torch.randn((), dtype=dtype).expand(lse.shape)
                    for dlse in (torch.randn(lse.shape).to(dtype), ones, torch.randn(lse.shape)):
                        before = len(ran.symbols)
                        got = rowops.logsumexp_backward(
                            dlse, given, saved, dims, keepdim, dtype, 0.5, False
                        )
                        assert len(ran.symbols) == before + 1
                        assert (got.dtype, got.shape) == (dtype, x.shape)
                        assert got.is_contiguous()
                        wide = (t.double() for t in (dlse, given, saved))
                        want = ops.logsumexp_backward(*wide, dims, keepdim, scale=0.5)
                        eps = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
                        torch.testing.assert_close(
                            got.double(), want, rtol=4e-6 + eps, atol=1e-7, msg=f"{name} {dims}"
                        )
                        count += 1
    assert sum(symbol.startswith("lse_backward") for symbol in ran.symbols) == count


FP8_VALUES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("fp8", ops.FP8, ids=str)
def test_fp8_by_kernels(fp8: torch.dtype, ran: _Ran) -> None:
    """Every value, NaN and infinities too, as the reference has it; the gradient is bfloat16."""
    x = FP8_VALUES.view(fp8).reshape(8, 32)
    for dim in (0, 1):
        for dtype, op in (
            (None, "softmax"),
            (torch.float16, "log_softmax"),
            (torch.float32, "softmax"),
        ):
            before = len(ran.symbols)
            got = rowops.forward(op, x, dim, dtype, 0.25, True, "")
            want = rowops.forward(op, x, dim, dtype, 0.25, True, "reference")
            assert len(ran.symbols) == before + 1
            assert got.dtype == (dtype or torch.bfloat16)
            eps = 2e-6 if dtype == torch.float32 else torch.finfo(got.dtype).eps
            torch.testing.assert_close(got, want, rtol=eps, atol=2e-6, equal_nan=True)
        before = len(ran.symbols)
        lse, saved = rowops.logsumexp_saving(x, (dim,), False, None, 0.25, "")
        want = rowops.logsumexp(x, (dim,), False, torch.float32, 0.25, "reference")
        assert (lse.dtype, saved.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(saved, want, equal_nan=True)
        arguments = (torch.randn(lse.shape), x, saved, (dim,), False, torch.bfloat16, 0.25, True)
        got = rowops.logsumexp_backward(*arguments)
        assert len(ran.symbols) == before + 2
        *inputs, dtype, scale, zero_empty = arguments
        want = ops.logsumexp_backward(*inputs, dtype=dtype, scale=scale, zero_empty=zero_empty)
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("op", [*TORCHS, "logsumexp"])
def test_scales_that_float32_cannot_multiply_with(op: str, ran: _Ran) -> None:
    """2^-126 to 2^127 is for the kernels. Below, a scale may be 0 in float32, beside an infinite
    padding; above, its product with log2(e) is infinite. Both gave NaN for finite rows."""
    x = torch.tensor([[1.0, 0.0, 3.0], [0.0, -1e-38, 1e-38]])

    def result(scale: float) -> Tensor:
        if op == "logsumexp":
            return rowops.logsumexp(x, (-1,), False, None, scale, "")
        return rowops.forward(op, x, -1, None, scale, False, "")

    for scale, has_kernel in (
        (1e-46, False),
        (1e-39, False),
        (2.0**-126, True),
        (2.0**127, True),
        (3e38, False),
    ):
        before = len(ran.symbols)
        wide = (x * scale).double()
        function = torch.logsumexp if op == "logsumexp" else TORCHS[op]
        rows = slice(None) if scale < 1 else slice(1, None)  # 3 times 2^127 is infinite
        close(result(scale)[rows], function(wide, -1)[rows])
        assert (len(ran.symbols) > before) == has_kernel
    with pytest.raises(ValueError, match="a scale from 2\\^-126 to 2\\^127"):
        rowops.forward("softmax", x, -1, None, 1e-46, False, "split")
