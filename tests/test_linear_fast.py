"""memory="fast" of linear_cross_entropy: its groups, and gradients made before their upstream."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ce_kit import needs_compiler
from linear_kit import by_logits, cut_finely, example, gradients, take_kernels
from losses_kit import IGNORED
from online_softmax import linear_cross_entropy, linearfast, linearops, linearplan, rowkernels
from online_softmax.cuda import launch


@pytest.fixture(autouse=True)
def _fine_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_finely(monkeypatch)


def test_one_group_has_one_product_for_each_gradient() -> None:
    """In bfloat16, where the gradient by all logits takes no more than sums of the weight's."""
    group, chunk = linearplan.fast_cut(12, 9, 77, 4, 2, 4)
    assert (group, chunk) == (12, 4)
    counted: list[str] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            counted.append(str(function))
            return function(*args, **(kwargs or {}))

    x, w, _, target = example(12, 9, 77, torch.bfloat16)
    o = linearops.Options(IGNORED, 0.0, 0.0, None, 1.0)
    needs = (True, True, False)
    with Count():
        args = (x, w, None, target, None, torch.bfloat16, o, True, needs, "")
        _, dx, dw, _ = linearfast.forward_with_gradient(*args)
    assert sum("aten.mm" in each for each in counted) == 3 + 2
    assert not any("addmm" in each for each in counted)
    assert dx.dtype == dw.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=needs_compiler)], ids=["reference", "kernels"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_was_made_is_given_once(
    dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over itself where no other backward can come, and as it is for an upstream of 1; a graph that
    is kept gives the same again, whatever became of the first."""
    if kernels:
        take_kernels(monkeypatch)
    made: list[int] = []
    original = linearfast.forward_with_gradient

    def note(*args: Any) -> Any:
        found = original(*args)
        made[:] = [t.data_ptr() for t in found[1:]]
        return found

    monkeypatch.setattr(linearfast, "forward_with_gradient", note)
    x, w, b, target = example(12, 9, 80, dtype)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    most = 4 * torch.finfo(dtype).eps
    for upstream in (1.0, 0.3):
        given = torch.tensor(upstream, dtype=dtype)
        want = gradients(lambda: by_logits(*wide[:2], target, linear_bias=wide[2]), wide, given)
        loss = linear_cross_entropy(x, w, target, linear_bias=b, memory="fast")
        for keep in (True, True, False):
            found = torch.autograd.grad(loss, leaves, given, retain_graph=keep)
            for mine, true in zip(found, want[1:], strict=True):
                assert (mine.double() - true).norm() <= most * true.norm()
            is_same = [t.data_ptr() for t in found] == made
            assert is_same == (not keep and dtype != torch.float16)
            if keep:
                for each in found:
                    each.fill_(7.0)


def test_the_second_rounding_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the float32 sums, element by element: one rounding to bfloat16 where the upstream is
    a power of two, two where it is not; of float16, one whatever it is."""
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit, relative
    for dtype, once in unit.items():
        x, w, b, target = example(12, 9, 80, dtype)
        leaves = [t.requires_grad_() for t in (x, w, b)]

        def call(t: torch.Tensor = target) -> torch.Tensor:
            x, w, b = leaves  # noqa: B023
            return linear_cross_entropy(x, w, t, linear_bias=b, reduction="sum", memory="fast")

        sums: list[torch.Tensor] = []
        original = linearfast.forward_with_gradient
        with monkeypatch.context() as patch:
            patch.setattr(linearfast, "held_dtype", lambda given, dtype: torch.float32)
            patch.setattr(
                linearfast,
                "forward_with_gradient",
                lambda *args: sums.extend((found := original(*args))[1:]) or found,  # noqa: B023
            )
            call()
        assert [t.dtype for t in sums] == [torch.float32] * 3
        for upstream in (1.0, 0.25, 8.0, 0.3, 3.0):
            given = torch.tensor(upstream, dtype=dtype)
            found = torch.autograd.grad(call(), leaves, given)
            errors = []
            for mine, summed in zip(found, sums, strict=True):
                want = summed.double() * given.double()
                errors.append(((mine.double() - want).abs() / want.abs().clamp(min=1e-3)).max())
            largest = float(max(errors))
            is_twice = dtype == torch.bfloat16 and upstream in (0.3, 3.0)
            assert largest <= (2 if is_twice else 1) * once + 2.0**-15, (dtype, upstream)
            assert not is_twice or largest > once + 2.0**-15


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_upstream_of_1_moves_nothing(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_kernels(monkeypatch)
    counted = []
    run = launch.run
    monkeypatch.setattr(launch, "run", lambda *args: counted.append(run(*args)))
    target = torch.tensor([0, IGNORED, 5])
    for upstream, moved in ((1.0, False), (0.5, True)):
        made = torch.randn(40, 900).to(dtype)
        want = made.clone() * upstream
        args = (made, torch.tensor(upstream), target, 40, IGNORED)
        assert linearfast.rescale_in_place(*args).data_ptr() == made.data_ptr()
        assert torch.equal(made, want)
        assert (counted[-1].writes > 0) == moved
    assert counted[0].reads < made.numel() / 4  # the upstream, by each thread
    nothing = torch.full((3,), IGNORED)
    for kernels in (True, False):
        monkeypatch.setattr(rowkernels, "has_kernels", lambda x, kernels=kernels: kernels)
        made = torch.zeros(4, 9, dtype=dtype)
        linearfast.rescale_in_place(made, torch.tensor(math.inf), nothing, 40, IGNORED)
        assert torch.equal(made, torch.zeros(4, 9, dtype=dtype))
