"""The way in to attention: the cheapest route that is right for a call, as routes.py has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from online_softmax import attentionkernels, attentionops, keptcalls
from online_softmax.attentionarguments import check_attention_kernel, check_options
from online_softmax.attentionops import Made, Tensors
from online_softmax.attentionplan import Options
from online_softmax.catalogue import FLOATS
from online_softmax.library.attention import Forward, apply_forward, op
from online_softmax.library.loss_eager import are_plain
from online_softmax.library.private import (
    dispatch_modes,
    function_mode_count,
    functorch_active,
    is_forward_mode,
)
from online_softmax.reference.ops import is_autocast

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_autocast = torch.is_autocast_enabled
_is_grad_enabled = torch.is_grad_enabled


def again(
    tensors: tuple[Any, ...],
    options: tuple[Any, Any, Any, Any, Any],
    lengths: tuple[Any, Any],
    with_state: bool,
    kernel: Any,
) -> Made | None:
    """(out, lse, m, d) of a call like one before; None: the call goes the whole way.

    Asked before the arguments are checked: an equal call has passed the checks. Wherever another
    route than a plain eager one may be right, the answer is None. m and d are None unless
    with_state.

    Args:
        tensors: what the user gave, in the order of `attentionops.TENSORS`.
        options: what `check_options` takes before lengths, of which nothing is believed.
        lengths: of packed sequences, the longest.
        with_state: as for `attentionops.forward`.
        kernel: what the user gave.
    """
    # First: Dynamo sees nothing of what follows. Other tracing has modes, or tensors of a type.
    if _is_dynamo_compiling() or not keptcalls.kept:
        return None
    is_recorded, q = False, tensors[0]
    for t in tensors:
        if t is not None:
            if type(t) is not Tensor and type(t) is not Parameter:
                return None
            is_recorded = is_recorded or t.requires_grad
    if (
        q is None
        or dispatch_modes()
        or function_mode_count()
        or functorch_active()
        or is_forward_mode()
        or (_is_autocast("cuda") and q.dtype is not torch.get_autocast_dtype("cuda"))
    ):
        return None
    max_q, max_k = lengths
    if type(max_q) is not int or type(max_k) is not int or max_q < 0 or max_k < 0:
        return None
    try:
        forced = "" if kernel is None else check_attention_kernel("attention", kernel)
        o = check_options("attention", *options, lengths)
        known = keptcalls.find(attentionkernels.FORWARD, (o, with_state, forced), tensors)
    except (TypeError, ValueError):  # raised again where the tensors have been checked
        return None
    if known is None:
        return None
    if not is_recorded or not _is_grad_enabled():
        return keptcalls.start(known)
    made: Made = apply_forward(*tensors, o, with_state, forced, known)
    return made


def attention(tensors: Tensors, o: Options, with_state: bool, kernel: str) -> Made:
    """(out, lse, m, d); arguments as for `attentionops.forward`, of any kind of tensor."""
    made: Made
    tensors = _cast(tensors)
    if torch.compiler.is_compiling():
        return op(*tensors, *o, with_state, kernel)
    if functorch_active():
        made = Forward.apply(*tensors, o, with_state, kernel, None)
        return made
    if not are_plain(*tensors) or tensors[0].is_meta:  # type: ignore[union-attr]
        return op(*tensors, *o, with_state, kernel)
    needs = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if needs or is_forward_mode():
        made = apply_forward(*tensors, o, with_state, kernel, None)
        return made
    return attentionops.forward(tensors, o, with_state, kernel)


def _cast(tensors: Tensors) -> Tensors:
    """Under autocast q, k and v in its dtype, as torch's list has it for attention."""
    device = tensors[0].device.type  # type: ignore[union-attr]
    if not is_autocast(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    cast = [t.to(dtype) if t is not None and t.dtype in FLOATS else t for t in tensors[:3]]
    return (*cast, *tensors[3:])
