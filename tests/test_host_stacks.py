"""Host execution: stacks of its threads, two memory mappings each; a process has 65,530."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from host_kit import KERNELS

COUNT = """
from pathlib import Path
import torch
from online_softmax.cuda import host
from online_softmax.cuda.launch import Launch

def mappings():
    return Path("/proc/self/maps").read_text().splitlines()

def guards():
    bounds = [line.split()[0].split("-") for line in mappings() if " ---p " in line]
    return sum(int(stop, 16) - int(start, 16) == 64 << 10 for start, stop in bounds)

"""


def counted(script: str) -> list[int]:
    """What a script prints, run in a process in which nothing was launched yet."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not list a process's mappings in /proc/self/maps")
    command = [sys.executable, "-c", COUNT + script]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=path, check=False)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_libraries_share_their_stacks() -> None:
    start, first, second, third = counted(
        "print(len(mappings()))\n"
        "for dtype, name in zip((torch.float32, torch.float16, torch.bfloat16),\n"
        "                       ('float', 'half_t', 'bfloat16_t')):\n"
        "    x = torch.ones(1, 4096, dtype=dtype)\n"
        "    args = (x, torch.empty_like(x), 1, 4096, 4096)\n"
        "    symbol = f'v1_warp_shuffle<{name}>'\n"
        "    host.launch(Launch('ladder/v1_warp_shuffle.cu', symbol, args, 1, 1024), workers=1)\n"
        "    print(len(mappings()))\n"
    )
    assert first - start >= 2 * 1024  # a stack and its guard for each thread
    assert third - first < 200, f"{start}, {first}, {second}, {third} mappings"


def test_only_so_many_stacks_have_a_guard() -> None:
    """The others go back to the system after the launch, and only they do."""
    found = counted(
        "before = guards(), len(mappings())\n"
        "for _ in range(2):\n"
        "    y = torch.zeros(12)\n"
        f"    launch = Launch({str(KERNELS)!r}, 'grid_barrier', (y,), 12, 1024, cooperative=True)\n"
        "    host.launch(launch)\n"
        "    assert (y == 13).all(), y\n"
        "    print(guards() - before[0], len(mappings()) - before[1])\n"
    )
    kept, mapped, kept_again, mapped_again = found
    assert kept == kept_again == 8192, found
    assert max(mapped, mapped_again) < 2 * 8192 + 200, found
