"""Attention of a few queries over many keys by cuda/decode.cu, on plain tensors: no autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from online_softmax import attentionkernels, catalogue, notedcalls, rowkernels
from online_softmax import decodeplan as plan
from online_softmax.attentionplan import Options, has_dependent_launch
from online_softmax.cuda.launch import Launch
from online_softmax.keptcalls import Given, Made
from online_softmax.plan import MAX_GRID, VECTOR_BYTES, ceil_div

FIRST_ARCH = 80  # whose tensor cores take bfloat16
MOST = 2**31 - 1  # the kernel counts keys and parts up to it, and looks a grid or a part ahead

Empty = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]


def reasons(given: Given) -> list[str]:
    """Why the kernel does not run a forward, each a sentence; empty: it does.

    Args:
        given: as for `attentionops.forward`.
    """
    q, k, v, bias, mask, _, cu_seq_q, _ = given
    if q is None or k is None or v is None:
        raise AssertionError("attention has q, k and v")
    if not rowkernels.has_kernels(q):
        missing = catalogue.lacks("cuda")
        return [missing or f"it runs on CUDA tensors; this one is on {q.device}"]
    arch = catalogue.arch_of(q)
    return [*of_device(arch), *unfit(q, k, v, bias, mask, cu_seq_q)]


def of_device(arch: str) -> list[str]:
    """`reasons` that lie in the device."""
    if int(arch.removeprefix("sm_").rstrip("a")) >= FIRST_ARCH:
        return []
    return [f"it takes sm_{FIRST_ARCH} or later; this is {arch}"]


def unfit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    cu_seq_q: Tensor | None,
) -> list[str]:
    """`reasons` that do not lie in the device."""
    if cu_seq_q is not None:
        return ["it takes no packed sequences"]
    why = []
    if bias is not None or mask is not None:
        why.append("it takes no bias and no mask")
    if q.dtype not in catalogue.HALVES:
        why.append(f"it takes float16 and bfloat16; this is {q.dtype}")
    dim = q.shape[-1]
    if dim not in plan.DIMS or v.shape[-1] != dim:
        dims = ", ".join(map(str, plan.DIMS))
        why.append(f"it takes a head_dim of {dims} for keys and values; this has {dim}, "
                   f"{v.shape[-1]}")  # fmt: skip
        return why
    (batch, heads, q_len, _), (kv_heads, k_len) = q.shape, k.shape[1:3]
    rows, most = heads // max(kv_heads, 1) * q_len, plan.ROWS * plan.tiles(dim)
    if not 0 < rows <= most or not batch:
        why.append(f"it takes 1 to {most} queries of the heads that share keys; these are {rows}")
        return why
    parts = ceil_div(k_len, plan.cut(dim, rows, k_len).keys)
    if parts < 2:
        why.append(f"{k_len} keys are one part: nothing to merge")
    blocks = batch * heads * q_len * (dim // plan.PIECE)  # of a merge, at most
    if max(k_len, batch * kv_heads * parts) > MOST // 2 or blocks > MAX_GRID:
        why.append("more keys or parts than it counts")
    if not all(_is_aligned(t) for t in (q, k, v)):
        why.append(f"rows of q, k and v must be contiguous and lie on {VECTOR_BYTES} bytes")
    return why


def _is_aligned(t: Tensor) -> bool:
    """Whether each row begins on a boundary of vectors, and the next is not too far."""
    count = VECTOR_BYTES // t.element_size()
    is_even = all(
        s % count == 0 or n == 1 for s, n in zip(t.stride()[:3], t.shape[:3], strict=True)
    )
    return t.stride(3) == 1 and is_even and t.stride(2) <= MOST and not t.data_ptr() % VECTOR_BYTES


def multiprocessors_of(x: Tensor) -> int:
    """Of a tensor's device; off CUDA, those of the default architecture's."""
    return catalogue.problem_of(x.view(1, -1) if x.is_meta else x[0, 0]).multiprocessors


def forward(given: Given, o: Options, with_state: bool, kernel: str) -> Made:
    """(out, lse, m, d), the last two None unless with_state. `reasons` were none."""
    q = given[0]
    if q is None:
        raise AssertionError("attention has a q")

    def call() -> tuple[Tensor, ...]:
        made, work = launches(given, o, with_state, notedcalls.empty)
        notedcalls.run(work, q.device)
        return made  # type: ignore[return-value]

    return notedcalls.repeated(attentionkernels.FORWARD, (o, with_state, kernel), given, call)


def launches(given: Given, o: Options, with_state: bool, empty: Empty) -> tuple[Made, list[Launch]]:
    """The results, and what fills them."""
    from online_softmax.cuda import decode_launch

    q, k, v, sinks = given[0], given[1], given[2], given[5]
    if q is None or k is None or v is None:
        raise AssertionError("attention has q, k and v")
    (batch, heads, q_len, dim), (kv_heads, k_len) = q.shape, k.shape[1:3]
    cut = plan.cut(dim, heads // kv_heads * q_len, k_len)
    count, arch = ceil_div(k_len, cut.keys), catalogue.arch_of(q)
    states = empty((decode_launch.memory(q, count),), torch.float32, q.device)
    out = empty(tuple(q.shape), torch.float32 if with_state else q.dtype, q.device)
    rows = batch, heads, q_len
    lse = empty(rows, torch.float32, q.device)
    m, d = (empty(rows, torch.float32, q.device) if with_state else None for _ in "md")
    if sinks is not None:
        sinks = (sinks.float() if sinks.dtype == torch.float64 else sinks).contiguous()
    overlaps = has_dependent_launch(arch)
    work = [
        decode_launch.parts(q, k, v, o, cut, multiprocessors_of(q), states),
        decode_launch.merge(states, count, sinks, out, lse, m, d, o.nan_empty, overlaps),
    ]
    return (out, lse, m, d), work
