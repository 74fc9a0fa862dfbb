"""Every rung through its real launcher, for compute-sanitizer: `make sanitize-gpu`.

Small awkward shapes; with PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an allocation of its own
size, so a byte outside is seen. tests/sanitize_driver.cu does the same for the CUDA rungs without
torch; this adds Triton's and v5's dependent launch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import sanitize_attention
from online_softmax import cekernels, cereduce, rowplan, shardkernels, statskernels
from online_softmax.catalogue import KERNELS, problem_of
from online_softmax.cuda import launch, outer_launch, row_launch
from online_softmax.cuda.launch import C_TYPE
from online_softmax.lab import judge, opjudge
from online_softmax.reference.shards import Shard

COLS = (1, 33, 256, 1000, 4099)
PAD = 3  # elements between rows: another 16-byte phase each
ROW_COLS = (1, 65, 1000, 4099)
V5_COLS = 20_000  # several parts a row
OUTER_COLS = (3, 70, 2100)
STATS_COLS = (1, 65, 1000, 9001, 40_003)  # one warp to several blocks a row
LOSS_COLS = (1, 65, 1000, 9001, 140_001)  # a few lanes to several blocks a row, and split


def main() -> int:
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
        sys.exit("set PYTORCH_NO_CUDA_MEMORY_CACHING=1: in torch's blocks an overrun hides")
    wrong = 0
    generator = torch.Generator().manual_seed(0)
    for record in KERNELS.values():
        if not record.rung:
            continue
        for dtype in record.dtypes:
            for cols in (*COLS, *((V5_COLS,) if record.name == "v5_split_row" else ())):
                for pad in (0, PAD):
                    base = torch.randn(3 * (cols + pad) - pad, generator=generator).to(dtype).cuda()
                    x = base.as_strided((3, cols), (cols + pad, 1))
                    y = torch.empty(3, cols, dtype=dtype, device="cuda").fill_(torch.nan)
                    record.run(x, y, record.numbers(problem_of(x)))
                    verdict = judge.check(y.cpu(), x.cpu())
                    wrong += not verdict.ok
                    if not verdict.ok:
                        print(f"{record.name} {dtype} 3 x {cols} pad {pad}: {verdict.why}")
        print(f"{record.name}: done", flush=True)
    wrong += rows(generator) + lying(generator) + losses(generator) + stats(generator)
    of_attention = sanitize_attention.merges, sanitize_attention.attention
    for name in (each for make in (*of_attention, sanitize_attention.decodes) for each in make()):
        wrong += 1
        print(f"{name}: wrong")
    print(f"{wrong} wrong")
    return 1 if wrong else 0


def rows(generator: torch.Generator) -> int:
    """What ships: every operation by every strategy, at every alignment; how many were wrong."""
    wrong = 0
    for op in rowplan.OPERATIONS:
        for kernel in rowplan.IDEAS:
            for dtype in C_TYPE:
                for cols in (*ROW_COLS, *((V5_COLS,) if kernel in ("streamed", "split") else ())):
                    for pad in (0, PAD):
                        base = torch.randn(3 * (cols + pad) - pad, generator=generator)
                        x = base.to(dtype).cuda().as_strided((3, cols), (cols + pad, 1))
                        wrong += run_row(op, kernel, x)
            print(f"{op} by {kernel}: done", flush=True)
    return wrong


def run_row(op: str, kernel: str, x: torch.Tensor) -> bool:
    """Whether a row kernel's result on a matrix is wrong."""
    problem = problem_of(x)
    if rowplan.reasons(kernel, op, problem):
        return False
    row = rowplan.forced(kernel, op, x.shape[1], problem.dtype, problem.arch)
    shape = (len(x), 1) if op == "logsumexp" else x.shape
    out = torch.empty(shape, dtype=x.dtype, device="cuda")
    inputs = [x]
    if op in rowplan.BACKWARD:
        y = torch.softmax(x, -1) if op.startswith("soft") else torch.log_softmax(x, -1)
        inputs = [x, y.contiguous()]
        work = row_launch.backward(op, x, inputs[1], out, 1.0, False, row, True)
    else:
        work = row_launch.forward(op, x, out, 1.0, False, row, True)
    launch.run(work, x.device)
    got = out[:, 0] if op == "logsumexp" else out
    verdict = opjudge.check(op, [each.cpu() for each in inputs], got.cpu())
    if not verdict.ok:
        print(f"{op} by {kernel} {x.dtype} {tuple(x.shape)}: {verdict.why}")
    return not verdict.ok


