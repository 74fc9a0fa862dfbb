"""For sanitize_rungs.py: attention's kernels and the kernel that merges, on small ragged shapes
with every option. Each function gives the names of what was wrong, against the reference in
float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from attention_kit import CASES, PLAIN, Inputs, inputs, upstream
from merge_kit import KINDS, parts
from merge_kit import upstream as for_merged
from online_softmax import attentionops, decodeplan, mergekernels
from online_softmax.attentionplan import Options
from online_softmax.catalogue import FLOATS, HALVES
from online_softmax.reference import attention as reference
from online_softmax.reference import attention_gradient
from online_softmax.reference import packed as packed_reference
from online_softmax.reference import parts as reference_parts
from online_softmax.reference.packed import Packed

NAMES = ("causal_more_queries", "window", "all", "mask", "decode")  # each is compiled anew
DIMS = {torch.float32: (40,), torch.float16: (40,), torch.bfloat16: (8, 128)}
BOUND = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def merges(device: str = "cuda") -> Iterator[str]:
    """States and pairs, few and many, of odd dims, and their gradients."""
    for kind, count in itertools.product(KINDS, (2, 3, 17)):
        for dtype in FLOATS if kind.startswith("pairs") else FLOATS[:1]:
            for dim in (1, 33, 80) if kind != "states_alone" else (0,):
                given = parts(kind, count, (5, 3), dim, dtype, device)
                got = mergekernels.forward(given)
                above = for_merged(got)
                found = mergekernels.backward(*above, given)
                wide = given.double()
                right = reference_parts.forward(wide)
                by = (t if t is None else t.double() for t in above)
                pairs = [*zip(got, right, strict=True)]
                pairs += zip(found, reference_parts.backward(*by, wide), strict=True)
                if not are_near(pairs, dtype):
                    yield f"merge of {count} {kind} {dtype} dim {dim}"


def attention(device: str = "cuda") -> Iterator[str]:
    """Forward, gradients, states, keys in parts and packed sequences."""
    for dtype in FLOATS:
        for name, dim in itertools.product(NAMES, DIMS[dtype]):
            o, shapes = CASES[name]
            few = {"q_len": 33, "k_len": 47} if name == "mask" else {}
            given = inputs(**{**shapes, **few, "dim": dim})
            if not is_right(given.cast(dtype, device), o):
                yield f"attention {name} {dtype} dim {dim}"
        many = inputs(2, 4, 2, 3, 700, 40).cast(dtype, device)  # keys in parts
        if not is_right(many, PLAIN._replace(right=0)):
            yield f"attention {dtype} of keys in parts"
        for lens in (((3, 0, 21, 1), (4, 2, 0, 35)), ((1, 0, 4, 1), (700, 2, 0, 300))):
            if not is_right_packed(dtype, *lens, device):
                yield f"attention {dtype} of sequences of {lens}"


def decodes(device: str = "cuda") -> Iterator[str]:
    """A few queries over two parts of the keys and more, by cuda/decode.cu."""
    o = PLAIN._replace(right=0)
    for dtype, dim in itertools.product(HALVES, decodeplan.DIMS):
        q_len = 3 * decodeplan.tiles(dim)  # of the two heads that share keys: as many products
        shapes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": q_len, "k_len": 700, "dim": dim}
        for name, options in (("causal", o), ("window", o._replace(left=530, softcap=2.0))):
            given = inputs(**shapes, sinks=name == "window").cast(dtype, device)
            if not is_right(given, options, "cuda"):
                yield f"decode {name} {dtype} dim {dim}"


def is_right(given: Inputs, o: Options, kernel: str = "triton") -> bool:
    """Results, states and gradients of one call."""
    tensors = (*given, None, None)
    out, lse, _, _ = attentionops.forward(tensors, o, False, kernel)
    state = attentionops.forward(tensors, o, True, kernel)
    up = upstream(given)
    above = up.dout.to(out.device, out.dtype), up.dlse.to(lse.device, lse.dtype)
    wants = [True, True, True, given.bias is not None, given.sinks is not None]
    found = attentionops.backward(*above, tensors, out, lse, o, wants, kernel)
    wide = given.cast(torch.float64, str(out.device))
    right = reference.forward(*wide, o)
    above = [t.double() for t in above]
    by = attention_gradient.backward(*above, *wide, right.out, right.lse, o)
    pairs = [(out, right.out), (lse, right.lse), (state[0], right.out), (state[1], right.lse)]
    pairs += [(a, b) for a, b, is_there in zip(found, by, wants, strict=True) if is_there]
    return are_near(pairs, out.dtype)


def is_right_packed(
    dtype: torch.dtype, q_lens: tuple[int, ...], k_lens: tuple[int, ...], device: str
) -> bool:
    """The same of packed sequences."""
    ends = [torch.tensor([0, *n], device=device).cumsum(0).int() for n in (q_lens, k_lens)]
    q = torch.randn(sum(q_lens) + 2, 4, 40).to(device, dtype)
    k, v = (torch.randn(sum(k_lens) + 3, 2, 40).to(device, dtype) for _ in range(2))
    o = PLAIN._replace(right=0, max_q=max(q_lens), max_k=max(k_lens))
    tensors = (q, k, v, None, None, None, *ends)
    out, lse, _, _ = attentionops.forward(tensors, o, False, "triton")
    dout = torch.randn_like(out)
    wants = [True, True, True, False, False]
    found = attentionops.backward(dout, None, tensors, out, lse, o, wants, "triton")
    wide = (*(t.double() for t in (q, k, v)), None, Packed(*ends))
    right = packed_reference.forward(*wide, o)
    by = packed_reference.backward(dout.double(), None, *wide, right.out, right.lse, o)
    pairs = [(out, right.out), (lse, right.lse), *zip(found[:3], by[:3], strict=True)]
    return are_near(pairs, dtype)


def are_near(pairs: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> bool:
    return all(near(got, want, BOUND[dtype]) for got, want in pairs)


def near(got: Tensor, want: Tensor, bound: float) -> bool:
    """Within a part of the largest, NaN and infinities in the same places."""
    got, want = got.double().cpu(), want.double().cpu()
    finite = want[want.isfinite()].abs()
    most = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(got, want, rtol=bound, atol=bound * (most + 0.1), equal_nan=True)
