"""Facts about GPU architectures, as their vendor states them. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """Facts of one GPU architecture, as its vendor states them (one representative card)."""

    name: str
    card: str  # the card whose SM count, L2 and bandwidth are given
    sm_count: int
    max_warps: int  # resident warps a multiprocessor
    max_blocks: int  # resident blocks a multiprocessor
    registers: int  # 32-bit registers a multiprocessor
    shared_bytes_sm: int
    shared_bytes_block: int  # the most one block may ask for
    l2_bytes: int
    bandwidth_gbs: float  # datasheet, GB/s
    measured: bool = False  # whether this project has measured its tables there


KIB, MIB = 1024, 1024 * 1024
ARCHES = {
    a.name: a
    for a in (
        Arch("sm_75", "T4", 40, 32, 16, 65536, 64 * KIB, 64 * KIB, 4 * MIB, 320),
        Arch("sm_80", "A100 80GB", 108, 64, 32, 65536, 164 * KIB, 163 * KIB, 40 * MIB, 2039),
        Arch("sm_86", "A10", 72, 48, 16, 65536, 100 * KIB, 99 * KIB, 6 * MIB, 600),
        Arch("sm_89", "L4", 58, 48, 24, 65536, 100 * KIB, 99 * KIB, 48 * MIB, 300),
        Arch("sm_90a", "H200", 132, 64, 32, 65536, 228 * KIB, 227 * KIB, 60 * MIB, 4800, True),
        Arch("sm_100a", "B200", 148, 64, 32, 65536, 228 * KIB, 227 * KIB, 126 * MIB, 8000),
        Arch("sm_120", "RTX 5090", 170, 48, 24, 65536, 100 * KIB, 99 * KIB, 96 * MIB, 1792),
    )
}
DEFAULT_ARCH = "sm_90a"
