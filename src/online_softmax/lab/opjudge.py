"""Judging any operation's result against float64, in chunks of rows, so that memory is bounded.

The bound of an element is an absolute share (ATOL) of the sizes that the operation adds and
subtracts, a relative one (RTOL), and the rounding to the output's type: half a unit in the last
place for ours, RIVAL_ULPS for rivals, of which torch.logsumexp rounds three times in 16-bit types.
Rivals may also round what they add, as torch's softmax backward rounds dy y.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 2**24  # float64 elements compared at a time
RTOL = 1e-5  # float32 arithmetic: exp, the sum, the division
ATOL = 1e-5
PROBABILITY_ATOL = 1e-8  # of the row's largest: far below it exp loses digits
OUR_ULPS, RIVAL_ULPS = 0.5, 2.0


@dataclass(frozen=True)
class Judged:
    """What `check` found. A share is an error over the `size` of its row."""

    ok: bool
    max_error: float  # largest |result - float64| where that is a number
    why: str = ""  # if not ok: the first wrong element, in a sentence
    share_max: float = math.nan
    share_mean: float = math.nan


Wanted = tuple[Tensor, Tensor]  # the float64 result, and the sizes that ATOL is a share of


def _softmax(x: Tensor) -> Wanted:
    y = torch.softmax(x, -1)
    return y, y.amax(-1, keepdim=True).expand_as(y) * (PROBABILITY_ATOL / ATOL)


def _log_softmax(x: Tensor) -> Wanted:
    y = torch.log_softmax(x, -1)
    return y, torch.ones_like(y)  # log d, and x - m, have float32's error of numbers of about 1


def _logsumexp(x: Tensor) -> Wanted:
    lse = torch.logsumexp(x, -1)
    return lse, torch.ones_like(lse)


def _softmax_backward(dy: Tensor, y: Tensor) -> Wanted:
    terms = dy * y
    dx = y * (dy - terms.sum(-1, keepdim=True))
    return dx, y * (dy.abs() + terms.abs().sum(-1, keepdim=True))


def _log_softmax_backward(dy: Tensor, y: Tensor) -> Wanted:
    probability = y.exp()
    dx = dy - probability * dy.sum(-1, keepdim=True)
    return dx, dy.abs() + probability * dy.abs().sum(-1, keepdim=True)


WANTED: dict[str, Callable[..., Wanted]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "softmax_backward": _softmax_backward,
    "log_softmax_backward": _log_softmax_backward,
}


def _largest(x: Tensor) -> Tensor:
    """The largest finite |element| of each row."""
    return x.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)


def size(op: str, want: Tensor, sizes: Tensor) -> Tensor:
    """What an error is shown as a share of, for each row: its largest probability; of logarithms
    the largest result, at least 1; of a gradient the largest of what is added and subtracted, which
    grows with dy as the error does."""
    if op == "logsumexp":
        return want.abs().nan_to_num(0.0, 0.0, 0.0).clamp(min=1.0)
    if op == "log_softmax":
        return _largest(want).clamp(min=1.0)
    return _largest(want if op == "softmax" else sizes)


def check(
    op: str, inputs: Sequence[Tensor], got: Tensor, ulps: float = OUR_ULPS, rows: int = 0
) -> Judged:
    """Judge a result of an operation along the last dimension of (rows, cols) inputs.

    Args:
        op: a name of WANTED.
        inputs: x, or dy and y of a backward, each (rows, cols).
        got: the result: (rows, cols), of logsumexp (rows,), in the inputs' type or float32.
        ulps: of the output's own rounding.
        rows: how many rows to compare, evenly spread, the first and last among them; 0: all.
    """
    whole = inputs[0]
    shape = whole.shape[:1] if op == "logsumexp" else whole.shape
    if got.shape != shape or got.dtype not in (whole.dtype, torch.float32):
        given, wanted = f"{tuple(got.shape)} {got.dtype}", f"{tuple(shape)} {whole.dtype}"
        return Judged(False, math.nan, f"the result is {given}, should be {wanted}")
    if rows and rows < len(whole):
        places = torch.arange(rows, device=whole.device) * (len(whole) - 1) // max(rows - 1, 1)
        return _check(op, [t[places] for t in inputs], got[places], places, ulps)
    return _check(op, inputs, got, range(len(whole)), ulps)


def _check(
    op: str, inputs: Sequence[Tensor], got: Tensor, places: Sequence[int] | Tensor, ulps: float
) -> Judged:
    eps = torch.finfo(got.dtype).eps
    spacing = ulps * torch.finfo(got.dtype).smallest_normal * eps  # near 0
    atol = ATOL + (ulps - OUR_ULPS) * eps  # of the sizes: 0 more for ours
    rtol = RTOL + (0.0 if got.dtype == torch.float32 else ulps * eps)
    step = max(CHUNK // max(inputs[0].shape[1], 1), 1)
    worst = share_max = share_sum = 0.0
    first_wrong = ""
    for start in range(0, len(got), step):
        part = slice(start, start + step)
        want, sizes = WANTED[op](*(t[part].double() for t in inputs))
        found = got[part].double()
        off = (found - want).abs()
        allowed = rtol * want.abs() + atol * sizes + spacing
        right = torch.where(want.isnan(), found.isnan(), want.isfinite() & (off <= allowed))
        right |= (found == want) | (found == want.to(got.dtype))  # infinities, also by rounding
        off = off.nan_to_num(0.0, posinf=0.0)
        worst = max(worst, float(off.max()))
        share = (off / size(op, want, sizes)).nan_to_num(0.0)  # rows without a number are 0 / 0
        share_max = max(share_max, float(share.max()))
        share_sum += float(share.sum())
        if not first_wrong and not bool(right.all()):
            where = [int(i) for i in (~right).nonzero()[0]]
            at = tuple(where)
            place = ", ".join(map(str, (int(places[start + where[0]]), *where[1:])))
            first_wrong = (
                f"[{place}] is {float(got[part][at]):.9g}, should be {float(want[at]):.9g} "
                f"(allowed error {float(allowed[at]):.2g}); {int((~right).sum())} of "
                f"{right.numel()} compared there are wrong"
            )
    mean = share_sum / max(got.numel(), 1)
    return Judged(not first_wrong, worst, first_wrong, share_max, mean)
