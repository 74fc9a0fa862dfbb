"""What a contender raises that does not have an operation; and an error as a row tells it."""

from __future__ import annotations

REASON = 300  # characters of a message that are kept
ABSENT = "not installed"
PACKAGES = {  # of a contender's module, as pip knows it
    "torch": "torch", "triton": "triton", "quack": "quack-kernels", "liger_kernel": "liger-kernel",
    "flash_attn": "flash-attn", "cut_cross_entropy": "cut-cross-entropy",
}  # fmt: skip


class Refusal(Exception):  # noqa: N818 a state of a contender, told in its row
    """A contender does not have this operation; the message is a sentence."""


def one_line(error: BaseException) -> str:
    """An error on one line; of a contender that is not here, how to get it.

    >>> one_line(ValueError("no\\n  such"))
    'ValueError: no such'
    >>> one_line(ModuleNotFoundError(name="quack.softmax"))
    'not installed: pip install quack-kernels'
    """
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        if module in PACKAGES:
            return f"{ABSENT}: pip install {PACKAGES[module]}"
    return " ".join(f"{type(error).__name__}: {error}".split())[:REASON]
