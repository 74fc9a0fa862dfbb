"""CUDA kernels on the CPU: an ordinary C++ compiler builds the same .cu file, fibers run it.

For tests, teaching and exact counts, not for speed. Blocks, barriers, warp shuffles, shared memory,
clusters and cooperative launches mean what they mean on a GPU (device.h says what a kernel sees).
A launch that a GPU would hang on, or whose result would be undefined, is a :class:`Fault`.
"""

from online_softmax.cuda.host.execute import Counts, Fault, Launchable, build, launch
from online_softmax.cuda.host.sanitizers import Report, sanitize
from online_softmax.cuda.host.toolchain import CompileError, CompilerMissing, compiler

__all__ = [
    "CompileError",
    "CompilerMissing",
    "Counts",
    "Fault",
    "Launchable",
    "Report",
    "build",
    "compiler",
    "launch",
    "sanitize",
]
