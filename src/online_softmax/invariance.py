"""Batch invariance, on unless someone gives it up: whether few rows may have other bits than many.

One setting for the whole process. A backward runs in threads of autograd's, and a compiled function
calls the ops when it runs: a setting of one thread would not be seen there.
"""

from __future__ import annotations

import os
from types import TracebackType

import torch

VARIABLE = "ONLINE_SOFTMAX_BATCH_INVARIANT"


def from_environment(text: str | None) -> bool:
    """The setting that a process begins with, from the variable's text (None: it is not set).

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    if text not in (None, "", "0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {text!r}")
    return text != "0"


class _Setting:
    __slots__ = ("is_on",)

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on


setting = _Setting(from_environment(os.environ.get(VARIABLE)))  # read in every call


class batch_invariant:  # noqa: N801  a function to its callers, as torch.set_grad_enabled
    """Whether a row has the same bits however many rows come with it. It has, unless this says not.

    A call sets it for the whole process: all threads, backwards too. In a `with` statement what
    was before is back at the end, after an exception too; such blocks nest. Two threads that change
    it at the same time change it for each other, so let one do it.

    With False, few rows may take a faster cut, and then have other bits than the same rows among
    many: within the same bounds, and the same at every run. Today softmax and log_softmax of 16-bit
    types have such cuts, along the last dim, for up to 16 rows of more than 16,384 and up to
    163,840 columns, or up to 4 rows of up to 262,144, that are whole 16-byte vectors, on sm_90a and
    sm_100a; all else is as before. `explain` says where.

    A process begins with True, or False where the environment variable
    ONLINE_SOFTMAX_BATCH_INVARIANT is 0 as the package is imported.

    A function that torch.compile has compiled asks when it runs, not when it is compiled. It cannot
    change the setting itself: put the call around it. Inside, the graph breaks there, and with
    fullgraph=True torch.compile refuses. A CUDA graph keeps the kernels that it was captured with.

    Args:
        is_on: True or False.

    Raises:
        TypeError: is_on is something else.

    Examples:
        >>> import torch
        >>> from online_softmax import softmax
        >>> with batch_invariant(False):
        ...     y = softmax(torch.zeros(2))
        >>> y
        tensor([0.5000, 0.5000])
    """

    def __init__(self, is_on: bool) -> None:
        if not isinstance(is_on, bool):
            raise TypeError(f"batch_invariant(): is_on must be True or False, got {is_on!r}")
        if torch.compiler.is_compiling():  # torch.compile would set it after the ops, not before
            raise RuntimeError("batch_invariant(): call it outside the compiled function")
        self._is_on = is_on
        self._before = [setting.is_on]
        self._is_set = True  # by this call, for the `with` that it may stand in
        setting.is_on = is_on

    def __enter__(self) -> None:
        if not self._is_set:
            self._before.append(setting.is_on)
            setting.is_on = self._is_on
        self._is_set = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        setting.is_on = self._before.pop()
