"""What one distribution a token gives, by log_softmax and torch's operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from online_softmax import ceops
from online_softmax.library import routes
from online_softmax.library.loss_eager import are_plain
from online_softmax.library.private import functorch_active
from online_softmax.reference.cross_entropy import Targets
from online_softmax.reference.ops import sum_dtype

NO_CLASS_IGNORED = -1  # an index that is no class


class TokenStats(NamedTuple):
    """Of each token, in logits' shape without the last dimension; floats are float32 (float64)."""

    lse: Tensor  # (...) natural log-sum-exp of logits / temperature
    entropy: Tensor  # (...) in nats
    target_log_prob: Tensor | None  # (...) natural logarithm; None without a target
    target_rank: Tensor | None  # (...) int64, from 1; None without a target
    top_log_probs: Tensor | None  # (..., top_k), falling; None for top_k 0
    top_indices: Tensor | None  # (..., top_k) int64; None for top_k 0


def token_stats(x: Tensor, target: Tensor | None, top_k: int, temperature: float) -> TokenStats:
    """Arguments as for the public function, checked, of any kind of tensor."""
    wide = x.to(sum_dtype(x.dtype))
    scale = 1.0 / temperature
    log_p = routes.along("log_softmax", x, -1, wide.dtype, scale, False, "")
    lse = routes.logsumexp(wide, (-1,), False, scale, False, "")
    p = log_p.exp()
    entropy = -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)  # 0 log 0 is 0
    log_prob = rank = top_log_probs = top_indices = None
    if target is not None:
        log_prob, rank = _of_target(wide.detach(), log_p, target.to(torch.int64))
    if top_k:
        # torch.topk says nothing about ties.
        top_indices = wide.detach().sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
        top_log_probs = log_p.detach().gather(-1, top_indices)
    return TokenStats(lse, entropy, log_prob, rank, top_log_probs, top_indices)


def _of_target(x: Tensor, log_p: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Its log-probability and rank; NaN and 0 of a target that is no class."""
    classes = x.shape[-1]
    is_seen = not torch.compiler.is_compiling() and not functorch_active() and are_plain(target)
    if target.device.type == "cpu" and is_seen:
        ceops.check_target("token_stats", target, classes, None)
    rows = Targets.of(target, classes, NO_CLASS_IGNORED)
    place = rows.place.unsqueeze(-1)
    log_prob = torch.where(rows.counts, log_p.gather(-1, place).squeeze(-1), torch.nan)
    above = (x > x.gather(-1, place)).sum(-1)
    return log_prob, torch.where(rows.counts, above + 1, 0)
