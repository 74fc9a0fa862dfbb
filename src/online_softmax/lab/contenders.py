"""Who runs in a cell: the ceiling, ours, and the rivals, each as a call on a buffer set's tensors.

A set is what buffersets.py says. A call fills the last of its tensors or returns one of its own.
Those of a loss are in losscontenders.py. Rivals are imported when they are made.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from online_softmax import batch_invariant, jit, rowops
from online_softmax.lab import (
    attentioncontenders,
    ceilings,
    goals,
    linearcells,
    losscontenders,
    mergecontenders,
    morecontenders,
)
from online_softmax.lab.contender import Contender
from online_softmax.lab.fusedsizes import LINEAR, MERGE
from online_softmax.lab.grid import LOSS_OPS, OPS, WRITING, Cell
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.moresizes import MORE_OPS
from online_softmax.lab.refusal import PACKAGES, Refusal
from online_softmax.lab.rotation import Call
from online_softmax.plan import DEFAULT_ARCH

# ---- the ceiling and ours


CEILING: dict[str, Call] = {
    "softmax": ceilings.copy_call,
    "log_softmax": ceilings.copy_call,
    "softmax_backward": ceilings.add_call,
    "log_softmax_backward": ceilings.add_call,
    "logsumexp": ceilings.read_call,
}


def _forward(op: str) -> Call:
    return lambda x, y: rowops.forward(op, x, -1, None, 1.0, False, "", y)


def _backward(op: str) -> Call:
    return lambda dy, y, dx: rowops.backward(op, dy, y, -1, None, 1.0, False, dx)


def _ours(op: str) -> Call:
    """The package's own call of an operation on a set's tensors: the one place that names it.

    What `rowops` runs, below autograd, into the set's last tensor; logsumexp returns its own.
    """
    calls: dict[str, Call] = {
        "softmax": _forward("softmax"),
        "log_softmax": _forward("log_softmax"),
        "softmax_backward": _backward("softmax"),
        "log_softmax_backward": _backward("log_softmax"),
        "logsumexp": lambda x, lse: rowops.logsumexp(x, (-1,), False, None, 1.0, ""),
    }
    if op not in calls:
        raise Refusal(f"the package has no kernel for {op} yet")
    return calls[op]


def _ours_not_invariant(op: str) -> Call:
    """The same with `batch_invariant(False)`, as each call sets it."""
    call = _ours(op)

    def under_the_setting(*tensors: Tensor) -> Any:
        with batch_invariant(False):
            return call(*tensors)

    return under_the_setting


# Lines of ours, each under a setting of its own: judged and timed alike, with a column each.
OURS: dict[str, Callable[[str], Call]] = {
    "ours": _ours,
    goals.NOT_INVARIANT: _ours_not_invariant,
}


def _ours_in(cell: Cell) -> list[str]:
    """The lines of ours that a cell has: the second where it runs another cut."""
    arch = jit.device_arch() if torch.cuda.is_available() else DEFAULT_ARCH
    return list(OURS) if goals.has_other_cut(cell, arch) else ["ours"]


# ---- rivals

# The operations on rows that a rival has, of those that have not all of them.
HAS = {
    "quack": ("softmax", "softmax_backward"),
    "liger": ("softmax", "softmax_backward"),
    "tutorial": ("softmax",),
}


def has(name: str, op: str) -> bool:
    """Whether a rival has an operation: without one its line is a refusal.

    >>> has("liger", "log_softmax"), has("liger", "cross_entropy"), has("torch", "log_softmax")
    (False, True, True)
    """
    if op in LOSS_OPS:
        return name not in losscontenders.LACK.get(op, ())
    return op not in OPS or op in HAS.get(name, OPS)


def _torch(op: str) -> Call:
    calls: dict[str, Call] = {
        "softmax": lambda x, y: torch.softmax(x, -1, out=y),
        "log_softmax": lambda x, y: torch.log_softmax(x, -1, out=y),
        "logsumexp": lambda x, lse: torch.logsumexp(x, -1, out=lse),
        "softmax_backward": lambda dy, y, dx: torch.ops.aten._softmax_backward_data.out(
            dy, y, -1, y.dtype, grad_input=dx
        ),
        "log_softmax_backward": lambda dy, y, dx: torch.ops.aten._log_softmax_backward_data.out(
            dy, y, -1, y.dtype, out=dx
        ),
    }
    return calls[op]


def _compile(op: str) -> Call:
    """The same operation as torch.compile makes it of its parts, for these sizes alone."""
    aten = torch.ops.aten
    functions: dict[str, Callable[..., Tensor]] = {
        "softmax": lambda x: torch.softmax(x, -1),
        "log_softmax": lambda x: torch.log_softmax(x, -1),
        "logsumexp": lambda x: torch.logsumexp(x, -1),
        "softmax_backward": lambda dy, y: aten._softmax_backward_data(dy, y, -1, y.dtype),
        "log_softmax_backward": lambda dy, y: aten._log_softmax_backward_data(dy, y, -1, y.dtype),
    }
    # Each size is a recompilation of the same code; after a few, Dynamo would run it eagerly.
    torch.compiler.reset()
    compiled = torch.compile(functions[op], dynamic=False)
    return lambda *tensors: compiled(*tensors[:-1])


def _quack(op: str) -> Call:
    if not has("quack", op):
        raise Refusal(f"quack has no {op}")
    quack = import_module("quack.softmax")
    if op == "softmax":
        return lambda x, y: quack.softmax_fwd(x)
    return lambda dy, y, dx: quack.softmax_bwd(dy, y)


def _liger(op: str) -> Call:
    if not has("liger", op):
        raise Refusal(f"liger has no {op}")
    liger = import_module("liger_kernel.ops.softmax")
    if op == "softmax":
        return lambda x, y: liger._softmax_forward(x)[0]
    settings = import_module("liger_kernel.ops.utils").calculate_settings

    def backward(dy: Tensor, y: Tensor, dx: Tensor) -> Tensor:
        block, warps = settings(dy.shape[1])  # as its forward keeps them
        return liger._softmax_backward(dy, y, block, warps, dy.shape[1] > block)

    return backward


def _tutorial(op: str) -> Call:
    """Triton's tutorial written anew (tutorial.py), of which there is a softmax."""
    if not has("tutorial", op):
        raise Refusal(f"the tutorial has no {op}")
    call: Call = import_module("online_softmax.lab.tutorial").softmax
    return call


