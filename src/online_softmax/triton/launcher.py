"""A call's launches of Triton's kernels: started by Triton, and started again without its binder.

`kernel[grid](...)` looks at every argument to learn which compiled kernel is meant: types, what is
1, what is a multiple of 16. For a call whose tensors have the type, shape, strides and 16-byte
phase of one before, and whose options are its options, the answer is the same. So a kept call
takes the compiled kernel and the arguments as they were, puts in the new addresses, and calls the
launcher that Triton itself would call. That is no public interface: `missing` says what it lacks
here, and where it lacks anything each call goes Triton's ordinary way. So does one while somebody
has hooks on launches, and an interpreted kernel always. What else of `triton.knobs` is changed
after a call was kept does not reach it: `jit.clear_cache` drops what is kept.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from online_softmax.keptcalls import Launched, Places, Start
from online_softmax.triton.tiles import OPTIONS

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


def launched(
    launches: Sequence[Launch], compiled: Sequence[Any], names: Sequence[str]
) -> list[Launched] | None:
    """A call's launches for `keptcalls.keep`; None: they cannot be started again.

    Args:
        launches: they have run; compiled: what each of them gave back.
        names: what the kernels call each of the call's given tensors.
    """
    from triton.compiler import CompiledKernel

    if missing() is not None:
        return None
    numbers, found = {f"{name}_ptr": i for i, name in enumerate(names)}, []
    for launch, kernel in zip(launches, compiled, strict=True):
        if not launch.programs:
            continue
        if not isinstance(kernel, CompiledKernel):
            return None
        tensors, values = [], [launch.arguments[name] for name in launch.kernel.arg_names]
        for place, (name, value) in enumerate(zip(launch.kernel.arg_names, values, strict=True)):
            if isinstance(value, Tensor):
                tensors.append((place, value, numbers.get(name)))
                values[place] = None
        found.append(Launched(tensors, partial(_starter, kernel, launch.programs, values)))
    return found


def _starter(kernel: Any, programs: int, values: list[Any], places: Places) -> Start:
    """What starts a compiled kernel on a stream of the current device.

    Args:
        values: the arguments in the kernel's order; nothing writes here again.
        places: which of them are addresses, and of what.
    """
    run: Callable[..., None] = kernel.run
    numbers = kernel.function, kernel.packed_metadata, None, None, None

    def start(stream: int, addresses: Sequence[int]) -> None:
        arguments = values.copy()  # of this call: others may be under way
        for place, number, offset in places:
            arguments[place] = addresses[number] + offset
        run(programs, 1, 1, stream, *numbers, *arguments)

    start.kernel = kernel  # type: ignore[attr-defined] # what is loaded stays loaded
    return start
