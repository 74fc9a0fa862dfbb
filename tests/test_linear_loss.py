"""linear_cross_entropy: values and gradients, by both ways, against torch's and float64."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional

from ce_kit import needs_compiler
from linear_kit import EVERY, MEMORY, by_logits, cut_finely, example, gradients, take_kernels
from losses_kit import IGNORED
from online_softmax import linear_cross_entropy, linearfast, linearops, linearplan

close = torch.testing.assert_close
REDUCTIONS = ("mean", "sum", "none")


@pytest.fixture(autouse=True)
def _fine_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_finely(monkeypatch)


@MEMORY
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["plain", "every"])
def test_agrees_with_whole_logits(name: str, reduction: str, memory: str) -> None:
    """In float64, with a bias and a weight, for any upstream gradient, twice."""
    x, w, b, target = example()
    assert linearplan.block_cols(12, 77, 8, 0) < 77
    assert linearplan.fast_cut(12, 5, 77, 8, 0, 0).group < 12
    weight = torch.rand(77, dtype=torch.double) + 0.1 if name == "every" else None
    options = {"reduction": reduction, "weight": weight, **(EVERY if weight is not None else {})}
    leaves = [t.requires_grad_() for t in (x, w, b)]
    loss = linear_cross_entropy(x, w, target, linear_bias=b, memory=memory, **options)
    want = by_logits(x, w, target, linear_bias=b, **options)
    close(loss, want)
    for _ in range(2):
        upstream = torch.randn_like(loss)
        got = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
        wanted = torch.autograd.grad(want, leaves, upstream, retain_graph=True)
        close(got, wanted)


@pytest.mark.skipif(
    not hasattr(functional, "linear_cross_entropy"), reason="needs torch's, of 2.13 on"
)
@MEMORY
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(), (12,)])
def test_agrees_with_torchs(shape: tuple[int, ...], reduction: str, memory: str) -> None:
    x, w, b, target = example()
    x, target = (x, target) if shape else (x[0], target[0])
    leaves = [t.requires_grad_() for t in (x, w, b)]
    for options in ({}, {"label_smoothing": 0.2}, {"ignore_index": 5}):
        places = target if "ignore_index" not in options else target.clamp(min=5)
        given = {"linear_bias": b, "reduction": reduction, "weight": torch.rand(77).double()}
        given |= options
        ours = functools.partial(linear_cross_entropy, memory=memory)
        found = [
            gradients(lambda f=f, t=places, o=given: f(x, w, t, **o), leaves)
            for f in (ours, functional.linear_cross_entropy)
        ]
        close(*found)


@MEMORY
def test_probabilities_are_torchs(memory: str) -> None:
    x, w, b, _ = example()
    p = torch.softmax(torch.randn(12, 77).double(), -1)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    options = {"linear_bias": b, "label_smoothing": 0.1}
    ours = lambda: linear_cross_entropy(x, w, p, memory=memory, **options)  # noqa: E731
    want = lambda: functional.cross_entropy(functional.linear(x, w, b), p, label_smoothing=0.1)  # noqa: E731
    close(gradients(ours, leaves), gradients(want, leaves))


@MEMORY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=needs_compiler)], ids=["reference", "kernels"]
)
def test_no_worse_than_whole_logits(
    kernels: bool, dtype: torch.dtype, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 on the same values; torch's errors are those of eager code in the dtype."""
    cut_finely(monkeypatch, 12 * 40)
    if kernels:
        take_kernels(monkeypatch)
    x, w, b, target = example(12, 33, 130, dtype)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    options = {"z_loss": 0.02, "label_smoothing": 0.1}
    ours = lambda: linear_cross_entropy(x, w, target, linear_bias=b, memory=memory, **options)  # noqa: E731
    whole = lambda x, w, b: by_logits(x, w, target, linear_bias=b, **options)  # noqa: E731
    got, eager = gradients(ours, leaves), gradients(lambda: whole(*leaves), leaves)
    truth = gradients(lambda: whole(*wide), wide)
    eps = torch.finfo(dtype).eps
    for mine, theirs, true in zip(got, eager, truth, strict=True):
        assert mine.dtype == dtype
        most = (theirs.double() - true).abs().max() + 2 * eps * true.abs().max()
        assert (mine.double() - true).abs().max() <= most


