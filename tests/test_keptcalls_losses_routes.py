"""A cross-entropy like one before, asked for first: only where its kernels themselves are right."""

from __future__ import annotations

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
from online_softmax import celoss, cross_entropy, keptcalls, library
from online_softmax.library import loss_routes

fresh_cache, nvrtc = jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
notes, built = jit_notes.notes, jit_notes.built

ROWS, COLS = 6, 96
Pair = tuple[Tensor, Tensor]


def pair() -> Pair:
    return torch.randn(ROWS, COLS), torch.randint(COLS, (ROWS,))


@pytest.fixture
def asked(built: Built, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call to come was one like before, by the way in."""
    found: list[bool] = []
    find = celoss.find

    def note(*args: Any) -> Any:
        known = find(*args)
        found.append(known is not None)
        return known

    for _ in range(2):
        cross_entropy(*pair())
    monkeypatch.setattr(celoss, "find", note)
    return found


def test_a_call_like_one_before_passes_no_check(asked: list[bool], monkeypatch) -> None:
    monkeypatch.setattr(library, "of_classes", None)
    loss = cross_entropy(*pair())
    assert (loss.shape, loss.dtype, loss.requires_grad) == ((), torch.float32, False)
    loss, lse = cross_entropy(*pair(), return_lse=True)  # type: ignore[misc]
    assert (loss.shape, lse.shape) == ((), (ROWS,))
    with torch.inference_mode():
        assert cross_entropy(*pair()).is_inference()
    x, target = pair()
    with torch.no_grad():
        assert not cross_entropy(x.requires_grad_(), target).requires_grad
    assert asked == [True] * 4


def test_a_recorded_call_is_started_again(asked: list[bool], built: Built, monkeypatch) -> None:
    """And its gradient is that of the same backward."""
    for _ in range(2):
        x, target = pair()
        cross_entropy(x.requires_grad_(), target).backward()
    before = built.count
    monkeypatch.setattr(library, "of_classes", None)
    x, target = pair()
    loss = cross_entropy(x.requires_grad_(), target)
    assert type(loss.grad_fn).__name__ == "OnlineSoftmax_cross_entropyBackward"
    loss.backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert built.count == before
    assert asked == [True] * 3


def test_what_has_no_aligned_memory_goes_the_whole_way(asked: list[bool], built: Built) -> None:
    short = keptcalls.empty_strided

    def off_by_one(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        made: Tensor = short((torch.Size(shape).numel() + 1,), (1,), dtype)
        return made[1:].view(shape)

    for needs in (False, True):
        before = built.count
        keptcalls.empty_strided = off_by_one
        try:
            x, target = pair()
            assert cross_entropy(x.requires_grad_(needs), target).requires_grad == needs
        finally:
            keptcalls.empty_strided = short
        assert built.count == before + 2
    assert asked == [True, True]


# ---- other routes


class Subclass(Tensor):
    pass


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


def _under(context: Any) -> Any:
    with context():
        return cross_entropy(*pair())


def _dual() -> Any:
    x, target = pair()
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(cross_entropy(forward_ad.make_dual(x, x), target)).tangent


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "a parameter": lambda: cross_entropy(torch.nn.Parameter(pair()[0]), pair()[1]),
    "a subclass": lambda: cross_entropy(pair()[0].as_subclass(Subclass), pair()[1]),
    "a mode over functions": lambda: _under(FunctionMode),
    "a mode over ops": lambda: _under(DispatchMode),
    "vmap": lambda: torch.vmap(cross_entropy)(torch.randn(2, 6, 96), torch.ones(2, 6).long()),
    "grad": lambda: torch.func.grad(cross_entropy)(*pair()),
    "forward mode": _dual,
    "the gradient in the forward": lambda: cross_entropy(*pair(), grad_in_forward=True),
    "targets to be checked": lambda: cross_entropy(*pair(), check_target=True),
    "a kernel by name": lambda: cross_entropy(*pair(), kernel="split"),
    "a dim by name": lambda: cross_entropy(*pair(), dim=1),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_another_route_is_taken(where: str, asked: list[bool]) -> None:
    assert ELSEWHERE[where]() is not None
    assert asked == []
    cross_entropy(*pair())
    assert asked == [True]


def test_compile_sees_the_op(asked: list[bool]) -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compile(cross_entropy, backend=backend, fullgraph=True)(*pair())
    assert "online_softmax.cross_entropy.default" in seen
    assert asked == []


def test_autocast_widens(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_routes, "_is_autocast", lambda device: device == "cuda")
    x, target = pair()
    options = (-100, 0.0, 0.0, None, 1.0)
    assert loss_routes.again(x.half(), target, None, "mean", options) is None
    assert asked == []
    cross_entropy(x, target)  # float32 stays
    assert asked == [True]


# ---- what only looks like one before

REFUSED: dict[str, tuple[type[Exception], Callable[[Tensor, Tensor], Any]]] = {
    "ignore_index a bool": (TypeError, lambda x, t: cross_entropy(x, t, ignore_index=True)),
    "smoothing a bool": (TypeError, lambda x, t: cross_entropy(x, t, label_smoothing=False)),
    "z_loss a bool": (TypeError, lambda x, t: cross_entropy(x, t, z_loss=False)),
    "softcap a bool": (TypeError, lambda x, t: cross_entropy(x, t, softcap=True)),
    "scale a bool": (TypeError, lambda x, t: cross_entropy(x, t, scale=True)),
    "reduction a list": (ValueError, lambda x, t: cross_entropy(x, t, reduction=["mean"])),  # type: ignore[arg-type]
    "no reduction": (ValueError, lambda x, t: cross_entropy(x, t, reduction="most")),  # type: ignore[arg-type]
    "overwrite alone": (ValueError, lambda x, t: cross_entropy(x, t, overwrite_logits=True)),
    "fewer targets": (ValueError, lambda x, t: cross_entropy(x, t[1:].clone())),
    "targets elsewhere": (RuntimeError, lambda x, t: cross_entropy(x, t.to("meta"))),
    "a weight too short": (RuntimeError, lambda x, t: cross_entropy(x, t, weight=torch.ones(3))),
    "a weight with a gradient": (
        RuntimeError,
        lambda x, t: cross_entropy(x, t, weight=torch.ones(COLS, requires_grad=True)),
    ),
    "sparse": (NotImplementedError, lambda x, t: cross_entropy(x.to_sparse(), t)),
    "no tensor": (TypeError, lambda x, t: cross_entropy(x.tolist(), t)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_stays_refused(what: str, asked: list[bool]) -> None:
    x, target = pair()
    for _ in range(3):
        cross_entropy(x, target, ignore_index=1, softcap=1.0)
        cross_entropy(x, target, weight=torch.ones(COLS))
    error, call = REFUSED[what]
    asked.clear()
    with pytest.raises(error):
        call(x, target)
    assert True not in asked


def test_launches_are_those_of_the_whole_way(asked: list[bool], notes: Notes) -> None:
    """For rows of more dims and one row alone as well."""
    for shape, of in (((2, COLS, 3), (2, 3)), ((COLS,), ())):
        seen = []
        for _ in range(3):
            notes.launches.clear()
            x, target = torch.randn(shape), torch.zeros(of, dtype=torch.long)
            _, lse = cross_entropy(x, target, return_lse=True)
            kinds = [each._replace(words=()) for each in notes.launches]
            seen.append((kinds, lse.shape, lse.stride()))
        assert seen[0] == seen[1] == seen[2]
    assert asked[-1]
