"""What a case is; laying it out among NaN; and judging a result against float64.

The bound is absolute: PyTorch's own softmax in the same dtype meets it on every case (a test holds
that), so a kernel that meets it is no worse. One rounding to the output type, plus float32's share.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GUARD = 128  # NaN elements before and after: 16-byte boundaries stay where they were, in any dtype
CHUNK = 2**24  # float64 elements compared at a time
RTOL = 1e-5  # float32 arithmetic: exp, the sum, the division
ATOL = 1e-8  # of the row's largest probability: arguments near -18 and below lose more
SUM_ATOL = 1e-5  # of a row's sum, in outputs that hold float32 or better
DOUBLE_RTOL, DOUBLE_ATOL = 1e-12, 1e-15
POISON = {2: 0x7FDB, 4: 0x7FDBADED, 8: 0x7FFBADEDADEDADED}  # NaN in every dtype of that many bytes
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Case:
    """A (rows, cols) matrix of awkward values, laid out awkwardly."""

    name: str
    rows: int
    cols: int
    build: Callable[[torch.Generator], Tensor]  # (rows, cols) float64, or fewer rows that repeat
    phase: int = 0  # elements from a 16-byte boundary to the first row
    gap: int = 0  # elements from the end of a row to the start of the next
    size: str = "cpu"  # "cpu": also run on the CPU; "gpu": on a GPU only
    source: str = ""
    dtypes: tuple[torch.dtype, ...] = DTYPES
    checked: tuple[int, ...] = ()  # the rows worth comparing; () is all

    @property
    def layout(self) -> str:
        return "sliced" if self.phase else "row_stride" if self.gap else "contiguous"

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class View:
    """A tensor of any rank: what `take` cuts out of a base whose other elements are NaN."""

    name: str
    base: tuple[int, ...]
    take: Callable[[Tensor], Tensor]
    dims: tuple[int, ...]  # each is a softmax over that dim
    source: str = ""


@dataclass(frozen=True)
class Verdict:
    """What `check` found. `max_error` is the largest |y - float64| where that is a number."""

    ok: bool
    max_error: float
    why: str = ""  # if not ok: the first wrong element, in a sentence


# ---- memory


def poison(elements: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A vector of one NaN bit pattern that no arithmetic makes."""
    bits = torch.full(
        (elements,), POISON[dtype.itemsize], dtype=INTEGER[dtype.itemsize], device=device
    )
    return bits.view(dtype)


def generator(name: str) -> torch.Generator:
    """Random numbers of a case's own, the same in every process."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def lay_out(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """The case as a (rows, cols) tensor, cols contiguous, NaN before, after and between rows."""
    stride = case.cols + case.gap
    storage = poison(
        case.phase + max(case.rows - 1, 0) * stride + case.cols + 2 * GUARD, dtype, device
    )
    x = storage.as_strided((case.rows, case.cols), (stride, 1), GUARD + case.phase)
    values = case.build(generator(case.name)).to(dtype).to(device)
    whole, rest = divmod(case.rows, max(len(values), 1))
    if whole and case.cols:
        x[: case.rows - rest].unflatten(0, (whole, len(values))).copy_(values)
        x[case.rows - rest :].copy_(values[:rest])
    return x


def lay_out_view(view: View, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """The view, filled with random numbers; what it leaves out of its base is NaN."""
    base = poison(math.prod(view.base), dtype, device).view(view.base)
    taken = view.take(base)
    target = base if 0 in taken.stride() else taken  # an expanded view cannot be written
    target.copy_(torch.randn(target.shape, generator=generator(view.name), dtype=torch.float64))
    return taken


def output(rows: int, cols: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A contiguous (rows, cols) tensor full of NaN to write into; `spilled` reads its guards."""
    return poison(rows * cols + 2 * GUARD, dtype, device)[GUARD : GUARD + rows * cols].view(
        rows, cols
    )


