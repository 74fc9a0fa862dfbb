"""Kept calls: one like a call before starts the same launches again, with new addresses.

What a call launches follows from its options, from each given tensor's type, shape, strides, device
and 16-byte phase, and from whether batch invariance is on: together these are its name. Who works a
call out hands it to `keep`; once it has come twice, the next call alike takes memory of the same
shapes and starts the same launches. Nothing is decided here: what is not known goes the whole way.
No tensor is held, and a kept call never changes: any number of threads may start it at once.
`again` is for any call; `again_in_one`, for one launch with one result, does no step too much.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from online_softmax import invariance
from online_softmax.plan import VECTOR_BYTES

if TYPE_CHECKING:
    from online_softmax.jit import Launchable

PHASE = VECTOR_BYTES - 1  # the bits of an address that decide how a kernel loads

Options = tuple[Hashable, ...]  # all that decides a call's launches beside the tensors
Given = Sequence[Tensor | None]
Made = tuple[Any, ...]  # tensors, None where one is not wanted
Own = Sequence[tuple[Tensor, float | None]]  # a call's own memory, and what it is filled with
Start = Callable[[int, Sequence[int]], None]  # of a launch: the stream, all of a call's addresses
Places = list[tuple[int, int, int]]  # (which argument, number of the tensor, bytes from its first)


# A call that is kept: a plain tuple, since nothing is read faster. Its tensors have numbers: the
# given ones first, then its own.
Call = tuple[
    tuple[Start, ...],  # of its launches, in order
    tuple[tuple[Any, ...], ...],  # its own memory: shape, strides, type, filling
    int,  # the phase of that
    tuple[int | None, ...],  # what it gives back
    torch.device,
    int,  # its index
    Callable[[], bool] | None,  # whether it goes the whole way for now
    Callable[[], int],  # the current device
    Callable[[int], int],  # the current stream of a device
]


class Launched(NamedTuple):
    """A launch that has run. Its tensors: (which argument, the tensor, its number if known)."""

    tensors: Sequence[tuple[int, Tensor, int | None]]
    starter: Callable[[Places], Start | None]  # makes what starts it again


Known = tuple[Call, list[int], Given]  # and the addresses of what is given, 0 for None

kept: dict[Hashable, Call] = {}  # by name; dropped as kernels are
came_once: dict[Hashable, None] = {}  # names: shapes that never come again cost no more
is_cuda = attrgetter("is_cuda")
_setting = invariance.setting

# What Inductor's own code allocates by: half of what torch.empty_strided takes on the host. It
# knows the current device alone, and does not fill memory where torch is told to be deterministic.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
empty_strided = getattr(_guards, "_empty_strided_cuda", None)
is_deterministic = torch._C._get_deterministic_algorithms


def again_in_one(
    what: str, options: Options, x: Tensor, out: Tensor | None = None, dy: Tensor | None = None
) -> Tensor | None:
    """The result of a call that `keep_in_one` knows, or None.

    Args:
        what, options: as `keep_in_one` has them.
        x: of type Tensor or Parameter; in a backward, the forward's result.
        out: to be filled; None: a tensor of its own.
        dy: in a backward, the gradient by that result.
    """
    if not kept:
        return None
    try:  # the name that name_of gives, made here for the time of a call
        address = x.data_ptr()
        is_on, phase = _setting.is_on, address & PHASE
        name: tuple[Hashable, ...]
        name = what, options, is_on, x.device, x.dtype, x.shape, x.stride(), phase
        if dy is not None:
            dy_address = dy.data_ptr()
            name += dy.device, dy.dtype, dy.shape, dy.stride(), dy_address & PHASE
        call = kept.get(name)
    except (RuntimeError, TypeError):  # sparse, nested, or an option that is no option: not kept
        return None
    # Of a tensor with a negation pending, or without memory, the kernel would read no values.
    if call is None or not address or x.is_neg():
        return None
    if dy is not None and (not dy_address or dy.is_neg()):
        return None
    starts, fresh, phase, _, device, index, _, current_device, raw_stream = call
    if current_device() != index:
        with torch.cuda.device(index):
            return again_in_one(what, options, x, out, dy)
    if out is not None:
        if not out.is_contiguous():
            return None
        y = out
    else:
        shape, stride, dtype, _ = fresh[0]
        if empty_strided is None or is_deterministic():
            y = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        else:
            y = empty_strided(shape, stride, dtype)
    y_address = y.data_ptr()
    if y_address & PHASE != phase:
        return None
    if dy is None:
        starts[0](raw_stream(index), (address, y_address))
    else:
        starts[0](raw_stream(index), (address, dy_address, y_address))
    return y


def name_of(what: str, options: Hashable, given: Given) -> tuple[Hashable, list[int]]:
    """All that a call's launches follow from but the addresses; and those.

    RuntimeError: a tensor that has none.
    """
    name: list[Hashable] = [what, options, _setting.is_on]
    addresses = []
    for t in given:
        if t is None:
            name.append(None)
            addresses.append(0)
        else:
            address = t.data_ptr()
            if not address or t.is_neg():
                raise RuntimeError("a tensor has no values in memory")
            name += (t.device, t.dtype, t.shape, t.stride(), address & PHASE)
            addresses.append(address)
    return tuple(name), addresses


def find(what: str, options: Hashable, given: Given) -> Known | None:
    """A call like one that is kept; None: there is none.

    Args:
        what: which call it is.
        options: all that decides its launches beside the tensors.
        given: of type Tensor or Parameter.
    """
    if not kept:
        return None
    try:
        name, addresses = name_of(what, options, given)
        call = kept.get(name)
    except (RuntimeError, TypeError):  # as in again_in_one
        return None
    return None if call is None else (call, addresses, given)


def start(known: Known) -> Made | None:
    """What the call gives, by the launches that are kept; None: it is to go the whole way."""
    call, addresses, given = known
    starts, fresh, phase, results, device, index, is_watched, current_device, raw_stream = call
    if is_watched is not None and is_watched():
        return None
    if current_device() != index:
        with torch.cuda.device(index):
            return start(known)
    make = None if is_deterministic() else empty_strided
    tensors, addresses, phases = [*given], addresses.copy(), 0
    for shape, stride, dtype, filling in fresh:
        if make is None:
            t = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        else:
            t = make(shape, stride, dtype)
        if filling is not None:
            t.fill_(filling)
        address = t.data_ptr()
        phases |= address
        tensors.append(t)
        addresses.append(address)
    if phases & PHASE != phase:
        return None
    stream = raw_stream(index)
    for each in starts:
        each(stream, addresses)
    return tuple([None if i is None else tensors[i] for i in results])


def again(what: str, options: Hashable, given: Given) -> Made | None:
    """`start` of what `find` finds."""
    known = find(what, options, given)
    return None if known is None else start(known)


def keep(
    what: str,
    options: Hashable,
    given: Given,
    launches: Sequence[Launched],
    own: Own,
    results: Made,
    is_watched: Callable[[], bool] | None = None,
) -> None:
    """Keep a call that has run, the second time, if a later one needs other addresses alone.

    what, options, given: as `find` will have them. own: the call's own memory, contiguous.
    results: tensors of it, given ones, or None. is_watched: whether a later call is to go the
    whole way after all.
    """
    lead = next(t for t in given if t is not None)
    try:
        name, addresses = name_of(what, options, given)
    except RuntimeError:
        return
    if not is_cuda(lead):
        return
    from online_softmax import jit  # here: an import need not load it

    if name not in came_once:
        jit.keep(came_once, name, None)
        return
    tensors = [*given, *(t for t, _ in own)]
    addresses += [t.data_ptr() for t, _ in own]
    within = {t.untyped_storage().data_ptr(): i for i, (t, _) in enumerate(own, len(given))}
    starts = []
    for each in launches:
        places = _places(each, addresses, within)
        start = None if places is None else each.starter(places)
        if start is None:  # or another thread has dropped its kernel
            return
        starts.append(start)
    phases = [address & PHASE for address in addresses[len(given) :]]
    numbers: dict[int, int | None] = {id(t): i for i, t in enumerate(tensors)} | {id(None): None}
    if (any(phases) and len(phases) > 1) or any(id(t) not in numbers for t in results):
        return
    # As results of its own have them: along a dim of one element an `out` may have any stride.
    strides = [torch.empty(t.shape, device="meta").stride() for t, _ in own]
    fresh = [(tuple(t.shape), s, t.dtype, f) for (t, f), s in zip(own, strides, strict=True)]
    made = tuple(starts), tuple(fresh), sum(phases), tuple(numbers[id(t)] for t in results)
    about = lead.device, lead.get_device(), is_watched, jit.current_device, jit.raw_stream
    jit.keep(kept, name, (*made, *about))


def _places(each: Launched, addresses: list[int], own: dict[int, int]) -> Places | None:
    """Which of a call's addresses a launch takes; None: it takes others. own: by storage."""
    places: Places = []
    for place, t, number in each.tensors:
        address, storage = t.data_ptr(), t.untyped_storage().data_ptr()
        if number is None or addresses[number] != address:
            same = [i for i, other in enumerate(addresses) if other == address]
            # Not one: its own memory may hold several things, one behind the other.
            number = None if len(same) > 1 else same[0] if same else own.get(storage)
            if number is None or addresses[number] > address:
                return None  # a copy, of torch's making, or one tensor for two
        places.append((place, number, address - addresses[number]))
    return places


