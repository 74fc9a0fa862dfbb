"""What the tests of token_stats's kernels share: float64's answer, rows of every order, parts."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from online_softmax.cuda import host, launch, tokenstats_launch
from online_softmax.cuda.launch import Launch
from online_softmax.cuda.tokenstats_launch import Results
from online_softmax.rowplan import Row

INF, NAN = math.inf, math.nan
NO_CLASS = 10**9
Fields = list[Tensor]  # lse, entropy, log_prob, rank, top_log_probs, top_indices


def written_out(x: Tensor, target: Tensor, top_k: int, scale: float) -> Fields:
    """In float64; the order by a stable sort."""
    z, values, cols = x.double() * scale, x.float(), x.shape[1]
    log_p = torch.log_softmax(z, -1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    is_class = (target >= 0) & (target < cols)
    at = torch.where(is_class, target, 0)[:, None]
    log_prob = torch.where(is_class, log_p.gather(1, at)[:, 0], NAN)
    rank = torch.where(is_class, 1 + (values > values.gather(1, at)).sum(-1), 0)
    order = values.cpu().sort(dim=-1, descending=True, stable=True)[1]
    top = order[:, :top_k].to(x.device)
    fields = [torch.logsumexp(z, -1), entropy, log_prob, rank, log_p.gather(1, top), top]
    return fields if top_k else fields[:4]


def check(results: Iterable[Tensor | None], want: Fields, what: str = "") -> None:
    """The fields that were asked for, in their order, and exactly these."""
    got = [each for each in results if each is not None]
    assert [tuple(t.shape) for t in got] == [tuple(t.shape) for t in want], what
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        if b.dtype == torch.int64:
            assert torch.equal(a, b), f"{what} field {place}: {a} for {b}"
        else:
            torch.testing.assert_close(
                a.double(), b, rtol=2e-6, atol=2e-6, equal_nan=True,
                msg=lambda text, place=place: f"{what} field {place}: {text}",
            )  # fmt: skip


def work(
    x: Tensor, target: Tensor | None, top_k: int, scale: float, row: Row
) -> tuple[list[Launch], Results]:
    """The launches of a cut, and what they fill, which holds other numbers before."""
    rows = len(x)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, 7, dtype=dtype, device=x.device)

    results = Results(
        state=new(rows, 2),
        lse=new(rows),
        entropy=new(rows),
        log_prob=None if target is None else new(rows),
        rank=None if target is None else new(rows, dtype=torch.int64),
        top_log_probs=new(rows, top_k) if top_k else None,
        top_indices=new(rows, top_k, dtype=torch.int64) if top_k else None,
    )
    return tokenstats_launch.forward(x, target, results, scale, row), results


def run(launches: list[Launch], device: torch.device) -> None:
    """What shares a file is compiled together, which is far sooner than one by one."""
    if device.type == "cpu":
        for file in {each.file for each in launches}:
            host.build(file, [each.symbol for each in launches if each.file == file])
    launch.run(launches, device)


def cuts(cols: int, item_bytes: int) -> dict[str, Row]:
    """Parts as planned, and smaller ones, of several warps and of one."""
    planned = tokenstats_launch.cut(cols, item_bytes)
    return {
        "planned": planned,
        "small": tokenstats_launch.cut(cols, item_bytes, 2, 2),
        "single": tokenstats_launch.cut(cols, item_bytes, 1, 1),
    }


def among_nan(values: Tensor, start: int, gap: int) -> Tensor:
    """The same values `start` elements into memory, `gap` more between rows, NaN around."""
    rows, cols = values.shape
    base = values.new_full((rows, start + cols + gap), NAN)
    return base[:, start : start + cols].copy_(values)


def orders(cols: int) -> dict[str, Tensor]:
    """Rows that top-k, ranks and entropies may stumble on, float32, exact in float16."""
    steps = torch.arange(cols).float()
    # Exact in 16 bits; equal where they are more than those hold.
    rising = (steps - cols // 2).div(8).to(torch.bfloat16).clamp(-60000, 60000).float()
    few = torch.full((cols,), -INF)
    few[torch.tensor([cols // 3, cols // 2, cols - 1])] = torch.tensor([1.0, 3.0, 3.0])
    spike, tail = torch.randn(cols).bfloat16().float(), torch.zeros(cols)
    spike[cols // 2] = NAN
    tail[cols - cols // 4 :] = 1.0
    signs = torch.where(steps % 2 == 0, 0.0, -0.0)
    infinite = torch.randn(cols).bfloat16().float()
    infinite[::3], infinite[1::3] = -INF, INF
    return {
        "random": torch.randn(cols).bfloat16().float(),
        "constant": torch.full((cols,), 2.5),
        "rising": rising,
        "falling": rising.flip(0),
        "coarse": torch.randint(4, (cols,)).float(),
        "three": few,
        "one": torch.where(steps == cols - 1, 0.0, -INF),
        "nothing": torch.full((cols,), -INF),
        "nan": torch.full((cols,), NAN),
        "spike": spike,
        "zeros": signs,
        "infinite": infinite,
        "tail": tail,
        "negative": -rising.abs() - 1.0,
        "mixed": torch.cat([torch.full((cols // 2,), NAN), steps[: cols - cols // 2] * 0 + 1.0]),
    }
