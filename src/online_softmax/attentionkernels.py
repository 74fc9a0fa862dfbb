"""Attention by its Triton kernels: what is launched, and kept for calls alike (keptcalls.py)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from online_softmax import catalogue, keptcalls
from online_softmax.attentionplan import Options
from online_softmax.keptcalls import Given, Made

FORWARD, BACKWARD = "attention", "attention_backward"
# What the kernels call the tensors that a call is given.
INPUTS = ("q", "k", "v", "bias", "mask", "sinks", "cu_q", "cu_k")
ABOVE = ("dout", "dlse", *INPUTS, "out", "lse")


def forward(given: Given, o: Options, with_state: bool, kernel: str) -> Made:
    """(out, lse, m, d), the last two None unless with_state.

    Arguments as for `attentionops.forward`, with their values in memory, for `keptcalls.find` in
    this order.
    """
    from online_softmax.triton import attention_launch

    inputs = attention_launch.Inputs(*given).unit()  # type: ignore[arg-type]
    options = o, with_state, kernel
    found = _if_copied(FORWARD, options, given, inputs)
    if found is not None:
        return found
    made = attention_launch.forward(inputs, o, catalogue.arch_of(inputs.q), with_state)
    compiled = attention_launch.run(made.launches, inputs.q.device)
    _keep(FORWARD, options, inputs, INPUTS, made, compiled, made[:4])
    return made[:4]


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    given: Given,
    out: Tensor,
    lse: Tensor,
    o: Options,
    wanted: Sequence[bool],
    kernel: str,
) -> Made:
    """The gradients by q, k, v, bias and sinks, the last of each query; None if not wanted.

    Those by k and v come together.
    """
    from online_softmax.triton import attention_backward_launch, attention_launch

    unit, inputs = attention_launch.unit, attention_launch.Inputs(*given).unit()  # type: ignore[arg-type]
    q, which = inputs.q, attention_backward_launch.Wanted(*wanted)
    above = unit(dout.to(q.dtype)), None if dlse is None else dlse.to(torch.float32).contiguous()
    below = unit(out), lse.contiguous()
    options = o, which, kernel
    found = _if_copied(BACKWARD, options, (dout, dlse, *given, out, lse), (*above, *inputs, *below))
    if found is not None:
        return found
    made = attention_backward_launch.backward(
        *above, inputs, *below, o, which, catalogue.arch_of(q)
    )
    compiled = attention_launch.run(made.launches, q.device)
    _keep(BACKWARD, options, (*above, *inputs, *below), ABOVE, made, compiled, made[:5])
    return made[:5]


def _if_copied(what: str, options: Hashable, given: Given, inputs: Given) -> Made | None:
    """Where some of what was given had to be copied, the rest of the call may be known."""
    if all(one is other for one, other in zip(given, inputs, strict=True)):
        return None
    return keptcalls.again(what, options, inputs)


def _keep(
    what: str,
    options: Hashable,
    given: Given,
    names: Sequence[str],
    made: Any,
    compiled: Sequence[Any],
    results: Made,
) -> None:
    """names: what the kernels call what is given."""
    from online_softmax.triton import launcher

    work = launcher.launched(made.launches, compiled, names)
    if work is not None:
        keptcalls.keep(what, options, given, work, made.own.made, results, launcher.is_watched)
