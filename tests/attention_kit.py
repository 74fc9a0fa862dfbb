"""What the tests of attention share: inputs, the options, and the formula in float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from online_softmax import attention
from online_softmax.attentionplan import Options

INF, NAN = math.inf, math.nan
PLAIN = Options(0, 0, None, -1, -1, False, None, False)


class Inputs(NamedTuple):
    """The tensors of a call, in the order of the op's."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None

    def cast(self, dtype: torch.dtype, device: str = "cpu") -> Inputs:
        """Of another dtype and device; sinks stay as they are but for the device."""
        *first, mask, sinks = (t if t is None else t.to(device) for t in self)
        return Inputs(*(t if t is None else t.to(dtype) for t in first), mask, sinks)

    def leaves(self) -> Inputs:
        """In float64, each float one to be differentiated by."""
        return Inputs(
            *(
                t
                if t is None or not t.is_floating_point()
                else t.detach().double().requires_grad_()
                for t in self
            )
        )

    def floats(self) -> list[Tensor]:
        return [t for t in self if t is not None and t.is_floating_point()]


def inputs(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 9,
    k_len: int = 13,
    dim: int = 8,
    value_dim: int | None = None,
    bias: tuple[int, ...] | None = None,
    mask: tuple[int, ...] | None = None,
    sinks: bool = False,
) -> Inputs:
    """float64, of the shapes asked for; of bias and mask, 0 stands for the whole length."""
    whole = (batch, heads, q_len, k_len)
    generator = torch.Generator().manual_seed(q_len * 31 + k_len)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.double)

    def shape(given: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size or full for size, full in zip(given, whole, strict=True))

    return Inputs(
        normal(batch, heads, q_len, dim),
        normal(batch, kv_heads, k_len, dim),
        normal(batch, kv_heads, k_len, value_dim or dim),
        None if bias is None else normal(*shape(bias)),
        None if mask is None else normal(*shape(mask)) > -0.5,
        normal(heads) if sinks else None,
    )


def few(q_len: int, k_len: int, dim: int = 64, group: int = 2, **more: Any) -> Inputs:
    """`inputs` of a few queries of heads, `group` of which share keys."""
    return inputs(**{"batch": 2, "heads": 2 * group, "kv_heads": 2, **more}, q_len=q_len,
                  k_len=k_len, dim=dim)  # fmt: skip


def allowed(q_len: int, k_len: int, o: Options) -> Tensor:
    """(q_len, k_len), by the words of the documentation."""
    seen = torch.zeros(q_len, k_len, dtype=torch.bool)
    for i in range(q_len):
        place = i if o.top_left else i + k_len - q_len
        for j in range(k_len):
            seen[i, j] = (o.left < 0 or j >= place - o.left) and (
                o.right < 0 or j <= place + o.right
            )
    return seen