def spilled(y: Tensor) -> int:
    """How many elements around an `output` were written."""
    storage = poison(0, y.dtype, y.device).set_(y.untyped_storage())
    guards = torch.cat((storage[:GUARD], storage[-GUARD:])).view(INTEGER[y.dtype.itemsize])
    return int((guards != POISON[y.dtype.itemsize]).sum())


def checked_rows(case: Case, x: Tensor) -> Tensor:
    """The rows of a case's input or output that are worth comparing."""
    return x[list(case.checked)] if case.checked else x


# ---- the judge


def oracle(x: Tensor, dim: int = -1) -> Tensor:
    """float64 softmax of what x holds, where x is. NaN wherever the row's maximum is not finite."""
    return torch.softmax(x.detach().double(), dim)


def bound(dtype: torch.dtype, ulps: float = 0.5) -> tuple[float, float]:
    """(rtol, atol) for probabilities of a dtype; atol is a share of the row's largest probability.

    `ulps` is the output's own rounding: half a unit in the last place, or one where it truncates.
    """
    if dtype == torch.float64:
        return DOUBLE_RTOL, DOUBLE_ATOL
    return RTOL + (0 if dtype == torch.float32 else ulps * torch.finfo(dtype).eps), ATOL


def check(y: Tensor, x: Tensor, dim: int = -1, ulps: float = 0.5) -> Verdict:
    """Judge y, said to be the softmax of x over dim, element by element.

    Exact: NaN where float64 gives NaN, and 0 where x is -inf in a row with a finite maximum. Else
    within `bound`; and rows of float32 and float64 sum to 1 within SUM_ATOL.
    """
    if y.shape != x.shape or y.dtype != x.dtype:
        given, wanted = f"{tuple(y.shape)} {y.dtype}", f"{tuple(x.shape)} {x.dtype}"
        return Verdict(False, math.nan, f"the result is {given}, should be {wanted}")
    if x.numel() == 0:
        return Verdict(True, 0.0)
    x_rows, y_rows = (
        t.detach().reshape(1) if t.ndim == 0 else t.detach().movedim(dim, -1) for t in (x, y)
    )
    x_rows, y_rows = (t.reshape(-1, t.shape[-1]) for t in (x_rows, y_rows))
    step = max(CHUNK // x_rows.shape[1], 1)
    worst = 0.0
    for start in range(0, len(x_rows), step):
        got = y_rows[start : start + step].double()
        verdict = _check_rows(got, x_rows[start : start + step], start, ulps)
        if not verdict.ok:
            return verdict
        worst = max(worst, verdict.max_error)
    return Verdict(True, worst)


def _check_rows(got: Tensor, x: Tensor, start: int, ulps: float) -> Verdict:
    want = oracle(x)
    rtol, atol = bound(x.dtype, ulps)
    spacing = ulps * torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps  # near 0
    allowed = rtol * want + atol * want.amax(-1, keepdim=True) + spacing
    allowed = torch.where(x == -math.inf, 0.0, allowed)
    error = (got - want).abs()
    right = torch.where(want.isnan(), got.isnan(), error <= allowed)
    worst = float(error.nan_to_num(0.0).max())
    if not bool(right.all()):
        row, col = (int(i) for i in (~right).nonzero()[0])
        return Verdict(
            False,
            worst,
            f"y[{start + row}, {col}] is {got[row, col]:.9g}, should be {want[row, col]:.9g} "
            f"(x there {float(x[row, col]):.9g}, allowed error {allowed[row, col]:.2g}); "
            f"{int((~right).sum())} of {right.numel()} elements are wrong",
        )
    off = (got.sum(-1) - 1).abs()  # NaN rows compare false below
    if x.dtype.itemsize >= 4 and bool((off > SUM_ATOL).any()):
        row = int((off > SUM_ATOL).nonzero()[0])
        return Verdict(False, worst, f"row {start + row} of y sums to {float(got[row].sum()):.9g}")
    return Verdict(True, worst)
