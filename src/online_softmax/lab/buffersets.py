"""The tensors that a cell's contenders are called with: sets of them, in rotation.

A set is (x, y) of softmax and log_softmax, (dy, y, dx) of a backward, (x, lse) of logsumexp; of a
loss (logits, target, dlogits), where no gradient is asked for with a number in place of dlogits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from online_softmax import plan
from online_softmax.lab import rotation
from online_softmax.lab.benchclock import Setting
from online_softmax.lab.grid import LOSS_OPS, WRITING, Cell
from online_softmax.lab.rotation import Rotation

SEED = 1
# Calls that overwrite their input are timed in graphs of one turn over the sets: with so many bytes
# in rotation, which take a millisecond at 4 TB/s, a graph's own launch vanishes in one turn too.
TURN_BYTES, TURN_SETS = 2**32, 64
FLOAT = torch.float32  # of a number: the read kernel wants 4 bytes


def set_count(cell: Cell, l2_bytes: int) -> tuple[int, bool]:
    """How many sets a cell has, and whether they keep the L2 cold."""
    count, is_cold = rotation.set_count(cell.ideal_bytes, l2_bytes)
    if cell.op == "cross_entropy_in_forward":
        count = max(count, min(plan.ceil_div(TURN_BYTES, cell.ideal_bytes), TURN_SETS))
    return count, is_cold


def buffers(cell: Cell, setting: Setting) -> Rotation:
    """The cell's buffer sets, in the setting's arena. A backward's y is a result in its type, the
    same in all sets; targets are classes at random, none ignored."""
    count, is_cold = set_count(cell, setting.l2_bytes)
    matrix, dtype = (cell.rows, cell.cols), getattr(torch, cell.dtype)
    cut, where = setting.arena.cut, (count, setting.device)
    # A failed capture leaves the default generator unusable: this one is the cell's own.
    generator = torch.Generator(setting.device).manual_seed(SEED)
    is_ascending = setting.values == "ascending"

    def made() -> Tensor:
        x = torch.empty(matrix, dtype=dtype, device=setting.device).normal_(generator=generator)
        return x.sort(-1).values if is_ascending else x

    first = cut("first", matrix, dtype, *where, is_random=not is_ascending)
    if is_ascending:
        first[:] = made()
    if cell.op in LOSS_OPS:
        target = cut("target", matrix[:1], torch.int64, *where)
        target[:] = torch.randint(
            cell.cols, target.shape, generator=generator, device=setting.device
        )
        has_matrix = cell.op in WRITING
        last = cut("last", matrix if has_matrix else (), dtype if has_matrix else FLOAT, *where)
        roles = [first, target, last]
    elif cell.op == "logsumexp":
        roles = [first, cut("last", matrix[:1], dtype, *where)]
    elif cell.op.endswith("_backward"):
        second = cut("second", matrix, dtype, *where)
        second[:] = (torch.log_softmax if cell.op.startswith("log") else torch.softmax)(made(), -1)
        roles = [first, second, cut("last", matrix, dtype, *where)]
    else:
        roles = [first, cut("last", matrix, dtype, *where)]
    return Rotation(list(zip(*(role.unbind() for role in roles), strict=True)), is_cold)