@pytest.mark.parametrize(("features", "groups"), [(33, 24), (65, 1)])
def test_low_and_fast_round_alike(features: int, groups: int) -> None:
    """bfloat16: both sum in float32 over all blocks and round once, so an error does not grow with
    the number of blocks."""
    assert -(-96 // linearplan.fast_cut(96, features, 257, 4, 2, 4).group) == groups
    x, w, _, target = example(96, features, 257, torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x, w)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = gradients(lambda: by_logits(*wide, target), wide)
    for memory in ("low", "fast"):
        got = gradients(lambda m=memory: linear_cross_entropy(x, w, target, memory=m), leaves)
        for mine, true in zip(got, truth, strict=True):
            # half a unit for the result, and the rounding of the logits' gradient, which averages
            assert (mine.double() - true).norm() <= 2.0**-8 * true.norm()


@MEMORY
def test_float16_keeps_small_gradients(memory: str) -> None:
    """Those by the logits are below float16's spacing; those by the matrices are not."""
    x, w, b, target = example(64, 8, 30, torch.float16)
    x = (100 * x).requires_grad_()
    leaves = [x, w.requires_grad_(), b.requires_grad_()]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    upstream = torch.tensor(2.0**-19)
    ours = lambda: linear_cross_entropy(  # noqa: E731
        x, w, target, linear_bias=b, memory=memory, reduction="sum", scale=0.01
    )
    want = lambda: by_logits(  # noqa: E731
        wide[0], wide[1], target, linear_bias=wide[2], reduction="sum", scale=0.01
    )
    _, _, dw, _ = gradients(ours, leaves, upstream)
    _, _, true, _ = gradients(want, wide, upstream)
    assert dw.abs().max() > 0
    close(dw.double(), true, rtol=0.02, atol=2.0**-25)


@MEMORY
def test_shapes_and_strides(memory: str) -> None:
    """More dimensions, inputs that are not contiguous, weights that are transposed or strided."""
    x, w, _, target = example(12, 6, 40)
    want = gradients(lambda: by_logits(x, w, target), [x.requires_grad_(), w.requires_grad_()])
    views = {
        "three": (x.detach().reshape(3, 4, 6), w.detach(), target.reshape(3, 4)),
        "input": (x.detach().repeat_interleave(2, 1)[:, ::2], w.detach(), target),
        "transposed": (x.detach().t().contiguous().t(), w.detach().t().contiguous().t(), target),
        "strided": (x.detach(), w.detach().repeat_interleave(3, 1)[:, ::3], target),
        "bytes": (x.detach(), w.detach(), target.clamp(min=0).to(torch.uint8)),
    }
    for name, (a, v, t) in views.items():
        given = {"ignore_index": IGNORED}
        if name == "bytes":
            want = gradients(lambda: by_logits(x, w, target.clamp(min=0)), [x, w])
        a, v = a.requires_grad_(), v.requires_grad_()
        call = lambda a=a, v=v, t=t: linear_cross_entropy(a, v, t, memory=memory, **given)  # noqa: B023, E731
        loss, dx, dw = gradients(call, [a, v])
        close((loss, dx.reshape(12, 6), dw), want)


@MEMORY
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_row_counts(reduction: str, memory: str) -> None:
    """All ignored, or no tokens at all: torch's loss, and gradients of 0."""
    for tokens in (3, 0):
        x, w, b, _ = example(tokens)
        target = torch.full((tokens,), IGNORED)
        leaves = [t.requires_grad_() for t in (x, w, b)]
        options = {"linear_bias": b, "reduction": reduction}
        ours = lambda: linear_cross_entropy(x, w, target, memory=memory, **options)  # noqa: B023, E731
        loss, *found = gradients(ours, leaves)
        close(loss, by_logits(x, w, target, **options).detach(), equal_nan=True)
        assert all(torch.equal(g, torch.zeros_like(t)) for g, t in zip(found, leaves, strict=True))


def test_an_ignored_token_may_hold_anything() -> None:
    """As in cross_entropy: nothing of its logits reaches the weight's gradient but 0 * input."""
    x, w, _, target = example()
    x[2], target[2] = 1e30, IGNORED  # logits that are infinite in float32
    x, w = x.float().requires_grad_(), w.float().requires_grad_()
    for memory in ("low", "fast"):
        call = lambda m=memory: linear_cross_entropy(x, w, target, memory=m, scale=1e20)  # noqa: E731
        loss, dx, dw = gradients(call, [x, w])
        assert loss.isfinite()
        assert torch.equal(dx[2], torch.zeros(5))
        assert dw.isfinite().all()


@MEMORY
def test_tied_weights(memory: str) -> None:
    """The same matrix as embedding and as head has the sum of both gradients."""
    _, w, _, target = example(12, 5, 40)
    tokens = torch.arange(12)
    found = []
    for head in (lambda *a: linear_cross_entropy(*a, memory=memory), by_logits):
        table = w.clone().requires_grad_()
        head(functional.embedding(tokens, table), table, target).backward()
        found.append(table.grad)
    close(*found)


@MEMORY
def test_what_is_frozen_costs_no_product(memory: str) -> None:
    counted: list[str] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            counted.append(str(function))
            return function(*args, **(kwargs or {}))

    x, w, b, target = example()
    o = linearops.Options(IGNORED, 0.0, 0.0, None, 1.0)
    blocks = -(-77 // linearplan.block_cols(12, 77, 8, 0))
    groups = -(-12 // linearplan.fast_cut(12, 5, 77, 8, 0, 0).group)
    for needs in itertools.product((False, True), repeat=3):
        counted.clear()
        with Count():
            if memory == "fast":
                args = (x, w, b, target, None, torch.float64, o, True, needs, "")
                _, *found = linearfast.forward_with_gradient(*args)
            else:
                row = torch.ones(12, dtype=torch.double)
                args = (row, x, w, b, target, None, row, 0 * row, torch.float64, o, needs, "")
                found = linearops.backward(*args)
        products = sum("addmm" in each or "aten.mm" in each for each in counted)
        assert products == (groups if memory == "fast" else blocks) * (1 + needs[0] + needs[1])
        assert [t.numel() > 0 for t in found] == list(needs)


@MEMORY
@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_a_gradient_by_one_alone(needs: tuple[bool, bool], memory: str) -> None:
    x, w, _, target = example()
    leaves = [t for t, need in zip((x, w), needs, strict=True) if need]
    for leaf in leaves:
        leaf.requires_grad_()
    ours = lambda: linear_cross_entropy(x, w, target, memory=memory)  # noqa: E731
    close(gradients(ours, leaves), gradients(lambda: by_logits(x, w, target), leaves))
