"""Machine code read: how wide its loads and stores are, and how many exponentials stand in it.

Needs nvdisasm, which comes with Triton's package and with the CUDA toolkit, and no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from online_softmax.lab.profilefile import Code

WIDTHS = {"256": 256, "128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}  # else 32
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)", re.MULTILINE)
NO_TOOL = (
    "no nvdisasm here, which reads machine code: it comes with Triton (pip install triton) and "
    "with the CUDA toolkit"
)


def disassembler() -> str | None:
    """The path of nvdisasm; None: it is not here."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [Path(home, "bin")] if home else []
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton else ():
        places.append(Path(folder, "backends", "nvidia", "bin"))
    tools = [folder / "nvdisasm" for folder in places]
    return shutil.which("nvdisasm") or next(
        (str(tool) for tool in tools if os.access(tool, os.X_OK)), None
    )


def code(cubin: bytes, entry: str = "") -> Code:
    """What stands in the machine code of one kernel, or of all of a file if none is named."""
    text, why = listing(cubin)
    return Code(missing=why) if why else counted(text, entry)


def listing(cubin: bytes) -> tuple[str, str]:
    """nvdisasm's text of machine code; or "", and a sentence on why there is none."""
    tool = disassembler()
    if tool is None:
        return "", NO_TOOL
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", path], check=False, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return "", f"nvdisasm cannot read it: {said}"
    return done.stdout, ""


def counted(text: str, entry: str = "") -> Code:
    """The same of nvdisasm's text."""
    starts = [(found[1], found.end()) for found in SECTION.finditer(text)]
    ends = [start for _, start in starts[1:]] + [len(text)]
    parts = [
        text[start:end]
        for (name, start), end in zip(starts, ends, strict=True)
        if entry in ("", name)
    ]
    words = [word.split(".") for part in parts for word in INSTRUCTION.findall(part)]
    return Code(
        loads=_widths(word for word in words if word[0] in ("LDG", "LDGSTS")),
        stores=_widths(word for word in words if word[0] == "STG"),
        bulk=sum(word[0] == "UBLKCP" for word in words),
        exps=sum(word[:2] == ["MUFU", "EX2"] for word in words),
    )


def _widths(words: Iterable[list[str]]) -> dict[str, int]:
    """Bits -> how many, the widest first."""
    found = Counter(next((WIDTHS[w] for w in word if w in WIDTHS), 32) for word in words)
    return {str(bits): found[bits] for bits in sorted(found, reverse=True)}


def together(codes: Iterable[Code]) -> Code:
    """Of several kernels, their sums; what is missing of one is missing of all."""
    loads: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    bulk = exps = 0
    for each in codes:
        if each.missing:
            return each
        loads.update(each.loads)
        stores.update(each.stores)
        bulk, exps = bulk + each.bulk, exps + each.exps
    return Code(dict(loads), dict(stores), bulk, exps)
