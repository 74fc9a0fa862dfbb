"""Launches as the driver reads them: laid out once for each kind, then addresses and stream alone.

`cuda.bindings` hands a prepared launch to the driver without making anything. What a launch reads
belongs to one call at a time: it is taken from a list and put back, which no other thread, and no
finalizer or signal handler in between, can do at the same moment.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from ctypes import c_float
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from online_softmax.jit_compile import checked

WORD_BYTES = 8  # an argument's place, whatever its type


class Shape(NamedTuple):
    """The numbers of a launch."""

    grid: int  # blocks, also when they form clusters
    block: int
    cluster: int
    shared_bytes: int
    cooperative: bool = False
    dependent: bool = False


def words(args: Sequence[object], index: int) -> list[int]:
    """Arguments as 8-byte integers: a tensor's address, an int, the bits of a float32,
    infinite where a float is beyond it.

    Raises:
        ValueError: a tensor is not on CUDA device `index`.
        TypeError: an argument of another type.
    """
    return [value if type(value) is int else _word(value, index) for value in args]


def _word(value: object, index: int) -> int:
    if isinstance(value, Tensor):
        if value.get_device() != index:
            raise ValueError(f"a tensor on {value.device} is given to a kernel on cuda:{index}")
        return value.data_ptr()
    if isinstance(value, float):
        return int(struct.unpack("=q", struct.pack("=f4x", c_float(value).value))[0])
    if isinstance(value, int):
        return int(value)  # a bool
    raise TypeError(f"a kernel takes tensors, ints and floats, not {type(value).__name__}")


def config(driver: ModuleType, shape: Shape, is_cluster: bool | None = None) -> Any:
    """The driver's record of a launch's numbers; `is_cluster`: None, if it has several blocks."""
    made, kinds = driver.CUlaunchConfig(), driver.CUlaunchAttributeID
    made.gridDimX, made.gridDimY, made.gridDimZ = shape.grid, 1, 1
    made.blockDimX, made.blockDimY, made.blockDimZ = shape.block, 1, 1
    made.sharedMemBytes = shape.shared_bytes
    attributes = []

    def attribute(name: str) -> Any:
        each = driver.CUlaunchAttribute()
        each.id = getattr(kinds, f"CU_LAUNCH_ATTRIBUTE_{name}")
        attributes.append(each)
        return each.value

    if shape.cluster > 1 if is_cluster is None else is_cluster:
        dim = attribute("CLUSTER_DIMENSION").clusterDim
        dim.x, dim.y, dim.z = shape.cluster, 1, 1
    if shape.cooperative:
        attribute("COOPERATIVE").cooperative = 1
    if shape.dependent:
        name = "PROGRAMMATIC_STREAM_SERIALIZATION"
        attribute(name).programmaticStreamSerializationAllowed = 1
    made.attrs, made.numAttrs = attributes, len(attributes)
    return made


class Laid:
    """What the driver reads of one launch: a config, and arguments with a pointer to each."""

    __slots__ = ("address", "config", "pointers", "stream", "words")

    def __init__(self, config: Any, values: Sequence[int]) -> None:
        self.config = config
        self.stream = -1  # the handle that the config has; none yet
        self.words = array("q", values)
        first, count = self.words.buffer_info()
        self.pointers = array("Q", range(first, first + count * WORD_BYTES, WORD_BYTES))
        self.address = self.pointers.buffer_info()[0]


class Kind:
    """A kernel on one device with the numbers of its launch."""

    def __init__(self, driver: ModuleType, handle: Any, shape: Shape) -> None:
        self.driver, self.shape = driver, shape
        # The driver takes a kernel for a function: that of the context which is current.
        self.function = driver.CUfunction(int(handle))
        self._spare: list[Laid] = []

    def lay(self, values: Sequence[int]) -> Laid:
        """A launch with these arguments, the caller's alone."""
        try:
            laid = self._spare.pop()
        except IndexError:
            return Laid(config(self.driver, self.shape), values)
        if len(values) != len(laid.words):
            return Laid(laid.config, values)
        laid.words[:] = array("q", values)
        return laid

    def start(self, values: Sequence[int], stream: int) -> None:
        """Launch with these arguments on a stream, 0 for the default one.

        Raises:
            BindingError: the driver refuses; the message is its status.
        """
        laid = self.lay(values)
        if laid.stream != stream:
            turn(self.driver, laid, stream)
        checked(self.driver.cuLaunchKernelEx(laid.config, self.function, laid.address, 0))
        self._spare.append(laid)


def turn(driver: ModuleType, laid: Laid, stream: int) -> None:
    """Have a launch go to another stream."""
    # 0 could mean a default stream for each thread: the handle of the one says what is meant.
    laid.config.hStream = driver.CUstream(stream or driver.CU_STREAM_LEGACY)
    laid.stream = stream
