"""Bytes that each rung moves, by the GPU's own counters: DRAM, and from L2 to multiprocessors.

python benchmarks/traffic.py --rows 4096 --cols 4096 --out benchmarks/results/h200

Runs itself under Nsight Compute (ncu), which empties the caches before each kernel. Bytes per
element; an ideal softmax in float32 reads 4 and writes 4.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

SECTOR_BYTES = 32
METRICS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "l2_read": "lts__t_sectors_srcunit_tex_op_read.sum",
    "l2_write": "lts__t_sectors_srcunit_tex_op_write.sum",
    "l1_load": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "time": "gpu__time_duration.sum",
}
SCALE = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": SECTOR_BYTES,
         "ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3}  # fmt: skip


# Kernel names, as the profiler prints them, of each rung.
KERNELS_OF = {
    "safe": ("safe",),
    "v0_thread": ("v0_thread",),
    "v1_warp_shuffle": ("v1_warp_shuffle",),
    "v2_vectorized": ("v2_vectorized",),
    "v3_register_cache": ("v3_register_cache",),
    "v4_grid_stride": ("v4_grid_stride",),
    "v5_split_row": ("v5_fold_part", "v5_emit_part"),
    "triton_two_pass": ("two_pass",),
    "triton_online": ("online",),
}


def launch_all(rows: int, cols: int) -> None:
    """Every rung once."""
    import torch

    from online_softmax.catalogue import KERNELS, problem_of

    x = torch.randn(rows, cols, device="cuda")
    y = torch.empty_like(x)
    problem = problem_of(x)
    for name in KERNELS_OF:
        record = KERNELS[name]
        if not record.reasons(problem):
            record.run(x, y, record.numbers(problem))
            torch.cuda.synchronize()


def profiled(rows: int, cols: int) -> dict[str, dict[str, float]]:
    """Per rung: bytes an element (time: microseconds), summed over its kernels."""
    wanted = "|".join(kernel for kernels in KERNELS_OF.values() for kernel in kernels)
    command = ["ncu", "--clock-control", "none", "--csv", "--kernel-name-base", "function"]
    command += ["--kernel-name", f"regex:^({wanted})$", "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, __file__, "--launch", "--rows", str(rows), "--cols", str(cols)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if len(lines) < 2:
        sys.exit(f"ncu gave no figures: {(done.stdout + done.stderr)[-600:]}")
    keys = {metric: key for key, metric in METRICS.items()}
    sums = {name: dict.fromkeys(METRICS, 0.0) for name in KERNELS_OF}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        kernel = re.sub(r"^void |[<(].*$", "", row["Kernel Name"])
        key = keys.get(row["Metric Name"])
        for name, kernels in KERNELS_OF.items():
            if key and kernel in kernels:
                value = float(row["Metric Value"].replace(",", ""))
                sums[name][key] += value * SCALE[row["Metric Unit"]]
    found = {
        name: {key: v if key == "time" else v / (rows * cols) for key, v in figures.items()}
        for name, figures in sums.items()
        if figures["time"]
    }
    for name, figures in found.items():
        print(name, {key: round(value, 3) for key, value in figures.items()}, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--launch", action="store_true", help="only launch the rungs (for ncu)")
    options = parser.parse_args()
    if options.launch:
        launch_all(options.rows, options.cols)
        return 0
    if not shutil.which("ncu"):
        sys.exit("Nsight Compute (ncu) is not on PATH: it comes with the CUDA toolkit")
    figures = profiled(options.rows, options.cols)
    if not figures:
        return 1
    from online_softmax.lab.bench import machine

    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": f"python benchmarks/traffic.py --rows {options.rows} --cols {options.cols}",
        "machine": machine(),
        "rows": options.rows,
        "cols": options.cols,
        "dtype": "float32",
        "unit": "bytes per element; time: microseconds",
        "metrics": METRICS,
        "rungs": figures,
    }
    path = options.out / f"ncu-{options.rows}x{options.cols}-float32.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
