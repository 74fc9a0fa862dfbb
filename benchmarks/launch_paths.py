"""Host time of a launch by every way that needs no compiler: an empty kernel with our arguments.

python benchmarks/launch_paths.py: microseconds a launch, median and least of batches that fit into
a stream's queue, with and without a cluster of blocks. A way that fails is a row with its reason.
"""

from __future__ import annotations

import ctypes
import json
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

GRID, BLOCK, SIZES = 8, 128, (8, 1024, 1024)
KERNEL = """extern "C" __global__ void nothing(
    const float*, float*, long long, long long, long long, float, long long) {}"""
Way = Callable[[], Any]


def ways(work: Launch, x: Tensor, y: Tensor) -> dict[str, Callable[[], Way]]:
    """What makes each way: a function that launches once."""
    from cuda.bindings import driver

    index, cluster, a, b = x.get_device(), work.cluster, x.data_ptr(), y.data_ptr()
    jit.launch(work, index)
    stream, kind = jit._raw_stream(index), jit._ready[jit._key(work, index)]
    laid = kind.lay(jit_launch.words(work.args, index))
    jit_launch.turn(driver, laid, stream)
    config, function, address = laid.config, kind.function, laid.address

    def core() -> Way:
        import cuda.core as core

        blocks = cluster if cluster > 1 else None
        numbers = core.LaunchConfig(grid=GRID // cluster, block=BLOCK, cluster=blocks)
        f = core.Kernel.from_handle(int(function))
        on = core.Stream.from_handle(stream) if stream else core.LEGACY_DEFAULT_STREAM
        return lambda: core.launch(on, numbers, f, a, b, *SIZES, ctypes.c_float(1.0), 0)

    def by_ctypes() -> Way:
        _, entry, _ = driver.cuGetProcAddress(b"cuLaunchKernelEx", 12000, 0)
        launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(int(entry))
        return partial(launch, config.getPtr(), int(function), address, None)

    def torchs() -> Way:
        launch, arguments = torch._C._StaticCudaLauncher._launch_kernel, (a, b, *SIZES, 1.0, 0)
        _, own = driver.cuKernelGetFunction(driver.CUkernel(int(function)))
        return partial(launch, int(own), GRID, 1, 1, BLOCK // 32, 0, "KKlllfl", arguments, stream)

    jit.keep("launch_paths", work, index, (0, 1))
    start, ex, plain = jit.kept("launch_paths")[0], driver.cuLaunchKernelEx, driver.cuLaunchKernel
    grid, on = (GRID, 1, 1, BLOCK, 1, 1, 0), config.hStream
    found = {
        "(softmax)": lambda: lambda: softmax(x),
        "(torch.softmax)": lambda: lambda: torch.softmax(x, -1),
        "(torch.empty_like)": lambda: lambda: torch.empty_like(x),
        "kept launch: ours, a call like one before": lambda: lambda: start(a, b),
        "jit.launch: ours, another call": lambda: lambda: jit.launch(work, index),
        "cuda.bindings cuLaunchKernelEx": lambda: lambda: ex(config, function, address, 0),
        "ctypes cuLaunchKernelEx": by_ctypes,
        "cuda.core.launch": core,
    }
    alone = {"cuda.bindings cuLaunchKernel": lambda: lambda: plain(function, *grid, on, address, 0)}
    return found if cluster > 1 else found | alone | {"torch's static launcher": torchs}


lines: list[dict[str, Any]] = []
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "nothing.cu")
    file.write_text(KERNEL)
    x = torch.zeros(SIZES[:2], device="cuda")
    y = torch.empty_like(x)
    for blocks in (1, 4):
        work = Launch(str(file), "nothing", (x, y, *SIZES, 1.0, 0), GRID, BLOCK, blocks)
        calls: dict[str, Way] = {}
        for name, make in ways(work, x, y).items():
            try:
                (call := make())()
                torch.cuda.synchronize()
                calls[name] = call
            except Exception as error:  # noqa: BLE001 one way's failure is its row
                lines.append({"cluster": blocks, "way": name, "why": repr(error)})
        for name, us in batches_us(calls, torch.cuda.synchronize).items():
            figures = {"median_us": round(median(us), 2), "least_us": round(min(us), 2)}
            lines.append({"cluster": blocks, "way": name, **figures})
for line in lines:
    said = line.get("why") or f"{line['median_us']:7.2f} {line['least_us']:7.2f}"
    print(f"cluster of {line['cluster']}  {line['way']:42} {said}")
print(json.dumps(lines))
