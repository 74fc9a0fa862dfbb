"""The recurrence in PyTorch: the definition, which triton/online.py and cuda/online.cuh repeat.

A row is summarised by two numbers, its maximum m and d, the sum of exp(x - m). Summaries of parts
merge in any order and grouping, so a row may be read once, in pieces, by many. Natural units
throughout: no base-2 scores, natural logarithms.

M. Milakov, N. Gimelshein, Online normalizer calculation for softmax (2018), arXiv:1805.02867: one
pass for (m, d), and the merge of two. G. E. Blelloch, Prefix sums and their applications (1990):
an associative merge is all that doing it in parallel needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# A half row has a float32 state: a sum kept in half precision stops growing at 256 or 2048.
STATE_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


class State(NamedTuple):
    """The summary of a row, or of a part of one, or of many rows at once.

    Attributes:
        m: the maximum, in natural units; float32, or float64 for float64 rows. Any shape, one
            element for each row. -inf: no finite element yet. NaN or +inf: the row holds one.
        d: the sum of exp(x - m), of m's shape and dtype. Where m is not finite, d means nothing
            and nothing reads it: two states are equal if m is, and, where m is finite, d is.

    Merging is associative and commutative, exactly for m and up to rounding for d.

    Examples:
        >>> first = State.of(torch.tensor([1.0, 5.0, 3.0]))
        >>> row = first.merge(State.of(torch.tensor([9.0, 2.0])))
        >>> [round(float(value), 4) for value in (*first, *row)]
        [5.0, 1.1537, 9.0, 1.022]

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867.
    """

    m: Tensor
    d: Tensor

    @classmethod
    def empty(
        cls,
        shape: int | Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> State:
        """The state of no elements, which merges with any other and leaves it as it is.

        Args:
            shape: one element for each row.
            dtype: float32 or float64. Anything else raises NotImplementedError.
            device: torch's current default if None.
        """
        return empty(shape, dtype, device)

    @classmethod
    def of(cls, x: Tensor, dim: int = -1) -> State:
        """The state of each slice of `x` along `dim`.

        Args:
            x: any shape; float16, bfloat16, float32 or float64. With no element along `dim` the
                result is `empty`.
            dim: the dimension that the state summarises.

        Returns:
            A state of x's shape without `dim`; float64 if x is, else float32.

        Raises:
            TypeError: x is not a tensor.
            NotImplementedError: x is of another dtype (as in torch, convert integers first), or
                not dense.
            IndexError: dim is out of range.
        """
        return of(x, dim)

    def merge(self, *others: State) -> State:
        """The state of all the parts together; any number of them, in any order.

        RuntimeError if they differ in shape, dtype or device.
        """
        return merge(self, *others)

    def lse(self) -> Tensor:
        """Natural logarithm of the sum of exponentials, in m's shape and dtype.

        -inf where nothing was summed or all of it was -inf, +inf where the row holds +inf, NaN
        where it holds NaN.
        """
        return lse(self)

    def softmax(self, x: Tensor, dim: int = -1) -> Tensor:
        """Probabilities of `x`, which may be any part of what this state summarises.

        Args:
            x: m's shape with `dim` added, of any length along it.
            dim: where x has that dimension.

        Returns:
            x's shape and dtype, rounded once; NaN in rows whose maximum is not finite.

        Raises:
            RuntimeError: x does not have the state's rows.

        Examples:
            >>> row = torch.tensor([1.0, 5.0, 3.0, 9.0])
            >>> State.of(row).softmax(row[2:])
            tensor([0.0024, 0.9793])
        """
        return prob(widen(x, "State.softmax"), self, dim).to(x.dtype)


def empty(
    shape: int | Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> State:
    """The identity of merge: (-inf, 0)."""
    if dtype not in STATE_DTYPE.values():
        raise NotImplementedError(f"a state is float32 or float64, got {dtype}")
    shape = tuple(shape) if isinstance(shape, Iterable) else (shape,)  # int, SymInt or NumPy's
    m = torch.full(shape, -math.inf, dtype=dtype, device=device)
    return State(m, torch.zeros_like(m))


def lift(x: Tensor) -> State:
    """Each element of x as a state of its own: (x, 1)."""
    x = widen(x, "lift")
    return State(x, torch.ones_like(x))


def join(m_a: Tensor, m_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two maxima -> their maximum, NaN if one is, and what each part counts for from now on."""
    m = torch.maximum(m_a, m_b)
    return m, weight(m_a, m), weight(m_b, m)


def weight(part: Tensor, m: Tensor) -> Tensor:
    """exp(part - m), and 1 where both are the same infinity. The only subtraction of two maxima."""
    # Equal finite maxima do go through the subtraction: it gives 0 as well, and its gradient
    # counts, since at a tie torch.maximum shares the gradient between both parts.
    same = (part == m) & m.isinf()
    return torch.exp(torch.where(same, 0.0, part - m))


