"""What `explain` says of what is not softmax: the other row operations, token_stats,
linear_cross_entropy, attention and merges. Each function gives lines, the first with the kernel."""

from __future__ import annotations

import math

import torch

from online_softmax import (
    attentionplan,
    catalogue,
    decodekernels,
    decodeplan,
    invariance,
    linearplan,
    mergekernels,
    plan,
    rowchoice,
    rowplan,
)
from online_softmax import statskernels as stats
from online_softmax.plan import Problem, ceil_div

ROWS = (*rowplan.OPERATIONS, *rowplan.ELEMENTWISE)
SIZES: dict[str, dict[str, int]] = {  # what an op takes beside rows and cols, and what it is if not
    **{op: {"inner": 1} for op in ROWS},
    "linear_cross_entropy": {"hidden": 4096},
    "attention": {"batch": 1, "heads": 32, "kv_heads": 0, "head_dim": 128},
    "merge": {"parts": 2},
}
ITEM_BYTES = {**rowplan.ITEM_BYTES, "float64": 8}
FLOAT_BYTES = 4
MOST_BYTES = 2**63 - 1  # of a tensor


def of_rows(op: str, problem: Problem, inner: int) -> list[str]:
    """log_softmax, logsumexp, the gradients of all three; softmax too where it is not of rows."""
    if missing := _missing(problem):
        return [f"reference: the definition, in PyTorch operations: {missing}"]
    if inner > 1 and op not in ("logsumexp", *rowplan.ELEMENTWISE):
        return _of_outer(op, problem, inner)
    if inner > 1 and op == "logsumexp":
        beside = Problem(problem.rows * inner, problem.cols, problem.dtype, arch=problem.arch)
        copied = (
            "  x is copied first, so that what is summed lies side by side: 2 more passes over x"
        )
        return [*of_rows(op, beside, 1), copied]
    if op in rowplan.ELEMENTWISE:
        why = "an element at a time, as x lies: one read, one write; nothing to choose"
        return [f"{op}: {why}"]
    row = rowchoice.chosen(op, problem, invariance.setting.is_on)
    lines = [f"{row.kernel}: {row.why}"]
    if cut := rowchoice.few(op, problem):
        other = rowchoice.chosen(op, problem) if not invariance.setting.is_on else cut
        lines.append(f"  with batch_invariant({not invariance.setting.is_on}): {other.why}")
    for name in rowplan.IDEAS:
        if name != row.kernel:
            why = [*rowplan.reasons(name, op, problem), rowplan.WHY_NOT[name]][0]
            lines.append(f"  not {name}: {why}")
    return lines


def _of_outer(op: str, problem: Problem, inner: int) -> list[str]:
    """Softmax and log_softmax along a dim that is not the last, and their gradients: one type."""
    from online_softmax import outerplan

    item = ITEM_BYTES[problem.dtype]
    whole = inner * item % plan.VECTOR_BYTES == 0
    if op in rowplan.BACKWARD:
        cut, reads = outerplan.outer_backward(problem.cols, 2 * item, item, whole), "read of each"
    else:
        cut, reads = outerplan.outer(problem.cols, item, whole), "read"
    kept = f"each thread keeps {cut.held} elements" if cut.held else "nothing is kept"
    passes = f"one {reads}" if cut.held else f"two {reads.replace('read', 'reads')}"
    side = f"{cut.across} threads side by side, {cut.along} along the dim"
    blocks = ceil_div(problem.rows * inner, cut.across * cut.width)
    words = (
        f"{_count(cut.width, 'neighbour')} a thread: inner rows are whole 16-byte words"
        if whole
        else f"one element at a time: inner rows of {inner} are no whole 16-byte words"
    )
    return [
        f"outer: x as it lies, {side}: {kept}: {passes}, one write: {_blocks(blocks, problem)}",
        f"  {words}; by cols and type alone, so that a slice keeps its bits",
        "  not one of the kernels of rows: they take what lies side by side, and a copy costs 2 "
        "passes more",
    ]


