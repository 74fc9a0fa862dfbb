"""attention, attention_varlen and attention_state against the whole matrix of scores in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import online_softmax
from online_softmax.lab import gradients
from online_softmax.lab.checkcase import GRADIENT, LSE, OUT, Case, both, near, normal
from online_softmax.lab.contract import Ran

# Of shapes batch, heads, kv_heads, q_len, k_len, head_dim; bias and mask broadcast to the scores.
ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {"shape": (2, 4, 4, 9, 13, 16)},
    "causal": {"shape": (1, 2, 2, 33, 33, 64), "causal": True},
    "heads that share keys": {"shape": (2, 6, 2, 17, 40, 32), "causal": True},
    "bias and mask": {"shape": (2, 4, 2, 9, 13, 16), "bias": (1, 4, 9, 13), "mask": (2, 1, 9, 13)},
    "window and softcap": {"shape": (1, 2, 2, 40, 40, 16), "window": (5, 2), "softcap": 3.0},
    "sinks": {"shape": (2, 4, 2, 9, 13, 32), "causal": True, "sinks": True},
    "decode": {"shape": (2, 8, 2, 1, 70, 64)},
    "more queries than keys": {"shape": (1, 1, 1, 9, 4, 8), "causal": True},
    "every option": {
        "shape": (2, 4, 2, 20, 37, 16), "causal": True, "window": (12, 0), "softcap": 4.0,
        "bias": (2, 1, 1, 37), "mask": (1, 4, 20, 1), "sinks": True, "scale": 0.4,
    },
}  # fmt: skip
# Of heads, kv_heads, head_dim; the lengths of queries and keys of each sequence.
PACKED: dict[str, dict[str, Any]] = {
    "plain": {"shape": (4, 4, 16), "queries": (5, 1, 17), "keys": (5, 1, 17)},
    "causal, one is empty": {
        "shape": (4, 2, 32), "queries": (3, 0, 33), "keys": (9, 4, 33), "causal": True,
    },
    "a decode": {"shape": (8, 2, 64), "queries": (1, 1, 1), "keys": (70, 0, 33)},
    "window, softcap and sinks": {
        "shape": (2, 1, 16), "queries": (40, 12), "keys": (40, 12), "window_size": (5, 2),
        "softcap": 3.0, "sinks": True,
    },
}  # fmt: skip
STATES: dict[str, dict[str, Any]] = {  # as ATTENTIONS, and where the keys are parted
    "two parts": {"shape": (2, 4, 2, 9, 13, 16), "at": (5,)},
    "softcap and four parts, one empty": {
        "shape": (1, 2, 2, 9, 40, 32), "at": (1, 1, 33), "softcap": 3.0,
    },
    "bias and mask": {
        "shape": (2, 4, 2, 9, 13, 16), "at": (6,), "bias": (1, 4, 9, 13), "mask": (2, 1, 9, 13),
    },
    "a decode": {"shape": (2, 8, 2, 1, 70, 64), "at": (33,)},
}  # fmt: skip
OF = {"attention": ATTENTIONS, "attention_varlen": PACKED, "attention_state": STATES}
NOT_OPTIONS = ("shape", "queries", "keys", "at")


def cases_of(op: str, is_quick: bool) -> list[Case]:
    """The inputs of an operation of OF, both directions."""
    return both(list(OF[op].items())[:: 2 if is_quick else 1])


def run(op: str, case: Case, dtype: torch.dtype, device: str) -> Ran:
    """Run and judge a case."""
    one = {"attention": _attention, "attention_varlen": _varlen, "attention_state": _state}
    return one[op](case, dtype, device)


def _tensors(case: Case, shapes: Sequence[Sequence[int]], where: tuple[Any, str]) -> list[Tensor]:
    return [normal(case, shape, *where, role=f" {i}") for i, shape in enumerate(shapes)]


def _options(case: Case, heads: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The options of a case, with tensors for the shapes that it names."""
    found = {name: value for name, value in case.given.items() if name not in NOT_OPTIONS}
    if "bias" in found:
        found["bias"] = normal(case, found["bias"], dtype, device, " bias")
    if "mask" in found:
        found["mask"] = normal(case, found["mask"], dtype, device, " mask") > -0.5
    if "sinks" in found:
        found["sinks"] = normal(case, (heads,), dtype, device, " sinks")
    return found


def _judged(
    ours: Callable[..., Any], right: Callable[..., Any], tensors: dict[str, Tensor], case: Case,
    dtype: torch.dtype,
) -> Ran:  # fmt: skip
    """Both on the same tensors, by name, right's in float64: (out, lse), or the gradients of out by
    each, of numbers as many as out."""
    wide = {name: t.double() for name, t in tensors.items()}
    if not case.is_gradient:
        (out, lse), (want, want_lse) = ours(**tensors), right(**wide)
        return near((("out", out, want, OUT[dtype]), ("lse", lse, want_lse, LSE)))

    def loss(function: Callable[..., Any]) -> Callable[..., Tensor]:
        def made(*leaves: Tensor) -> Tensor:
            out: Tensor = function(**dict(zip(tensors, leaves, strict=True)))[0]
            dout = normal(case, out.shape, dtype, str(out.device), " dout")
            return (out * dout.to(out.dtype)).sum()

        return made

    got = gradients.of(loss(ours), *tensors.values())
    wanted = gradients.of(loss(right), *wide.values())
    parts = zip(tensors, got, wanted, strict=True)
    return near([(f"the gradient by {name}", g, w, GRADIENT[dtype]) for name, g, w in parts])


