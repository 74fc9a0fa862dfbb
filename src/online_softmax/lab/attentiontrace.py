"""How (m, d, o) moves over tiles of keys, step by step: attention in the float32 of its states.

The scores, the states and their merge are those of reference/, so what is shown is what runs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from online_softmax.attentionplan import Options
from online_softmax.lab.trace import as_json
from online_softmax.reference.attention import Block, Place, scores
from online_softmax.reference.online import join
from online_softmax.reference.outputs import OutputState


@dataclass(frozen=True)
class Sizes:
    """What is walked over. All counts are at least 1."""

    queries: int = 2
    keys: int = 6
    dim: int = 4  # of a query and of a key
    value_dim: int = 2  # of a value, and so of o and of the output
    block: int = 2  # keys of a tile
    is_causal: bool = False  # the last query at the last key


@dataclass(frozen=True)
class Summary:
    """One query's state."""

    m: float  # the largest score
    d: float  # sum of exp(score - m)
    o: tuple[float, ...]  # sum of exp(score - m) v, not divided


@dataclass(frozen=True)
class Step:
    """One tile of keys: its scores, and the state before and after."""

    first: int  # key
    last: int
    scores: tuple[float, ...]  # -inf where the query does not see the key
    before: Summary
    old_weight: float  # w: what d and o were multiplied by, exp(old m - m)
    new_weight: float  # what the tile's own sums were multiplied by
    after: Summary


@dataclass(frozen=True)
class Half:
    """A part of the keys, folded by itself, and what it counts for in the merge."""

    first: int  # key
    last: int  # under first: no keys, the empty state
    state: Summary
    weight: float


@dataclass(frozen=True)
class Row:
    """One query: its walk over all tiles, the merge of two parts, and the results."""

    steps: tuple[Step, ...]
    halves: tuple[Half, Half]
    merged: Summary
    output: tuple[float, ...]  # o / d of the walk; 0 where it sees no key
    merged_output: tuple[float, ...]
    lse: float  # natural logarithm
    plain: tuple[float, ...]  # softmax(scores) v in float64, all scores at once


@dataclass(frozen=True)
class Walk:
    """All queries, what they read, and how far from float64 they end."""

    sizes: Sizes
    scale: float  # 1 / sqrt(dim)
    q: tuple[tuple[float, ...], ...]
    k: tuple[tuple[float, ...], ...]
    v: tuple[tuple[float, ...], ...]
    masked: tuple[int, ...]  # first keys of tiles that not every query sees whole
    rows: tuple[Row, ...]
    largest_difference: float  # of output or merged_output from plain, where a key is seen


