"""A call like one before, asked for first: only where the kernel itself is right."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import jit_kit
import jit_notes
from jit_notes import Built, Notes
from online_softmax import jit, keptcalls, log_softmax, logsumexp, rowops, softmax
from online_softmax.library import routes, traced

fresh_cache, nvrtc = jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
notes, built = jit_notes.notes, jit_notes.built

SHAPE = (4, 64)
FORWARD = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp}


def x_of() -> Tensor:
    return torch.randn(SHAPE)


@pytest.fixture
def asked(built: Built, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call to come was one like before, by the way in."""
    found: list[bool] = []

    def again(*args: Any) -> Tensor | None:
        known = keptcalls.again_in_one(*args)
        found.append(known is not None)
        return known

    for function in FORWARD.values():
        for _ in range(2):
            function(x_of())
    monkeypatch.setattr(routes, "_again", again)
    return found


@pytest.mark.parametrize("op", FORWARD)
def test_a_call_like_one_before_passes_no_check(op: str, asked: list[bool], monkeypatch) -> None:
    for name in ("along", "logsumexp"):
        monkeypatch.setattr(f"online_softmax.library.{name}", None)
    FORWARD[op](x_of())
    with torch.no_grad():
        FORWARD[op](x_of().requires_grad_())
    with torch.inference_mode():
        assert FORWARD[op](x_of()).is_inference()
    assert asked == [True] * 3


# ---- other routes


class Subclass(Tensor):
    pass


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


def _under(context: Any) -> Callable[[Callable[..., Tensor]], Any]:
    def call(function: Callable[..., Tensor]) -> Any:
        with context():
            return function(x_of())

    return call


def _dual(function: Callable[..., Tensor]) -> Any:
    with forward_ad.dual_level():
        y = function(forward_ad.make_dual(x_of(), x_of()))
        return forward_ad.unpack_dual(y).tangent


ELSEWHERE: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "a gradient": lambda f: f(x_of().requires_grad_()).grad_fn,
    "a parameter": lambda f: f(torch.nn.Parameter(x_of())).grad_fn,
    "a subclass": lambda f: f(x_of().as_subclass(Subclass)),
    "a mode over functions": _under(FunctionMode),
    "a mode over ops": _under(DispatchMode),
    "vmap": lambda f: torch.vmap(f)(torch.randn(2, *SHAPE)),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(x_of()),
    "forward mode": _dual,
}


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("where", ELSEWHERE)
def test_another_route_is_taken(where: str, op: str, asked: list[bool]) -> None:
    assert ELSEWHERE[where](FORWARD[op]) is not None
    assert asked == []
    FORWARD[op](x_of())
    assert asked == [True]


@pytest.mark.parametrize("op", FORWARD)
def test_compile_sees_the_op(op: str, asked: list[bool]) -> None:
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    torch.compile(FORWARD[op], backend=backend, fullgraph=True)(x_of())
    assert traced.ops[op] in seen
    assert asked == []


