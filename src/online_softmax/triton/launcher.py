"""A call's launches of Triton's kernels: started by Triton, and started again without its binder.

`kernel[grid](...)` looks at every argument to learn which compiled kernel is meant: types, what is
1, what is a multiple of 16. For a call whose tensors have the type, shape, strides and 16-byte
phase of one before, and whose options are its options, the answer is the same. So `again` takes the
compiled kernel and the arguments as they were, puts in the new addresses, and calls the launcher
that Triton itself would call. That is no public interface: `missing` says what it lacks here, and
where it lacks anything each call goes Triton's ordinary way. So does one while somebody has hooks
on launches, and an interpreted kernel always. What else of `triton.knobs` is changed after a call
was kept does not reach it: `jit.clear_cache` drops what is kept.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from online_softmax import jit
from online_softmax.triton import ALIGNED
from online_softmax.triton.tiles import OPTIONS

Start = Callable[[int, list[int]], None]  # of a launch, by the stream and the addresses
Fresh = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, float | None]

# Triton's own call of the launcher: what is passed, in which order. Of 3.6 and of 3.9.
CONVENTION = (
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, "
    "launch_metadata, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, "
    "*bound_args.values())"
)


class Launch(NamedTuple):
    kernel: Any
    programs: int
    arguments: dict[str, Any]  # by name, all but the launch options
    warps: int
    stages: int
    is_dependent: bool = False  # may start while the kernel before runs; it waits by itself

    def start(self) -> Any:
        """By Triton; what it gives back is the compiled kernel, None if it interprets."""
        if not self.programs:
            return None
        return self.kernel[(self.programs,)](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        options = {"num_warps": self.warps, "num_stages": self.stages, **OPTIONS}
        return options | {"launch_pdl": True} if self.is_dependent else options


class Own:
    """Memory of a call's own, in the order in which it was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made: list[tuple[Tensor, float | None]] = []  # and what it is filled with, if at all

    def make(self, shape: Sequence[int], dtype: torch.dtype, fill: float | None = None) -> Tensor:
        """A contiguous tensor; fill: what stands in it before the launches, None: anything."""
        t = torch.empty(shape, dtype=dtype, device=self.device)
        self.made.append((t if fill is None else t.fill_(fill), fill))
        return t


class Call(NamedTuple):
    """What starts a call's launches again. It never changes: any number of threads may use it.

    Tensors have numbers: the given ones by their places, then the call's own.
    """

    starts: tuple[Start, ...]
    fresh: tuple[Fresh, ...]  # its own memory: shape, strides, type, what it is filled with
    results: tuple[int | None, ...]  # which of its own it gives back
    device: torch.device
    device_index: int
    is_watched: Callable[[], bool]
    current_device: Callable[[], int]
    raw_stream: Callable[[int], int]


@functools.cache
def missing() -> str | None:
    """A sentence on what this Triton lacks for a launch to be started again, or None."""
    try:
        from triton import knobs
        from triton.compiler import CompiledKernel
    except ImportError as error:
        return f"Triton {triton.__version__}: {error}"
    lacking = [
        name
        for name, is_there in (
            ("CompiledKernel.run", hasattr(CompiledKernel, "run")),
            ("knobs.runtime", hasattr(knobs, "runtime")),
            ("launch_enter_hook", hasattr(knobs.runtime, "launch_enter_hook")),
            ("launch_exit_hook", hasattr(knobs.runtime, "launch_exit_hook")),
        )
        if not is_there
    ]
    if lacking:
        return f"Triton {triton.__version__} has no {' and no '.join(lacking)}"
    try:
        text = re.sub(r"\s+", " ", inspect.getsource(triton.JITFunction.run))
    except (OSError, TypeError) as error:
        return f"Triton {triton.__version__} does not show JITFunction.run: {error}"
    if CONVENTION not in text:
        return f"Triton {triton.__version__} calls its launcher in another way than {CONVENTION}"
    return None


def is_watched() -> bool:
    """Whether somebody has hooks on each launch, which Triton alone calls as they are meant."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def prepared(
    launches: Sequence[Launch],
    compiled: Sequence[Any],
    own: Own,
    names: Sequence[str],
    given: Sequence[Tensor | None],
    results: Sequence[Tensor | None],
    index: int,
) -> Call | None:
    """What starts these launches again, or None if a later call needs more than other addresses.

    Args:
        launches: those of a call, which have run; compiled: what each of them gave back.
        own: the memory that was made for it.
        given: the tensors of the call; names: what the kernels call each.
        results: what the call gives back: tensors of `own`, or None.
        index: the device.
    """
    from triton.compiler import CompiledKernel

    if missing() is not None or any(t.data_ptr() % ALIGNED for t, _ in own.made):
        return None
    by_storage = {t.untyped_storage().data_ptr(): i for i, (t, _) in enumerate(own.made)}
    by_name = {f"{name}_ptr": i for i, name in enumerate(names)}
    starts = []
    for launch, kernel in zip(launches, compiled, strict=True):
        if not launch.programs:
            continue
        if not isinstance(kernel, CompiledKernel):
            return None
        places, values = [], [launch.arguments[name] for name in launch.kernel.arg_names]
        for place, (name, value) in enumerate(zip(launch.kernel.arg_names, values, strict=True)):
            if not isinstance(value, Tensor):
                continue
            address, storage = value.data_ptr(), value.untyped_storage().data_ptr()
            source = given[by_name[name]] if name in by_name else None
            if storage in by_storage:
                places.append((place, len(given) + by_storage[storage], address - storage))
            elif source is not None and source.data_ptr() == address:
                places.append((place, by_name[name], 0))
            else:  # a copy, or of torch's making
                return None
            values[place] = None
        starts.append(_start(kernel, launch.programs, values, places))
    numbers = {id(t): i for i, (t, _) in enumerate(own.made)}
    if any(t is not None and id(t) not in numbers for t in results):
        return None
    return Call(
        tuple(starts),
        tuple((tuple(t.shape), t.stride(), t.dtype, fill) for t, fill in own.made),
        tuple(None if t is None else numbers[id(t)] for t in results),
        own.device,
        index,
        is_watched,
        jit._current_device,
        jit._raw_stream,
    )


def _start(
    kernel: Any, programs: int, values: list[Any], places: Sequence[tuple[int, int, int]]
) -> Start:
    """What starts a compiled kernel on a stream of the current device.

    Args:
        values: the arguments in the kernel's order; nothing writes here again.
        places: which of them are addresses, and of what: (place, number of the tensor, bytes from
            its first).
    """
    run: Callable[..., None] = kernel.run
    numbers = kernel.function, kernel.packed_metadata, None, None, None

    def start(stream: int, addresses: list[int]) -> None:
        arguments = values.copy()  # of this call: others may be under way
        for place, number, offset in places:
            arguments[place] = addresses[number] + offset
        run(programs, 1, 1, stream, *numbers, *arguments)

    start.kernel = kernel  # type: ignore[attr-defined] # what is loaded stays loaded
    return start
