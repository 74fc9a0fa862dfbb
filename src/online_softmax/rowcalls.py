"""Row kernels started again: a call like one before, of which only the addresses are new.

What a call launches follows from its options, from each tensor's type, shape, strides, device and
16-byte phase, and from whether batch invariance is on. rowkernels works it out and hands it here;
once it has come twice, the next call alike takes memory for its result and starts the launch.
Nothing is decided here: what is not known goes the whole way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from online_softmax import invariance
from online_softmax.cuda.launch import Launch
from online_softmax.plan import VECTOR_BYTES

PHASE = VECTOR_BYTES - 1  # the bits of an address that decide how a kernel loads

Options = tuple[Hashable, ...]  # all that decides a launch beside the tensors
_once: set[Hashable] = set()  # calls that came once: shapes that never come again cost no more
_is_cuda = attrgetter("is_cuda")
_setting = invariance.setting
_kept: dict[Hashable, Any] = {}  # jit's memory of launches, from the first that is kept on

# What Inductor's own code allocates by: half of what torch.empty_strided takes on the host. It
# knows the current device alone, and does not fill memory where torch is told to be deterministic.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty = getattr(_guards, "_empty_strided_cuda", None)
_is_deterministic = torch._C._get_deterministic_algorithms


def again(
    op: str, options: Options, x: Tensor, out: Tensor | None = None, dy: Tensor | None = None
) -> Tensor | None:
    """The result of a call that `keep` knows, or None.

    Args:
        op: what is computed.
        options: as `keep` has them.
        x: of type Tensor or Parameter; in a backward, the forward's result.
        out: to be filled; None: a tensor of its own.
        dy: in a backward, the gradient by that result.
    """
    if not _kept:
        return None
    try:  # the name that _name gives, made here for the time of a call
        address = x.data_ptr()
        name: Hashable
        name = op, options, _setting.is_on, x.device, x.dtype, x.shape, x.stride(), address & PHASE
        if dy is not None:
            dy_address = dy.data_ptr()
            name = name, dy.device, dy.dtype, dy.shape, dy.stride(), dy_address & PHASE
        found = _kept.get(name)
    except (RuntimeError, TypeError):  # sparse, nested, or an option that is no option: not kept
        return None
    # Of a tensor with a negation pending, or without memory, the kernel would read no values.
    if found is None or not address or x.is_neg():
        return None
    if dy is not None and (not dy_address or dy.is_neg()):
        return None
    start, (current_device, index, shape, stride, dtype, phase) = found
    if out is not None:
        if not out.is_contiguous():
            return None
        y = out
    elif _empty is None or current_device() != index or _is_deterministic():
        y = torch.empty_strided(shape, stride, dtype=dtype, device=x.device)
    else:
        y = _empty(shape, stride, dtype)
    y_address = y.data_ptr()
    if y_address & PHASE != phase:
        return None
    if dy is None:
        start(address, y_address)
    else:
        start(address, y_address, dy_address)
    return y


def _name(op: str, options: Options, x: Tensor, dy: Tensor | None) -> Hashable:
    """All that the launch of a call follows from but its result's phase."""
    phase = x.data_ptr() & PHASE
    name = op, options, _setting.is_on, x.device, x.dtype, x.shape, x.stride(), phase
    if dy is None:
        return name
    return name, dy.device, dy.dtype, dy.shape, dy.stride(), dy.data_ptr() & PHASE


def came_before(name: Hashable) -> bool:
    """Whether a call of this name has come; it has from now on."""
    from online_softmax import jit

    if name in _once:
        return True
    if len(_once) >= jit.REMEMBERED:
        _once.clear()
    _once.add(name)
    return False


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
    from online_softmax import jit  # which has launched it; an import need not load it

    global _kept  # noqa: PLW0603 one name, looked up fast by every call
    _kept = jit._kept
    name = _name(op, options, x[0], None if dy is None else dy[0])
    if not came_before(name):
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
        result, index = y[0], x[0].get_device()
        # As a result of its own has them: along a dim of one element `out` may have any stride.
        strides = torch.empty(result.shape, device="meta").stride()
        made = tuple(result.shape), strides, result.dtype  # of no tensor is anything held
        about = (jit._current_device, index, *made, result.data_ptr() & PHASE)
        jit.keep(name, work[0], index, places, about)
