"""The public attention functions: check the arguments once, then call the library.

A call like one before starts its kernels again at once.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from online_softmax import library
from online_softmax.arguments import check_bool
from online_softmax.attentionarguments import (
    check_attention_kernel,
    check_beside,
    check_length,
    check_options,
    check_sequences,
    check_sinks,
    check_tokens,
)
from online_softmax.reference.outputs import OutputState

_again = library.attention_again
NOT_PACKED = (0, 0)  # the lengths of packed sequences
Causal = bool | Literal["top_left"]
Empty = Literal["zero", "nan"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    empty: Empty = "zero",
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(cap(scale q k) + bias) v along the keys that a query sees, without the matrix.

    cap(t) is softcap * tanh(t / softcap), or t without one. Sums are in float32 (float64); the
    result is rounded once. Query i stands at key i + k_len - q_len: the last query at the last key.

    Args:
        q: (batch, heads, q_len, head_dim); float16, bfloat16, float32 or float64; any strides.
        k: (batch, kv_heads, k_len, head_dim). kv_heads divides heads: so many heads, side by side,
            share one of k and v.
        v: (batch, kv_heads, k_len, value_dim), most often head_dim. A key that is not seen counts
            0 times: its values must be finite.
        causal: a query sees no key behind its place. "top_left": query i stands at key i, as in
            torch.
        scale: finite; None: 1 / sqrt(head_dim).
        window: (left, right): a query sees so many keys before and behind its own, which it sees
            too; -1: all. With causal, right is 0.
        softcap: above 0 and finite, or None.
        bias: of any float type, broadcasts to (batch, heads, q_len, k_len). Differentiable, with
            the same bits every time.
        mask: bool, broadcasts to the same: True takes part.
        sinks: (heads,) of any float type: a score more for each row, of a key without a value.
        return_lse: return (out, lse).
        empty: what a query that sees no key gives. "zero": 0. "nan": NaN. In both, its lse is -inf
            and it has no gradient.
        kernel: "cuda", "triton" or "reference"; None: on CUDA tensors "cuda" for a few queries
            over many keys where it takes them (float16, bfloat16; head_dim 64, 128 or 256; no bias
            or mask; its gradient is Triton's), else Triton for float16, bfloat16 and float32 up to
            head_dim 256, else the reference.

    Returns:
        out, of shape (batch, heads, q_len, value_dim), in q's dtype; under autocast in its dtype.
        With return_lse also lse, of shape (batch, heads, q_len), float32 (float64), the natural
        logarithm of the sum of exp(score), the sink not in it. Both are differentiable, twice as
        well.

    Raises:
        TypeError: q, k, v, bias, mask or sinks is not a tensor, a number or a bool is of another
            type.
        ValueError: causal, scale, window, softcap or empty is none of these; the named kernel
            cannot run this.
        RuntimeError: shapes, dtypes or devices do not belong together.
        NotImplementedError: a dtype that is not listed above, or not a dense tensor.

    Examples:
        >>> import torch
        >>> q = k = torch.tensor([[[[0.0], [1.0]]]])
        >>> v = torch.tensor([[[[1.0], [3.0]]]])
        >>> attention(q, k, v, causal=True, return_lse=True)
        (tensor([[[[1.0000],
                  [2.4621]]]]), tensor([[[0.0000, 1.3133]]]))
    """
    name = "attention"
    known = _again(
        (q, k, v, bias, mask, sinks, None, None),
        (causal, scale, window, softcap, empty),
        NOT_PACKED,
        False,
        kernel,
    )
    if known is not None and type(return_lse) is bool:
        return known[:2] if return_lse else known[0]
    given = tuple(t for t in (q, k, v, bias, mask, sinks) if t is not None)
    if not all(isinstance(t, Tensor) for t in given) and has_torch_function(given):
        return handle_torch_function(
            attention, given, q, k, v, causal=causal, scale=scale, window=window,
            softcap=softcap, bias=bias, mask=mask, sinks=sinks, return_lse=return_lse,
            empty=empty, kernel=kernel,
        )  # fmt: skip
    check_tokens(name, q, k, v, 4, ("q", "k", "v"))
    options = check_options(name, causal, scale, window, softcap, empty)
    bias, mask = (check_beside(name, what, t, q, k) for what, t in (("bias", bias), ("mask", mask)))
    check_sinks(name, sinks, q, q.shape[1])
    forced = check_attention_kernel(name, kernel)
    tensors = (q, k, v, bias, mask, sinks, None, None)
    with_lse = check_bool(name, "return_lse", return_lse)
    out, lse, _, _ = library.attention(tensors, options, False, forced)
    return (out, lse) if with_lse else out


