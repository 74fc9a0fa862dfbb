"""The public statistics of logits: check the arguments once, then call the library."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from online_softmax import library
from online_softmax.arguments import check_input
from online_softmax.library import TokenStats
from online_softmax.lossarguments import check_classes, check_temperature


def token_stats(
    logits: Tensor, target: Tensor | None = None, *, top_k: int = 0, temperature: float = 1.0
) -> TokenStats:
    """What serving and reinforcement learning ask of each token's distribution.

    All of it is of p = softmax(logits / temperature), in float32 (float64). lse, entropy and the
    target's log-probability are differentiable by logits, twice and in forward mode; the rest is
    not.

    On CUDA kernels read the logits once and hold nothing of their size, with a top_k of at most
    128, under torch.compile too. The limit is a decision: lists of the largest are merged in the
    registers of a warp, four elements a lane. With more the rows are sorted beside that read, which
    holds several tensors of their size; the other statistics are made as before. Elsewhere, and
    under torch.func and in forward mode, all is made of torch's operations.

    Args:
        logits: (..., classes), with at least one class; float16, bfloat16, float32, float64 or fp8.
        target: (...) int64 or uint8, a class of each token.
        top_k: how many of the largest to give, at most the number of classes.
        temperature: above 0 and finite, and so is 1 / temperature in float32 (float64); divides the
            logits.

    Returns:
        A TokenStats, a NamedTuple of lse, entropy, target_log_prob, target_rank, top_log_probs and
        top_indices, which says what each is. As with log_softmax, a token whose logits, divided by
        the temperature, are all -inf, or hold +inf or NaN, has NaN in entropy and
        log-probabilities.

    Raises:
        TypeError: logits or target is not a tensor, top_k no integer, temperature no number.
        IndexError: on the CPU, outside of traces and transforms, a target is no class. Elsewhere
            its log-probability is NaN and its rank 0.
        ValueError: top_k or temperature is none of these, or target has another number of tokens.
        RuntimeError: target has another shape, dtype or device, or there is no class.
        NotImplementedError: a dtype of logits that is not listed above, or not a dense tensor.

    Examples:
        >>> import torch
        >>> stats = token_stats(torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([2]), top_k=2)
        >>> stats.entropy, stats.target_log_prob, stats.target_rank
        (tensor([0.8324]), tensor([-1.4076]), tensor([2]))
        >>> stats.top_log_probs, stats.top_indices
        (tensor([[-0.4076, -1.4076]]), tensor([[0, 2]]))
    """
    name = "token_stats"
    given = (logits,) if target is None else (logits, target)
    if not all(isinstance(t, Tensor) for t in given) and has_torch_function(given):
        return handle_torch_function(
            token_stats, given, logits, target, top_k=top_k, temperature=temperature
        )
    check_input(name, logits, "logits")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise RuntimeError(
            f"{name}(): logits must be (..., classes) with a class, got {tuple(logits.shape)}"
        )
    if target is not None:
        check_classes(name, logits, target, logits.dim() - 1)
        if target.dim() == logits.dim():
            target = target.reshape(())
    count = check_top_k(name, top_k, logits.shape[-1])
    divisor = check_temperature(name, temperature, logits.dtype)
    return library.token_stats(logits, target, count, divisor)


def check_top_k(name: str, top_k: Any, classes: int | None = None) -> int:
    """top_k, in [0, classes]; classes: None where they are not yet known."""
    is_int = isinstance(top_k, int)  # a size that torch.compile has made a symbol is one too
    if isinstance(top_k, bool) or not (is_int or hasattr(top_k, "__index__")):
        raise TypeError(f"{name}(): top_k must be an int, got {top_k!r}")
    top_k = top_k if is_int else operator.index(top_k)
    if top_k < 0 or (classes is not None and top_k > classes):
        wanted = "at least 0" if classes is None else f"in [0, {classes}]"
        raise ValueError(f"{name}(): top_k must be {wanted}, got {top_k}")
    return top_k
