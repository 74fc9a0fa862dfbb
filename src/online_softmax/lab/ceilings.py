"""What memory alone allows: the copy, add and read kernels on tensors of any element type; on a CPU
what torch has for the same.

The kernels move 16-byte vectors. What is left of a size that is no multiple of 16 bytes is not
moved; torch allocates 512 bytes at least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from online_softmax import jit, plan
from online_softmax.cuda.launch import Launch

FILE = "ceilings.cu"
BLOCK = 256
READ_VECTORS = 4  # of a thread of `read`: ceilings.cu's READ_VECTORS


def _vectors(x: Tensor) -> int:
    return max(x.numel() * x.element_size() // plan.VECTOR_BYTES, 1)


def copy(x: Tensor, y: Tensor) -> Launch:
    """One read and one write: y is x."""
    vectors = _vectors(x)
    return Launch(FILE, "copy", (x, y, vectors), plan.ceil_div(vectors, BLOCK), BLOCK)


def add(a: Tensor, b: Tensor, c: Tensor) -> Launch:
    """Two reads and one write: the bits of c, as float32, are those of a plus those of b."""
    vectors = _vectors(a)
    return Launch(FILE, "add", (a, b, c, vectors), plan.ceil_div(vectors, BLOCK), BLOCK)


def read(x: Tensor, seen: Tensor) -> Launch:
    """One read. `seen`, 4 bytes or more, is hardly ever written (ceilings.cu)."""
    vectors = _vectors(x)
    grid = plan.ceil_div(vectors, BLOCK * READ_VECTORS)
    return Launch(FILE, "read", (x, seen, vectors), grid, BLOCK)


def copy_call(x: Tensor, y: Tensor) -> None:
    """The copy kernel: the ceiling for one read and one write."""
    if not x.is_cuda:
        y.copy_(x)
        return
    jit.launch(copy(x, y), x.device)


def add_call(a: Tensor, b: Tensor, c: Tensor) -> None:
    """The add kernel: the ceiling for two reads and one write."""
    if not a.is_cuda:
        torch.add(a, b, out=c)
        return
    jit.launch(add(a, b, c), a.device)


def read_call(x: Tensor, seen: Tensor) -> None:
    """The read kernel: the ceiling for one read."""
    if not x.is_cuda:
        x.sum()
        return
    jit.launch(read(x, seen), x.device)
