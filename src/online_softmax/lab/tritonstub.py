"""Triton without a GPU: kernels are bound and looked up as ever, but none is compiled or started.

For the host's cost of a launch, and for tests of what is launched: what stands between a call and
the launcher is Triton's own, and the launcher notes what it was given. CPU tensors stand for those
of device 0; nothing writes to results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from online_softmax import attentionops, jit, keptcalls
from online_softmax.triton import attention, attention_backward, attention_bias

KERNELS = (
    (attention, ("forward", "merge_parts")),
    (attention_backward, ("prepare", "by_keys", "by_queries")),
    (attention_bias, ("by_bias",)),
)
TARGET = GPUTarget("cuda", 90, 32)
STREAM = 7
METADATA = (8, 1, 0)  # of a compiled kernel; nothing reads it here
BEFORE_ARGUMENTS = 3  # what is told of the launch, and two hooks


class Started(NamedTuple):
    """What Triton's launcher was given."""

    kernel: str
    built_for: Any  # Triton's key of the compiled kernel: types, what is 1, multiples of 16
    stream: int
    grid: tuple[int, int, int]
    hooks: tuple[Any, ...]
    arguments: tuple[Any, ...]  # in the kernel's order


class Notes:
    """The launches, and how many kernels were asked for that Triton had not built."""

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.built = 0
        self.is_noting = True
        self.device_index = 0  # the current one

    def launcher(self, name: str, built_for: Any) -> Callable[..., None]:
        def start(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            if self.is_noting:
                _, *hooks = rest[1 : 1 + BEFORE_ARGUMENTS]
                arguments = rest[1 + BEFORE_ARGUMENTS :]
                self.started.append(
                    Started(name, built_for, stream, (x, y, z), tuple(hooks), arguments)
                )

        return start


def _unbuilt(kernel: Any) -> Any:
    """The kernel as Triton compiles it, also where it interprets, with nothing built yet."""
    options = kernel if isinstance(kernel, triton.JITFunction) else SimpleNamespace(**kernel.kwargs)
    return triton.JITFunction(kernel.fn, do_not_specialize=options.do_not_specialize)


@contextlib.contextmanager
def stubbed() -> Iterator[Notes]:
    """Within, attention of CPU tensors goes the way of CUDA tensors, and launches to the notes."""
    notes = Notes()

    def build(self: Any, key: Any, _signature: Any, device: int, *_: Any) -> Any:
        kernel: Any = object.__new__(CompiledKernel)
        kernel.module, kernel._module_pid, kernel.function = 1, None, 1
        kernel.packed_metadata, kernel.name, kernel.src = METADATA, self.__name__, None
        kernel._run = notes.launcher(self.__name__, key)
        self.device_caches[device][0][key] = kernel
        notes.built += 1
        return kernel

    @contextlib.contextmanager
    def device(given: Any) -> Iterator[None]:
        before, notes.device_index = notes.device_index, getattr(given, "index", given) or 0
        try:
            yield
        finally:
            notes.device_index = before

    stub = SimpleNamespace(
        get_current_device=lambda: notes.device_index,
        get_current_stream=lambda index: STREAM + index,
        get_current_target=lambda: TARGET,
        utils=SimpleNamespace(unload_module=lambda _: None),
    )
    allocate = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
    replaced: list[tuple[Any, str, Any]] = [
        (driver, "_active", stub),
        (triton.JITFunction, "_do_compile", build),
        (attentionops, "takes_triton", lambda *_: True),
        (keptcalls, "is_cuda", lambda _: True),
        (keptcalls, "empty_strided", allocate),
        (jit, "current_device", lambda: notes.device_index),
        (jit, "raw_stream", lambda index: STREAM + index),
        (torch.cuda, "device", device),
        (torch.Tensor, "get_device", lambda _: 0),
    ]
    for module, names in KERNELS:
        replaced += [(module, name, _unbuilt(getattr(module, name))) for name in names]
    with contextlib.ExitStack() as stack:
        for where, name, value in replaced:
            stack.enter_context(mock.patch.object(where, name, value))
        for memory in (keptcalls.kept, keptcalls.came_once):
            stack.callback(memory.clear)
            memory.clear()
        yield notes