RIVALS: dict[str, Callable[[str], Call]] = {
    "torch": _torch,
    "compile": _compile,
    "quack": _quack,
    "liger": _liger,
    "tutorial": _tutorial,
}
FUSED_RIVALS = ("flash-attn", "cut-cross-entropy")  # of attention, of a linear layer's loss
KNOWN = (*RIVALS, *FUSED_RIVALS)
MODULE = {
    "torch": "torch", "compile": "torch", "quack": "quack", "liger": "liger_kernel",
    "tutorial": "triton", "flash-attn": "flash_attn", "cut-cross-entropy": "cut_cross_entropy",
}  # fmt: skip
PACKAGE = {name: PACKAGES[module] for name, module in MODULE.items()}
# Packages of other names that bring the same module, as do some named after a vendor.
ALSO = {"flash-attn": ("flash-attn-4",)}
TUTORIAL_OPS = ("softmax", "attention")  # elsewhere it is no line at all
EVERYWHERE = ("torch",)  # the rivals of every cell; the others where grid.Cell.has_rivals


def versions(rivals: tuple[str, ...]) -> dict[str, str | None]:
    """What is installed of the rivals; None: it is not."""
    return {name: _version(name) for name in rivals}


def _version(name: str) -> str | None:
    for package in (PACKAGE[name], *ALSO.get(name, ())):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    module = MODULE[name]
    if find_spec(module) is None:  # to ask every package takes a while
        return None
    packages = dict.fromkeys(metadata.packages_distributions().get(module, ()))
    return ", ".join(f"{each} {metadata.version(each)}" for each in packages) or None


def rivals(text: str) -> tuple[str, ...]:
    """Rivals by name, torch always the first.

    >>> rivals("quack")
    ('torch', 'quack')
    """
    named = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in named if name not in KNOWN]
    if unknown:
        raise BadInput(f"--against {unknown[0]}: there are {', '.join(KNOWN)}")
    return tuple(dict.fromkeys(("torch", *named)))


Makers = dict[str, Callable[[str], Call]]


def makers(op: str) -> tuple[dict[str, Call], Makers, Makers]:
    """Of an operation: the ceilings' calls, and what makes the lines of ours and the rivals'."""
    if op in LOSS_OPS:
        return losscontenders.CEILING, losscontenders.OURS, losscontenders.RIVALS
    return CEILING, OURS, RIVALS


def contenders(cell: Cell, rivals: tuple[str, ...]) -> list[Contender]:
    """The lines of a cell, the ceiling first."""
    if cell.is_fused:
        return _fused(cell, rivals)

    def line(kind: str, name: str, make: Callable[[str], Call]) -> Contender:
        writes = kind == "ours" and cell.op in WRITING
        return Contender(name, kind, lambda: make(cell.op), writes)

    ceiling, ours, theirs = makers(cell.op)
    names = losscontenders.ours_in(cell.op) if cell.is_loss else _ours_in(cell)
    timed = [name for name in rivals if name in theirs and _is_timed(name, cell)]
    return [
        line("ceiling", "ceiling", ceiling.__getitem__),
        *(line("ours", name, ours[name]) for name in names),
        *(line("rival", name, theirs[name]) for name in timed),
    ]


def _is_timed(name: str, cell: Cell) -> bool:
    """Whether a rival has a line in a cell of rows."""
    if name == "tutorial" and cell.op not in TUTORIAL_OPS:
        return False
    return cell.has_rivals or name in EVERYWHERE


def _fused(cell: Cell, rivals: tuple[str, ...]) -> list[Contender]:
    """The lines of a cell that is more than a matrix."""
    if cell.op == LINEAR:
        return linearcells.contenders(cell, rivals)
    if cell.op == MERGE:
        return mergecontenders.contenders(cell, rivals)
    family = morecontenders if cell.op in MORE_OPS else attentioncontenders
    return family.contenders(cell, rivals, torch.cuda.is_available())