def of_stats(problem: Problem) -> list[str]:
    """token_stats, of logits (tokens, classes)."""
    missing = _missing(problem)
    if not missing and problem.cols > stats.MOST_COLS:
        missing = f"ranks of more than {stats.MOST_COLS} columns do not fit float32"
    if missing:
        return [f"reference: log_softmax, logsumexp and PyTorch operations: {missing}"]
    from online_softmax.cuda import tokenstats_launch as launch

    cut = launch.cut(problem.cols, ITEM_BYTES[problem.dtype])
    parts = "a part a row" if cut.parts == 1 else f"{cut.parts} parts a row"
    return [
        f"split: {parts}, {cut.block} threads each, by the columns alone: one read",
        "  a second kernel merges a row's parts, and what may be among the first top_k of each",
        f"  past top_k {launch.MOST_COUNT}: rows are sorted for the top part",
        "  gradient: by lse, entropy and the target's log-probability at once: one read, one write",
    ]


def of_linear(problem: Problem, hidden: int) -> list[str]:
    """linear_cross_entropy, of (tokens, hidden) and (classes, hidden)."""
    tokens, classes = problem.rows, problem.cols
    item = ITEM_BYTES[problem.dtype]
    wide = max(item, FLOAT_BYTES)
    beside, sums = (item, wide) if item < wide else (0, 0)
    cols = linearplan.block_cols(tokens, classes, wide, beside)
    cut = linearplan.fast_cut(tokens, hidden, classes, wide, beside, sums)
    most = {
        memory: linearplan.most_bytes(memory, tokens, hidden, classes, wide, item) / 1e6
        for memory in ("low", "fast")
    }
    blocks = _count(ceil_div(classes, cols), "block")
    groups = _count(ceil_div(tokens, cut.group), "group")
    missing = _missing(problem)
    rows = f"torch operations on each block: {missing}" if missing else "kernels on each block"
    return [
        f"low: {blocks} of {min(cols, classes)} classes with all {tokens} tokens; "
        f"at most {most['low']:.0f} MB beside the gradients",
        f'  memory="fast": {groups} of {cut.group} tokens in chunks of {cut.chunk}, with all '
        f"classes: the gradient is made in the forward; {most['fast']:.0f} MB",
        f"  products by torch's matrix multiplication, hidden {hidden}; the rows by {rows}",
        "  low is what memory= is by default; fast where the logits' gradient fits",
    ]


def of_attention(
    problem: Problem, batch: int, heads: int, kv_heads: int, head_dim: int
) -> list[str]:
    """attention, of q_len x k_len."""
    q_len, k_len, arch = problem.rows, problem.cols, problem.arch
    item, dim = ITEM_BYTES[problem.dtype], attentionplan.padded(head_dim)
    shapes = (batch, heads, q_len, head_dim), (batch, kv_heads, k_len, head_dim)
    for name, shape in zip(("q", "k"), shapes, strict=True):
        if math.prod(shape) * item > MOST_BYTES:
            raise ValueError(
                f"explain(): {name} must be at most {MOST_BYTES:,} bytes, got {shape} of "
                f"{problem.dtype}"
            )
    not_cuda, not_triton = _not_by_cuda(problem, *shapes), _not_by_triton(problem, head_dim)
    if not_cuda and not_triton:
        return [f"reference: the definition, tiles in PyTorch operations: {not_triton}"]
    if not not_cuda:
        lines = _decode_by_cuda(problem, *shapes)
    elif q_len <= attentionplan.MAX_DECODE_QUERIES:
        lines = [*_decode_by_triton(problem, *shapes), f"  not cuda: {not_cuda}"]
    else:
        tiles = attentionplan.tiles("forward", arch, item, dim)
        programs = batch * heads * ceil_div(q_len, tiles.block_q)
        lines = [f"triton: {_words(tiles)}: {_blocks(programs, problem)}"]
        lines.append(f"  one pass over the keys: {attentionplan.why(arch, item, dim)}")
    if not_triton:
        return [*lines, f"  gradient by the reference, in PyTorch operations: {not_triton}"]
    by_keys, by_queries = (
        _words(attentionplan.tiles(name, arch, item, dim)) for name in ("by_keys", "by_queries")
    )
    lines.append(f"  gradient by k and v, in Triton: a block owns keys: {by_keys}")
    lines.append(
        f"  gradient by q, in Triton: a block owns queries: {by_queries}; nothing is added "
        "atomically"
    )
    if padding := dim - head_dim:
        lines.append(f"  head_dim {head_dim} is padded to {dim}: {padding} columns of zeros")
    return lines