def merge(*states: State) -> State:
    """The state of several parts together: d = d_a w_a + d_b w_b, from left to right."""
    check_alike(states)
    m, d = states[0]
    for other in states[1:]:
        whole, w_a, w_b = join(m, other.m)
        # The d of an empty state may hold anything, and 0 NaN is NaN.
        d = torch.where(m == -math.inf, 0.0, d) * w_a
        d = d + torch.where(other.m == -math.inf, 0.0, other.d) * w_b
        m = whole
    return State(m, d)


def of(x: Tensor, dim: int = -1) -> State:
    """The state of a block: one maximum, then one exponential an element."""
    m, terms = maximum_and_terms(widen(x, "State.of"), dim)
    return State(m, terms.sum(dim))


def maximum_and_terms(x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """m, and exp(x - m) of each element, for x of a state's dtype."""
    if x.dim() and x.size(dim) == 0:  # torch has no maximum of nothing
        return x.sum(dim) - math.inf, x
    m = x.amax(dim)
    shift = torch.where(m == -math.inf, 0.0, m)
    return m, (x - _beside(shift, x, dim)).exp_()  # in place: one tensor of x's size, not two


def absorb(state: State, x: Tensor, dim: int = -1) -> State:
    """The state with a block of further elements, those of x along dim: the inner loop."""
    return merge(state, of(x, dim))


def prob(x: Tensor, state: State, dim: int = -1) -> Tensor:
    """exp(x - m) / d, in the state's dtype; NaN where m is not finite."""
    x = widen(x, "prob")
    m, d = (_beside(value, x, dim) for value in state)
    return torch.where(m.isfinite(), torch.exp(x - m) / d, math.nan)


def log_prob(x: Tensor, state: State, dim: int = -1) -> Tensor:
    """(x - m) - log d, in the state's dtype; NaN where m is not finite."""
    x = widen(x, "log_prob")
    m, d = (_beside(value, x, dim) for value in state)
    # In that order: next to an m of 1e7, log d would be rounded away.
    return torch.where(m.isfinite(), (x - m) - torch.log(d), math.nan)


def lse(state: State) -> Tensor:
    """m + log d; m itself where m is not finite."""
    m, d = state
    return torch.where(m.isfinite(), m + torch.log(d), m)


def widen(x: Tensor, caller: str) -> Tensor:
    """x in the dtype of its state."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{caller}(): x must be a Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        raise not_dense(f"{caller}(): x", x)
    if x.dtype not in STATE_DTYPE:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in STATE_DTYPE)
        raise NotImplementedError(
            f"{caller}(): x must be one of {wanted}; got {x.dtype}: convert it first, x.float() say"
        )
    return x.to(STATE_DTYPE[x.dtype])


def not_dense(what: str, x: Tensor) -> NotImplementedError:
    """What to raise of a tensor that is sparse, of a library's own layout, or nested."""
    kind = "a nested tensor" if x.is_nested else f"one of layout {x.layout}"
    return NotImplementedError(f"{what} must be a dense tensor, got {kind}")


def _beside(value: Tensor, x: Tensor, dim: int) -> Tensor:
    """A value of each row, shaped to stand beside each element of the row."""
    rows = list(x.shape)
    if rows:
        x.size(dim)  # torch's IndexError if dim is out of range
        rows.pop(dim)
    if list(value.shape) != rows:
        raise RuntimeError(
            f"x of shape {tuple(x.shape)} has rows {tuple(rows)} along dim {dim}; the state has "
            f"{tuple(value.shape)}"
        )
    return value.unsqueeze(dim) if x.dim() else value


def check_alike(states: Sequence[State]) -> None:
    """Raise if these are not states of dense tensors, of one shape, dtype and device."""
    if not states:
        raise TypeError("merge() takes at least one State")
    first = states[0]
    for position, state in enumerate(states, 1):
        if not isinstance(state, State):
            kind = type(state).__name__
            raise TypeError(f"merge(): argument {position} must be a State, got {kind}")
        for value in state:
            if value.layout is not torch.strided or value.is_nested:
                raise not_dense(f"merge(): m and d of argument {position}", value)
            if value is first.m:
                continue
            for what in ("shape", "dtype", "device"):
                wanted, given = getattr(first.m, what), getattr(value, what)
                if given != wanted:
                    raise RuntimeError(
                        "merge(): states must have one shape, dtype and device, m and d alike; "
                        f"argument 1 has {what} {_plain(wanted)}, argument {position} has "
                        f"{_plain(given)}"
                    )


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value
