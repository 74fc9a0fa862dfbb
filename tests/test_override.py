"""torch's own functions by our kernels: the mechanism at the CPU's dispatch key, where a fake
`takes` stands for what a GPU has kernels for; the real thing on a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch

from online_softmax import override_torch, rowops, softmax
from online_softmax.library import override
from online_softmax.library.override import Override
from rows_kit import gpu

close = torch.testing.assert_close
X = torch.arange(12.0).view(3, 4) / 7


class _Spy:
    """Counts what rowops is asked for, and answers with what torch would, plus `offset`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, offset: float = 0.0) -> None:
        self.calls: list[str] = []
        forward, backward, logsumexp = rowops.forward, rowops.backward, rowops.logsumexp

        def spy_forward(name, *args):
            self.calls.append(name)
            y = forward(name, *args)
            return y.add_(offset) if offset else y

        def spy_backward(name, *args):
            self.calls.append(f"{name}_backward")
            return backward(name, *args)

        def spy_logsumexp(*args):
            self.calls.append("logsumexp")
            return logsumexp(*args)

        monkeypatch.setattr(rowops, "forward", spy_forward)
        monkeypatch.setattr(rowops, "backward", spy_backward)
        monkeypatch.setattr(rowops, "logsumexp", spy_logsumexp)

    def of(self, function) -> list[str]:
        """What one call makes of ours."""
        self.calls.clear()
        function()
        return list(self.calls)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> _Spy:
    return _Spy(monkeypatch)


def _floats(name: str, *tensors: torch.Tensor) -> bool:
    return tensors[0].dtype in (torch.float32, torch.bfloat16)


def _cpu() -> Override:
    return Override("CPU", _floats)


def test_what_is_reached(spy: _Spy) -> None:
    x = X.clone().requires_grad_()
    reached = {
        "softmax": [
            lambda: torch.softmax(x, -1),
            lambda: x.softmax(0),
            lambda: torch.nn.functional.softmax(x, dim=1),
            lambda: torch.nn.Softmax(-1)(x),
            lambda: torch.softmax(X, -1, out=torch.empty(3, 4)),
        ],
        "log_softmax": [
            lambda: torch.log_softmax(x, -1),
            lambda: torch.nn.functional.cross_entropy(x, torch.tensor([0, 1, 2])),
        ],
        "logsumexp": [
            lambda: torch.logsumexp(x, -1),
            lambda: x.logsumexp((0, 1), keepdim=True),
        ],
    }
    with _cpu():
        for name, calls in reached.items():
            for call in calls:
                assert spy.of(call) == [name]
        for dim in (0, -1):
            assert spy.of(torch.softmax(x, dim).sum().backward) == ["softmax_backward"]
        assert spy.of(torch.log_softmax(x, -1).sum().backward) == ["log_softmax_backward"]
        # torch composes this backward of other operations.
        assert spy.of(torch.logsumexp(x, -1).sum().backward) == []
    for calls in reached.values():
        for call in calls:
            assert spy.of(call) == []


def test_values_and_gradients() -> None:
    def everything() -> list[torch.Tensor]:
        results = []
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = X.to(dtype).requires_grad_()
            for y in (
                torch.softmax(x, 0),
                torch.log_softmax(x, -1),
                torch.logsumexp(x, (0, 1)),
                torch.logsumexp(x, 1, keepdim=True),
                torch.vmap(lambda v: v.softmax(0))(x),
            ):
                results += [y, *torch.autograd.grad(y.square().sum(), x, create_graph=True)]
                results += torch.autograd.grad(results[-1].sum(), x)
        return results

    want = everything()
    with _cpu():
        got = everything()
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        # ATen's CPU kernels round in bfloat16 between; so do gradients of gradients.
        rough = a.dtype == torch.bfloat16
        close(a, b, rtol=5e-2 if rough else 1e-5, atol=5e-2 if rough else 1e-6)


def test_torchs_kernel_where_ours_has_none(spy: _Spy) -> None:
    x = X.double().requires_grad_()
    with _cpu():
        assert spy.of(lambda: torch.softmax(x, -1)) == []
        close(torch.softmax(x, -1), x.exp() / x.exp().sum(-1, keepdim=True))
        assert spy.of(torch.softmax(x, -1).sum().backward) == []
        assert spy.of(lambda: torch.logsumexp(X.long(), -1)) == []
        with pytest.raises(RuntimeError):
            torch.logsumexp(X, ())  # torch's own error
        with pytest.raises(NotImplementedError), Override("CPU", lambda *_: True):
            torch.softmax(X.to(torch.float8_e5m2), -1)  # too
        other = torch.empty(0)
        assert spy.of(lambda: torch.softmax(X, -1, out=other)) == []  # has to be resized
        close(other, softmax(X))
        in_place = X.clone()
        assert spy.of(lambda: torch.softmax(in_place, -1, out=in_place)) == []
        for dims in (5, -3):
            for function in (torch.softmax, torch.log_softmax, torch.logsumexp):
                with pytest.raises(IndexError):
                    function(X, dims)
        with pytest.raises(RuntimeError, match="appears multiple times"):
            torch.logsumexp(X, (0, -2))


