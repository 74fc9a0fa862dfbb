"""Whole operations that `profile` takes by name: their calls, and the launches of their kernels.

Rows and columns are of attention queries and keys, of a decode queries (32 heads a sequence) and
keys, of a merge rows and columns of a part, of token_stats and cross_entropy tokens and classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import online_softmax
from online_softmax import attentionplan, catalogue, cekernels, decodekernels, jit, plan
from online_softmax.cuda.launch import Launch
from online_softmax.lab.fusedsizes import HEAD_DIM, HEADS, KV_HEADS, decode, written
from online_softmax.lab.grid import TOP_K, Cell
from online_softmax.lab.profilefile import Code
from online_softmax.lab.results import Figures
from online_softmax.plan import Problem

ATTENTION_HEADS, PARTS = 16, 4
IDEAS = {
    "attention": f"one sequence of {ATTENTION_HEADS} heads, head_dim {HEAD_DIM}",
    "decode": f"one query of each of {HEADS} heads on {KV_HEADS}, head_dim {HEAD_DIM}",
    "merge": f"{PARTS} parts of pairs (out, lse)",
    "token_stats": f"with a target and the {TOP_K} largest",
    "cross_entropy": "the mean loss",
}
NAMES = tuple(IDEAS)
LOGITS = ("token_stats", "cross_entropy")
NO_WIDTHS = "of Triton's attention the widths of loads and stores are not read"
MERGES = "merge_parts"  # of Triton's kernels of a decode the one that is no fold
SEED = 1
MADE_FOR = attentionplan.Options(0, 0, None, -1, -1, False, None, False)
Given = tuple[Tensor, ...]


def reasons(name: str, problem: Problem) -> list[str]:
    """Why an operation has no such size, a sentence; empty: it has."""
    if name == "decode" and problem.rows % HEADS:
        return [f"decode has {HEADS} rows a sequence: --rows takes a multiple of {HEADS}, got "
                f"{problem.rows}"]  # fmt: skip
    return []


def tensors(name: str, problem: Problem, device: str) -> Given:
    """What a call takes: (q, k, v), (outs, lses) or (logits, target)."""
    dtype, rows, cols = getattr(torch, problem.dtype), problem.rows, problem.cols
    generator = None if device == "meta" else torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device).normal_(generator=generator)

    if name == "attention":
        k_shape = (1, ATTENTION_HEADS, cols, HEAD_DIM)
        return normal(1, ATTENTION_HEADS, rows, HEAD_DIM), normal(*k_shape), normal(*k_shape)
    if name == "decode":
        k_shape = (rows // HEADS, KV_HEADS, cols, HEAD_DIM)
        return normal(rows // HEADS, HEADS, 1, HEAD_DIM), normal(*k_shape), normal(*k_shape)
    if name == "merge":
        return normal(PARTS, rows, cols), normal(PARTS, rows, kind=torch.float32)
    target = torch.empty(rows, dtype=torch.int64, device=device)
    return normal(rows, cols), target.random_(cols, generator=generator)


def least_bytes(name: str, problem: Problem) -> int:
    """What goes in and what comes out of a call, once."""
    rows, cols, op, sizes = problem.rows, problem.cols, name, ""
    if name == "attention":
        heads = ATTENTION_HEADS
        sizes = written(batch=1, heads=heads, kv_heads=heads, head_dim=HEAD_DIM, causal=0)
        rows = heads * rows
    elif name == "decode":
        op = "attention_decode"
        rows, cols, sizes = decode(rows // HEADS, cols)
    elif name == "merge":
        sizes = written(parts=PARTS)
    return Cell(op, problem.dtype, rows, cols, sizes).ideal_bytes


def run(name: str, given: Given) -> Any:
    """The public function, without gradients."""
    with torch.no_grad():
        if name in ("attention", "decode"):
            q, k, v = given
            return online_softmax.attention(q, k, v)
        first, second = given
        if name == "merge":
            return online_softmax.merge_outputs(*zip(first, second, strict=True), base="e")
        if name == "token_stats":
            return online_softmax.token_stats(first, second, top_k=min(TOP_K, first.shape[1]))
        return online_softmax.cross_entropy(first, second)


def call(name: str, problem: Problem, device: str = "cuda") -> Callable[[], Any]:
    """The call, on tensors of its own."""
    given = tensors(name, problem, device)
    return lambda: run(name, given)


# ---- without a GPU


def report(name: str, problem: Problem, arches: Sequence[str]) -> tuple[tuple[Figures, ...], Code]:
    """Registers and the rest on each architecture, the worst of its kernels; what stands in the
    code of the first."""
    found = [_report(name, replace(problem, arch=arch)) for arch in arches]
    return tuple(figures for figures, _ in found), found[0][1]


def _report(name: str, problem: Problem) -> tuple[Figures, Code]:
    from online_softmax.lab import rung, sass

    if problem.arch not in plan.ARCHES:
        missing = f"the planner has no facts about {problem.arch}"
        return Figures(problem.arch, missing=missing), Code(missing=missing)
    try:
        work = launches(name, problem)
        if not work:
            return _by_triton(name, problem)
        figures = rung.cuda_figures(work, problem.arch)
        images = [jit.compile(each.file, each.symbol, problem.arch) for each in work]
    except jit.Unavailable as error:
        return Figures(problem.arch, missing=str(error)), Code(missing=str(error))
    return figures, sass.together(sass.code(each.code, each.entry) for each in images)


def launches(name: str, problem: Problem) -> list[Launch]:
    """The launches of our CUDA kernels, on tensors without memory; none: Triton runs it."""
    if name == "attention":
        return []
    given = tensors(name, problem, "meta")
    if name == "decode":
        beside: tuple[None, ...] = (None,) * 5
        if decodekernels.unfit(*given, *beside[:3]) or decodekernels.of_device(problem.arch):
            return []
        _, work = decodekernels.launches((*given, *beside), MADE_FOR, False, _empty)
        return work
    if name == "merge":
        return _merge(*given)
    if name == "token_stats":
        return _token_stats(*given)
    x, target = given
    return _cross_entropy(x, target, problem)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _merge(outs: Tensor, lses: Tensor) -> list[Launch]:
    from online_softmax.cuda import merge_launch

    none = lses.new_empty(0)
    return merge_launch.forward([*lses], [], [*outs], "e", lses[0], none, outs[0])


def _token_stats(x: Tensor, target: Tensor) -> list[Launch]:
    from online_softmax.cuda import tokenstats_launch as launch

    rows, count = len(x), min(TOP_K, x.shape[1])
    number = torch.empty(rows, device=x.device)
    top = (number.new_empty(rows, count), target.new_empty(rows, count))
    results = launch.Results(number.new_empty(rows, 2), number, number, number, target, *top)
    return launch.forward(x, target, results, 1.0, launch.cut(x.shape[1], x.itemsize))


def _cross_entropy(x: Tensor, target: Tensor, problem: Problem) -> list[Launch]:
    from online_softmax.cuda import crossentropy_launch as launch

    row, loss = cekernels.planned(problem), torch.empty(len(x), device=x.device)
    options = launch.Options()
    if row.kernel == "split":
        return launch.split(x, target, loss, loss, None, options, row)
    streams = catalogue.streams(x, 1)
    return launch.in_registers(x, target, None, loss, loss, None, None, options, row, streams)


def _by_triton(name: str, problem: Problem) -> tuple[Figures, Code]:
    """The worst figures of attention's kernels as Triton builds them, keys shared by four heads:
    each by its own warps."""
    from online_softmax.lab import info

    if lacking := catalogue.lacks("triton") or info.no_triton_cache():
        return Figures(problem.arch, missing=lacking), Code(missing=lacking)
    from online_softmax.triton import attention_builds as builds

    direction = "decode" if name == "decode" else "forward"
    dtype = getattr(torch, problem.dtype)
    build = builds.Build(direction, dtype, problem.arch, HEAD_DIM, causal=False)
    found = builds.compile_all([build])[0]
    if said := next((each for each in found.values() if isinstance(each, str)), ""):
        return Figures(problem.arch, missing=said), Code(missing=said)
    item = dtype.itemsize
    tiles = attentionplan.tiles("forward", problem.arch, item, HEAD_DIM)
    if name == "decode":
        tiles = attentionplan.decode(item, HEAD_DIM, HEADS // KV_HEADS)
    facts = plan.ARCHES[problem.arch]
    warps = {MERGES: attentionplan.MERGE_WARPS}
    kernels = {name: each for name, each in found.items() if isinstance(each, jit.Resources)}
    taken = kernels.values()
    return Figures(
        problem.arch,
        registers=max(each.registers for each in taken),
        spill_bytes=max(each.spill_store_bytes + each.spill_load_bytes for each in taken),
        stack_bytes=max(each.stack_bytes for each in taken),
        shared_bytes=max(each.shared_bytes for each in taken),
        occupancy=min(
            jit.occupancy(each, facts, warps.get(name, tiles.warps) * plan.WARP)
            for name, each in kernels.items()
        ),
    ), Code(missing=NO_WIDTHS)
