"""Judging losses, their gradients and a token's statistics against float64, in chunks of rows.

A mean is compared over all rows, all else in some of them. The bounds are opjudge's: float32's
arithmetic, and the rounding to the output's type. A rival may also round what it adds, log p above
all, as torch's eager cross-entropy does: in bfloat16 the probabilities of its gradient are then off
by up to 3 % of themselves, and the errors that are kept say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from online_softmax.lab.grid import TOP_K
from online_softmax.lab.opjudge import ATOL, CHUNK, OUR_ULPS, RTOL, Judged
from online_softmax.lab.tally import Tally

NUMBERS = ("lse", "entropy", "target_log_prob", "top_log_probs")  # of a token
FIELDS = (*NUMBERS, "target_rank", "top_indices")
# Rivals are asked for less: what log_softmax, gather and topk of torch give.
RIVALS_FIELDS = ("entropy", "target_log_prob", "top_log_probs", "top_indices")


def check(
    op: str, x: Tensor, target: Tensor, got: Any, ulps: float = OUR_ULPS, rows: int = 0
) -> Judged:
    """Judge what a contender of a loss gave.

    Args:
        op: a name of `grid.LOSS_OPS`.
        x: (rows, cols) logits, as they were before the call.
        target: (rows,) classes, all of them counted.
        got: the mean loss; of `grid.WRITING` its gradient, (rows, cols); of token_stats the fields
            of `online_softmax.library.TokenStats`, a mapping or a NamedTuple.
        ulps: of the output's own rounding.
        rows: how many rows to compare, evenly spread, the first and last among them; 0: all.
    """
    if op == "cross_entropy":
        return _loss(x, target, got, ulps)
    judge: Callable[..., Judged] = _stats if op == "token_stats" else _gradient
    count = len(x)
    places = torch.arange(count, device=x.device)
    if rows and rows < count:
        places = places[:rows] * (count - 1) // max(rows - 1, 1)
    return judge(x, target, got, ulps, places)


def _chunks(places: Tensor, cols: int) -> Iterator[Tensor]:
    return iter(places.split(max(CHUNK // max(cols, 1), 1)))


def _mismatch(what: str, got: Any, shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> str:
    """Why a result is none, a sentence; "": it has the shape and one of the types."""
    wanted = f"{shape} {' or '.join(map(str, dtypes))}"
    if not isinstance(got, Tensor):
        return f"{what} is {type(got).__name__}, should be {wanted}"
    if tuple(got.shape) == shape and got.dtype in dtypes:
        return ""
    return f"{what} is {tuple(got.shape)} {got.dtype}, should be {wanted}"


def _eps(got: Tensor, ulps: float) -> float:
    """What rounding to the output's type may take: nothing more of float32."""
    return 0.0 if got.dtype == torch.float32 else ulps * torch.finfo(got.dtype).eps


def _loss(x: Tensor, target: Tensor, got: Any, ulps: float) -> Judged:
    if why := _mismatch("the loss", got, (), (x.dtype, torch.float32)):
        return Judged(False, math.nan, why)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in _chunks(torch.arange(len(x), device=x.device), x.shape[1]):
        log_p = torch.log_softmax(x[part].double(), -1)
        total -= log_p.gather(-1, target[part, None]).sum()
    want, tally = total / len(x), Tally()
    # A rival may have rounded the loss of each row to the logits' type before.
    rounded = _eps(got, ulps) + (ulps - OUR_ULPS) * torch.finfo(x.dtype).eps
    allowed = (RTOL + rounded) * want.abs() + ATOL
    tally.add(want, got.double(), allowed, want.abs().clamp(min=1.0), "the loss")
    return tally.judged()


def _gradient(x: Tensor, target: Tensor, got: Any, ulps: float, places: Tensor) -> Judged:
    if why := _mismatch("the gradient", got, tuple(x.shape), (x.dtype,)):
        return Judged(False, math.nan, why)
    tally, info = Tally(), torch.finfo(got.dtype)
    spacing = ulps * info.smallest_normal * info.eps  # near 0
    for part in _chunks(places, x.shape[1]):
        log_p = torch.log_softmax(x[part].double(), -1)
        p = log_p.exp()
        one = torch.zeros_like(p).scatter_(-1, target[part, None], 1.0)
        want = (p - one) / len(x)
        of_log = (ulps - OUR_ULPS) * info.eps * p * log_p.abs() / len(x)
        allowed = (RTOL + _eps(got, ulps)) * (want.abs() + p / len(x)) + of_log + spacing
        size = want.abs().amax(-1, keepdim=True)
        tally.add(want, got[part].double(), allowed, size, f"from row {int(part[0])} on ")
    return tally.judged()


