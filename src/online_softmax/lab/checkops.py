"""The public operations against float64, forward and backward, on small and awkward inputs.

The bounds are those of the judges (opjudge, lossjudge); of attention and linear_cross_entropy
those that docs/accuracy.md has for their kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import online_softmax
from online_softmax.lab import cases, gradients, judge, linear, lossjudge, opjudge
from online_softmax.lab.contract import Ran

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FAMILY = ("softmax", "log_softmax", "logsumexp")
LOSSES = ("cross_entropy", "token_stats")
OPERATIONS = (*FAMILY, *LOSSES, "linear_cross_entropy", "attention")
# Sizes that cross vectors, warps and blocks; on a GPU also a vocabulary and a row for many blocks.
SIZES = ((1, 1), (3, 5), (5, 33), (4, 1000), (2, 4099))
GPU_SIZES = ((64, 50257), (2, 1048577))
VALUES = (5, 33)  # of the cases whose values are awkward
# Of the largest element, by type: the output, the gradients; lse is float32.
OUT = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
GRADIENT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
LSE = 2e-5
ATTENTIONS: dict[str, dict[str, Any]] = {  # batch, heads, kv_heads, q_len, k_len, head_dim
    "plain": {"shape": (2, 4, 4, 9, 13, 16)},
    "causal": {"shape": (1, 2, 2, 33, 33, 64), "causal": True},
    "heads that share keys": {"shape": (2, 6, 2, 17, 40, 32), "causal": True},
    "window and softcap": {"shape": (1, 2, 2, 40, 40, 16), "window": (5, 2), "softcap": 3.0},
    "decode": {"shape": (2, 8, 2, 1, 70, 64)},
    "more queries than keys": {"shape": (1, 1, 1, 9, 4, 8), "causal": True},
}


@dataclass(frozen=True)
class Case:
    """One input of an operation."""

    name: str
    given: Any = None
    source: str = ""
    is_gradient: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def cases_of(op: str, device: str, is_quick: bool) -> list[Case]:
    """The inputs of an operation, both directions."""
    if op == "attention":
        named = list(ATTENTIONS.items())[:: 2 if is_quick else 1]
        return [
            Case(f"{name}{suffix}", given, is_gradient=bool(suffix))
            for name, given in named
            for suffix in ("", ", gradient")
        ]
    sizes = [*SIZES, *(GPU_SIZES if device == "cuda" and not is_quick else ())]
    if op == "linear_cross_entropy":
        works = [(5, 8, 33), (12, 16, 1000)]
        return [Case(f"{m}, {w}", (w, m)) for m in ("low", "fast") for w in works]
    named_sizes = [(f"{rows}x{cols}", (rows, cols)) for rows, cols in sizes]
    if op == "token_stats":
        return [Case(name, given) for name, given in named_sizes]
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
    found = [
        Case(f"normal {name}{suffix}", given, is_gradient=bool(suffix))
        for name, given in named_sizes
        for suffix in ("", ", gradient")
    ]
    values = [c for c in cases.CASES if (c.rows, c.cols) == VALUES and c.layout == "contiguous"]
    return found + [Case(c.name, c, c.source) for c in values[:: 3 if is_quick else 1]]


def runs(op: str, dtype: torch.dtype, device: str) -> Callable[[Case], Ran]:
    """What runs a case of an operation."""
    one: Callable[..., Ran] = {
        "attention": _attention,
        "linear_cross_entropy": _linear,
        "cross_entropy": _cross_entropy,
        "token_stats": _token_stats,
    }.get(op, _of_rows)
    return lambda case: one(op, case, dtype, device)


def _normal(case: Case, shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Numbers of a case's own, the same on every machine: a CPU makes them."""
    made = torch.randn(*shape, generator=judge.generator(case.name), dtype=torch.float64)
    return made.to(dtype).to(device)


def _judged(found: opjudge.Judged) -> Ran:
    return Ran(why=found.why, max_error=0.0 if math.isnan(found.share_max) else found.share_max)


# ---- of rows


def _of_rows(op: str, case: Case, dtype: torch.dtype, device: str) -> Ran:
    function = getattr(online_softmax, op)
    if isinstance(case.given, judge.Case):
        x = judge.lay_out(case.given, dtype, device)
        return _judged(opjudge.check(op, [x], function(x, -1)))
    x = _normal(case, case.given, dtype, device) * 3
    y = function(x, -1)
    if not case.is_gradient:
        return _judged(opjudge.check(op, [x], y))
    if op == "logsumexp":  # of the sum of all: softmax
        (dx,) = gradients.of(lambda leaf: function(leaf, -1).sum(), x)
        return _judged(opjudge.check("softmax", [x], dx))
    dy = torch.ones_like(y) + _normal(case, y.shape, dtype, device)
    (dx,) = gradients.of(lambda leaf: (function(leaf, -1) * dy).sum(), x)
    return _judged(opjudge.check(f"{op}_backward", [dy, y], dx))


