"""The public operations against float64, forward and backward, on small and awkward inputs.

The bounds are those of the judges: opjudge of operations on rows, lossjudge of losses, token_stats
and their gradients. linear_cross_entropy is judged by its norms. Attention (checkattention.py) has
the bounds that docs/accuracy.md gives its kernels, shares of the largest element (checkcase.py);
merges (checkmerges.py), which give attention's out and lse, have the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import online_softmax
from online_softmax.lab import (
    cases,
    checkattention,
    checkmerges,
    gradients,
    judge,
    linear,
    lossjudge,
    opjudge,
)
from online_softmax.lab.checkcase import Case, both, normal
from online_softmax.lab.contract import Ran

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FAMILY = ("softmax", "log_softmax", "logsumexp")
LOSSES = ("cross_entropy", "token_stats")
OPERATIONS = (
    *FAMILY, *LOSSES, "linear_cross_entropy", *checkattention.OF, *checkmerges.OPERATIONS
)  # fmt: skip
# Sizes that cross vectors, warps and blocks; on a GPU also a vocabulary and a row for many blocks.
SIZES = ((1, 1), (3, 5), (5, 33), (4, 1000), (2, 4099))
GPU_SIZES = ((64, 50257), (2, 1048577))
VALUES = (5, 33)  # of the cases whose values are awkward


def cases_of(op: str, device: str, is_quick: bool) -> list[Case]:
    """The inputs of an operation, both directions."""
    if op in checkattention.OF:
        return checkattention.cases_of(op, is_quick)
    if op in checkmerges.OPERATIONS:
        return checkmerges.cases_of(op, is_quick)
    sizes = [*SIZES, *(GPU_SIZES if device == "cuda" and not is_quick else ())]
    if op == "linear_cross_entropy":
        works = [(5, 8, 33), (12, 16, 1000)]
        return [Case(f"{m}, {w}", (w, m)) for m in ("low", "fast") for w in works]
    named_sizes = [(f"{rows}x{cols}", (rows, cols)) for rows, cols in sizes]
    if op == "token_stats":
        return both(named_sizes)
    if op == "cross_entropy":
        return [
            Case(f"{name}{suffix}", given, is_gradient=bool(suffix), options=options)
            for name, given in named_sizes
            for suffix, options in (
                ("", {}),
                (", gradient", {}),
                (", gradient in the forward", {"grad_in_forward": True}),
            )
        ]
    found = both([(f"normal {name}", given) for name, given in named_sizes])
    values = [c for c in cases.CASES if (c.rows, c.cols) == VALUES and c.layout == "contiguous"]
    return found + [Case(c.name, c, c.source) for c in values[:: 3 if is_quick else 1]]


def runs(op: str, dtype: torch.dtype, device: str) -> Callable[[Case], Ran]:
    """What runs a case of an operation."""
    if op in checkattention.OF:
        return lambda case: checkattention.run(op, case, dtype, device)
    if op in checkmerges.OPERATIONS:
        return lambda case: checkmerges.run(op, case, dtype, device)
    one: Callable[..., Ran] = {
        "linear_cross_entropy": _linear,
        "cross_entropy": _cross_entropy,
        "token_stats": _token_stats,
    }.get(op, _of_rows)
    return lambda case: one(op, case, dtype, device)


def _judged(found: opjudge.Judged) -> Ran:
    return Ran(why=found.why, max_error=0.0 if math.isnan(found.share_max) else found.share_max)


# ---- of rows


def _of_rows(op: str, case: Case, dtype: torch.dtype, device: str) -> Ran:
    function = getattr(online_softmax, op)
    if isinstance(case.given, judge.Case):
        x = judge.lay_out(case.given, dtype, device)
        return _judged(opjudge.check(op, [x], function(x, -1)))
    x = normal(case, case.given, dtype, device) * 3
    y = function(x, -1)
    if not case.is_gradient:
        return _judged(opjudge.check(op, [x], y))
    if op == "logsumexp":  # of the sum of all: softmax
        (dx,) = gradients.of(lambda leaf: function(leaf, -1).sum(), x)
        return _judged(opjudge.check("softmax", [x], dx))
    dy = torch.ones_like(y) + normal(case, y.shape, dtype, device)
    (dx,) = gradients.of(lambda leaf: (function(leaf, -1) * dy).sum(), x)
    return _judged(opjudge.check(f"{op}_backward", [dy, y], dx))


def _targets(case: Case, size: tuple[int, int], device: str) -> Tensor:
    rows, cols = size
    return torch.randint(cols, (rows,), generator=judge.generator(case.name)).to(device)


def _cross_entropy(op: str, case: Case, dtype: torch.dtype, device: str) -> Ran:
    x, target = normal(case, case.given, dtype, device), _targets(case, case.given, device)
    if not case.is_gradient:
        loss = online_softmax.cross_entropy(x, target)
        return _judged(lossjudge.check(op, x, target, loss))
    (dx,) = gradients.of(lambda z: online_softmax.cross_entropy(z, target, **case.options), x)
    # Made in the forward, before what arrives from above is known, it is rounded twice.
    ulps = opjudge.OUR_ULPS * (2 if case.options else 1)
    return _judged(lossjudge.check("cross_entropy_both", x, target, dx, ulps))


def _token_stats(op: str, case: Case, dtype: torch.dtype, device: str) -> Ran:
    x, target = normal(case, case.given, dtype, device), _targets(case, case.given, device)
    if case.is_gradient:
        return _stats_gradient(case, x, target)
    found = online_softmax.token_stats(x, target, top_k=min(lossjudge.TOP_K, x.shape[1]))
    return _judged(lossjudge.check(op, x, target, found))


def _stats_gradient(case: Case, x: Tensor, target: Tensor) -> Ran:
    """By the logits, of all three numbers that have one, each row with upstreams of its own."""
    up = [normal(case, target.shape, torch.float32, str(x.device), f" up {i}") for i in range(3)]

    def weighed(z: Tensor) -> Tensor:
        made = online_softmax.token_stats(z, target)
        parts: tuple[Any, ...] = (made.lse, made.entropy, made.target_log_prob)
        return torch.stack([(p * u).sum() for p, u in zip(parts, up, strict=True)]).sum()

    (dx,) = gradients.of(weighed, x)
    return _judged(lossjudge.stats_gradient(x, target, dx, up))


# ---- of more tensors


def _linear(op: str, case: Case, dtype: torch.dtype, device: str) -> Ran:
    (tokens, features, classes), memory = case.given
    x, weight = (
        normal(case, shape, dtype, device) for shape in ((tokens, features), (classes, features))
    )
    target = _targets(case, (tokens, classes), device)
    losses: list[Tensor] = []

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        made = online_softmax.linear_cross_entropy(x, weight, target, memory=memory)
        losses.append(made.detach())
        return made

    got = gradients.of(loss, x, weight)
    wanted, allowed = linear.exact(x, weight, target), linear.EXACT + torch.finfo(dtype).eps
    worst = 0.0
    parts = zip(("loss", "gradient by input", "gradient by weight"), (*losses, *got), wanted,
                strict=True)  # fmt: skip
    for what, found, want in parts:
        off = linear.error(found.reshape(-1, 1), want.reshape(-1, 1))
        worst = max(worst, off)
        if not off <= allowed:  # NaN is wrong too
            return Ran(why=f"the {what} is off by {off:.3g} of its norm (allowed {allowed:.2g})")
    return Ran(max_error=worst)
