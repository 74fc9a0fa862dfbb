"""Cases in which cross-entropies elsewhere were wrong: targets, ignored rows, reused logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ce_kit
from ce_kit import needs_compiler
from losses_kit import IGNORED
from online_softmax import ceblocks, cekernels, ceops, cross_entropy
from online_softmax.reference import cross_entropy as reference
from rows_kit import INF, NAN, gpu

ran, place = ce_kit.ran, ce_kit.place  # fixtures
close = torch.testing.assert_close
FORWARD = pytest.mark.parametrize("in_forward", [False, True])


@pytest.fixture
def here(place: str) -> Iterator[None]:
    """Tensors are made in a place."""
    with torch.device(place) if place == "cuda" else contextlib.nullcontext():
        yield


def _loss_and_gradient(
    x: Tensor, target: Tensor, upstream: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    loss = cross_entropy(x, target, **options)
    (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss) if upstream is None else upstream)
    return loss.detach(), dx


@FORWARD
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_rows_are_ignored(smoothing: float, in_forward: bool, place: str) -> None:  # S18
    device = place
    x = torch.randn(4, 5, device=device)
    x[1] = NAN
    x[2, 0] = INF
    target = torch.full((4,), IGNORED, device=device)
    for weight in (None, torch.rand(5, device=device)):
        options = {"weight": weight, "label_smoothing": smoothing, "grad_in_forward": in_forward}
        options["softcap"] = None if weight is None else 4.0
        for reduction, want in (
            ("none", torch.zeros(4)),
            ("sum", torch.tensor(0.0)),
            ("mean", torch.tensor(NAN)),
        ):
            loss, dx = _loss_and_gradient(x, target, reduction=reduction, z_loss=0.1, **options)
            close(loss, want.to(device), equal_nan=True)
            assert torch.equal(dx, torch.zeros_like(x))
        one = target.clone()
        one[0] = 3
        loss, dx = _loss_and_gradient(x, one, **options)
        alone, dx_alone = _loss_and_gradient(x[:1], one[:1], **options)
        close((loss, dx[:1]), (alone, dx_alone))
        assert torch.equal(dx[1:], torch.zeros_like(x[1:]))


@pytest.mark.parametrize("bad", [1000, 3, -1, -99])
def test_a_target_that_is_no_class_on_the_cpu(bad: int) -> None:  # S19
    x = torch.tensor([[2.5, 0, 0], [0, 0, 2.5]], requires_grad=True)
    wanted = rf"target must be in \[0, 3\), or ignore_index \(-100\), got {bad} at index \(1,\)"
    for options in ({}, {"grad_in_forward": True}, {"check_target": True}):
        with pytest.raises(IndexError, match=wanted):
            cross_entropy(x, torch.tensor([0, bad]), **options)
    with pytest.raises(IndexError, match=f"got {bad}$"):
        cross_entropy(x[0], torch.tensor(bad))
    close(cross_entropy(x, torch.tensor([0, 2])).item(), 0.1520, atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    "rows", [reference, ceblocks, pytest.param(cekernels, marks=needs_compiler)]
)
def test_a_target_that_is_no_class_elsewhere(rows: Any) -> None:  # S19
    """Where the host does not look: NaN and a gradient of 0, in that row alone."""
    x = torch.tensor([[2.5, 0, 0], [0, 0, 2.5], [0, 1, 2]])
    for weight in (None, torch.tensor([0.5, 1, 2])):
        options = {"label_smoothing": 0.1, "z_loss": 0.1, "weight": weight}
        target = torch.tensor([0, 1000, 2])
        loss, lse = rows.forward(x, target, **options)
        fine, _ = rows.forward(x[::2], target[::2], **options)
        assert loss.isnan().tolist() == [False, True, False]
        close(loss[::2], fine)
        close(lse, torch.logsumexp(x, -1))
        dx = rows.backward(torch.full((3,), NAN), x, target, lse, **options)
        assert dx.isnan().all(-1).tolist() == [True, False, True]
        assert torch.equal(dx[1], torch.zeros(3))
        both = rows.forward_with_gradient(x, target, torch.ones(()), **options)
        close(both[0], loss, equal_nan=True)
        assert torch.equal(both[2][1], torch.zeros(3))


@gpu
@FORWARD
def test_a_target_that_is_no_class_on_a_gpu(in_forward: bool) -> None:  # S19
    x = torch.tensor([[2.5, 0, 0], [0, 0, 2.5]], device="cuda")
    for bad in (1000, 3, -1):
        target = torch.tensor([0, bad], device="cuda")
        options = {"reduction": "none", "grad_in_forward": in_forward}
        loss, dx = _loss_and_gradient(x, target, **options)
        assert loss.isnan().tolist() == [False, True]
        assert torch.equal(dx[1], torch.zeros_like(dx[1]))
        assert cross_entropy(x, target).isnan()
        with pytest.raises(IndexError, match=f"got {bad} at index"):
            cross_entropy(x, target, check_target=True)


@gpu
@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@FORWARD
def test_counting_waits_for_nothing(
    in_forward: bool, reduction: str, dtype: torch.dtype, over: bool
) -> None:
    """No host synchronisation, and capturable; a replay sees the logits and targets of its time."""
    if over and not in_forward:
        pytest.skip("it writes over logits in the forward alone")
    values = torch.randn(6, 40, device="cuda", dtype=dtype)
    target = torch.tensor([0, 1, IGNORED, 3, 39, 5], device="cuda")
    weight = torch.rand(40, device="cuda")
    options = {"reduction": reduction, "label_smoothing": 0.1, "weight": weight}
    options |= {"grad_in_forward": in_forward, "overwrite_logits": over}

    def step() -> tuple[Tensor, Tensor]:
        leaf = values.detach().requires_grad_()  # a leaf of this stream's
        loss = cross_entropy(leaf * 1.0, target, **options)
        return loss, torch.autograd.grad(loss, leaf, torch.ones_like(loss))[0]

    for _ in range(3):  # the third starts the launches of the second again
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = step()
    values.copy_(torch.randn(6, 40))
    target.copy_(torch.tensor([IGNORED, 1, 2, IGNORED, 39, 5]))
    graph.replay()
    close(got, step())


@FORWARD
@pytest.mark.usefixtures("here")
def test_each_row_has_its_upstream(in_forward: bool) -> None:  # S20
    x = torch.tensor([[2.0, 0, 1], [0, 3, 0], [1, 1, 1]])
    options = {"reduction": "none", "grad_in_forward": in_forward}
    upstream = torch.tensor([1.0, 5.0, 2.0])
    loss, dx = _loss_and_gradient(x, torch.tensor([0, IGNORED, 2]), upstream, **options)
    close(loss, torch.tensor([0.4076060, 0.0, 1.0986123]))
    rows = [[-0.3347590, 0.0900306, 0.2447285], [0, 0, 0], [0.6666667, 0.6666667, -1.3333333]]
    close(dx, torch.tensor(rows))
    _, dx = _loss_and_gradient(x, torch.tensor([IGNORED, 1, 2]), upstream, **options)
    assert torch.equal(dx[0], torch.zeros(3))
    assert dx[1:].abs().min() > 0.1


@pytest.mark.usefixtures("here")
def test_weights_of_ignored_rows() -> None:  # S21
    x, target = torch.tensor([[1.0, 2.0], [3.0, 0.4]]), torch.tensor([IGNORED, 1])
    options = {"weight": torch.tensor([0.2, 0.3]), "label_smoothing": 0.1}
    loss = cross_entropy(x, target, reduction="none", **options)
    close(loss, torch.tensor([0.0, 0.7621352]))
    close(cross_entropy(x, target, reduction="sum", **options).item(), 0.7621352)
    close(cross_entropy(x, target, **options).item(), 2.5404506)
    close(cross_entropy(x[1:], target[1:], **options).item(), 2.5404506)


@FORWARD
@pytest.mark.usefixtures("here")
def test_logits_are_only_read(in_forward: bool) -> None:  # S22
    leaf = torch.randn(4, 6, requires_grad=True)
    target, other = torch.tensor([0, 1, 2, 3]), torch.tensor([5, 4, 3, 2])
    for x in (leaf, leaf.tanh()):
        before, version = x.detach().clone(), x._version
        first = cross_entropy(x, target, grad_in_forward=in_forward)
        (dx,) = torch.autograd.grad(first, leaf, retain_graph=True)
        second = cross_entropy(x, other, grad_in_forward=in_forward)
        (again,) = torch.autograd.grad(first, leaf, retain_graph=True)
        (dx_second,) = torch.autograd.grad(second, leaf)
        assert torch.equal(again, dx)
        assert torch.equal(x.detach(), before)
        assert x._version == version
        wide = leaf.detach().double().requires_grad_()
        z = wide if x is leaf else wide.tanh()
        for got, labels in ((dx, target), (dx_second, other)):
            (want,) = torch.autograd.grad(
                functional.cross_entropy(z, labels), wide, retain_graph=True
            )
            close(got.double(), want, rtol=1e-5, atol=1e-7)


@FORWARD
@pytest.mark.usefixtures("here")
def test_without_a_gradient(in_forward: bool) -> None:  # S23
    x = torch.tensor(
        [[-0.1118, 0.0162, 0.0956], [-0.1134, 0.0088, 0.1046],
         [-0.1737, 0.1315, 0.0422], [-0.0921, 0.0728, 0.0194]]
    )  # fmt: skip
    target = torch.zeros(4, dtype=torch.int64)

    def loss(x: Tensor) -> float:
        return cross_entropy(x, target, grad_in_forward=in_forward).item()

    close(loss(x), 1.2258567)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            close(loss(x.clone().requires_grad_()), 1.2258567)


@pytest.mark.usefixtures("here")
def test_ignore_index_concerns_targets_alone() -> None:  # S49
    x = torch.ones(2, 3)
    for target in ([1, 2], [0, 2]):
        close(cross_entropy(x, torch.tensor(target), ignore_index=0).item(), 1.0986123)


@FORWARD
@pytest.mark.usefixtures("here")
def test_smoothing_shares_among_all_classes(in_forward: bool) -> None:  # S50
    x, target = torch.tensor([[1.0, 2, 3], [3, 2, 1]]), torch.tensor([2, 0])
    loss, dx = _loss_and_gradient(x, target, label_smoothing=0.2, grad_in_forward=in_forward)
    close(loss.item(), 0.6076060)
    rows = [[0.0116820, 0.0890309, -0.1007129], [-0.1007129, 0.0890309, 0.0116820]]
    close(dx, torch.tensor(rows))
    loss, dx = _loss_and_gradient(x, target, label_smoothing=1.0, grad_in_forward=in_forward)
    wide = x.double().requires_grad_()
    want = functional.cross_entropy(wide, target, label_smoothing=1.0)
    close((loss, dx), (want.float(), torch.autograd.grad(want, wide)[0].float()))


@pytest.mark.usefixtures("here")
def test_a_probability_that_underflows() -> None:  # S51
    loss, dx = _loss_and_gradient(torch.tensor([[0.0, 200.0]]), torch.tensor([0]))
    assert loss == 200
    close(dx, torch.tensor([[-1.0, 1.0]]))


def test_rows_are_views_where_they_can_be() -> None:
    x = torch.randn(4, 6)
    for view in (x, x[:, 1:4], x[::2], x.T.contiguous().T[1:]):
        rows = ceops.as_rows(view, 1)
        assert torch.equal(rows, view)
        assert rows.stride(1) == 1
        assert (rows.data_ptr() == view.data_ptr()) == (view.stride(1) == 1)
    assert torch.equal(ceops.as_rows(x, 0), x.T)
    negative = torch.complex(x, -x).conj().imag
    assert negative.is_neg()
    assert not ceops.as_rows(negative, 1).is_neg()
    three = torch.randn(2, 3, 4)
    assert torch.equal(ceops.from_rows(ceops.as_rows(three, 1), three, 1), three)


def test_one_place_says_what_computes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and both in one go where `implementation` says, seen as rows."""
    calls: list[tuple[str, tuple[int, ...]]] = []

    class Seen:
        def __getattr__(self, name: str) -> Any:
            def function(*tensors: Tensor | None, **options: Any) -> Any:
                logits = tensors[1] if name == "backward" else tensors[0]
                calls.append((name, tuple(logits.shape)))
                assert options["z_loss"] == 0.5
                return getattr(reference, name)(*tensors, **options)

            return function

    monkeypatch.setattr(ceops, "implementation", lambda *_: Seen())
    x, target = torch.randn(2, 5, 3, requires_grad=True), torch.zeros(2, 3, dtype=torch.int64)
    loss = cross_entropy(x, target, z_loss=0.5)
    loss.backward()
    assert calls == [("forward", (6, 5)), ("backward", (6, 5))]
    calls.clear()
    cross_entropy(x, target, z_loss=0.5, grad_in_forward=True).backward()
    assert calls == [("forward_with_gradient", (6, 5))]