def attention_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    kernel: str | None = None,
) -> OutputState:
    """What a part of the keys gives, to be merged with what others give: the state (m, d, o).

    `merge(*states).output()` is `attention` over all the keys, in any order and grouping. A sink is
    the state (sink, 1, 0), merged like any other. Where places matter (causal, window), they are
    those in this part: give a mask or bias if that is not what is meant.

    Args:
        q, k, v, causal, scale, window, softcap, bias, mask, kernel: as for `attention`.

    Returns:
        An OutputState with m and d (batch, heads, q_len), o (batch, heads, q_len, value_dim), in
        float32 (float64). Differentiable, m but for a constant: what is made of a state (its
        output, its lse, a merge) does not depend on where m was put.

    Raises what `attention` raises.

    Examples:
        >>> import torch
        >>> from online_softmax import merge
        >>> q, k, v = torch.randn(3, 1, 1, 4, 16).unbind()
        >>> parts = [attention_state(q, k[:, :, i : i + 2], v[:, :, i : i + 2]) for i in (0, 2)]
        >>> torch.allclose(merge(*parts).output(), attention(q, k, v), atol=1e-6)
        True
    """
    name = "attention_state"
    known = _again(
        (q, k, v, bias, mask, None, None, None),
        (causal, scale, window, softcap, "zero"),
        NOT_PACKED,
        True,
        kernel,
    )
    if known is not None:
        return _state(known)
    given = tuple(t for t in (q, k, v, bias, mask) if t is not None)
    if not all(isinstance(t, Tensor) for t in given) and has_torch_function(given):
        return handle_torch_function(
            attention_state, given, q, k, v, causal=causal, scale=scale, window=window,
            softcap=softcap, bias=bias, mask=mask, kernel=kernel,
        )  # fmt: skip
    check_tokens(name, q, k, v, 4, ("q", "k", "v"))
    options = check_options(name, causal, scale, window, softcap, "zero")
    bias, mask = (check_beside(name, what, t, q, k) for what, t in (("bias", bias), ("mask", mask)))
    forced = check_attention_kernel(name, kernel)
    tensors = (q, k, v, bias, mask, None, None, None)
    return _state(library.attention(tensors, options, True, forced))


def _state(made: tuple[Tensor, ...]) -> OutputState:
    out, _, m, d = made
    return OutputState(m, d, out * d.unsqueeze(-1))


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    causal: Causal = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    empty: Empty = "zero",
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of sequences of many lengths, packed one after the other.

    Names, order and the window are those of `torch.nn.attention.varlen.varlen_attn`. The lengths
    stay on the device: nothing waits for them but the reference.

    Args:
        query: (total_q, heads, head_dim); else as q for `attention`.
        key: (total_k, kv_heads, head_dim); else as k.
        value: (total_k, kv_heads, value_dim); else as v.
        cu_seq_q, cu_seq_k: (sequences + 1,) int32 or int64: the first token of each sequence, and
            where the last ends. Sequences may be empty. Tokens of no sequence give out 0 and lse
            -inf.
        max_q, max_k: at least the longest of each: tokens behind are not computed. With a max_q up
            to 16 long sequences of keys are read in parts, by several blocks each. The bits of a
            sequence depend on max_q, not on max_k nor on the other sequences.
        causal, scale, softcap, sinks, return_lse, empty, kernel: as for `attention`.
        window_size: (left, right), as `window` there.

    Returns:
        out, of shape (total_q, heads, value_dim); with return_lse also lse, (total_q, heads).

    Raises what `attention` raises.

    Examples:
        >>> import torch
        >>> q = k = v = torch.ones(5, 2, 16)
        >>> ends = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> attention_varlen(q, k, v, ends, ends, 3, 3).shape
        torch.Size([5, 2, 16])
    """
    name = "attention_varlen"
    known = _again(
        (query, key, value, None, None, sinks, cu_seq_q, cu_seq_k),
        (causal, scale, window_size, softcap, empty),
        (max_q, max_k),
        False,
        kernel,
    )
    if known is not None and type(return_lse) is bool:
        return known[:2] if return_lse else known[0]
    given = tuple(t for t in (query, key, value, cu_seq_q, cu_seq_k, sinks) if t is not None)
    if not all(isinstance(t, Tensor) for t in given) and has_torch_function(given):
        return handle_torch_function(
            attention_varlen, given, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
            causal=causal, scale=scale, window_size=window_size, softcap=softcap, sinks=sinks,
            return_lse=return_lse, empty=empty, kernel=kernel,
        )  # fmt: skip
    check_tokens(name, query, key, value, 3, ("query", "key", "value"))
    check_sequences(name, query, cu_seq_q, cu_seq_k)
    lengths = (check_length(name, "max_q", max_q), check_length(name, "max_k", max_k))
    options = check_options(name, causal, scale, window_size, softcap, empty, lengths)
    check_sinks(name, sinks, query, query.shape[1])
    forced = check_attention_kernel(name, kernel)
    tensors = (query, key, value, None, None, sinks, cu_seq_q, cu_seq_k)
    with_lse = check_bool(name, "return_lse", return_lse)
    out, lse, _, _ = library.attention(tensors, options, False, forced)
    return (out, lse) if with_lse else out