def stats_gradient(
    x: Tensor,
    target: Tensor,
    got: Any,
    up: Sequence[Tensor | float],
    ulps: float = OUR_ULPS,
) -> Judged:
    """Judge the gradient of a token's numbers by the logits, all rows of it.

    Args:
        x: (rows, cols) logits.
        target: (rows,) classes.
        got: the gradient, (rows, cols).
        up: what arrives from above at lse, the entropy H and log p[target]: (rows,), or a number.
        ulps: of the output's own rounding.
    """
    if why := _mismatch("the gradient", got, tuple(x.shape), (x.dtype,)):
        return Judged(False, math.nan, why)
    tally, info = Tally(), torch.finfo(got.dtype)
    spacing = ulps * info.smallest_normal * info.eps  # near 0
    above = [torch.as_tensor(u, dtype=torch.float64, device=x.device).expand(len(x)) for u in up]
    for part in _chunks(torch.arange(len(x), device=x.device), x.shape[1]):
        by_lse, by_entropy, by_target = (u[part, None] for u in above)
        log_p = torch.log_softmax(x[part].double(), -1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        one = torch.zeros_like(p).scatter_(-1, target[part, None], 1.0)
        want = by_lse * p - by_entropy * p * (log_p + entropy) + by_target * (one - p)
        # Of what is added, signs left out.
        size = p * (by_lse.abs() + by_entropy.abs() * (log_p.abs() + entropy))
        size += by_target.abs() * (one + p)
        allowed = _eps(got, ulps) * want.abs() + RTOL * size + spacing
        largest = want.abs().amax(-1, keepdim=True)
        tally.add(want, got[part].double(), allowed, largest, f"from row {int(part[0])} on ")
    return tally.judged()


def _stats(x: Tensor, target: Tensor, got: Any, ulps: float, places: Tensor) -> Judged:
    """Of equal logits ours must give the lower index first; torch.topk promises no order."""
    given: Mapping[str, Any] = got if isinstance(got, Mapping) else got._asdict()
    is_ours, count = ulps <= OUR_ULPS, min(TOP_K, x.shape[1])
    wanted = FIELDS if is_ours else RIVALS_FIELDS
    for name in wanted:
        shape = (len(x), count) if name.startswith("top_") else (len(x),)
        dtypes = (x.dtype, torch.float32) if name in NUMBERS else (torch.int64,)
        if why := _mismatch(name, given.get(name), shape, dtypes):
            return Judged(False, math.nan, why)
    tally = Tally()
    for part in _chunks(places, x.shape[1]):
        z = x[part].double()
        log_p = torch.log_softmax(z, -1)
        of_target = z.gather(-1, target[part, None])
        order = z.sort(dim=-1, descending=True, stable=True)[1][:, :count]
        right = {
            "lse": z.logsumexp(-1),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "target_log_prob": log_p.gather(-1, target[part, None])[:, 0],
            "top_log_probs": log_p.gather(-1, order),
        }
        for name in (name for name in NUMBERS if name in wanted):
            want, found = right[name], given[name][part]
            rounded = _eps(found, ulps) + (ulps - OUR_ULPS) * torch.finfo(found.dtype).eps
            size = want.abs().clamp(min=1.0)
            tally.add(want, found.double(), (RTOL + rounded) * (want.abs() + 1), size, name)
        if "target_rank" in wanted:
            rank = 1 + (z > of_target).sum(-1)
            tally.say(given["target_rank"][part] == rank, "target_rank")
        indices = given["top_indices"][part]
        same = indices == order if is_ours else z.gather(-1, indices) == z.gather(-1, order)
        differ = indices.sort(-1).values.diff(dim=-1) != 0
        tally.say(same.all(-1) & differ.all(-1), "top_indices")
    return tally.judged()
