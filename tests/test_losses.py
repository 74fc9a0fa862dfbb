"""cross_entropy: values and gradients against torch in float64, over its options; its errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from losses_kit import IGNORED, example, written_out
from online_softmax import cross_entropy
from rows_kit import INF, NAN

close = torch.testing.assert_close
OPTIONS = st.fixed_dictionaries(
    {
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "z_loss": st.sampled_from([0.0, 0.01]),
        "softcap": st.sampled_from([None, 3.0]),
        "scale": st.sampled_from([1.0, 0.5]),
        "return_lse": st.booleans(),
    }
)


def _gradient(results: Tensor | tuple[Tensor, ...], x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """By x (and more), with another upstream for each element."""
    results = (results,) if isinstance(results, Tensor) else results
    upstream = [torch.arange(1.0, r.numel() + 1).reshape(r.shape).to(r) for r in results]
    return torch.autograd.grad(results, (x, *more), upstream)


@pytest.mark.parametrize("kind", ["classes", "weighted", "probabilities"])
@settings(max_examples=40, deadline=None)
@given(
    options=OPTIONS,
    shape=st.sampled_from([(), (1,), (5,), (2, 3), (2, 3, 2)]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    grad_in_forward=st.booleans(),
)
def test_agrees_with_float64(kind: str, options, shape, dtype, grad_in_forward: bool) -> None:
    x, target, weight = example(*shape)
    if kind == "probabilities":
        target = torch.rand(x.shape, dtype=torch.double).to(dtype)
    x, weight = x.to(dtype).requires_grad_(), (None if kind == "classes" else weight.to(dtype))
    wide = x.detach().double().requires_grad_()
    wide_weight = None if weight is None else weight.double()
    wide_target = target.double() if kind == "probabilities" else target

    got = cross_entropy(x, target, weight=weight, grad_in_forward=grad_in_forward, **options)
    want = written_out(wide, wide_target, weight=wide_weight, **options)
    (dx,), (wide_dx,) = _gradient(got, x), _gradient(want, wide)
    loss, wide_loss = (got[0], want[0]) if options["return_lse"] else (got, want)
    # Of half types one rounding of the loss, and of its upstream and the gradient; one more of a
    # gradient that was made in the forward.
    eps = torch.finfo(dtype).eps
    sums = 1e-12 if dtype == torch.float64 else 2e-6
    assert (loss.dtype, dx.dtype) == (dtype, dtype)
    close(loss.double(), wide_loss, rtol=eps + sums, atol=sums, equal_nan=True)
    size = float(wide_dx.abs().max())
    close(dx.double(), wide_dx, rtol=2 * eps + 5 * sums, atol=(eps + sums) * size)
    if options["return_lse"]:
        lse, wide_lse = got[1], want[1]
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        close(lse.double(), wide_lse, rtol=sums, atol=sums)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_exactly_as_torch(reduction: str, smoothing: float, dtype: torch.dtype) -> None:
    """torch's own function, its default dim, uint8 targets and strided logits."""
    options = {"reduction": reduction, "label_smoothing": smoothing}
    for shape in ((), (5,), (2, 3), (2, 3, 4)):
        x, target, weight = example(*shape, ignored=False)
        x, weight = x.to(dtype), weight.to(dtype)
        close(cross_entropy(x, target, **options), functional.cross_entropy(x, target, **options))
        byte = target.to(torch.uint8)  # torch takes it of up to two dimensions
        assert torch.equal(cross_entropy(x, byte, **options), cross_entropy(x, target, **options))
        one = x.flip(0).double().to(dtype).T.contiguous().T if x.dim() == 2 else x
        got = cross_entropy(one, target, weight=weight, ignore_index=2, **options)
        close(got, functional.cross_entropy(one, target, weight=weight, ignore_index=2, **options))
        p = torch.softmax(x, 0)
        close(cross_entropy(x, p, **options), functional.cross_entropy(x, p, **options))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_any_dim(dim: int) -> None:
    x, target, weight = example(2, 3)
    options = {"weight": weight, "label_smoothing": 0.1, "z_loss": 0.1}
    moved = x.movedim(1, dim).requires_grad_()
    got = cross_entropy(moved, target, dim=dim, **options)
    close(got, written_out(x, target, **options))
    (dx,) = torch.autograd.grad(got, moved)
    (want,) = torch.autograd.grad(written_out(x.requires_grad_(), target, **options), x)
    close(dx, want.movedim(1, dim))
    assert dx.is_contiguous()
    p = torch.softmax(x.detach(), 1)
    got = cross_entropy(moved, p.movedim(1, dim), dim=dim, **options)
    close(got, written_out(x, p, **options))


