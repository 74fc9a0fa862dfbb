"""What the tests of `profile` share: ncu's CSV as it writes it, and a program that stands in."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from online_softmax.lab import ncu, profile, profiledriver
from online_softmax.lab.profile import Asked

HEAD = (
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
    "Block Size", "Grid Size", "Device", "CC", "Section Name", "Metric Name", "Metric Unit",
    "Metric Value",
)  # fmt: skip
H200 = profile.Here("NVIDIA H200", "sm_90a", 132)
MARK = f"void at::cuda::{profiledriver.MARK}(long)"
NAMES = {ours: names[0] for ours, names in ncu.METRICS.items()}
BASE = {"time_us": ("ns", 1000.0), "dram_read": ("byte", 1.0), "dram_write": ("byte", 1.0),
        "l2_read": ("sector", 1.0), "l2_write": ("sector", 1.0)}  # fmt: skip
ELEMENTS = 64 * 256
V3 = {
    "time_us": 31.04,
    "dram_read": 4.0 * ELEMENTS,
    "dram_write": 2.5 * ELEMENTS,
    "l2_read": ELEMENTS / 8,  # sectors of 32 bytes: 4 bytes an element
    "l2_write": ELEMENTS / 8,
    "load_sectors": ELEMENTS / 8,
    "load_requests": ELEMENTS / 128,
    "store_sectors": ELEMENTS / 8,
    "store_requests": ELEMENTS / 128,
    "occupancy": 61.5,
    "occupancy_most": 75.0,
    "xu": 12.25,
    "registers": 29.0,
    "shared_static": 256.0,
    "shared_dynamic": 1024.0,
    "stall_long_scoreboard": 30.0,
    "stall_barrier": 10.0,
    "stall_selected": 1.0,
}
Launch = tuple[str, Mapping[str, float | str]]  # the kernel, and its figures by our names


def csv_of(launches: Sequence[Launch], said: str = "==PROF== Connected to process 7\n") -> str:
    """ncu's CSV of launches, in base units, after what else it prints."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(HEAD)
    for number, (name, figures) in enumerate(launches):
        for ours, value in figures.items():
            unit, factor = BASE.get(ours, ("", 1.0))
            shown = value if isinstance(value, str) else f"{value * factor:,.2f}"
            line = (number, 7, "python3.12", "127.0.0.1", name, 1, 7, "(256, 1, 1)", "(64, 1, 1)")
            writer.writerow((*line, 0, "9.0", "Command line profiler metrics", NAMES[ours], unit,
                             shown))  # fmt: skip
    return said + text.getvalue() + "==PROF== Disconnected from process 7\n"


def stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, here: profile.Here | None = H200
) -> Path:
    """A program named ncu, first on the PATH; and a GPU that nobody has to have."""
    path = tmp_path / "bin" / "ncu"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setattr(profile, "here", lambda: here)
    return path


def asked(*names: str, **more: object) -> Asked:
    return Asked(names, 64, 256, "float32", "softmax")._replace(**more)
