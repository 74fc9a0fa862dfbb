"""Who runs in a cell of a loss: each a call on (logits, target, dlogits), as its users call it.

What is timed is the public function of each, reduction and all: of cross_entropy the mean of all
rows; of cross_entropy_both that, and its gradient by the logits through autograd; of
cross_entropy_in_forward the same with the gradient made in the forward where a contender can. Each
call makes a leaf of the logits anew, on their memory, and returns what it made.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import online_softmax
from online_softmax.lab import ceilings, gradients
from online_softmax.lab.grid import TOP_K
from online_softmax.lab.refusal import Refusal
from online_softmax.lab.rotation import Call, Overwrites

LACK = {"token_stats": ("quack", "liger")}  # who does not have an operation
Loss = Callable[[Tensor, Tensor], Any]  # of logits and target, a 0-dim tensor


# ---- the ceilings


def _read(x: Tensor, target: Tensor, seen: Tensor) -> None:
    ceilings.read_call(x, seen)


def read_and_copy(x: Tensor, target: Tensor, dx: Tensor) -> None:
    """The floor of a forward and a backward apart, read, read, write: the read kernel on the
    logits, then the copy kernel, one call; so it has the gap between two launches as they have."""
    ceilings.read_call(x, dx)
    ceilings.copy_call(x, dx)


def _copy(x: Tensor, target: Tensor, dx: Tensor) -> None:
    ceilings.copy_call(x, dx)


CEILING: dict[str, Call] = {
    "cross_entropy": _read,
    "cross_entropy_both": read_and_copy,
    "cross_entropy_in_forward": _copy,
    "token_stats": _read,
}


# ---- what is done with a loss


def _forward(loss: Loss) -> Call:
    return lambda x, target, out: loss(x, target)


def _both(loss: Loss) -> Call:
    """The mean's gradient by the logits; the loss is made on the way."""
    return lambda x, target, dx: gradients.of(lambda leaf: loss(leaf, target), x)[0]


def _in_place(loss: Loss) -> Call:
    """The same of logits as a model makes them, into their memory."""
    return Overwrites(lambda x, target, dx: gradients.of_made(lambda z: loss(z, target), x))


# ---- ours


def _stats(x: Tensor, target: Tensor, out: Tensor) -> Any:
    return online_softmax.token_stats(x, target, top_k=min(TOP_K, x.shape[-1]))


def _ours(op: str) -> Call:
    """The package's own call of an operation: the public function."""
    if op == "token_stats":
        return _stats
    if op == "cross_entropy":
        return _forward(_loss())
    return _both(_loss(grad_in_forward=op == "cross_entropy_in_forward"))


def _loss(**options: Any) -> Loss:
    return lambda x, target: online_softmax.cross_entropy(x, target, **options)


def _ours_in_place(op: str) -> Call:
    return _in_place(_loss(grad_in_forward=True, overwrite_logits=True))


OURS: dict[str, Callable[[str], Call]] = {"ours": _ours, "ours, in place": _ours_in_place}


def ours_in(op: str) -> list[str]:
    """The lines of ours that an operation's cells have."""
    return list(OURS) if op == "cross_entropy_in_forward" else ["ours"]


# ---- rivals


def _call(op: str, loss: Loss) -> Call:
    return _forward(loss) if op == "cross_entropy" else _both(loss)


def _torchs_stats(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entropy, the target's log-probability, the largest and their indices; neither lse nor rank,
    which cost it two more reads."""
    log_p = torch.log_softmax(x, -1, dtype=torch.float32)
    entropy = -(log_p.exp() * log_p).sum(-1)
    of_target = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return entropy, of_target, *log_p.topk(min(TOP_K, x.shape[-1]), dim=-1)


def _named(stats: Callable[..., tuple[Tensor, ...]]) -> Call:
    names = ("entropy", "target_log_prob", "top_log_probs", "top_indices")
    return lambda x, target, out: dict(zip(names, stats(x, target), strict=True))


def _torch(op: str) -> Call:
    return _named(_torchs_stats) if op == "token_stats" else _call(op, functional.cross_entropy)


def _compile(op: str) -> Call:
    """What torch.compile makes of the same, for these sizes alone; of a loss with a gradient it
    compiles forward and backward."""
    torch.compiler.reset()  # after a few sizes Dynamo would run the same code eagerly
    if op == "token_stats":
        return _named(torch.compile(_torchs_stats, dynamic=False))

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(x, target)

    return _call(op, torch.compile(loss, dynamic=False))


def _quack(op: str) -> Call:
    """Its gradient is made in the backward, out of place: its default."""
    if "quack" in LACK.get(op, ()):
        raise Refusal(f"quack has no {op}")
    quack = import_module("quack.cross_entropy").cross_entropy
    return _call(op, lambda x, target: quack(x, target, reduction="mean"))


def _liger(op: str) -> Call:
    """Where a gradient is wanted it is made in the forward and overwrites the logits: they are
    given back from a copy before each call, outside of what is timed."""
    if "liger" in LACK.get(op, ()):
        raise Refusal(f"liger has no {op}")
    liger = import_module("liger_kernel.transformers.functional").liger_cross_entropy
    call = _call(op, lambda x, target: liger(x, target, reduction="mean"))
    return call if op == "cross_entropy" else Overwrites(call)


RIVALS: dict[str, Callable[[str], Call]] = {
    "torch": _torch,
    "compile": _compile,
    "quack": _quack,
    "liger": _liger,
}