def test_autocast_widens(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    half = x_of().half()
    for _ in range(2):
        softmax(half)
    asked.clear()
    monkeypatch.setattr(routes, "_is_autocast", lambda device: device == "cuda")
    assert routes.again("softmax", half, (-1, None, 1.0, False, "")) is None
    assert asked == []
    softmax(x_of())  # float32 stays
    assert asked == [True]


# ---- what only looks like one before

REFUSED: dict[str, tuple[type[Exception], Callable[[Tensor], Any]]] = {
    "dim a bool": (TypeError, lambda x: softmax(x, True)),
    "dim a float": (TypeError, lambda x: softmax(x, 1.0)),  # type: ignore[arg-type]
    "dim a list": (TypeError, lambda x: softmax(x, [1])),  # type: ignore[arg-type]
    "scale a bool": (TypeError, lambda x: softmax(x, 1, scale=True)),
    "scale a tensor": (TypeError, lambda x: softmax(x, 1, scale=torch.tensor(1.0))),  # type: ignore[arg-type]
    "dtype a list": (TypeError, lambda x: softmax(x, 1, dtype=[])),  # type: ignore[arg-type]
    "empty no word of it": (ValueError, lambda x: softmax(x, 1, empty=False)),  # type: ignore[arg-type]
    "kernel empty": (ValueError, lambda x: softmax(x, 1, kernel="")),
    "dims twice": (RuntimeError, lambda x: logsumexp(x, (1, 1))),
    "sparse": (NotImplementedError, lambda x: softmax(x.to_sparse())),
    "compressed": (NotImplementedError, lambda x: softmax(x.to_sparse_csr())),
    "nested": (NotImplementedError, lambda x: softmax(torch.nested.as_nested_tensor([x, x]))),
    "no tensor": (TypeError, lambda x: softmax(x.tolist())),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors)")
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_stays_refused(what: str, asked: list[bool]) -> None:
    x = x_of()
    for _ in range(3):
        softmax(x, 1)
        logsumexp(x, 1)
    error, call = REFUSED[what]
    asked.clear()
    with pytest.raises(error):
        call(x)
    assert True not in asked


def test_into_out_is_never_the_short_way(asked: list[bool]) -> None:
    x, out = x_of(), x_of()
    for _ in range(3):
        version = out._version
        assert softmax(x, out=out) is out
        assert out._version > version
    assert asked == []


# ---- memory of the result


def test_memory_is_filled_where_torch_fills_it(asked: list[bool]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert softmax(x_of()).isnan().all()  # the launch is only noted
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [True]


@pytest.mark.parametrize("how", ["another device is current", "a torch without the short way"])
def test_memory_is_of_the_device(how: str, asked: list[bool], notes: Notes, monkeypatch) -> None:
    want, short = softmax(x_of()), keptcalls.empty_strided

    def on_the_current_device(*about: Any) -> Tensor:
        assert notes.current == 0
        return short(*about)

    is_there = how.startswith("another")
    monkeypatch.setattr(keptcalls, "empty_strided", on_the_current_device if is_there else None)
    monkeypatch.setattr(notes, "current", 1 if is_there else 0)
    y = softmax(x_of())
    assert notes.current == int(is_there)
    assert asked == [True, True]
    assert (y.shape, y.stride(), y.dtype) == (want.shape, want.stride(), want.dtype)
    assert notes.launches[-1].words[1] == y.data_ptr()
    assert notes.launches[-1].stream == 40


def test_torch_has_the_short_way_to_memory() -> None:
    """A private name: where it is gone, calls are right and slower by half a microsecond."""
    assert callable(torch._C._dynamo.guards._empty_strided_cuda)
    assert callable(keptcalls.is_deterministic)


# ---- values that memory does not hold


def _at(address: int) -> Tensor:
    return torch.frombuffer((ctypes.c_float * (4 * 64)).from_address(address), dtype=torch.float32)


@pytest.fixture
def computing(built: Built, monkeypatch: pytest.MonkeyPatch, notes: Notes) -> None:
    """Launches of softmax and its backward on SHAPE compute, from the addresses that they have."""
    start = (driver := jit._driver()).cuLaunchKernelEx

    def compute(config: Any, function: Any, address: int, extra: int) -> Any:
        status = start(config, function, address, extra)
        words = notes.launches[-1].words
        tensors = [_at(word).view(SHAPE) for word in words[: 3 if words[2] > SHAPE[0] else 2]]
        if len(tensors) == 2:
            tensors[1].copy_(torch.softmax(tensors[0], -1))
        else:
            tensors[2].copy_(torch._softmax_backward_data(*tensors[:2], -1, torch.float32))
        return status

    monkeypatch.setattr(driver, "cuLaunchKernelEx", compute)


@pytest.mark.usefixtures("computing")
def test_no_launch_reads_a_pending_negation_or_no_memory(built: Built) -> None:
    x = x_of()
    y, dy = torch.softmax(x, -1), x_of()
    back = lambda dy, y: rowops.backward("softmax", dy, y, -1, None, 1.0, False)  # noqa: E731
    for _ in range(3):
        assert torch.equal(softmax(x), y)
        assert torch.equal(back(dy, y), torch._softmax_backward_data(dy, y, -1, torch.float32))
    assert built.count == 4  # the third was started again
    negated, zeros = torch._neg_view(x), torch._efficientzerotensor(SHAPE)
    assert (negated.is_neg(), negated.data_ptr(), negated.stride()) == (
        True,
        x.data_ptr(),
        x.stride(),
    )
    for odd, plain in ((negated, -x), (zeros, torch.zeros(SHAPE))):
        assert torch.equal(softmax(odd), torch.softmax(plain, -1))
        for given, held in (((odd, y), (plain, y)), ((dy, odd), (dy, plain))):
            want = torch._softmax_backward_data(*held, -1, torch.float32)
            assert torch.equal(back(*given), want)
    assert built.count == 10