def written_out(given: Inputs, o: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) in the dtype given, by the whole matrix of scores; differentiable."""
    q, k, v, bias, mask, sinks = given
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    z = (q @ k.mT) * o.scale_for(q.shape[-1])
    if o.softcap is not None:
        z = o.softcap * torch.tanh(z / o.softcap)
    if bias is not None:
        z = z + bias
    seen = allowed(q.shape[2], k.shape[2], o).to(q.device).expand(z.shape)
    if mask is not None:
        seen = seen & mask
    empty = ~seen.any(-1, keepdim=True)
    z = torch.where(seen, z, -INF).masked_fill(empty, 0.0)  # filled in again below
    if sinks is None:
        p = torch.softmax(z, -1)
    else:
        beside = sinks.to(z.dtype).view(-1, 1, 1).expand(*z.shape[:-1], 1)
        p = torch.softmax(torch.cat([z, beside], -1), -1)[..., :-1]
    out = p.masked_fill(empty, 0.0) @ v
    lse = torch.logsumexp(z, -1).masked_fill(empty.squeeze(-1), -INF)
    if o.nan_empty:
        out = out.masked_fill(empty, NAN)
    return out, lse


class Upstream(NamedTuple):
    dout: Tensor
    dlse: Tensor


def upstream(given: Inputs) -> Upstream:
    generator = torch.Generator().manual_seed(5)
    shape = given.q.shape[:3]
    dout = torch.randn((*shape, given.v.shape[-1]), generator=generator, dtype=torch.double)
    return Upstream(dout, torch.randn(shape, generator=generator, dtype=torch.double))


def wanted(given: Inputs, o: Options, dout: Tensor, dlse: Tensor | None) -> Any:
    """(out, lse) in float64, and the gradients by what is a float among the inputs."""
    leaves = given.leaves()
    out, lse = written_out(leaves, o)
    # A query without a key has no gradient, whatever arrives.
    is_empty = lse == -INF
    loss = (torch.where(is_empty.unsqueeze(-1), 0.0, out) * dout.double()).sum()
    if dlse is not None:
        loss = loss + (torch.where(is_empty, 0.0, lse) * dlse.double()).sum()
    found = torch.autograd.grad(loss, leaves.floats(), allow_unused=True, materialize_grads=True)
    return out.detach(), lse.detach(), list(found)


# Options, and what inputs() takes for them.
CASES: dict[str, tuple[Options, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "causal": (PLAIN._replace(right=0), {}),
    "causal_more_queries": (PLAIN._replace(right=0), {"q_len": 13, "k_len": 6}),
    "top_left": (PLAIN._replace(right=0, top_left=True), {"q_len": 13, "k_len": 6}),
    "window": (PLAIN._replace(left=3, right=2), {"q_len": 17, "k_len": 21}),
    "left": (PLAIN._replace(left=2), {"q_len": 7, "k_len": 5}),
    "right": (PLAIN._replace(right=3, top_left=True), {}),
    "scale": (PLAIN._replace(scale=0.7), {}),
    "scale_0": (PLAIN._replace(scale=0.0), {}),
    "softcap": (PLAIN._replace(softcap=1.5, right=0), {}),
    "bias": (PLAIN, {"bias": (0, 0, 0, 0)}),
    "bias_shared": (PLAIN._replace(softcap=2.0), {"bias": (1, 0, 0, 0)}),
    "bias_of_keys": (PLAIN._replace(right=0), {"bias": (0, 1, 1, 0)}),
    "bias_of_queries": (PLAIN, {"bias": (1, 0, 0, 1)}),
    "bias_one": (PLAIN, {"bias": (1, 1, 1, 1)}),
    "mask": (PLAIN, {"mask": (0, 0, 0, 0)}),
    "mask_of_keys": (PLAIN._replace(right=0), {"mask": (0, 1, 1, 0)}),
    "mask_of_queries": (PLAIN, {"mask": (1, 1, 0, 1)}),
    "sinks": (PLAIN._replace(right=0), {"sinks": True}),
    "all": (
        Options(0, 0, 0.4, 4, 1, False, 3.0, False),
        {"bias": (1, 0, 0, 0), "mask": (0, 1, 0, 0), "sinks": True, "value_dim": 5},
    ),
    "nan": (PLAIN._replace(right=0, nan_empty=True), {"q_len": 9, "k_len": 4, "sinks": True}),
    "no_keys": (PLAIN, {"k_len": 0, "sinks": True}),
    "no_queries": (PLAIN, {"q_len": 0}),
    "one_head_of_keys": (PLAIN._replace(right=0), {"heads": 6, "kv_heads": 1}),
    "decode": (PLAIN._replace(right=0), {"q_len": 1, "k_len": 40}),
}

# How a case of the kit is asked for.
WORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal_more_queries": {"causal": True},
    "top_left": {"causal": "top_left"},
    "window": {"window": (3, 2)},
    "softcap": {"causal": True, "softcap": 1.5},
    "bias_of_keys": {"causal": True},
    "scale_0": {"scale": 0.0},
    "all": {"scale": 0.4, "window": (4, 1), "softcap": 3.0},
    "nan": {"causal": True, "empty": "nan"},
    "no_keys": {},
}


def call(name: str, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> Any:
    bias, mask, sinks = rest
    options = {"bias": bias, "mask": mask, "sinks": sinks, "return_lse": True, **WORDS[name]}
    return attention(q, k, v, **options)
