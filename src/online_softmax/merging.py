"""The public functions that merge what parts gave: check arguments once, then call the library."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from online_softmax import library
from online_softmax.reference.online import State
from online_softmax.reference.outputs import OutputState, check_pairs, check_states


def merge(*states: State | OutputState) -> State | OutputState:
    """The state of several parts together, with or without outputs.

    On CUDA float32 states are merged by one kernel, 64 at a time: one read of each part, one write.
    All else is in torch operations. Stacked tensors are not copied: iterate over them.

    Args:
        states: one or more, all of one kind, shape, dtype and device. Empty ones change nothing,
            whatever their d and o hold.

    Returns:
        A state of that kind. m is exact, whatever the order; d and o are within rounding.
        Differentiable, twice as well.

    Raises:
        TypeError: none is given, one is no state, or they are of two kinds.
        RuntimeError: they differ in shape, dtype or device.
        NotImplementedError: a tensor of one is not dense.

    Examples:
        >>> import torch
        >>> merge(State.of(torch.tensor([1.0, 5.0, 3.0])), State.of(torch.tensor([9.0, 2.0])))
        State(m=tensor(9.), d=tensor(1.0220))
    """
    check_states(states)
    return library.merge_states(states)


def merge_outputs(*pairs: tuple[Tensor, Tensor], base: Literal["e", "2"]) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of several parts of the keys together.

    These pairs are what inference engines keep of attention over a part of the keys: a prefix that
    several requests share, for example. Some count lse in base 2: it cannot be told from the
    numbers, so it has to be said.

    On CUDA up to 64 pairs are merged by one kernel, lse in float32, out in float32, float16 or
    bfloat16: one read of each part, one write, and the same for the gradient. All else is in torch
    operations. Stacked tensors are not copied: `merge_outputs(*zip(outs, lses), base="e")`.

    Args:
        pairs: one or more (out, lse). out: (..., dim), divided already; float16, bfloat16, float32
            or float64. lse: (...), float32 or float64: the logarithm of the sum of exponentials;
            -inf where the part has no key, and out counts for nothing there, whatever it holds.
        base: of the logarithm, "e" or "2", in all pairs and in the result.

    Returns:
        (out, lse) of the whole, in the dtypes of the first pair; out is 0 and lse -inf where no
        part has a key, without a gradient. Differentiable, twice as well.

    Raises:
        TypeError: no pair is given, or something in one is no tensor.
        ValueError: base is neither "e" nor "2", or a pair is not of two.
        RuntimeError: shapes, dtypes or devices do not match.
        NotImplementedError: a tensor is not dense.

    Examples:
        >>> import torch
        >>> first = torch.tensor([1.0]), torch.tensor(8.0)
        >>> merge_outputs(first, (torch.tensor([-1.0]), torch.tensor(4.1)), base="e")
        (tensor([0.9603]), tensor(8.0200))
    """
    check_pairs(pairs, base)
    return library.merge_pairs(pairs, base)