def lying(generator: torch.Generator) -> int:
    """What takes x as it lies: along a dim that is not the last, at every alignment, both ways and
    in mixed types; and the gradient of logsumexp. How many were wrong."""
    wrong = 0
    for x_type, y_type in ((t, u) for t in C_TYPE for u in dict.fromkeys((t, torch.float32))):
        for cols in OUTER_COLS:
            for inner in (1, 3, 16):
                for pad in (0, PAD):
                    count = 3 * cols * inner
                    base = torch.randn(count + pad, generator=generator).to(x_type).cuda()
                    x = base[pad:].view(3, cols, inner)
                    for op in rowplan.FORWARD:
                        wrong += run_outer(op, x, y_type)
                    wrong += run_lse_backward(x, y_type)
        print(f"as it lies: {x_type}, {y_type} done", flush=True)
    return wrong


def losses(generator: torch.Generator) -> int:
    """Cross-entropy and its gradient, both ways and in place, at every alignment and with options;
    how many were wrong."""
    wrong = 0
    for dtype in C_TYPE:
        for cols in LOSS_COLS:
            for pad in (0, PAD):
                base = torch.randn(3 * (cols + pad) - pad, generator=generator)
                x = base.to(dtype).cuda().as_strided((3, cols), (cols + pad, 1))
                for is_plain in (True, False):
                    wrong += run_loss(x, is_plain)
        print(f"cross-entropy: {dtype} done", flush=True)
    return wrong


def run_loss(x: torch.Tensor, is_plain: bool) -> bool:
    """Whether a loss or a gradient is wrong: one target ignored, none or all of the options."""
    cols = x.shape[1]
    target = torch.tensor([0, -100, cols - 1], device="cuda")
    weight = None if is_plain else torch.linspace(0.5, 1.5, cols, device="cuda")
    smoothing, softcap = (0.0, None) if is_plain else (0.1, 5.0)
    wide = x.double().cpu().requires_grad_()  # there: racecheck reports a reduction of torch's
    z = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    want = torch.nn.functional.cross_entropy(
        z,
        target.cpu(),
        None if weight is None else weight.double().cpu(),
        reduction="none",
        label_smoothing=smoothing,
    )
    (want_dx,) = torch.autograd.grad(want.sum(), wide)
    given = {"label_smoothing": smoothing, "softcap": softcap}
    loss, lse = cekernels.forward(x, target, weight, **given)
    ones = torch.ones(3, device="cuda")
    dx = cekernels.backward(ones, x, target, lse, weight, **given)
    both = cekernels.forward_with_gradient(x, target, ones, weight, **given)
    copy = x.clone()
    over = cekernels.forward_with_gradient(copy, target, ones, weight, **given, out=copy)
    eps = torch.finfo(x.dtype).eps
    pairs = [(loss, want, 1e-5), (both.loss, want, 1e-5)]
    # A copy of the last: it is rescaled in place below.
    made = (dx, both.dlogits, over.dlogits.clone())
    pairs += [(each, want_dx, 1e-6 + eps) for each in made]
    counted = 2.0 if weight is None else float(weight[[0, cols - 1]].double().sum())
    r = cereduce.Reduction("mean", x.dtype)
    mean, total = cereduce.by_kernel(loss, target, weight, cols, -100, r)
    pairs.append((mean, want.sum() / counted, 1e-5 + eps))
    for in_place in (False, True):
        each = cereduce.rescale_by_kernel(copy, ones, total, target, -100, in_place)
        pairs.append((each, want_dx / counted, 1e-6 + 2 * eps))
    pairs += in_shards(x, target, weight, given, want, want_dx)
    is_wrong = not all(
        torch.allclose(got.double().cpu(), right, rtol=rtol, atol=1e-6)
        for got, right, rtol in pairs
    )
    if is_wrong:
        print(f"cross-entropy {x.dtype} {tuple(x.shape)} plain {is_plain}: wrong")
    return is_wrong


