"""Calls of several CUDA launches, noted while they are worked out, and kept (keptcalls.py).

A call's own tensors come from `empty`, its launches go through `run`: so `repeated` learns of both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from online_softmax import keptcalls
from online_softmax.cuda.launch import Launch
from online_softmax.keptcalls import Given


class _Notes(threading.local):
    """What the call that is being worked out in this thread has launched and made; or None."""

    current: tuple[list[Launch], list[tuple[Tensor, None]]] | None = None


_notes = _Notes()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of a call's own."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if _notes.current is not None:
        _notes.current[1].append((made, None))
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
    found = keptcalls.again(what, options, given)
    if found is not None:
        return found
    around = _notes.current  # of a call that a finalizer or a signal handler has broken into
    work, own = _notes.current = [], []
    try:
        results = call()
    finally:
        _notes.current = around
    if work:
        index = next(t for t in given if t is not None).get_device()
        launches = [keptcalls.by_cuda(each, index) for each in work]
        keptcalls.keep(what, options, given, launches, own, results)
    return results