def test_the_way_back(spy: _Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # a test runner may have threads
    call = lambda: torch.softmax(X, -1)  # noqa: E731
    first = _cpu()
    assert spy.of(call) == ["softmax"]
    with _cpu() as second, _cpu():
        assert spy.of(call) == ["softmax"]
        second.remove()
        second.remove()  # again: nothing
        assert spy.of(call) == ["softmax"]
    assert spy.of(call) == ["softmax"]  # first is still in force
    first.remove()
    assert spy.of(call) == []
    with pytest.raises(KeyError), _cpu():
        raise KeyError
    assert spy.of(call) == []
    for _ in range(20):
        with _cpu():
            assert spy.of(call) == ["softmax"]
        assert spy.of(call) == []
    assert override._installations["CPU"].library is None


def test_it_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    code = (
        "import warnings; warnings.simplefilter('error');"
        "import torch; from online_softmax.library.override import Override;"
        "handle = Override('CPU', lambda *_: True); torch.softmax(torch.zeros(2), 0);"
        "handle.remove(); print(torch.softmax(torch.zeros(2), 0).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0.5, 0.5]\n", "")


def test_our_own_calls_of_torch_reach_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop, and kernel="torch" is torch's kernel, in force or not."""
    with _cpu():
        want = softmax(X)  # on the CPU our own function calls torch.softmax
        spy = _Spy(monkeypatch, offset=1.0)
        close(torch.softmax(X, -1), want + 1)
        assert spy.of(lambda: softmax(X, kernel="torch")) == ["softmax"]  # not twice
        close(softmax(X, kernel="torch"), want + 1)
        rowops.forward("log_softmax", X, -1, None, 1.0, False, "torch")
        assert spy.calls[-1:] == ["log_softmax"]


def test_an_error_inside_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(rowops, "forward", broken)
    with _cpu():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broken"):
                torch.softmax(X, -1)
    close(torch.softmax(X, -1).sum(-1), torch.ones(3))


def test_no_effect_inside_compile(spy: _Spy) -> None:
    """Inductor decomposes softmax and fuses it: before, inside and after."""
    torch._dynamo.reset()
    function = lambda x: torch.softmax(x * 2, -1) + torch.logsumexp(x, -1, True)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True)
    with _cpu():
        assert spy.of(lambda: compiled(X)) == []
        close(compiled(X), function(X))
        x = X.clone().requires_grad_()
        assert spy.of(lambda: compiled(x).sum().backward()) == []
    assert spy.of(lambda: compiled(X)) == []


def test_threads(spy: _Spy) -> None:
    """Begun and ended from many threads beside calls of many threads: no crash, right values."""
    errors: list[BaseException] = []
    want = torch.softmax(X, -1)

    def work() -> None:
        try:
            for _ in range(100):
                x = X.clone().requires_grad_()
                torch.softmax(x, -1)[0, 0].backward()
                with _cpu():
                    close(torch.softmax(X, -1), want)
        except BaseException as error:  # noqa: BLE001  whatever it is, the test tells
            errors.append(error)

    with _cpu():
        pass  # the first, before there are threads
    threads = [threading.Thread(target=work) for _ in range(4)]
    with _cpu():
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert spy.calls.count("softmax") >= 400
    assert spy.of(lambda: torch.softmax(X, -1)) == []


def test_beside_another_thread_the_registration_stays_but_passes_on(
    spy: _Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To unregister while another thread may be in a call would crash it."""
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    with _cpu():
        pass
    installation = override._installations["CPU"]
    assert installation.library is not None
    assert spy.of(lambda: torch.softmax(X, -1)) == []
    with _cpu():
        assert spy.of(lambda: torch.softmax(X, -1)) == ["softmax"]
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with _cpu():
        pass
    assert installation.library is None
    assert spy.of(lambda: torch.softmax(X, -1)) == []


def test_on_a_machine_without_cuda() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with override_torch():
            close(torch.softmax(X, -1), softmax(X))
        assert not torch.cuda.is_initialized() or torch.cuda.is_available()


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_on_a_gpu(spy: _Spy, dtype: torch.dtype) -> None:
    x = torch.randn(64, 1000, device="cuda", dtype=dtype, requires_grad=True)
    weights = torch.randn(64, 1000, device="cuda", dtype=dtype)

    def everything() -> list[torch.Tensor]:
        y = torch.softmax(x, -1)
        (dx,) = torch.autograd.grad((y * weights).sum(), x)
        half = torch.softmax(x, -1, dtype=torch.float32)
        return [y, dx, half, torch.log_softmax(x, 0), torch.logsumexp(x, -1)]

    want = everything()
    assert spy.calls == []
    with override_torch():
        got = everything()
        # float64 has no kernel of ours, but softmax(x, dtype=torch.float32) of it has.
        assert spy.calls[:1] == (["softmax"] if rowops.has_kernel("softmax", x.float()) else [])
    bound = {"rtol": 2**-7, "atol": 1e-3} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-5}
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        close(a, b, **bound)
    spy.calls.clear()
    everything()
    assert spy.calls == []