def _attention(case: Case, dtype: torch.dtype, device: str) -> Ran:
    batch, heads, kv_heads, q_len, k_len, dim = case.given["shape"]
    shapes = ((batch, heads, q_len, dim), *[(batch, kv_heads, k_len, dim)] * 2)
    q, k, v = _tensors(case, shapes, (dtype, device))
    options = _options(case, heads, dtype, device)
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {name: options.pop(name) for name in ("bias", "sinks") if name in options}

    def ours(**given: Any) -> Any:
        return online_softmax.attention(**given, **options, return_lse=True)

    return _judged(ours, lambda **given: written_out(**given, **options), tensors, case, dtype)


def _varlen(case: Case, dtype: torch.dtype, device: str) -> Ran:
    heads, kv_heads, dim = case.given["shape"]
    queries, keys = case.given["queries"], case.given["keys"]
    shapes = ((sum(queries), heads, dim), *[(sum(keys), kv_heads, dim)] * 2)
    q, k, v = _tensors(case, shapes, (dtype, device))
    options = _options(case, heads, dtype, device)
    tensors = {"query": q, "key": k, "value": v}
    tensors |= {name: options.pop(name) for name in ("sinks",) if name in options}
    ends_q, ends_k = (
        torch.tensor([0, *each], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        for each in (queries, keys)
    )

    def ours(**given: Tensor) -> Any:
        beside: dict[str, Any] = {"cu_seq_q": ends_q, "cu_seq_k": ends_k, **given, **options}
        beside |= {"max_q": max(queries), "max_k": max(keys), "return_lse": True}
        return online_softmax.attention_varlen(**beside)

    def right(query: Tensor, key: Tensor, value: Tensor, **sinks: Any) -> tuple[Tensor, Tensor]:
        named = dict(options)
        window = named.pop("window_size", None)
        found = []
        parts = (query.split(queries), key.split(keys), value.split(keys))
        for each in zip(*parts, strict=True):
            one, k, v = (t.transpose(0, 1).unsqueeze(0) for t in each)
            out, lse = written_out(one, k, v, window=window, **named, **sinks)
            found.append((out[0].transpose(0, 1), lse[0].transpose(0, 1)))
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs), torch.cat(lses)

    return _judged(ours, right, tensors, case, dtype)


def _state(case: Case, dtype: torch.dtype, device: str) -> Ran:
    """Each part's state is that of its keys; together they are attention over all."""
    batch, heads, kv_heads, q_len, k_len, dim = case.given["shape"]
    shapes = ((batch, heads, q_len, dim), *[(batch, kv_heads, k_len, dim)] * 2)
    q, k, v = _tensors(case, shapes, (dtype, device))
    options = _options(case, heads, dtype, device)
    places = (0, *case.given["at"], k_len)
    parts = [slice(a, b) for a, b in pairwise(places)]
    tensors = {"q": q, "k": k, "v": v}
    if "bias" in options:
        tensors["bias"] = options.pop("bias")
    mask = options.pop("mask", None)

    def of(part: slice, given: dict[str, Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "q": given["q"],
            "k": given["k"][:, :, part],
            "v": given["v"][:, :, part],
        }
        if "bias" in given:
            found["bias"] = given["bias"][..., part]
        return found if mask is None else {**found, "mask": mask[..., part]}

    def ours(**given: Tensor) -> Any:
        states = [online_softmax.attention_state(**of(part, given), **options) for part in parts]
        whole = online_softmax.merge(*states)
        return whole.output(), whole.lse()  # type: ignore[union-attr]

    def right(**given: Tensor) -> Any:
        return written_out(**of(slice(None), given), **options)

    ran = _judged(ours, right, tensors, case, dtype)
    if ran.why or case.is_gradient:
        return ran
    wide = {name: t.double() for name, t in tensors.items()}
    for i, part in enumerate(parts):
        state = online_softmax.attention_state(**of(part, tensors), **options)
        out, lse = written_out(**of(part, wide), **options)
        one = near(((f"the output of part {i}", state.output(), out, OUT[dtype]),
                    (f"the lse of part {i}", state.lse(), lse, LSE)))  # fmt: skip
        if one.why:
            return one
    return ran


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention by the whole matrix of scores, in the dtype given; differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    z = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if bias is not None:
        z = z + bias
    q_len, k_len = z.shape[-2:]
    if not k_len:
        return torch.zeros_like(q @ k.mT @ v), z.new_full(z.shape[:-1], -math.inf)
    place = torch.arange(q_len, device=q.device).unsqueeze(1) + k_len - q_len
    key = torch.arange(k_len, device=q.device)
    seen = torch.ones(z.shape, dtype=torch.bool, device=q.device)
    if causal:
        seen &= key <= place
    if window is not None:
        seen &= (key >= place - window[0]) & (key <= place + window[1])
    if mask is not None:
        seen &= mask
    empty = ~seen.any(-1, keepdim=True)
    z = z.masked_fill(~seen & ~empty, -math.inf)
    lse = torch.logsumexp(z, -1)
    beside = z if sinks is None else torch.cat((z, _column(sinks, z)), -1)
    p = torch.softmax(beside, -1)[..., :k_len].masked_fill(empty, 0.0)
    return p @ v, lse.masked_fill(empty.squeeze(-1), -math.inf)


def _column(sinks: Tensor, z: Tensor) -> Tensor:
    return sinks.to(z.dtype).view(1, -1, 1, 1).expand(*z.shape[:-1], 1)