def test_probabilities_and_weight_have_gradients() -> None:
    x, _, weight = example(4)
    p = torch.rand_like(x)
    leaves = [t.requires_grad_() for t in (x, p, weight)]
    ours = cross_entropy(x, p, weight=weight, label_smoothing=0.1, z_loss=0.1, softcap=4.0)
    want = written_out(x, p, weight=weight, label_smoothing=0.1, z_loss=0.1, softcap=4.0)
    close(torch.autograd.grad(ours, leaves), torch.autograd.grad(want, leaves))


def test_dtypes_of_probabilities() -> None:
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        p = torch.rand(3, 5, dtype=dtype)
        assert cross_entropy(x, p).dtype == functional.cross_entropy(x, p).dtype
    weight = torch.rand(5)
    p = torch.rand(3, 5, dtype=torch.bfloat16)
    assert cross_entropy(x, p, weight=weight).dtype == torch.float32
    fp8 = x.to(torch.float8_e4m3fn)
    assert cross_entropy(fp8, torch.tensor([0, 1, 2])).dtype == torch.bfloat16
    close(cross_entropy(fp8, p), cross_entropy(fp8.to(torch.bfloat16), p))


def test_empty_and_extreme_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert cross_entropy(torch.zeros(0, 5), none).isnan()
    assert cross_entropy(torch.zeros(0, 5), torch.zeros(0, 5)).isnan()
    assert cross_entropy(torch.zeros(0, 5), none, reduction="sum") == 0
    assert cross_entropy(
        torch.zeros(0, 5, 2), torch.zeros(0, 2).long(), reduction="none"
    ).shape == (
        0,
        2,
    )
    ignored = torch.full((3,), IGNORED)
    assert cross_entropy(torch.zeros(3, 0), ignored, reduction="sum") == 0
    assert cross_entropy(torch.zeros(3, 0), torch.zeros(3, 0), reduction="sum") == 0
    for row in ([-INF, 1.0, 2.0], [INF, 1.0, 2.0], [NAN, 1.0, 2.0], [-INF] * 3):
        for smoothing in (0.0, 0.1):
            for target in (0, 1):
                x = torch.tensor([row], requires_grad=True)
                args = (torch.tensor([target]),)
                ours = cross_entropy(x, *args, label_smoothing=smoothing)
                want = functional.cross_entropy(x, *args, label_smoothing=smoothing)
                close(ours, want, equal_nan=True)
                close(torch.autograd.grad(ours, x), torch.autograd.grad(want, x), equal_nan=True)


def test_loss_is_not_taken_from_a_rounded_lse() -> None:
    """max - z and the logarithm are far apart: m + log d would lose the logarithm."""
    x = torch.tensor([[1e7, 1e7, 1e7 - 4]])
    want = functional.cross_entropy(x.double(), torch.tensor([0]))
    close(cross_entropy(x, torch.tensor([0])).double(), want, rtol=1e-6, atol=0)


def test_gradient_is_as_exact_near_large_logits() -> None:
    """p from lse and what rounding took from it: a relative error of 6e-8 |lse| otherwise."""
    x = (torch.randn(4, 100) + 30_000).requires_grad_()
    target = torch.tensor([0, 1, 2, 3])
    (dx,) = torch.autograd.grad(cross_entropy(x, target, reduction="sum"), x)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(functional.cross_entropy(wide, target, reduction="sum"), wide)
    close(dx.double(), want, rtol=1e-5, atol=1e-9)
