"""Measure attention beside PyTorch's own: forward and backward in TFLOP/s, decode in GB/s.

python benchmarks/attention.py --out benchmarks/results/h200/bench-attention.jsonl

bfloat16; 16,384 tokens in one sequence, 2,048 features; decode: one query of 32 heads on 8 heads of
keys, head_dim 128. Products counted as usual: 4 q k d, half of it where causal, 2.5 times that in a
backward. The time of a decode includes what its call costs the host. A file that is there is
written anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from online_softmax import attention
from online_softmax.lab import scriptlog
from online_softmax.lab.benchfile import header_line

TOKENS, FEATURES = 16384, 2048
DECODES = [(1, 4096), (1, 32768), (1, 524288), (8, 4096), (8, 131072), (64, 4096), (64, 32768)]
ROUNDS = 3  # contenders interleaved
Call = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def torchs(backend: SDPBackend) -> Call:
    """PyTorch's own, by one of its backends."""

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            grouped = q.shape[1] != k.shape[1]
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return call


CONTENDERS: dict[str, Call] = {
    "ours": lambda q, k, v, causal: attention(q, k, v, causal=causal),
    "torch, flash": torchs(SDPBackend.FLASH_ATTENTION),
    "torch, cudnn": torchs(SDPBackend.CUDNN_ATTENTION),
}


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """A call's, of `repeats` one after the other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def compared(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """The milliseconds of each contender in each round; of one that refuses none."""
    found: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            found[name] = []
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
    for _ in range(ROUNDS):
        for name, times in found.items():
            times.append(milliseconds(calls[name], repeats))
    return found


def lines() -> list[dict]:
    """Every cell measured: what it is, and each contender's rounds and rate."""
    found: list[dict] = []

    def note(cell: dict, unit: str, amount: float, times: dict[str, list[float]]) -> None:
        """amount: in `unit` times milliseconds."""
        rates = {name: round(amount / sorted(ms)[ROUNDS // 2], 1) for name, ms in times.items()}
        line = {"kind": "attention", **cell, "unit": unit, "rates": rates, "rounds_ms": times}
        found.append(line)
        print(f"{cell}: {rates} {unit}", file=sys.stderr, flush=True)

    for dim in (128, 64):
        for causal in (False, True):
            shape = (1, FEATURES // dim, TOKENS, dim)
            q, k, v = (
                torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
                for _ in range(3)
            )
            work = 4e-9 * TOKENS**2 * FEATURES / (2 if causal else 1)  # TFLOP/s times ms
            with torch.no_grad():
                calls = {
                    n: lambda c=c, q=q, k=k, v=v, m=causal: c(q, k, v, m)
                    for n, c in CONTENDERS.items()
                }
                times = compared(calls, 5)
            cell = {"what": "forward", "head_dim": dim, "causal": causal}
            note(cell, "TFLOP/s", work, times)
            g, back = torch.randn_like(q), {}
            for name, call in CONTENDERS.items():
                out = call(q, k, v, causal)
                back[name] = lambda out=out, q=q, k=k, v=v, g=g: torch.autograd.grad(
                    out, (q, k, v), g, retain_graph=True
                )
            note({**cell, "what": "backward"}, "TFLOP/s", 2.5 * work, compared(back, 3))
    for batch, keys in DECODES:
        q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (
            torch.randn(batch, 8, keys, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        calls = {n: lambda c=c, q=q, k=k, v=v: c(q, k, v, False) for n, c in CONTENDERS.items()}
        size = 2 * k.numel() * k.element_size() * 1e-6  # GB/s times ms
        cell = {"what": "decode", "batch": batch, "keys": keys}
        note(cell, "GB/s", size, compared(calls, 10))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention.py needs a CUDA GPU, and torch sees none here")
    given.out.unlink(missing_ok=True)
    clock = "Events around several calls. Contenders interleaved; median of three rounds"
    log, header = scriptlog.begin(given.out, "python benchmarks/attention.py", clock)
    log.write(header_line(header) + "".join(json.dumps(each) + "\n" for each in lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