def _decode_by_cuda(
    problem: Problem, q_shape: tuple[int, ...], k_shape: tuple[int, ...]
) -> list[str]:
    (batch, kv_heads, k_len, dim), (heads, q_len) = k_shape, q_shape[1:3]
    cut = decodeplan.cut(dim, q_len * heads // kv_heads, k_len)
    parts = ceil_div(k_len, cut.keys)
    blocks = decodeplan.blocks(batch * kv_heads * parts, cut, problem.multiprocessors)
    return [
        f"cuda, a decode by tensor cores: 16 keys a warp at a time, {cut.warps} warps a block: "
        + _blocks(blocks, problem),
        _parts(parts, cut.keys),
    ]


def _decode_by_triton(
    problem: Problem, q_shape: tuple[int, ...], k_shape: tuple[int, ...]
) -> list[str]:
    (batch, kv_heads, k_len, head_dim), (heads, q_len) = k_shape, q_shape[1:3]
    item, dim = ITEM_BYTES[problem.dtype], attentionplan.padded(head_dim)
    group, keys = heads // kv_heads, attentionplan.part_keys(k_len)
    tiles, parts = attentionplan.decode(item, dim, q_len * group), max(ceil_div(k_len, keys), 1)
    programs = parts * ceil_div(q_len * group, tiles.block_q) * kv_heads * batch
    shared = f"; the {group} heads that share keys together" if group > 1 else ""
    return [
        f"triton, a decode: {_words(tiles)}{shared}: {_blocks(programs, problem)}",
        _parts(parts, keys)
        if parts > 1
        else f"  keys in one part: {k_len} are no more than {keys}",
    ]


def _parts(parts: int, keys: int) -> str:
    return (
        f"  keys in {parts} parts of {keys}, by their number alone: the same bits in any batch; a "
        "second kernel merges their states"
    )


def _not_by_triton(problem: Problem, head_dim: int) -> str | None:
    """Why Triton's kernels do not take it, or None."""
    if problem.dtype not in rowplan.ITEM_BYTES:
        return f"Triton's kernels take {', '.join(rowplan.ITEM_BYTES)}; this is {problem.dtype}"
    if head_dim > attentionplan.MAX_HEAD_DIM:
        return f"they take head_dim up to {attentionplan.MAX_HEAD_DIM}; this is {head_dim}"
    return catalogue.lacks("triton")


def _not_by_cuda(problem: Problem, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> str:
    """Why the CUDA kernel of few queries does not take it; "": it does."""
    if missing := catalogue.lacks("cuda"):
        return missing
    dtype = getattr(torch, problem.dtype)
    q, k = (torch.empty(shape, dtype=dtype, device="meta") for shape in (q_shape, k_shape))
    unfit = decodekernels.unfit(q, k, k, None, None, None)
    return "; ".join([*decodekernels.of_device(problem.arch), *unfit])


def of_merge(problem: Problem, parts: int) -> list[str]:
    """merge_outputs of pairs (out, lse), each of (rows, cols)."""
    rows, dim = problem.rows, problem.cols
    missing = _missing(problem)
    if not missing and not 2 <= parts <= mergekernels.MOST_PARTS:
        missing = f"a kernel merges 2 to {mergekernels.MOST_PARTS} pairs; this is {parts}"
    if not missing and not rows * dim:
        missing = "there is no element"
    if missing:
        return [f"reference: the definition, in PyTorch operations: {missing}"]
    from online_softmax.cuda import merge_launch

    item = ITEM_BYTES[problem.dtype]
    lanes, blocks = merge_launch.lanes(dim, item), merge_launch.blocks(rows, dim, item)
    each = f"{_count(lanes, 'lane')} a row, {merge_launch.BLOCK} threads a block"
    return [
        f"merge: {parts} pairs in one kernel, {each}: {_blocks(blocks, problem)}: one read of each "
        "part, one write",
        "  lse in float32; gradient by one kernel too: one read of each part, one write",
        f"  merge() of states in float32 is the same, {mergekernels.MOST_PARTS} at a time",
    ]


def _words(t: attentionplan.Tiles) -> str:
    stages = "1 stage" if t.stages == 1 else f"{t.stages} stages"
    return f"tiles of {t.block_q} queries x {t.block_k} keys, {t.warps} warps, {stages}"


def _blocks(programs: int, problem: Problem) -> str:
    return f"{_count(programs, 'block')} for {problem.multiprocessors} multiprocessors"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _missing(problem: Problem) -> str | None:
    """Why no CUDA kernel of ours takes rows of this type, or None."""
    if problem.dtype not in rowplan.ITEM_BYTES:
        return f"kernels take {', '.join(rowplan.ITEM_BYTES)}; this is {problem.dtype}"
    return catalogue.lacks("cuda")
