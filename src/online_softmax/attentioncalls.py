"""Attention by its Triton kernels: a call like one before starts the same launches again.

What a call launches follows from its options and from each given tensor's type, shape, strides,
device and 16-byte phase. `forward` and `backward` work it out and launch it; once a call has come
twice, the next one alike takes memory of the same shapes and starts the same launches with the new
addresses. Nothing is decided here: what is not known goes the whole way. A kept call never changes,
so that any number of threads may start it at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from online_softmax import catalogue, rowcalls
from online_softmax.attentionplan import Options
from online_softmax.rowcalls import PHASE

if TYPE_CHECKING:
    from online_softmax.triton.launcher import Call

Tensors = Sequence[Tensor | None]
Made = tuple[Any, ...]  # tensors, None where one is not wanted
Known = tuple["Call", list[int]]  # and the addresses of the given tensors, 0 for None

FORWARD, BACKWARD = "attention", "attention_backward"
# What the kernels call the tensors that a call is given.
INPUTS = ("q", "k", "v", "bias", "mask", "sinks", "cu_q", "cu_k")
ABOVE = ("dout", "dlse", *INPUTS, "out", "lse")

_kept: dict[Hashable, Any] = {}  # jit's memory of launches, from the first that is kept on


def name_of(what: str, options: Hashable, given: Tensors) -> tuple[Hashable, list[int]]:
    """All that a call's launches follow from but the addresses; and those.

    RuntimeError: a tensor that has none.
    """
    name: list[Hashable] = [what, options]
    addresses = []
    for t in given:
        if t is None:
            name.append(None)
            addresses.append(0)
        else:
            address = t.data_ptr()
            # With a negation pending, or without memory, a kernel would read no values.
            if not address or t.is_neg():
                raise RuntimeError("a tensor has no values in memory")
            name += (t.device, t.dtype, t.shape, t.stride(), address & PHASE)
            addresses.append(address)
    return tuple(name), addresses


def is_any_kept() -> bool:
    return bool(_kept)


def find(what: str, options: Hashable, given: Tensors) -> Known | None:
    """A call like one that is kept; None: there is none.

    Args:
        what: which direction.
        options: all that decides its launches beside the tensors.
        given: of type Tensor or Parameter.
    """
    if not _kept:
        return None
    try:
        name, addresses = name_of(what, options, given)
        found = _kept.get(name)
    except (RuntimeError, TypeError):  # sparse, nested, or an option that is no option: not kept
        return None
    return None if found is None else (found[1], addresses)


def start(known: Known) -> Made | None:
    """What the call gives, by the launches that are kept; None: it is to go the whole way."""
    call, given = known
    if call.is_watched():
        return None
    if call.current_device() == call.device_index:
        make = None if rowcalls._is_deterministic() else rowcalls._empty
        return _start(call, given, make)
    with torch.cuda.device(call.device_index):
        return _start(call, given, None)


def _start(call: Call, given: list[int], make: Any) -> Made | None:
    """make: allocates on the current device; None: torch does."""
    addresses, made, phases = given.copy(), [], 0
    for shape, stride, dtype, fill in call.fresh:
        if make is None:
            t = torch.empty_strided(shape, stride, dtype=dtype, device=call.device)
        else:
            t = make(shape, stride, dtype)
        if fill is not None:
            t.fill_(fill)
        address = t.data_ptr()
        phases |= address
        made.append(t)
        addresses.append(address)
    if phases & PHASE:
        return None
    stream = call.raw_stream(call.device_index)
    for each in call.starts:
        each(stream, addresses)
    return tuple([None if i is None else made[i] for i in call.results])


def again(what: str, options: Hashable, given: Tensors) -> Made | None:
    """`start` of what `find` finds."""
    known = find(what, options, given)
    return None if known is None else start(known)


def forward(given: Tensors, o: Options, with_state: bool, kernel: str) -> Made:
    """(out, lse, m, d), the last two None unless with_state.

    Arguments as for `attentionops.forward`, with their values in memory, for `find` in this order.
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
    given: Tensors,
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


def _if_copied(what: str, options: Hashable, given: Tensors, inputs: Tensors) -> Made | None:
    """Where some of what was given had to be copied, the rest of the call may be known."""
    if all(one is other for one, other in zip(given, inputs, strict=True)):
        return None
    return again(what, options, inputs)


def _keep(
    what: str,
    options: Hashable,
    given: Tensors,
    names: Sequence[str],
    made: Any,
    compiled: Sequence[Any],
    results: Made,
) -> None:
    """Keep a call that has run, the second time, if a later one needs other addresses alone."""
    global _kept  # noqa: PLW0603 one name, looked up fast by every call
    lead = next(t for t in given if t is not None)
    if not rowcalls._is_cuda(lead):
        return
    try:
        name, _ = name_of(what, options, given)
    except RuntimeError:
        return
    if not rowcalls.came_before(name):
        return
    from online_softmax import jit
    from online_softmax.triton import launcher

    index = lead.get_device()
    call = launcher.prepared(made.launches, compiled, made.own, names, given, results, index)
    if call is not None:
        _kept = jit._kept
        jit._remember(_kept, name, (None, call))
