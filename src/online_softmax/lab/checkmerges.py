"""merge and merge_outputs against float64: the sums of exponentials of all the parts together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import online_softmax
from online_softmax.lab import gradients
from online_softmax.lab.checkcase import GRADIENT, LSE, OUT, Case, both, near, normal
from online_softmax.lab.contract import Ran

# Of parts, rows, elements of a row in each part, the length of outputs: 0 for none.
STATES = {
    "states of three parts": (3, 33, 5, 0),
    "outputs of two parts": (2, 9, 7, 64),
    "outputs of more parts than one launch takes": (70, 5, 2, 16),
}
# Of parts, rows, the length of outputs, the base; a part of some rows has no key.
PAIRS = {
    "base e": (3, 33, 64, "e", False),
    "base 2": (2, 9, 40, "2", False),
    "a part without keys": (4, 9, 16, "e", True),
    "more parts than one launch takes": (70, 5, 8, "e", False),
}
OPERATIONS = ("merge", "merge_outputs")


def cases_of(op: str, is_quick: bool) -> list[Case]:
    """The inputs of an operation, both directions."""
    named: list[tuple[str, Any]] = list((STATES if op == "merge" else PAIRS).items())
    return both(named[:: 2 if is_quick else 1])


def run(op: str, case: Case, dtype: torch.dtype, device: str) -> Ran:
    """Run and judge a case."""
    return (_merge if op == "merge" else _merge_outputs)(case, dtype, device)


def _merge(case: Case, dtype: torch.dtype, device: str) -> Ran:
    """Of a row in parts, and a part that is empty: its log-sum-exp, and what it weighs."""
    parts, rows, keys, dim = case.given
    tensors = [normal(case, (parts, rows, keys), dtype, device, " x") * 3]
    if dim:
        tensors.append(normal(case, (parts, rows, keys, dim), dtype, device, " v"))

    def ours(x: Tensor, *v: Tensor) -> list[Tensor]:
        kind: Any = online_softmax.OutputState if v else online_softmax.State
        states = [
            kind.of(each[0].unsqueeze(-2), each[1]) if v else kind.of(each[0])
            for each in zip(x, *v, strict=True)
        ]
        like = states[0]
        end = (dim,) if v else ()
        states.append(kind.empty(like.m.shape, *end, dtype=like.m.dtype, device=like.m.device))
        whole: Any = online_softmax.merge(*states)
        return [whole.lse(), *([whole.output()] if v else [])]

    def right(x: Tensor, *v: Tensor) -> list[Tensor]:
        whole = x.transpose(0, 1).flatten(1)
        if not v:
            return [whole.logsumexp(-1)]
        values = v[0].transpose(0, 1).flatten(1, 2)
        out = torch.softmax(whole, -1).unsqueeze(-2) @ values
        return [whole.logsumexp(-1).unsqueeze(-1), out]

    return _judged(ours, right, tensors, case, dtype, ("lse", "out"))


def _merge_outputs(case: Case, dtype: torch.dtype, device: str) -> Ran:
    parts, rows, dim, base, has_empty = case.given
    outs = normal(case, (parts, rows, dim), dtype, device, " outs")
    lses = normal(case, (parts, rows), torch.float32, device, " lses") * 3
    if has_empty:
        lses[1, ::2] = -math.inf
        if not case.is_gradient:  # of rows without a key anywhere there is none
            lses[:, 4] = -math.inf

    def ours(outs: Tensor, lses: Tensor) -> list[Tensor]:
        out, lse = online_softmax.merge_outputs(*zip(outs, lses, strict=True), base=base)
        return [lse, out]

    def right(outs: Tensor, lses: Tensor) -> list[Tensor]:
        unit = math.log(2) if base == "2" else 1.0
        lse = torch.logsumexp(lses * unit, 0)
        weights = (lses * unit - lse.masked_fill(lse == -math.inf, 0.0)).exp()
        return [lse / unit, (outs * weights.unsqueeze(-1)).sum(0)]

    return _judged(ours, right, [outs, lses], case, dtype, ("lse", "out"))


def _judged(
    ours: Callable[..., list[Tensor]], right: Callable[..., list[Tensor]], tensors: list[Tensor],
    case: Case, dtype: torch.dtype, names: tuple[str, ...],
) -> Ran:  # fmt: skip
    """Both on the same tensors, right's in float64; or the gradients of a sum over all results."""
    wide = [t.double() for t in tensors]
    if not case.is_gradient:
        found = zip(names, ours(*tensors), right(*wide), strict=False)
        return near([(n, g, w, LSE if n == "lse" else OUT[dtype]) for n, g, w in found])

    def loss(function: Callable[..., list[Tensor]]) -> Callable[..., Tensor]:
        def made(*leaves: Tensor) -> Tensor:
            total = torch.zeros((), dtype=leaves[0].dtype, device=leaves[0].device)
            for i, each in enumerate(function(*leaves)):
                up = normal(case, each.shape, dtype, str(each.device), f" up {i}")
                total = total + (each * up.to(each.dtype)).sum()
            return total

        return made

    got, wanted = gradients.of(loss(ours), *tensors), gradients.of(loss(right), *wide)
    places = enumerate(zip(got, wanted, strict=True))
    return near([(f"gradient {i}", g, w, GRADIENT[dtype]) for i, (g, w) in places])