def in_shards(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    given: dict[str, Any],
    want: torch.Tensor,
    want_dx: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """What two shards of x give, what they should, and how near: of floats a bfloat16 gradient."""
    cols = x.shape[1]
    cut = cols // 2
    pieces = [(x[:, a:b], Shard(a, cols)) for a, b in ((0, cut), (cut, cols)) if a < b]
    partials = [shardkernels.fold(z, target, weight, shard, **given) for z, shard in pieces]
    loss, lse = shardkernels.finish(torch.cat(partials, 1), target, weight, cols, **given)
    pairs = [(loss, want, 1e-5)]
    dtype = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    for z, shard in pieces:
        dx, ones = torch.empty_like(z, dtype=dtype).fill_(torch.nan), torch.ones_like(lse)
        shardkernels.backward(ones, z, target, lse, weight, shard, **given, dlse=0 * lse, out=dx)
        part = want_dx[:, shard.first : shard.first + z.shape[1]]
        pairs.append((dx, part, 1e-6 + torch.finfo(dtype).eps))
    return pairs


def stats(generator: torch.Generator) -> int:
    """token_stats and its gradient, apart and in place, at every alignment, on random elements and
    on equal ones, of which more reach the bound than are written down; how many were wrong."""
    wrong = 0
    for dtype in C_TYPE:
        for cols in STATS_COLS:
            for pad in (0, PAD):
                base = torch.randn(3 * (cols + pad) - pad, generator=generator)
                x = base.to(dtype).cuda().as_strided((3, cols), (cols + pad, 1))
                wrong += run_stats(x, 20) + run_stats(torch.round(x), 128)
        print(f"token_stats: {dtype} done", flush=True)
    return wrong


def run_stats(x: torch.Tensor, top_k: int) -> bool:
    """Whether a field or a gradient is wrong: one target is no class."""
    cols = x.shape[1]
    top_k = min(top_k, cols)
    target = torch.tensor([0, -1, cols - 1], device="cuda")
    is_class, at = target >= 0, target.clamp(min=0)[:, None]
    wide = x.double().requires_grad_()
    log_p = torch.log_softmax(wide, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    log_prob = torch.where(is_class, log_p.gather(1, at)[:, 0], 0.0)
    total = (torch.logsumexp(wide, -1) + 2 * entropy + 3 * log_prob).sum()
    (want_dx,) = torch.autograd.grad(total, wide)
    values = x.float()
    order = values.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    rank = torch.where(is_class, 1 + (values > values.gather(1, at)).sum(-1), 0)
    got = statskernels.forward(x, target, top_k=top_k)
    ones = torch.ones(3, device="cuda")
    rest = (target, got.entropy, got.state)
    dx = statskernels.backward(ones, 2 * ones, 3 * ones, x, *rest)
    copy = x.clone()
    over = statskernels.backward(ones, 2 * ones, 3 * ones, copy, *rest, out=copy)
    eps = torch.finfo(x.dtype).eps
    pairs = [(got.entropy, entropy, 1e-5), (got.log_prob[::2], log_prob[::2], 1e-5)]
    pairs += [(got.top_log_probs, log_p.gather(1, order), 1e-5)]
    pairs += [(each, want_dx, 1e-5 + eps) for each in (dx, over)]
    is_wrong = not (
        torch.equal(got.top_indices, order)
        and torch.equal(got.rank, rank)
        and all(torch.allclose(a.double(), b, rtol=rtol, atol=1e-5) for a, b, rtol in pairs)
    )
    if is_wrong:
        print(f"token_stats {x.dtype} {tuple(x.shape)} top {top_k}: wrong")
    return is_wrong


def judged(op: str, inputs: list[torch.Tensor], got: torch.Tensor) -> bool:
    """Whether a result along dim 1 is wrong."""
    rows = [t.cpu().movedim(1, -1).reshape(-1, t.shape[1]) for t in (*inputs, got)]
    verdict = opjudge.check(op, rows[:-1], rows[-1])
    if not verdict.ok:
        print(f"{op} of {inputs[0].dtype} into {got.dtype} {tuple(got.shape)}: {verdict.why}")
    return not verdict.ok


def run_outer(op: str, x: torch.Tensor, y_type: torch.dtype) -> int:
    """How many are wrong of softmax or log_softmax of x along dim 1, and its gradient."""
    y = torch.empty(x.shape, dtype=y_type, device="cuda").fill_(torch.nan)
    launch.run([outer_launch.outer(op, x, y, 1, 1.0, False)], x.device)
    narrow, dx = y.to(x.dtype), torch.empty_like(x).fill_(torch.nan)  # a y that the judge may have
    work = outer_launch.outer_backward(
        f"{op}_backward", x.to(y_type), narrow.to(y_type), dx, 1, 1.0, False
    )
    launch.run([work], x.device)
    return judged(op, [x], y) + judged(f"{op}_backward", [x, narrow], dx)


def run_lse_backward(x: torch.Tensor, dlse_type: torch.dtype) -> bool:
    """Whether the gradient of logsumexp along dim 1, for an upstream of ones, is wrong."""
    lse = torch.logsumexp(x.float(), 1)
    dlse, dx = torch.ones_like(lse, dtype=dlse_type), torch.empty_like(x).fill_(torch.nan)
    inner, planes = x.shape[2], x.view(len(x), -1)
    work = outer_launch.lse_backward(dlse.flatten(), planes, lse.flatten(), dx, inner, 1.0, False)
    launch.run([work], x.device)
    return judged("softmax", [x], dx)  # which it is


if __name__ == "__main__":
    sys.exit(main())
