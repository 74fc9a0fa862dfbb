"""Host time of a launch by every way that needs no compiler: an empty kernel with our arguments.

python benchmarks/launch_paths.py: microseconds a launch, median and least of batches that fit into
a stream's queue, with and without a cluster of blocks. Each way has a process of its own, which
begins before CUDA does: one that fails, crashes or hangs is a row with its reason. A row is printed
when it is known, and all of them as JSON at the end.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from online_softmax import jit, jit_launch, softmax
from online_softmax.cuda.launch import Launch
from online_softmax.lab.hostcost import batches_us

GRID, BLOCK, SIZES, CLUSTERS = 8, 128, (8, 1024, 1024), (1, 4)
SECONDS = 30.0  # that one way may take
KERNEL = """extern "C" __global__ void nothing(
    const float*, float*, long long, long long, long long, float, long long) {}"""
Way = Callable[[], Any]  # launches once


class Laid:
    """The launch that every way starts, and what it reads: there for as long as this is held.

    `address` is that of pointers to the arguments, which are gone with `laid`.
    """

    def __init__(self, file: Path, cluster: int) -> None:
        from cuda.bindings import driver

        self.x = torch.zeros(SIZES[:2], device="cuda")
        self.y = torch.empty_like(self.x)
        self.a, self.b = self.x.data_ptr(), self.y.data_ptr()
        arguments = (self.x, self.y, *SIZES, 1.0, 0)
        self.work = Launch(str(file), "nothing", arguments, GRID, BLOCK, cluster)
        self.index, self.cluster, self.driver = self.x.get_device(), cluster, driver
        jit.launch(self.work, self.index)
        self.stream = jit.raw_stream(self.index)
        kind = jit.kind_of(self.work, self.index)
        self.laid = kind.lay(jit_launch.words(self.work.args, self.index))
        jit_launch.turn(driver, self.laid, self.stream)
        self.config, self.function = self.laid.config, kind.function
        self.address = self.laid.address


def _kept(of: Laid) -> Way:
    start, index = jit.starter(of.work, of.index, ((0, 0), (1, 1))), of.index
    current_device, raw_stream, a, b = jit.current_device, jit.raw_stream, of.a, of.b

    def way() -> None:  # as keptcalls has it
        if current_device() == index:
            start(raw_stream(index), (a, b))

    return way


def _bindings_ex(of: Laid) -> Way:
    return partial(of.driver.cuLaunchKernelEx, of.config, of.function, of.address, 0)


def _bindings(of: Laid) -> Way:
    numbers = (GRID, 1, 1, BLOCK, 1, 1, 0)
    launch, on = of.driver.cuLaunchKernel, of.config.hStream
    return partial(launch, of.function, *numbers, on, of.address, 0)


def _ctypes(of: Laid) -> Way:
    _, entry, _ = of.driver.cuGetProcAddress(b"cuLaunchKernelEx", 12000, 0)
    launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(int(entry))
    return partial(launch, of.config.getPtr(), int(of.function), of.address, None)


def _core(of: Laid) -> Way:
    import cuda.core as core

    blocks = of.cluster if of.cluster > 1 else None
    numbers = core.LaunchConfig(grid=GRID // of.cluster, block=BLOCK, cluster=blocks)
    f = core.Kernel.from_handle(int(of.function))
    on = core.Stream.from_handle(of.stream) if of.stream else core.LEGACY_DEFAULT_STREAM
    return lambda: core.launch(on, numbers, f, of.a, of.b, *SIZES, ctypes.c_float(1.0), 0)


def _torchs(of: Laid) -> Way:
    launch, arguments = torch._C._StaticCudaLauncher._launch_kernel, (of.a, of.b, *SIZES, 1.0, 0)
    status, own = of.driver.cuKernelGetFunction(of.driver.CUkernel(int(of.function)))
    if status != 0:
        raise RuntimeError(f"cuKernelGetFunction: {status.name}")
    numbers = (GRID, 1, 1, BLOCK // 32, 0)
    return partial(launch, int(own), *numbers, "KKlllfl", arguments, of.stream)


def _softmax(function: Callable[[Tensor], Tensor]) -> Callable[[Laid], Way]:
    return lambda of: partial(function, of.x)


WAYS: dict[str, Callable[[Laid], Way]] = {
    "(softmax)": _softmax(softmax),
    "(torch.softmax)": _softmax(lambda x: torch.softmax(x, -1)),
    "(torch.empty_like)": _softmax(torch.empty_like),
    "kept launch: ours, a call like one before": _kept,
    "jit.launch: ours, another call": lambda of: partial(jit.launch, of.work, of.index),
    "cuda.bindings cuLaunchKernelEx": _bindings_ex,
    "ctypes cuLaunchKernelEx": _ctypes,
    "cuda.core.launch": _core,
}
WITHOUT_CLUSTER = {"cuda.bindings cuLaunchKernel": _bindings, "torch's static launcher": _torchs}


def figures(make: Callable[[Laid], Way], file: Path, cluster: int) -> dict[str, Any]:
    """Microseconds of one way."""
    of = Laid(file, cluster)
    call = make(of)
    call()
    torch.cuda.synchronize()
    us = batches_us({"way": call}, torch.cuda.synchronize)["way"]
    return {"median_us": round(median(us), 2), "least_us": round(min(us), 2)}


def in_a_process(work: Callable[[], dict[str, Any]], seconds: float = SECONDS) -> dict[str, Any]:
    """What `work` gives, in a process forked for it; or "why" it gives nothing."""
    fork = multiprocessing.get_context("fork")  # what is imported stays; nothing has begun
    here, there = fork.Pipe(duplex=False)

    def child() -> None:
        try:
            there.send(work())
        except Exception as error:  # noqa: BLE001 one way's failure is its row
            there.send({"why": repr(error)})

    process = fork.Process(target=child)
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            return {"why": f"still at work after {seconds:g} s"}
        found: dict[str, Any] = here.recv()
        return found
    except EOFError:  # it ended and had sent nothing
        process.join()
        code = process.exitcode or 0
        return {"why": signal.Signals(-code).name if code < 0 else f"ended with {code}"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "nothing.cu")
        file.write_text(KERNEL)
        for cluster in CLUSTERS:
            for name, make in (WAYS if cluster > 1 else WAYS | WITHOUT_CLUSTER).items():
                found = in_a_process(partial(figures, make, file, cluster))
                lines.append({"cluster": cluster, "way": name, **found})
                said = found.get("why") or f"{found['median_us']:7.2f} {found['least_us']:7.2f}"
                print(f"cluster of {cluster}  {name:42} {said}", flush=True)
    print(json.dumps(lines), flush=True)


if __name__ == "__main__":
    main()
