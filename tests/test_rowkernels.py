"""The way from a tensor to a row kernel and back, by host execution: what else only a GPU runs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from host_kit import poisoned
from online_softmax import log_softmax, rowkernels, rowops, softmax
from online_softmax.cuda import launch as launches

INF = math.inf
TORCHS = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
ALONG = pytest.mark.parametrize("op", TORCHS)


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
    monkeypatch.setattr(rowkernels, "_has_kernels", lambda x: x.device.type == "cpu")
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
    assert len(ran.symbols) == (4 if kernel == "split" else 2)


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
    mixed = rowops.backward(op, dy.double(), y, -1, None, 0.5, False)  # of another dtype: no kernel
    assert mixed.dtype == y.dtype
    close(mixed, got.double())
    assert len(ran.symbols) == 3 * len(views())


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
