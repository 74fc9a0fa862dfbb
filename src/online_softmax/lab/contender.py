"""One line of a benchmark's cell: who, of which kind, and how its call is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from online_softmax.lab.rotation import Call


@dataclass(frozen=True)
class Contender:
    """One line of a cell; `make` is called once a cell and raises Refusal where there is none."""

    name: str
    kind: str  # "ceiling", "ours" or "rival"
    make: Callable[[], Call]
    writes: bool = False  # a matrix of its own, though it is ours: a gradient through autograd

    @property
    def allocates(self) -> bool:
        """Whether its call makes a matrix of its own instead of filling the set's."""
        return self.kind == "rival" or self.writes
