"""Memory for buffer sets, kept from cell to cell: allocated and filled once, cut anew each time.

To allocate and fill hundreds of MB for each of thousands of cells took longer than to time them.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED_BYTES = 512  # where torch's own allocations begin: a set is aligned like a fresh tensor
SEED = 0


class Arena:
    """A block of memory for each role of a set's tensors; it grows to the largest cell's need."""

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}  # role -> bytes
        self._filled: dict[str, torch.dtype] = {}  # role -> the type that its values have

    @property
    def held_bytes(self) -> int:
        """Memory that the next cell may use, whatever is free beside it."""
        return sum(block.numel() for block in self._blocks.values())

    def cut(
        self,
        role: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        sets: int,
        device: torch.device,
        is_random: bool = False,
    ) -> Tensor:
        """A (sets, *shape) tensor of a role's memory, each set contiguous on a boundary of
        ALIGNED_BYTES. What the role's tensors held before is lost.

        Args:
            role: tensors of two roles do not overlap.
            shape: of one set.
            dtype: of its elements.
            sets: how many.
            device: where.
            is_random: normal values. They are made once for a type, so two cells have the same
                ones, cut otherwise; what writes into them spoils the next cell's.
        """
        numel = torch.Size(shape).numel()
        step = max(-(-numel * dtype.itemsize // ALIGNED_BYTES), 1) * ALIGNED_BYTES // dtype.itemsize
        block = self._block(role, sets * step * dtype.itemsize, device)
        if is_random and self._filled.get(role) != dtype:
            # A failed capture leaves the default generator unusable: this one is the arena's own.
            generator = torch.Generator(device).manual_seed(SEED)
            block.view(dtype).normal_(generator=generator)
            self._filled[role] = dtype
        elif not is_random:  # somebody will write there
            self._filled.pop(role, None)
        whole = block.view(dtype)[: sets * step].view(sets, step)
        return whole[:, :numel].view(sets, *shape)

    def _block(self, role: str, size: int, device: torch.device) -> Tensor:
        block = self._blocks.get(role)
        if block is None or block.numel() < size or block.device != device:
            self._blocks.pop(role, None)
            self._filled.pop(role, None)
            del block  # before the new one is there, or both would have to fit
            self._blocks[role] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._blocks[role]