def keep_in_one(
    what: str,
    options: Options,
    work: Sequence[Launchable],
    x: tuple[Tensor, Tensor],
    y: tuple[Tensor, Tensor],
    dy: tuple[Tensor, Tensor] | None = None,
) -> None:
    """`keep` for `again_in_one`: one launch with one result, which may have been an `out`.

    Each tensor is a pair: as the call was given it, or gives it back; and as it was launched, a
    view of the first or a copy.
    """
    if len(work) == 1 and is_cuda(x[0]):
        pairs = (x, y) if dy is None else (x, dy, y)
        *given, result = (each for each, _ in pairs)
        launch = by_cuda(work[0], x[0].get_device(), [each for _, each in pairs])
        keep(what, options, given, [launch], [(result, None)], (result,))


def by_cuda(work: Launchable, index: int, views: Sequence[Tensor] = ()) -> Launched:
    """A launch by jit; views: what stands for each of the call's tensors, where that is known."""
    from online_softmax import jit

    tensors: list[tuple[int, Tensor, int | None]] = []
    for place, value in enumerate(work.args):
        if isinstance(value, Tensor):
            numbers = [number for number, t in enumerate(views) if t is value]
            tensors.append((place, value, numbers[0] if len(numbers) == 1 else None))

    def starter(places: Places) -> Start | None:
        pairs = [(place, number) for place, number, offset in places if not offset]
        return jit.starter(work, index, pairs) if len(pairs) == len(places) > 1 else None

    return Launched(tensors, starter)