def _targets(case: Case, size: tuple[int, int], device: str) -> Tensor:
    rows, cols = size
    return torch.randint(cols, (rows,), generator=judge.generator(case.name)).to(device)


def _cross_entropy(op: str, case: Case, dtype: torch.dtype, device: str) -> Ran:
    x, target = _normal(case, case.given, dtype, device), _targets(case, case.given, device)
    if not case.is_gradient:
        loss = online_softmax.cross_entropy(x, target)
        return _judged(lossjudge.check(op, x, target, loss))
    (dx,) = gradients.of(lambda z: online_softmax.cross_entropy(z, target, **case.options), x)
    # Made in the forward, before what arrives from above is known, it is rounded twice.
    ulps = opjudge.OUR_ULPS * (2 if case.options else 1)
    return _judged(lossjudge.check("cross_entropy_both", x, target, dx, ulps))


def _token_stats(op: str, case: Case, dtype: torch.dtype, device: str) -> Ran:
    x, target = _normal(case, case.given, dtype, device), _targets(case, case.given, device)
    found = online_softmax.token_stats(x, target, top_k=min(lossjudge.TOP_K, x.shape[1]))
    return _judged(lossjudge.check(op, x, target, found))


# ---- of more tensors


def _linear(op: str, case: Case, dtype: torch.dtype, device: str) -> Ran:
    (tokens, features, classes), memory = case.given
    x, weight = (
        _normal(case, shape, dtype, device) for shape in ((tokens, features), (classes, features))
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


def _attention(op: str, case: Case, dtype: torch.dtype, device: str) -> Ran:
    options = {name: value for name, value in case.given.items() if name != "shape"}
    batch, heads, kv_heads, q_len, k_len, dim = case.given["shape"]
    made = _normal(case, (batch * (heads * q_len + 2 * kv_heads * k_len) * dim,), dtype, device)
    sizes = (batch * heads * q_len * dim, *[batch * kv_heads * k_len * dim] * 2)
    shapes = ((batch, heads, q_len, dim), *[(batch, kv_heads, k_len, dim)] * 2)
    q, k, v = (part.view(s) for part, s in zip(made.split(sizes), shapes, strict=True))
    if not case.is_gradient:
        out, lse = online_softmax.attention(q, k, v, return_lse=True, **options)
        want, want_lse = written_out(q.double(), k.double(), v.double(), **options)
        return _near((("out", out, want, OUT[dtype]), ("lse", lse, want_lse, LSE)))
    dout = _normal(case, q.shape, dtype, device)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        function: Any = online_softmax.attention if q.dtype == dtype else _out
        out: Tensor = function(q, k, v, **options)
        return (out * dout.to(q.dtype)).sum()

    got = gradients.of(loss, q, k, v)
    wanted = gradients.of(loss, q.double(), k.double(), v.double())
    names = ("the gradient by q", "by k", "by v")
    return _near([(n, g, w, GRADIENT[dtype]) for n, g, w in zip(names, got, wanted, strict=True)])


def _out(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return written_out(q, k, v, **options)[0]


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention by the whole matrix of scores, in the dtype given; differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    z = (q @ k.mT) / math.sqrt(q.shape[-1])
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    q_len, k_len = z.shape[-2:]
    place = torch.arange(q_len, device=q.device).unsqueeze(1) + k_len - q_len
    key = torch.arange(k_len, device=q.device)
    seen = torch.ones(q_len, k_len, dtype=torch.bool, device=q.device)
    if causal:
        seen &= key <= place
    if window is not None:
        seen &= (key >= place - window[0]) & (key <= place + window[1])
    empty = ~seen.any(-1, keepdim=True)
    z = z.masked_fill(~seen & ~empty, -math.inf)
    out = torch.softmax(z, -1).masked_fill(empty, 0.0) @ v
    return out, torch.logsumexp(z, -1).masked_fill(empty.squeeze(-1), -math.inf)


def _near(parts: Sequence[tuple[str, Tensor, Tensor, float]]) -> Ran:
    """Results beside float64 ones, each within a share of its largest element, at least 1."""
    worst = 0.0
    for what, got, want, share in parts:
        if got.shape != want.shape:
            return Ran(why=f"{what} is {tuple(got.shape)}, should be {tuple(want.shape)}")
        same = got.double() == want
        off = (got.double() - want).abs().masked_fill(same, 0.0)
        allowed = share * max(float(want.nan_to_num(0.0, 0.0, 0.0).abs().max()), 1.0)
        largest = float(off.nan_to_num(math.inf).max())
        if not largest <= allowed:
            at = tuple(int(i) for i in (off.nan_to_num(math.inf) == largest).nonzero()[0])
            return Ran(
                why=f"{what}{list(at)} is {float(got[at]):.9g}, should be {float(want[at]):.9g} "
                f"(allowed error {allowed:.2g})"
            )
        worst = max(worst, largest)
    return Ran(max_error=worst)
