"""What a person asks of `bench`, checked: cells, rivals, limits, files; and the header of a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from online_softmax.lab.benchfile import Header
    from online_softmax.lab.grid import Cell

GRID, TYPES = "big", "bf16,fp16,fp32"  # where nothing else was asked for
HOST_AGAINST = "torch,quack"  # a compiled call is no eager one

NO_GPU = (
    "bench {} needs a CUDA GPU, and torch sees none here: `bench OP` alone times the CPU, --list "
    "shows the cells, --from FILE shows kept results, --accuracy compares with float64 on a CPU"
)


@dataclass(frozen=True)
class Asked:
    """What a person asked for, checked."""

    cells: list[Cell]
    rivals: tuple[str, ...]
    values: str
    seconds: float  # of the whole run
    as_json: bool
    save: Path | None
    resume: bool
    repeat: int = 1
    is_cpu: bool = False  # the CPU is timed
    is_default: bool = False  # neither a grid nor shapes were asked for

    @property
    def way_on(self) -> str:
        """What goes on with a run that its seconds ended."""
        return "--resume" if self.save else "--save FILE, and then --resume"

    @property
    def filled(self) -> list[Cell]:
        """The cells, for what has nothing to say of one without elements.

        Raises:
            BadInput: there is such a one.
        """
        from online_softmax.lab.inputs import BadInput

        if empty := [cell for cell in self.cells if cell.is_empty]:
            raise BadInput(
                f"--cells: {empty[0].text} has no elements; --tune, --prepare and --accuracy need "
                "some, such as 4096x50257"
            )
        return self.cells


@dataclass(frozen=True)
class Words:
    """The options as they were given; None: not at all."""

    grid: str | None
    shapes: str | None
    dtype: str | None
    against: str | None
    values: str
    shard: str

    def filled(self, is_cpu: bool, is_host: bool) -> Words:
        """With what counts where nothing was asked for: a CPU has few cells, small and of fixed
        sizes."""
        from online_softmax.lab import contenders, cpuclock

        against = ",".join(contenders.KNOWN)
        if is_host:
            against = HOST_AGAINST
        elif is_cpu:
            against = cpuclock.AGAINST
        return replace(
            self,
            grid=self.grid or (cpuclock.GRID if is_cpu else GRID),
            dtype=self.dtype or (cpuclock.TYPES if is_cpu else TYPES),
            against=self.against or against,
        )

    def cells(self, ops: list[str], is_accuracy: bool) -> list[Cell]:
        """The cells of a filled record, its shard's alone.

        Raises:
            BadInput: a word of it is none.
        """
        from online_softmax.lab import accuracy, grid, inputs

        words = (part.strip() for part in (self.dtype or "").split(","))
        types = dict.fromkeys(inputs.short_name(inputs.dtype_of(each)) for each in words if each)
        grid.named([self.grid or ""], grid.GRIDS, "--grid")
        if self.shapes:
            cells = grid.named_cells(ops, types, self.shapes)
        elif is_accuracy:
            cells = grid.cells(ops, types, accuracy.shapes())
        else:
            cells = grid.grid_cells(ops, types, self.grid or "")
        if self.values != "normal" and any(cell.is_fused for cell in cells):
            raise inputs.BadInput(f"--values {self.values} is of operations on rows alone")
        return grid.shard(cells, self.shard)


def header_now(rivals: tuple[str, ...], values: str) -> Header:
    """What stands above the lines of a run that begins now."""
    import torch

    from online_softmax.lab import bench, benchfile, contenders, cpuclock, info, ladder, places

    is_gpu = torch.cuda.is_available()
    return benchfile.Header(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=places.recorded(sys.argv[1:]),
        device=torch.cuda.get_device_name() if is_gpu else "cpu",
        versions=info.versions(),
        machine=bench.machine() if is_gpu else cpuclock.machine(),
        clock=ladder.CLOCK if is_gpu else cpuclock.CLOCK,
        rivals=contenders.versions(rivals),
        values=values,
    )


def lacks_gpu() -> bool:
    """Whether torch sees no CUDA GPU here."""
    import torch

    return not torch.cuda.is_available()


def needs_gpu(what: str) -> None:
    """Refuse an option that times a GPU where there is none."""
    from online_softmax.lab.inputs import BadInput

    if lacks_gpu():
        raise BadInput(NO_GPU.format(what))


def limit_of(seconds: float | None, is_cpu: bool) -> float:
    """Of a run: as long as it takes, on a CPU half a minute, unless a person says otherwise."""
    from online_softmax.lab import cpuclock

    if seconds is not None:
        return seconds
    return cpuclock.SECONDS if is_cpu else float("inf")
