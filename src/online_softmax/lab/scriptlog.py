"""The file that a script of benchmarks/ goes on with, and what stands above its lines."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import torch

from online_softmax.lab import bench, benchfile, contenders, info
from online_softmax.lab.benchfile import Header, Log


def begin(out: Path, command: str, clock: str, rivals: tuple[str, ...] = ()) -> tuple[Log, Header]:
    """The log, with what it has already, and the header of this run.

    Args:
        out: the file; it may be there.
        command: what was run, as a person would type it.
        clock: what timed it, a sentence.
        rivals: names of contenders.PACKAGE, whose versions are kept.

    Raises:
        BadInput: the file holds something else.
    """
    log = benchfile.Log(out, resume=True)
    header = Header(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        versions=info.versions(),
        machine=bench.machine(),
        clock=clock,
        rivals=contenders.versions(rivals),
    )
    return log, header
