"""torch.softmax, log_softmax and logsumexp on CUDA by our kernels, for as long as it is asked for.

Kernels of `aten` are registered at one dispatch key, over torch's own, which are kept and called
wherever we have no kernel. Removing the registration brings torch's back. What is below the
dispatcher is not reached: the backward of logsumexp, which torch composes of other operations (ours
has a kernel), and code that Inductor has compiled.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from online_softmax import rowops
from online_softmax.catalogue import atens_own
from online_softmax.library.private import has_computed_kernel
from online_softmax.reference.ops import FP8

Takes = Callable[..., bool]  # (name of an op, its tensors) -> whether ours runs it
Implementation = Callable[..., Tensor]


def _dtype(x: Tensor, half_to_float: bool) -> torch.dtype:
    return torch.float32 if half_to_float else x.dtype


def _in_range(x: Tensor, *dims: int) -> bool:
    """Different dims of x; of others torch's kernel says what is wrong."""
    rank = x.dim() or 1
    if len(dims) == 1:
        return -rank <= dims[0] < rank
    return all(-rank <= dim < rank for dim in dims) and len({d % rank for d in dims}) == len(dims)


def _implementations(takes: Takes) -> dict[str, tuple[Callable[..., bool], Implementation]]:
    """For each aten op: whether ours takes a call, and ours; both with the arguments of aten's."""
    table: dict[str, tuple[Callable[..., bool], Implementation]] = {}

    def along(name: str) -> None:
        def run(x: Tensor, dim: int, half_to_float: bool, out: Tensor | None = None) -> Tensor:
            dtype = _dtype(x, half_to_float)
            return rowops.forward(name, x, dim, dtype, 1.0, False, "", out)

        def takes_out(x: Tensor, dim: int, half_to_float: bool, *, out: Tensor) -> bool:
            """Not to be resized, converted, or told apart from x."""
            is_apart = x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
            fits = out.shape == x.shape and out.dtype == _dtype(x, half_to_float)
            return is_apart and fits and out.is_contiguous() and takes_along(x, dim, half_to_float)

        def takes_along(x: Tensor, dim: int, half_to_float: bool) -> bool:
            return _in_range(x, dim) and takes(name, x)

        def takes_backward(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> bool:
            return dy.shape == y.shape and _in_range(y, dim) and takes(backward, dy, y)

        def run_backward(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
            return rowops.backward(name, dy, y, dim, dtype, 1.0, False)

        backward = f"{name}_backward"
        table[f"_{name}"] = (takes_along, run)
        table[f"_{name}.out"] = (takes_out, run)
        table[f"_{backward}_data"] = (takes_backward, run_backward)

    along("softmax")
    along("log_softmax")
    table["logsumexp"] = (
        lambda x, dims, keepdim=False: bool(dims) and _in_range(x, *dims) and takes("logsumexp", x),
        lambda x, dims, keepdim=False: rowops.logsumexp(x, tuple(dims), keepdim, None, 1.0, ""),
    )
    return table


class _Installation:
    """The registration at one dispatch key, and how many ask for it.

    torch does not lock its table of kernels against calls: to change it under another thread's call
    ends in a crash. So the registration stays, passing all calls on to torch, for as long as the
    process has other threads when the last override ends.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.count = 0
        self.library: Library | None = None
        self.takes: Takes = rowops.has_kernel  # of the newest override: a registration may be older

    def add(self, takes: Takes) -> None:
        self.takes = takes
        if self.library is None:
            self._register()
        self.count += 1

    def drop(self) -> None:
        self.count -= 1
        if self.count == 0 and threading.active_count() == 1:
            self.library = None  # its end unregisters

    def _register(self) -> None:
        library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered")
            for name, (is_taken, ours) in _implementations(self._takes).items():
                if has_computed_kernel(f"aten::{name}", self.key):  # else a torch without it
                    original = get_kernel(f"aten::{name}", self.key)
                    kernel = self._kernel(original, is_taken, ours)
                    library.impl(name, kernel, self.key, with_keyset=True)
        self.library = library

    def _takes(self, name: str, *tensors: Tensor) -> bool:
        # Of fp8 torch's functions have no result, and ours one of another dtype.
        return not any(t.dtype in FP8 for t in tensors) and self.takes(name, *tensors)

    def _kernel(
        self, original: Any, is_taken: Callable[..., bool], ours: Implementation
    ) -> Implementation:
        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Tensor:
            # Inside our own implementations, what they call of torch is torch's.
            if not self.count or atens_own.depth or not is_taken(*args, **kwargs):
                return original.call_boxed(keys, *args, **kwargs)
            atens_own.depth += 1
            try:
                return ours(*args, **kwargs)
            finally:
                atens_own.depth -= 1

        return kernel


_lock = threading.Lock()
_installations: dict[str, _Installation] = {}


class Override:
    """What `override_torch` gives: in force until `remove`, or until the `with` block ends."""

    def __init__(self, key: str = "CUDA", takes: Takes = rowops.has_kernel) -> None:
        self._key: str | None = key
        with _lock:
            _installations.setdefault(key, _Installation(key)).add(takes)

    def remove(self) -> None:
        """End it. torch's kernels are back once every override has ended; again does nothing."""
        with _lock:
            if self._key is not None:
                _installations[self._key].drop()
            self._key = None

    def __enter__(self) -> Override:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def override_torch() -> Override:
    """Make torch.softmax, log_softmax and logsumexp on CUDA tensors use this package's kernels.

    Also what is made of them: `torch.nn.functional.softmax`, `cross_entropy`, `nn.Softmax`, and
    the backward of softmax and log_softmax. Whatever has no kernel here, by its dtype for example,
    runs torch's as before. It is for the whole process, all threads; a call costs a few
    microseconds more on the host. Without effect on code that torch.compile's Inductor has
    compiled or compiles, on the backward of logsumexp, and on CPU tensors.

    Returns:
        An `Override`: call its `remove()`, or use it in a `with` statement. Several count: torch's
        kernels are back when the last has ended. Any thread may begin and end one, but the first
        while no other thread is in these operations: torch does not lock its table of kernels.

    Examples:
        >>> import torch
        >>> with override_torch():
        ...     y = torch.softmax(torch.zeros(2), -1)  # with a CUDA tensor, by our kernel
        >>> y
        tensor([0.5000, 0.5000])
    """
    return Override()
