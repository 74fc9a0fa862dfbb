"""What `explain` says: which kernel an operation takes, and why not the others."""

from __future__ import annotations

import operator

from online_softmax import catalogue, cekernels, explained, invariance, plan, rowchoice, rowplan
from online_softmax.catalogue import DTYPES, KERNELS
from online_softmax.plan import Problem

_DTYPE_NAMES = tuple(catalogue.dtype_name(dtype) for dtype in DTYPES)
MOST_SIZE = 2**63 - 1
OPERATIONS = (  # what `explain` knows about
    "softmax",
    *(op for op in explained.ROWS if op != "softmax"),
    "cross_entropy",
    "linear_cross_entropy",
    "token_stats",
    "attention",
    "merge",
)
_LOSS_WHY_NOT = {
    "registers": "the blocks of its clusters would wait for each other, parts of a row do not",
    "split": "two kernels; the row fits in registers",
}


def explain(
    rows: int,
    cols: int,
    dtype: str = "float32",
    arch: str = plan.DEFAULT_ARCH,
    *,
    op: str = "softmax",
    **sizes: int,
) -> str:
    """Which kernel a rows x cols operation takes on a GPU, why, and why no other.

    Args:
        rows, cols: the matrix; softmax runs along cols. Of cross_entropy, linear_cross_entropy and
            token_stats: tokens and classes; of attention: queries and keys of a sequence; of merge:
            rows and columns of each part's output.
        dtype: "float32", "float16", "bfloat16" or "float64".
        arch: an architecture of plan.ARCHES, "sm_90a" for example.
        op: "softmax", "log_softmax", "logsumexp", the gradient of one ("softmax_backward"),
            "cross_entropy" (with classes as target), "linear_cross_entropy", "token_stats",
            "attention" or "merge" (of pairs); these say what their gradient takes too.
        sizes: of softmax, log_softmax, logsumexp and their gradients `inner` (1 if not given), the
            elements behind cols, which then are not the last dim: of x (rows, cols, inner); of
            linear_cross_entropy `hidden` (4096); of attention `batch` (1), `heads` (32), `kv_heads`
            (as heads) and `head_dim` (128); of merge `parts` (2).

    Raises:
        TypeError: a size is not a whole number, or is none of the op's.
        ValueError: an unknown type, architecture or op, a size below 0 or past an int64, heads that
            kv_heads does not divide, or more of attention than a tensor holds.

    Returns:
        Text, the kernel's name and the reason first: "reference" where PyTorch operations run,
        "none" where there is no element. Nothing runs, and no GPU is asked.

    Examples:
        >>> print(explain(1, 1_048_576).splitlines()[0])
        split: two kernels, a block for each of 128 parts of rows: streamed wants 528 or more
    """
    if arch not in plan.ARCHES:
        raise ValueError(f"explain(): no facts about {arch!r}; known are {', '.join(plan.ARCHES)}")
    if dtype not in _DTYPE_NAMES:
        raise ValueError(
            f"explain(): dtype must be one of {', '.join(_DTYPE_NAMES)}, got {dtype!r}"
        )
    for name, size in (("rows", rows), ("cols", cols)):
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"explain(): {name} must be an int, got {size!r}")
    rows, cols = operator.index(rows), operator.index(cols)  # a NumPy integer, for example
    if rows < 0 or cols < 0:
        raise ValueError(f"explain(): rows and cols must be at least 0, got {rows} x {cols}")
    if max(rows, cols) > MOST_SIZE:
        raise ValueError(f"explain(): rows and cols must be at most {MOST_SIZE}, as in a tensor")
    if not isinstance(op, str) or op not in OPERATIONS:
        raise ValueError(f"explain(): op must be one of {', '.join(OPERATIONS)}, got {op!r}")
    problem = Problem(rows, cols, dtype, arch=arch)
    sizes = _sizes(op, sizes)
    if is_nothing(op, rows, cols):
        return f"none: {rows} x {cols} has no element: no kernel of ours is launched"
    return "\n".join(_lines(op, problem, sizes))


def is_nothing(op: str, rows: int, cols: int) -> bool:
    """Whether there is nothing for a kernel to do. Attention's queries without keys give 0, and
    pairs without columns have an lse: these are made."""
    return not rows or (not cols and op not in ("attention", "merge"))


def asks_arch(op: str, rows: int, cols: int, dtype: str) -> bool:
    """Whether what `explain` says may depend on the architecture."""
    is_ours = dtype in rowplan.ITEM_BYTES or op == "linear_cross_entropy"
    return is_ours and not is_nothing(op, rows, cols)


