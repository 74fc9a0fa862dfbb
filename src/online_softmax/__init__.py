"""Softmax-family operations for PyTorch on one recurrence, the running pair (m, d).

>>> import torch, online_softmax
>>> online_softmax.softmax(torch.tensor([0.0, 0.0]))
tensor([0.5000, 0.5000])
"""

from importlib import import_module
from typing import Any

from online_softmax import nn
from online_softmax.api import log_softmax, logsumexp, softmax
from online_softmax.attentions import attention, attention_state, attention_varlen
from online_softmax.catalogue import KERNELS
from online_softmax.explanation import explain
from online_softmax.invariance import batch_invariant
from online_softmax.library import override_torch
from online_softmax.linear import linear_cross_entropy
from online_softmax.losses import cross_entropy
from online_softmax.merging import merge, merge_outputs
from online_softmax.reference.online import State
from online_softmax.reference.outputs import OutputState
from online_softmax.stats import token_stats

__version__ = "0.1.0"
__all__ = [
    "KERNELS",
    "OutputState",
    "State",
    "attention",
    "attention_state",
    "attention_varlen",
    "batch_invariant",
    "cross_entropy",
    "explain",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "merge",
    "merge_outputs",
    "nn",
    "override_torch",
    "softmax",
    "token_stats",
]


def __getattr__(name: str) -> Any:
    if name == "jit":  # for its errors, by which users catch them; an import need not load it
        return import_module("online_softmax.jit")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
