"""Nsight Compute as a subprocess: what is asked of it, and its CSV read.

ncu empties the caches before each pass over a kernel; clocks are left as they are. Metrics that a
chip does not know are left out and named, and the run goes on.
"""

from __future__ import annotations

import csv
import math
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

STALLS = (
    "barrier",
    "branch_resolve",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
LIMITS = ("registers", "shared_mem", "warps", "blocks", "barriers")
# Our name -> ncu's, of several the first that a chip knows.
METRICS: dict[str, tuple[str, ...]] = {
    "time_us": ("gpu__time_duration.sum",),
    "dram_read": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "dram_write": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "l2_read": ("lts__t_sectors_srcunit_tex_op_read.sum",),
    "l2_write": ("lts__t_sectors_srcunit_tex_op_write.sum",),
    "load_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",),
    "load_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",),
    "store_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",),
    "store_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "occupancy_most": ("sm__maximum_warps_per_active_cycle_pct",),
    "issue": ("sm__inst_issued.avg.pct_of_peak_sustained_active",),
    "xu": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",),
    "tensor": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "registers": ("launch__registers_per_thread",),
    "shared_static": ("launch__shared_mem_per_block_static",),
    "shared_dynamic": ("launch__shared_mem_per_block_dynamic",),
    "grid": ("launch__grid_size",),
    "block": ("launch__block_size",),
    "waves": ("launch__waves_per_multiprocessor",),
    **{f"limit_{name}": (f"launch__occupancy_limit_{name}",) for name in LIMITS},
    **{
        f"stall_{name}": (f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio",)
        for name in STALLS
    },
}
# To bytes and microseconds; a share, a count or a unit that is not here is taken as it is. Of a
# unit such as byte/block what stands before the stroke counts.
SCALE = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
SCALE |= {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
SCALE |= {"nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3, "second": 1e6}
PLACES = ("/usr/local/cuda/bin/ncu",)  # where toolkits put it, off the PATH
TRIES = 12  # runs, each without the metrics that the one before refused
NO_PERMISSION = "ERR_NVGPUCTRPERM"
COLUMNS = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")


@dataclass(frozen=True)
class Answer:
    """What ncu said."""

    csv: str  # its standard output, as it came
    said: str  # its standard error
    code: int  # its exit code
    unknown: tuple[str, ...] = ()  # metrics that it was not asked for: it does not know them here

    @property
    def why(self) -> str:
        """The first line that says what went wrong."""
        lines = [line.strip() for line in (self.csv + "\n" + self.said).splitlines()]
        errors = [line for line in lines if line.startswith("==ERROR==")]
        said = [line for line in lines if line and not line.startswith(("==PROF==", '"'))]
        return (errors or said[-1:] or [f"exit code {self.code}"])[0].removeprefix("==ERROR== ")


@dataclass(frozen=True)
class Launch:
    """One kernel launch as ncu saw it. Bytes, microseconds, shares of 100, counts."""

    name: str  # as it prints the kernel, with template arguments
    capability: str  # of the device: "9.0"
    metrics: dict[str, float]  # by ncu's names; those without a number are not here

    def figure(self, ours: str) -> float | None:
        """A figure of METRICS; None: ncu does not give it."""
        return next((self.metrics[n] for n in METRICS[ours] if n in self.metrics), None)


def find() -> str | None:
    """The path of ncu; None: it is not here."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [str(Path(home, "bin", "ncu"))] if home else []
    return shutil.which("ncu") or next(
        (place for place in [*places, *PLACES] if os.access(place, os.X_OK)), None
    )


def version(ncu: str) -> str:
    """Its version as it says it; "" if it does not."""
    found = re.search(r"Version (\S+)", _ran([ncu, "--version"]).csv)
    return found[1] if found else ""


def _ran(line: Sequence[str]) -> Answer:
    """What a command line says. One that cannot be started says why, as a shell would."""
    try:
        done = subprocess.run(
            line, check=False, capture_output=True, encoding="utf-8", errors="replace"
        )
    except OSError as error:
        return Answer("", f"{line[0]} cannot be run: {error.strerror}", 126)
    return Answer(done.stdout, done.stderr, done.returncode)


def command(ncu: str, metrics: Sequence[str], driver: Sequence[str]) -> list[str]:
    """The command line: kernels between the driver's profiler start and stop, in base units."""
    return [
        *(ncu, "--clock-control", "none", "--csv", "--page", "details", "--print-units", "base"),
        *("--profile-from-start", "off", "--metrics", ",".join(metrics), *driver),
    ]


def ask(ncu: str, driver: Sequence[str]) -> Answer:
    """Run a driver under ncu, with every metric that the chip knows: in place of one that it
    refuses the next name is asked for, if there is one; others come without a number."""
    unknown: list[str] = []
    for _ in range(TRIES):
        left = ([name for name in names if name not in unknown] for names in METRICS.values())
        line = command(ncu, [names[0] for names in left if names], driver)
        answer = replace(_ran(line), unknown=tuple(unknown))
        refused = [each for each in _refused(answer) if each not in unknown]
        if not refused or '"Metric Name"' in answer.csv:
            break
        unknown += refused
    return answer


def _refused(answer: Answer) -> list[str]:
    """Metrics that an error of ncu's names, whole or by what stands before the first dot."""
    lines = [line for line in (answer.csv + answer.said).splitlines() if line.startswith("==E")]
    named = set(re.findall(r"\w+__[\w.]*\w", "\n".join(lines)))
    every = [name for names in METRICS.values() for name in names]
    return [each for each in every if {each, each.partition(".")[0]} & named]


# ---- its CSV


def read(text: str) -> list[Launch]:
    """The launches of ncu's CSV, in their order, whatever else stands between its lines.

    Raises:
        ValueError: there is no CSV of ncu's in it, or it lacks a column; one line.
    """
    try:
        return _launches(text)
    except csv.Error as error:
        raise ValueError(f"no CSV of ncu: {error}") from None


def _launches(text: str) -> list[Launch]:
    lines = [line for line in text.splitlines() if line.startswith('"')]
    start = next((i for i, line in enumerate(lines) if '"Metric Name"' in line), None)
    if start is None:
        raise ValueError('no CSV of ncu: it has no line with "Metric Name"')
    rows = csv.DictReader(lines[start:])
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"no CSV of ncu: it lacks the column {missing[0]}")
    launches: dict[str, Launch] = {}
    for row in rows:
        launch = launches.setdefault(row["ID"], Launch(row["Kernel Name"], row.get("CC") or "", {}))
        value = scaled(row["Metric Value"], row["Metric Unit"])
        if value is not None:
            launch.metrics[row["Metric Name"]] = value
    return list(launches.values())


def scaled(value: str | None, unit: str | None) -> float | None:
    """A figure in bytes or microseconds, or as it is; None where ncu has none.

    >>> scaled("67.11", "Mbyte"), scaled("31,040", "ns"), scaled("(!) n/a", "")
    (67110000.0, 31.04, None)
    """
    try:
        number = float((value or "").replace(",", ""))
    except ValueError:
        return None
    number *= SCALE.get((unit or "").partition("/")[0], 1.0)
    return number if math.isfinite(number) else None
