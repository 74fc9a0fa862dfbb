"""Row kernels started again: a call like one before, of which only the addresses are new.

What a call launches follows from its options and from each tensor's type, shape, strides, device
and 16-byte phase. rowkernels works it out and hands it here; once it has come twice, the next call
alike takes memory for its result and starts the launch. Nothing is decided here: what is not known
goes the whole way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from online_softmax import jit
from online_softmax.cuda.launch import Launch
from online_softmax.plan import VECTOR_BYTES

PHASE = VECTOR_BYTES - 1  # the bits of an address that decide how a kernel loads

Options = tuple[Hashable, ...]  # all that decides a launch beside the tensors
_once: set[Hashable] = set()  # calls that came once: shapes that never come again cost no more
_is_cuda, _device = attrgetter("is_cuda"), Tensor.get_device
_kept = jit.kept


def _name(
    op: str, options: Options, index: int, x: Tensor, address: int, dy: Tensor | None
) -> Hashable:
    """All that the launch of a call follows from but its result's phase; `address`: x's."""
    name = op, options, index, x.dtype, x.shape, x.stride(), address & PHASE
    if dy is None:
        return name
    return name, _device(dy), dy.dtype, dy.shape, dy.stride(), dy.data_ptr() & PHASE


def again(
    op: str, options: Options, x: Tensor, out: Tensor | None = None, dy: Tensor | None = None
) -> Tensor | None:
    """The result of a call that `keep` knows, or None.

    Args:
        op: what is computed.
        options: as `keep` has them.
        x: a plain tensor; in a backward, the forward's result.
        out: to be filled; None: a tensor of its own.
        dy: in a backward, the gradient by that result.
    """
    # Of a tensor with a negation pending, or without memory, the kernel would read no values.
    if not _is_cuda(x) or x.is_neg() or not (out is None or out.is_contiguous()):
        return None
    address = x.data_ptr()
    found = _kept(_name(op, options, _device(x), x, address, dy))
    if found is None or not address:
        return None
    start, (fresh, phase) = found
    y: Tensor = fresh(x) if out is None else out
    y_address = y.data_ptr()
    if y_address & PHASE != phase:
        return None
    if dy is None:
        start(address, y_address)
        return y
    dy_address = dy.data_ptr()
    if not _is_cuda(dy) or dy.is_neg() or not dy_address:
        return None
    start(address, y_address, dy_address)
    return y


def keep(
    op: str,
    options: Options,
    work: Sequence[Launch],
    x: tuple[Tensor, Tensor],
    y: tuple[Tensor, Tensor],
    dy: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Keep what a call has launched, the second time, if a later one needs other addresses alone.

    Each tensor is a pair: as the call was given it, or gives it back; and as it was launched, a
    view of the first or a copy. `options`: all that decides the launch beside the tensors.
    """
    if len(work) != 1 or not _is_cuda(x[0]):
        return
    index = _device(x[0])
    name = _name(op, options, index, x[0], x[0].data_ptr(), None if dy is None else dy[0])
    if name not in _once:
        if len(_once) >= jit.REMEMBERED:
            _once.clear()
        _once.add(name)
        return
    tensors = [value for value in work[0].args if isinstance(value, Tensor)]
    pairs = (x, y) if dy is None else (x, y, dy)
    places = []
    for given, launched in pairs:
        found = [place for place, value in enumerate(work[0].args) if value is launched]
        if len(found) != 1 or given.data_ptr() != launched.data_ptr():  # one for two, or a copy
            return
        places += found
    if len(tensors) == len(pairs):  # else there is a workspace
        about = (_fresh(x[0], y[0]), y[0].data_ptr() & PHASE)
        jit.keep(name, work[0], index, places, about)


def _fresh(x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """The cheapest way to a tensor as y, for an x like this; it holds on to neither."""
    if y.shape != x.shape:
        whole = partial(
            torch.empty_strided, tuple(y.shape), y.stride(), dtype=y.dtype, device=y.device
        )
        return lambda _: whole()
    if y.dtype == x.dtype and y.stride() == x.stride():
        return torch.empty_like
    return partial(torch.empty_like, dtype=y.dtype, memory_format=torch.contiguous_format)
