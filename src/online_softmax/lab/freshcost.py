"""What the import and the first calls cost in a process of their own, in milliseconds.

Each process has its own time limit, and says each step when it is done: one that fails or hangs
costs its last steps and gives the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

PROCESSES = 3  # with the compiled kernels on disk, as many as begin in time
SECONDS = 8.0  # after so many no further one begins
CHILD_SECONDS = 10.0  # that one may take

Say = Callable[[str], None]  # shows what is being done

NAMES = {
    "import_ms": "import online_softmax, beyond torch, bytecode on disk",
    "first_ms": "first call, kernel on disk",
    "further_ms": "a further kernel, on disk",
    "again_ms": "a later call",
    "cold_import_ms": "import online_softmax, beyond torch, from source",
    "cold_first_ms": "first call, nothing on disk",
    "cold_further_ms": "a further kernel, nothing on disk",
}
COLD = ("import_ms", "first_ms", "further_ms")  # what the first process is asked for

PROGRAM = """
import json, os, sys, time
import torch
device = sys.argv[1]
def took(name, work):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({name: (time.perf_counter() - start) * 1000}), flush=True)
def load():
    import online_softmax
# Bytecode in a folder of its own: the first process imports from source and leaves it there, the
# others find it, as where pip has left it.
before, is_first = (sys.pycache_prefix, sys.dont_write_bytecode), not os.path.isdir(sys.argv[4])
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[4], False
took("import_ms", load)
if is_first:  # what it loads of others is where it was
    sys.pycache_prefix, sys.dont_write_bytecode = before
import online_softmax
x = torch.randn(int(sys.argv[2]), int(sys.argv[3]), device=device)
half = x.half()
took("first_ms", lambda: online_softmax.softmax(x))
took("further_ms", lambda: online_softmax.softmax(half))
took("again_ms", lambda: online_softmax.softmax(x))
"""


def _child(rows: int, cols: int, device: str, cache: str) -> dict[str, Any]:
    """What one process says, step by step; "why", if it fails or takes too long."""
    command = [sys.executable, "-c", PROGRAM, device, str(rows), str(cols)]
    command.append(os.path.join(cache, "bytecode"))
    environment = {**os.environ, "ONLINE_SOFTMAX_CACHE_DIR": cache}
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as failed:
        child = subprocess.Popen(command, env=environment, stdout=said, stderr=failed)
        try:
            status = child.wait(CHILD_SECONDS)
            why = f"ended with {status}" if status else ""
        except subprocess.TimeoutExpired:
            why = f"still at work after {CHILD_SECONDS:g} s"
        finally:
            child.kill()
            child.wait()
        for file in (said, failed):
            file.seek(0)
        found: dict[str, Any] = {}
        for line in said.read().splitlines():
            if line.startswith("{"):
                found |= json.loads(line)
        *_, last = ["", *failed.read().strip().splitlines()]
    return {**found, "why": f"{why}: {last}" if last else why} if why else found


def fresh(rows: int, cols: int, device: str, say: Say = lambda _: None) -> dict[str, Any]:
    """Milliseconds of the import and the first calls in processes of their own, torch imported and
    the GPU in use before: the first with an empty cache ("cold_..."), then medians of others that
    find their kernels on disk. "why": what one of them lacks, and the reason."""
    started = time.perf_counter()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        while len(runs) <= PROCESSES and not (runs and runs[-1].get("why")):
            if len(runs) > 1 and time.perf_counter() - started > SECONDS:
                break
            say(f"a fresh process, {'kernels on disk' if runs else 'nothing on disk'}")
            runs.append(_child(rows, cols, device, cache))
    cold, later = runs[0], runs[1:]
    found: dict[str, Any] = {
        name: median(run[name] for run in later if name in run)
        for name in NAMES
        if any(name in run for run in later)
    }
    found |= {f"cold_{name}": cold[name] for name in COLD if name in cold}
    failed = [run["why"] for run in runs if "why" in run]
    return found | {"why": failed[0]} if failed else found