def _sizes(op: str, given: dict[str, int]) -> dict[str, int]:
    """The op's own sizes: those given, and what the others are."""
    found = dict(explained.SIZES.get(op, {}))
    for name, size in given.items():
        if name not in found:
            own = f"takes {', '.join(found)}" if found else "takes rows and cols alone"
            raise TypeError(f"explain(): op {op!r} {own}, got {name}")
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"explain(): {name} must be an int, got {size!r}")
        found[name] = operator.index(size)
        if found[name] < 1:
            raise ValueError(f"explain(): {name} must be at least 1, got {size}")
        if found[name] > MOST_SIZE:
            raise ValueError(f"explain(): {name} must be at most {MOST_SIZE}, as in a tensor")
    if op == "attention":
        found["kv_heads"] = found["kv_heads"] or found["heads"]
        if found["heads"] % found["kv_heads"]:
            raise ValueError(
                f"explain(): kv_heads must divide heads, got {found['heads']} and "
                f"{found['kv_heads']}"
            )
    return found


def _lines(op: str, problem: Problem, sizes: dict[str, int]) -> list[str]:
    if op == "softmax" and sizes["inner"] == 1:
        return _of_softmax(problem)
    if op == "cross_entropy":
        return _of_loss(problem)
    if op == "attention":
        lines = explained.of_attention(problem, **sizes)
    elif op == "linear_cross_entropy":
        lines = explained.of_linear(problem, **sizes)
    elif op == "token_stats":
        lines = explained.of_stats(problem)
    elif op == "merge":
        lines = explained.of_merge(problem, **sizes)
    else:
        lines = explained.of_rows(op, problem, **sizes)
    return lines if lines[0].startswith("reference") else lines + _unmeasured(problem)


def _of_softmax(problem: Problem) -> list[str]:
    if problem.dtype not in rowplan.ITEM_BYTES:
        return explained.of_rows("softmax", problem, 1)
    kernel, why = catalogue.choose(problem)
    lines = [f"{kernel.name}: {why}"]
    if kernel.rung:
        numbers = kernel.numbers(problem)
        lines.append(f"  numbers: {numbers.why}")
    rung, why = plan.choose(problem)
    if rung in plan.RUNGS:
        lines.append(f"  of the ladder's rungs, {rung}: {why}")
    if kernel.is_row_kernel and (line := _few(problem)):
        lines.append(f"  {line}")
    lines += _unmeasured(problem)
    for other in KERNELS.values():
        if other.name == kernel.name or other.backend in ("torch", "reference"):
            continue
        refusals = other.reasons(problem)
        missing = catalogue.lacks(other.backend)
        against = rowplan.WHY_NOT.get(other.name) or plan.why_not(other.name, problem)
        note = missing or (refusals[0] if refusals else against)
        lines.append(f"  not {other.name}: {note}")
    return lines


def _of_loss(problem: Problem) -> list[str]:
    missing = catalogue.lacks("cuda")
    refusals = [missing] if missing else cekernels.refusals("split", problem)  # takes any length
    if refusals:
        return [f"reference: the definition, in PyTorch operations: {refusals[0]}"]
    row, kept = cekernels.planned(problem), cekernels.planned(problem, with_gradient=True)
    lines = [f"{row.kernel}: {row.why.removesuffix(', one write')}"]
    if kept.kernel == "registers":
        lines.append(f"  with grad_in_forward: registers: {kept.why}")
    else:
        why = cekernels.refusals("registers", problem, with_gradient=True)
        lines.append(
            f"  with grad_in_forward: {row.kernel}, then the gradient: {(*why, kept.why)[0]}"
        )
    lines.append("  gradient in the backward: from each row's lse: one read, one write")
    lines += _unmeasured(problem)
    for name in cekernels.NAMES:
        if name != row.kernel:
            why = [*cekernels.refusals(name, problem), _LOSS_WHY_NOT[name]]
            lines.append(f"  not {name}: {why[0]}")
    return lines


def _unmeasured(problem: Problem) -> list[str]:
    said = plan.unmeasured(problem.arch)
    return [f"  {said}"] if said else []


def _few(problem: Problem) -> str:
    """What the other setting of batch invariance would do, where that is something else."""
    cut = rowchoice.few("softmax", problem)
    if cut is None:
        return ""
    if invariance.setting.is_on:
        shape = f"{cut.cluster} blocks a row, {cut.block} threads of {cut.vectors} vectors"
        return f"with batch_invariant(False): {shape}; other bits"
    return f"with batch_invariant(True): {rowchoice.chosen('softmax', problem).why}"