def walk(sizes: Sizes) -> Walk:
    """Walk each query over the keys, a tile at a time.

    Args:
        sizes: of the example. Its values are small whole numbers by a fixed rule.

    Raises:
        ValueError: a size is under 1.

    >>> row = walk(Sizes(queries=1)).rows[0]
    >>> [(step.after.m, round(step.old_weight, 4)) for step in row.steps]
    [(1.0, 0.0), (1.5, 0.6065), (2.0, 0.6065)]
    """
    for name in ("queries", "keys", "dim", "value_dim", "block"):
        if getattr(sizes, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(sizes, name)}")
    q, k, v = _inputs(sizes)
    o = Options(0, 0, None, -1, 0 if sizes.is_causal else -1, False, None, False)
    starts = range(0, sizes.keys, sizes.block)
    one = slice(0, 1)
    place = Place(one, one, one, slice(0, sizes.queries))
    block = Block.of(q[None, None], k[None, None], v[None, None], None, None, o, place)
    tiles = [
        scores(block, slice(start, min(start + sizes.block, sizes.keys)), o).z[0, 0]
        for start in starts
    ]
    empty = OutputState.empty((sizes.queries,), sizes.value_dim)
    state, steps = empty, []
    for start, z in zip(starts, tiles, strict=True):
        part = OutputState.of(z, v[start : start + sizes.block])
        _, old, new = join(state.m, part.m)
        before, state = state, state.merge(part)
        steps.append((start, z, before, old, new, state))

    cut = math.ceil(len(tiles) / 2) * sizes.block  # the keys of the first part, whole tiles
    halves = [
        _folded(tiles[first // sizes.block : last // sizes.block], v[first:last], empty, sizes)
        for first, last in ((0, cut), (cut, len(tiles) * sizes.block))
    ]
    merged = halves[0].merge(halves[1])
    weights = join(halves[0].m, halves[1].m)[1:]
    ends = ((0, min(cut, sizes.keys) - 1), (cut, sizes.keys - 1))

    plain = _formula(q.double(), k.double(), v.double(), sizes)
    outputs, merged_outputs = state.output(), merged.output()
    sees = state.m > -math.inf
    apart = torch.stack([outputs, merged_outputs])[:, sees].double() - plain[sees]
    rows = tuple(
        Row(
            tuple(_step(*step, i) for step in steps),
            (
                Half(*ends[0], _summary(halves[0], i), weights[0][i].item()),
                Half(*ends[1], _summary(halves[1], i), weights[1][i].item()),
            ),
            _summary(merged, i),
            _plain(outputs[i]),
            _plain(merged_outputs[i]),
            state.lse()[i].item(),
            _plain(plain[i]),
        )
        for i in range(sizes.queries)
    )
    masked = (s for s, z in zip(starts, tiles, strict=True) if z.isinf().any())
    largest = apart.abs().max().item() if apart.numel() else 0.0
    return Walk(
        sizes,
        o.scale_for(sizes.dim),
        *(_matrix(q), _matrix(k), _matrix(v)),
        masked=tuple(masked),
        rows=rows,
        largest_difference=largest,
    )


def to_json(sizes: Sizes) -> str:
    """The walk as JSON; infinities and NaN, which JSON lacks, as the strings inf, -inf and nan."""
    return as_json(asdict(walk(sizes)))


# ---- the parts


def _inputs(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Small whole numbers: by default m rises with each tile of one query, of the other not."""

    def matrix(rows: int, cols: int, down: int, right: int, first: int, values: int) -> Tensor:
        row, col = torch.arange(rows).unsqueeze(1), torch.arange(cols)
        return ((down * row + right * col + first) % values - values // 2).float()

    return (
        matrix(sizes.queries, sizes.dim, 2, 1, 2, 5),
        matrix(sizes.keys, sizes.dim, 3, 4, 3, 5),
        matrix(sizes.keys, sizes.value_dim, 2, 3, 4, 7),
    )


def _formula(q: Tensor, k: Tensor, v: Tensor, sizes: Sizes) -> Tensor:
    """softmax(z) v with all scores z at once, by torch alone."""
    z = q @ k.mT / math.sqrt(sizes.dim)
    if sizes.is_causal:
        seen = torch.ones_like(z).tril(sizes.keys - sizes.queries)
        z = z.masked_fill(seen == 0, -math.inf)
    return torch.softmax(z, 1) @ v


def _folded(tiles: list[Tensor], v: Tensor, empty: OutputState, sizes: Sizes) -> OutputState:
    """The state of a part of the keys, a tile after the other."""
    state = empty
    for z, values in zip(tiles, v.split(sizes.block), strict=False):  # no tile has one empty split
        state = state.merge(OutputState.of(z, values))
    return state


def _step(
    start: int,
    z: Tensor,
    before: OutputState,
    old_weight: Tensor,
    new_weight: Tensor,
    after: OutputState,
    query: int,
) -> Step:
    last, states = start + z.shape[1] - 1, (_summary(each, query) for each in (before, after))
    old, new = old_weight[query].item(), new_weight[query].item()
    return Step(start, last, _plain(z[query]), next(states), old, new, next(states))


def _summary(state: OutputState, query: int) -> Summary:
    m, d, o = (t[query] for t in state)
    return Summary(m.item(), d.item(), _plain(o))


def _matrix(values: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(_plain(row) for row in values)


def _plain(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
