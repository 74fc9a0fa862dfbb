"""The steps of attention's kernel in processes of their own: built and read, or run and checked.

A compiler that dies and a kernel that never ends cost their own row and no other. What a process
compiles for the GPU stays in Triton's cache on disk, where the process that times finds it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from online_softmax.lab import sass
from online_softmax.lab.attentionerrors import Case, Errors, truth
from online_softmax.lab.refusal import one_line
from online_softmax.lab.stepkernel import Variant, allocate, launch
from online_softmax.triton import WARP, ask_all, made
from online_softmax.triton import answer as answer_by
from online_softmax.triton.attention_launch import run

BUILT_LENGTH = 16384  # of a build's tensors, which lie nowhere
# Two tiles of queries at least. 16 heads, as Triton builds apart for a multiple of 16.
CHECKED_LENGTH, CHECKED_HEADS = 512, 16
# A part of the truth's size that the root of the squared errors may be; a kernel that is right has
# 2^-9 or so of rounding p and the output to bfloat16, one with a wrong tile has 2^-4 and more.
BOUND = 2.0**-7
# That a process may take to start, and for each variant, before it counts as hanging.
START_SECONDS, VARIANT_SECONDS = 30.0, 10.0
INSTRUCTIONS = {  # by what their names begin with, in machine code
    "wgmma": "HGMMA", "tma_loads": "UTMALDG", "cp_async": "LDGSTS", "setmaxnreg": "USETMAXREG",
    "exp2": "MUFU.EX2",
}  # fmt: skip
Answer = dict[str, Any] | str


def asked(
    variants: Sequence[Variant],
    arch: str,
    is_run: bool,
    workers: int,
) -> dict[Variant, Answer]:
    """Of each variant its figures, or a sentence on why there are none.

    Args:
        arch: what is built for, or the GPU's own.
        is_run: run on the GPU, which must be there, and compared with float64, with a limit on the
            time; else built alone.
        workers: processes at a time, each with a share.
    """
    shares = [list(variants[at::workers]) for at in range(min(workers, len(variants)))]

    def ask(share: list[Variant]) -> list[Answer]:
        questions = [{"variant": asdict(v), "arch": arch, "is_run": is_run} for v in share]
        seconds = START_SECONDS + VARIANT_SECONDS * len(share)
        names = [_name(v) for v in share]
        return ask_all(__name__, questions, names, seconds if is_run else None)

    with ThreadPoolExecutor(max(len(shares), 1)) as pool:
        answers = list(pool.map(ask, shares))
    pairs = zip(shares, answers, strict=True)
    found = {v: a for share, given in pairs for v, a in zip(share, given, strict=True)}
    return {variant: found[variant] for variant in variants}


def _name(variant: Variant) -> str:
    which = "causal" if variant.causal else "all keys"
    return f"{variant.step}, head_dim {variant.head_dim}, {which}, {variant.numbers}"


# ---- in a process of its own


def answer() -> None:
    """For `ask_all` alone."""
    answer_by(_answer)


def _answer(variant: dict[str, Any], arch: str, is_run: bool) -> Answer:
    given = Variant(**variant)
    if not is_run:
        return figures(given, arch)
    try:
        return {"rms": checked(given, arch, "cuda")}
    except Exception as error:  # noqa: BLE001  a compiler and a launch fail in any way: a row
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # nothing runs in this process any more; the next variant has another
            sys.exit(one_line(error))
        return one_line(error)


def figures(variant: Variant, arch: str) -> Answer:
    """What a variant takes, and what stands in its machine code; or why it does not build."""
    from online_softmax.triton.attention_builds import source

    heads = 2048 // variant.head_dim
    shape = (1, heads, BUILT_LENGTH, variant.head_dim)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(3))
    start, _ = launch(variant, q, k, v, arch)
    found = made(source(start), _name(variant), arch, start.options)
    if isinstance(found, str):
        return found
    kernel, resources = found
    text, why = sass.listing(kernel.asm["cubin"])
    return {**resources, **code(text, kernel.asm["ptx"], kernel.asm["ttgir"]), "missing": why}


def code(listing: str, ptx: str, ttgir: str) -> dict[str, Any]:
    """What stands in nvdisasm's text of a kernel, in its PTX and in what Triton made that from."""
    found = Counter(
        what
        for word in sass.INSTRUCTION.findall(listing)
        for what, name in INSTRUCTIONS.items()
        if word.startswith(name)
    )
    threads = re.search(r"\.reqntid\s+(\d+)", ptx)
    kept = re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)
    return {
        **{what: found[what] for what in INSTRUCTIONS},
        "all_warps": int(threads[1]) // WARP if threads else None,  # added ones too
        "roles": 1 + len(re.findall(r"^\s*partition\d+\(", ttgir, re.MULTILINE)),
        "registers_of_roles": sorted({int(n) for n in kept}),
    }


def checked(
    variant: Variant,
    arch: str,
    device: str,
    length: int = CHECKED_LENGTH,
    heads: int = CHECKED_HEADS,
) -> float:
    """Run a variant on a few heads: its error, the root of the squares in parts of the truth's.

    Raises:
        ValueError: it is above BOUND, or no number.
    """
    kind = "causal" if variant.causal else "normal"
    case = Case(kind, variant.head_dim, "bfloat16", length, length, heads=heads)
    q, k, v, dout = case.inputs(device)
    if device == "cuda":
        allocate()
    start, out = launch(variant, q, k, v, arch)
    run([start], q.device)
    return judged(out, truth(case, (q, k, v, dout), None)[0])


def judged(out: Tensor, want: Tensor) -> float:
    """The error of an output; ValueError above BOUND."""
    rms = Errors.of(out, want.double()).rms
    if rms is None or rms > BOUND:
        raise ValueError(
            f"wrong: its error is {rms} of the truth's size, where {BOUND:.4f} is allowed"
        )
    return rms
