"""The recurrence with an output: (m, d, o), what attention keeps of the keys it has seen.

o is the sum of exp(x - m) v, where d is the sum of exp(x - m): a weighted sum beside its weights.
Both are rescaled alike when m rises, so parts merge as in online.py, and o / d is the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from online_softmax.reference import online
from online_softmax.reference.online import STATE_DTYPE, State, not_dense, weight
from online_softmax.reference.ops import is_autocast

LOG = {"e": 1.0, "2": math.log(2.0)}  # by base: the natural logarithm of it


class OutputState(NamedTuple):
    """The summary of rows of scores, each score with a vector of its own.

    Attributes:
        m: the maximum of a row's scores, in natural units; float32 or float64, any shape.
        d: the sum of exp(x - m), of m's shape and dtype.
        o: the sum of exp(x - m) v, not divided by d: m's shape and one dimension more, m's dtype.
            Where m is not finite, d and o mean nothing and nothing reads them.

    Examples:
        >>> x, v = torch.tensor([1.0, 5.0, 3.0]), torch.tensor([[1.0], [2.0], [3.0]])
        >>> whole = OutputState.of(x, v)
        >>> halves = OutputState.of(x[:1], v[:1]).merge(OutputState.of(x[1:], v[1:]))
        >>> whole.output(), halves.output()
        (tensor([2.1014]), tensor([2.1014]))
    """

    m: Tensor
    d: Tensor
    o: Tensor

    @classmethod
    def empty(
        cls,
        shape: int | Sequence[int],
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> OutputState:
        """The state of no scores, which merges with any other and leaves it as it is.

        Args:
            shape: one element for each row.
            dim: the length of an output vector.
            dtype: float32 or float64. Anything else raises NotImplementedError.
            device: torch's current default if None.
        """
        m, d = online.empty(shape, dtype, device)
        return cls(m, d, d.new_zeros((*d.shape, dim)))

    @classmethod
    def of(cls, x: Tensor, v: Tensor) -> OutputState:
        """The state of each row of scores, with the vectors that they weigh.

        Args:
            x: (..., rows, keys), or (keys,); float16, bfloat16, float32 or float64.
            v: (..., keys, dim), of x's dtype; its leading dimensions broadcast with x's.

        Raises what `State.of` raises, of v too, and RuntimeError if shapes or devices do not match.
        """
        wide = online.widen(x, "OutputState.of")
        check_vectors(x, v)
        m, terms = online.maximum_and_terms(wide)
        with without_autocast(x.device.type):
            d, o = terms.sum(-1), terms @ v.to(m.dtype)
        rows = o.shape[:-1]  # v may have leading dimensions that x has not
        return cls(m, d, o) if m.shape == rows else cls(m.expand(rows), d.expand(rows), o)

    def merge(self, *others: OutputState) -> OutputState:
        """The state of all the parts together; any number of them, in any order.

        RuntimeError if they differ in shape, dtype or device.
        """
        check_states((self, *others))
        return _merge_outputs((self, *others))

    def lse(self) -> Tensor:
        """Natural logarithm of the sum of exponentials, as `State.lse`."""
        return online.lse(State(self.m, self.d))

    def output(self, empty: Literal["zero", "nan"] = "zero") -> Tensor:
        """o / d, of o's shape and dtype: the vectors' mean, each counting as much as exp(x).

        Where nothing was summed or all scores were -inf: 0, or NaN for empty="nan". NaN where m is
        +inf or NaN.
        """
        if empty not in ("zero", "nan"):
            raise ValueError(f'output(): empty must be "zero" or "nan", got {empty!r}')
        m = self.m.unsqueeze(-1)
        is_empty = m == -math.inf
        # Dividing by 1 there instead of 0 keeps the gradient free of NaN.
        d = torch.where(is_empty, 1.0, self.d.unsqueeze(-1))
        output = torch.where(m.isfinite(), self.o / d, math.nan)
        return torch.where(is_empty, 0.0 if empty == "zero" else math.nan, output)


def merge(*states: State | OutputState) -> State | OutputState:
    """`online_softmax.merge` in torch operations, which says what it takes."""
    check_states(states)
    return merge_states(states)


def merge_states(states: Sequence[State | OutputState]) -> State | OutputState:
    """The state of several parts together; `check_states` has seen them."""
    if isinstance(states[0], State):
        return online.merge(*states)  # type: ignore[arg-type]
    return _merge_outputs(states)  # type: ignore[arg-type]


def merge_outputs(*pairs: tuple[Tensor, Tensor], base: Literal["e", "2"]) -> tuple[Tensor, Tensor]:
    """`online_softmax.merge_outputs` in torch operations, which says what it takes."""
    check_pairs(pairs, base)
    return merge_pairs(pairs, base)


def merge_pairs(pairs: Sequence[tuple[Tensor, Tensor]], base: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of the whole; `check_pairs` has seen them."""
    # float64, so that a change of base and back leaves every float32 as it was.
    maxima = [lse.double() * LOG[base] for _, lse in pairs]
    m, d = online.merge(*(State(part, torch.ones_like(part)) for part in maxima))
    wide = STATE_DTYPE[pairs[0][0].dtype]
    o = sum(
        counted(out.to(wide), part) * beside(weight(part, m).to(wide))
        for (out, _), part in zip(pairs, maxima, strict=True)
    )
    whole = OutputState(m.to(wide), d.to(wide), o)  # type: ignore[arg-type]
    # A row without keys has no gradient: there m is a constant.
    lse = torch.where(m == -math.inf, m.detach(), online.lse(State(m, d))) / LOG[base]
    return whole.output().to(pairs[0][0].dtype), lse.to(pairs[0][1].dtype)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Products are in the dtype of their operands, whatever autocast would make of them."""
    if not is_autocast(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


# ---- the parts


def _merge_outputs(parts: Sequence[OutputState]) -> OutputState:
    """The maximum of all first, so that each o is read once and multiplied once."""
    m, d = online.merge(*(State(part.m, part.d) for part in parts))
    first, *others = (counted(part.o, part.m) * beside(weight(part.m, m)) for part in parts)
    return OutputState(m, d, sum(others, first))


def counted(o: Tensor, m: Tensor) -> Tensor:
    """o where something was summed, else 0: it may hold anything there, and 0 NaN is NaN."""
    return torch.where(beside(m) == -math.inf, 0.0, o)


def beside(value: Tensor) -> Tensor:
    """A value a row, to stand beside its vector."""
    return value.unsqueeze(-1)


def _kind(state: object) -> str:
    return type(state).__name__


def check_vectors(x: Tensor, v: Tensor) -> None:
    """Raise what `OutputState.of` says it raises, of v."""
    where = "OutputState.of(): v"
    if not isinstance(v, Tensor):
        raise TypeError(f"{where} must be a Tensor, got {_kind(v)}")
    if v.layout is not torch.strided or v.is_nested:
        raise not_dense(where, v)
    if v.dtype not in STATE_DTYPE:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in STATE_DTYPE)
        raise NotImplementedError(f"{where} must be one of {wanted}; got {v.dtype}")
    if v.device != x.device:
        raise RuntimeError(f"{where} must be on {x.device} like x, got {v.device}")
    fits = x.dim() > 0 and v.dim() > 1 and x.shape[-1] == v.shape[-2]
    leading = zip(reversed(x.shape[:-2]), reversed(v.shape[:-2]), strict=False)
    if not fits or not all(a == b or 1 in (a, b) for a, b in leading):
        raise RuntimeError(
            "OutputState.of(): x (..., rows, keys) and v (..., keys, dim) must have as many keys, "
            f"and other dimensions that broadcast, got {tuple(x.shape)} and {tuple(v.shape)}"
        )


def check_states(states: Sequence[State | OutputState]) -> None:
    """Raise what `online_softmax.merge` says it raises."""
    for position, state in enumerate(states, 1):
        if not isinstance(state, (State, OutputState)):
            wanted = "a State or an OutputState"
            raise TypeError(f"merge(): argument {position} must be {wanted}, got {_kind(state)}")
        if type(state) is not type(states[0]):
            raise TypeError(
                f"merge(): states must be of one kind; argument 1 is {_kind(states[0])}, argument "
                f"{position} is {_kind(state)}"
            )
    online.check_alike([State(state.m, state.d) for state in states])
    first = states[0]
    if isinstance(first, State):
        return
    for position, part in enumerate(states, 1):
        o = part.o  # type: ignore[union-attr]
        if o.layout is not torch.strided or o.is_nested:
            raise not_dense(f"merge(): o of argument {position}", o)
    shape, dtype, device = (*first.m.shape, *first.o.shape[-1:]), first.m.dtype, first.m.device
    for position, part in enumerate(states, 1):
        given = part.o  # type: ignore[union-attr]
        if given.shape != shape or given.dtype != dtype or given.device != device:
            raise RuntimeError(
                f"merge(): o of argument {position} must have shape {tuple(shape)}, {dtype} and "
                f"be on {device}, got {tuple(given.shape)}, {given.dtype} on {given.device}"
            )


def check_pairs(pairs: Sequence[tuple[Tensor, Tensor]], base: str) -> None:
    """Raise what `online_softmax.merge_outputs` says it raises."""
    if not isinstance(base, str) or base not in LOG:
        raise ValueError(f'merge_outputs(): base must be "e" or "2", got {base!r}')
    if not pairs:
        raise TypeError("merge_outputs() takes at least one pair (out, lse)")
    for position, pair in enumerate(pairs, 1):
        where = f"merge_outputs(): pair {position}"
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"{where} must be (out, lse), got {_kind(pair)}")
        for each in pair:
            if not isinstance(each, Tensor):
                raise TypeError(f"{where} must hold two Tensors, got {_kind(each)}")
            if each.layout is not torch.strided or each.is_nested:
                raise not_dense(f"{where}: {'out' if each is pair[0] else 'lse'}", each)
        out, lse = pair
        if out.dtype not in STATE_DTYPE or lse.dtype not in STATE_DTYPE.values():
            raise RuntimeError(
                f"{where} must be of a float type, its lse float32 or float64, got {out.dtype} and "
                f"{lse.dtype}"
            )
        if out.shape[:-1] != lse.shape or out.dim() != lse.dim() + 1:
            raise RuntimeError(
                f"{where}: lse must have out's shape without its last dimension, got out "
                f"{tuple(out.shape)}, lse {tuple(lse.shape)}"
            )
        first = pairs[0]
        if position > 1 and any(
            a.shape != b.shape or a.dtype != b.dtype or a.device != b.device
            for a, b in zip(pair, first, strict=True)
        ):
            raise RuntimeError(
                f"{where} must have the shapes, dtypes and device of the first: out "
                f"{tuple(first[0].shape)} {first[0].dtype} on {first[0].device}, lse "
                f"{first[1].dtype}; got out {tuple(out.shape)} {out.dtype} on {out.device}, lse "
                f"{lse.dtype}"
            )
