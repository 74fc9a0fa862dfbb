"""Calls of cross-entropy's kernels, of several launches: a call like one before starts them again.

As rowcalls has it for the row operations, with any number of launches and tensors. What a call
launches follows from its options and from each given tensor's type, shape, strides, device and
16-byte phase. A call's own tensors come from `empty`, its launches go through `run`: both are noted
while `repeated` works a call out, and once it has come twice, the next call alike takes memory of
the same shapes and starts the same launches with the new addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from online_softmax import rowcalls
from online_softmax.cuda.launch import Launch
from online_softmax.rowcalls import PHASE

Given = tuple[Tensor | None, ...]
_kept: dict[Hashable, Any] = {}  # jit's memory of launches, from the first that is kept on


class _Notes(threading.local):
    """What the call that is being worked out in this thread has launched and made; or None."""

    current: tuple[list[Launch], list[Tensor]] | None = None


_notes = _Notes()


class _Call(NamedTuple):
    """A call that is kept. Its tensors have numbers: the given ones first, then its own."""

    steps: list[tuple[Callable[..., None], list[int]]]  # a launch, and whose addresses it takes
    results: list[int]
    fresh: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]  # shape, strides, type
    current_device: Callable[[], int]
    device_index: int


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of a call's own."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if _notes.current is not None:
        _notes.current[1].append(made)
    return made


def run(work: list[Launch], device: torch.device) -> None:
    """Run launches in order, on a GPU or by host execution."""
    from online_softmax.cuda import launch

    launch.run(work, device)
    if _notes.current is not None:
        _notes.current[0].extend(work)


def repeated(
    what: str, options: Hashable, given: Given, call: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What `call` gives, by the launches of a call before where one was like it.

    Args:
        what: which call it is.
        options: all that decides its launches beside the tensors.
        given: the tensors that it works on, plain ones on a device that has kernels.
        call: works it out, and runs it. It gives back tensors of `empty`, or given ones.
    """
    name: Hashable = what, options, rowcalls._setting.is_on, *map(_looks, given)
    found = _again(name, given)
    if found is not None:
        return found
    work, fresh = _notes.current = [], []
    try:
        results = call()
    finally:
        _notes.current = None
    if work:
        _keep(name, given, work, fresh, results)
    return results


def _looks(t: Tensor | None) -> Hashable:
    if t is None:
        return None
    return t.device, t.dtype, t.shape, t.stride(), t.data_ptr() & PHASE


def _again(name: Hashable, given: Given) -> tuple[Tensor, ...] | None:
    found = _kept.get(name)
    if found is None:
        return None
    call: _Call = found[1]
    tensors, addresses = [], []
    for t in given:
        if t is not None:
            address = t.data_ptr()
            # With a negation pending, or without memory, a kernel would read no values.
            if not address or t.is_neg():
                return None
            tensors.append(t)
            addresses.append(address)
    make = rowcalls._empty
    if make is None or call.current_device() != call.device_index or rowcalls._is_deterministic():
        device = tensors[0].device
        fresh = [torch.empty_strided(*s, dtype=dtype, device=device) for *s, dtype in call.fresh]
    else:
        fresh = [make(*each) for each in call.fresh]
    phases = 0
    for t in fresh:
        address = t.data_ptr()
        phases |= address
        addresses.append(address)
    if phases & PHASE:
        return None
    for start, places in call.steps:
        start(*[addresses[i] for i in places])
    tensors += fresh
    return tuple([tensors[i] for i in call.results])


def _keep(
    name: Hashable,
    given: Given,
    work: list[Launch],
    fresh: list[Tensor],
    results: tuple[Tensor, ...],
) -> None:
    """Keep a call the second time, if a later one needs other addresses alone."""
    tensors = [t for t in given if t is not None] + fresh
    if not rowcalls._is_cuda(tensors[0]) or not rowcalls.came_before(name):
        return
    from online_softmax import jit, jit_launch  # which have launched it

    global _kept  # noqa: PLW0603 one name, looked up fast by every call
    _kept = jit._kept
    index, by_address = tensors[0].get_device(), {t.data_ptr(): i for i, t in enumerate(tensors)}
    if len(by_address) < len(tensors) or any(t.data_ptr() & PHASE for t in fresh):
        return
    steps = []
    for each in work:
        args = [(place, t) for place, t in enumerate(each.args) if isinstance(t, Tensor)]
        if any(t.data_ptr() not in by_address for _, t in args):  # a copy, or of torch's making
            return
        kind = jit._ready.get(jit._key(each, index))
        if kind is None:  # another thread may have dropped it
            return
        values = jit_launch.words(each.args, index)
        start = jit._starter(kind, index, values, [place for place, _ in args])
        steps.append((start, [by_address[t.data_ptr()] for _, t in args]))
    by_identity = {id(t): i for i, t in enumerate(tensors)}
    if any(id(t) not in by_identity for t in results):
        return
    made = [(tuple(t.shape), t.stride(), t.dtype) for t in fresh]
    given_back = [by_identity[id(t)] for t in results]
    call = _Call(steps, given_back, made, jit._current_device, index)
    jit._remember(jit._kept, name, (None, call))
