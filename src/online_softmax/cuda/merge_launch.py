"""How the kernels of merge.cu are launched: states, or pairs (out, lse), of parts in one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from online_softmax.cuda.launch import C_TYPE, Launch
from online_softmax.cuda.row_launch import is_whole
from online_softmax.plan import VECTOR_BYTES, WARP, ceil_div, next_power_of_two

FILE = "merge.cu"
BLOCK = 256  # threads
ROWS = 1  # of a thread of merge_forward, their vectors on their way together
KINDS = {"": "STATES", "e": "PAIRS", "2": "PAIRS_BASE_2"}  # by the base of a pair's logarithm


def forward(
    ms: Sequence[Tensor],
    ds: Sequence[Tensor],
    os: Sequence[Tensor],
    base: str,
    m: Tensor,
    d: Tensor,
    o: Tensor,
) -> list[Launch]:
    """The parts merged into m, d and o.

    Args:
        ms: of each part (rows,) float32, contiguous: the maximum, or lse of pairs.
        ds: the same, the sum; of pairs none.
        os: (rows, dim) of unit column stride, of one type; dim 0: states without outputs.
        base: "" for states (all float32); "e" or "2" for pairs.
        m, d, o: of the whole, contiguous; d of pairs has no element.
    """
    kinds, grid = _kernel(os, base, o)
    symbol = f"merge_forward<{kinds}, {ROWS}>"
    args = (_some(o, m), m, d if base == "" else m, *_sizes(os), *_table(ms, ds, os))
    return [Launch(FILE, symbol, args, ceil_div(grid, ROWS), BLOCK)]


def backward(
    dm: Tensor | None,
    dd: Tensor | None,
    do: Tensor,
    ms: Sequence[Tensor],
    ds: Sequence[Tensor],
    os: Sequence[Tensor],
    base: str,
    to_m: Tensor,
    to_d: Tensor,
    to_o: Tensor,
) -> list[Launch]:
    """The gradients by all parts into (parts, rows), (parts, rows) and (parts, rows, dim).

    Args:
        dm, dd, do: those by what `forward` gave, contiguous; None: there is none.
        to_d: of pairs without an element.
    """
    kinds, grid = _kernel(os, base, do, *to_o)
    flags = int(dm is not None), int(dd is not None)
    given = (_some(do, to_m), to_m if dm is None else dm, to_m if dd is None else dd)
    results = (_some(to_o, to_m), to_m, to_d if base == "" else to_m)
    args = (*given, *results, *_sizes(os), *flags, *_table(ms, ds, os))
    return [Launch(FILE, f"merge_backward<{kinds}>", args, grid, BLOCK)]


def blocks(rows: int, dim: int, itemsize: int) -> int:
    """Of a launch, at most."""
    return ceil_div(rows, BLOCK // lanes(dim, itemsize))


def lanes(dim: int, itemsize: int) -> int:
    """That own a row: one for each vector, up to a warp."""
    vectors = ceil_div(dim * itemsize, VECTOR_BYTES)
    return min(next_power_of_two(max(vectors, 1)), WARP)


def _kernel(os: Sequence[Tensor], base: str, *contiguous: Tensor) -> tuple[str, int]:
    """What both kernels are made for, and the blocks where a thread has one row; contiguous: what
    else has vectors of the rows."""
    (rows, dim), item = os[0].shape, os[0].itemsize
    whole = "true" if is_whole(*os, *contiguous) else "false"
    most = max(next_power_of_two(len(os)), 2)
    kinds = f"{C_TYPE[os[0].dtype]}, {KINDS[base]}, {lanes(dim, item)}, {whole}, {most}"
    return kinds, blocks(rows, dim, item)


def _some(o: Tensor, other: Tensor) -> Tensor:
    """A tensor with an address in place of one without elements, which is not read."""
    return o if o.numel() else other


def _sizes(os: Sequence[Tensor]) -> tuple[int, int, int]:
    return *os[0].shape, len(os)  # type: ignore[return-value]


def _table(ms: Sequence[Tensor], ds: Sequence[Tensor], os: Sequence[Tensor]) -> list[Tensor | int]:
    """The kernel's last parameter, flat; places without a part have the first one."""
    found: list[Tensor | int] = []
    for i in range(max(next_power_of_two(len(os)), 2)):
        at = i if i < len(os) else 0
        m, o = ms[at], os[at]
        found += [_some(o, m), m, ds[at] if ds else m, o.stride(0)]
    return found


def instances(
    dims: Sequence[int] = (0, 8, 64, 128, 512),
    counts: Sequence[int] = (2, 8, 64),
    dtypes: Sequence[torch.dtype] = tuple(C_TYPE),
) -> list[tuple[str, str]]:
    """(file, symbol) of these merges in every kind, of pairs in these types: what a compile run
    compiles. Without types, states alone."""
    found: dict[tuple[str, str], None] = {}
    for base, dim, count, gap in itertools.product(KINDS, dims, counts, (0, 1)):
        for dtype in dtypes if base else (torch.float32,):
            if base and not dim:
                continue
            m = torch.empty(2, device="meta")
            o = torch.empty((2, dim + gap), dtype=dtype, device="meta")[:, gap:]
            parts = [m] * count, [] if base else [m] * count, [o] * count, base
            all_o = o.expand(count, 2, dim)
            work = forward(*parts, m, m, o)
            work += backward(None, None, o, *parts, m, m, all_o)
            for each in work:
                found[each.file, each.symbol] = None
    return list(found)
