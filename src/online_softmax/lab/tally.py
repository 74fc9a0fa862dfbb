"""Errors beside float64, added up over the chunks and the parts of a contender's result."""

from __future__ import annotations

import torch
from torch import Tensor

from online_softmax.lab.opjudge import Judged


class Tally:
    """The errors of a contender's results, and the first wrong element."""

    def __init__(self) -> None:
        self.worst = self.share_max = self.share_sum = 0.0
        self.count, self.why = 0, ""

    def add(self, want: Tensor, found: Tensor, allowed: Tensor, size: Tensor, what: str) -> None:
        """Compare a chunk; `what` says what it is, where something is wrong.

        Args:
            want, found, allowed: float64 of one shape.
            size: what an error is a share of; broadcasts.
        """
        off = (found - want).abs()
        right = torch.where(want.isnan(), found.isnan(), off <= allowed)
        off = off.nan_to_num(0.0, posinf=0.0)
        share = (off / size).nan_to_num(0.0, posinf=0.0)
        self.worst = max(self.worst, float(off.max()))
        self.share_max = max(self.share_max, float(share.max()))
        self.share_sum, self.count = self.share_sum + float(share.sum()), self.count + off.numel()
        if not self.why and not bool(right.all()):
            at = tuple((~right).nonzero()[0].tolist())
            self.why = (
                f"{what}{list(at) if at else ''} is {float(found[at]):.9g}, should be "
                f"{float(want[at]):.9g} (allowed error {float(allowed[at]):.2g}); "
                f"{int((~right).sum())} of {right.numel()} compared there are wrong"
            )

    def say(self, is_right: Tensor, what: str) -> None:
        """Something that is right or wrong, without an error to it."""
        if not self.why and not bool(is_right.all()):
            self.why = f"{what} of {int((~is_right).sum())} of {is_right.numel()} rows is wrong"

    def judged(self) -> Judged:
        """All that was compared."""
        mean = self.share_sum / max(self.count, 1)
        return Judged(not self.why, self.worst, self.why, self.share_max, mean)
