"""Attention's errors against float64, beside PyTorch's backends on the same inputs; and its memory.

    python -m online_softmax.lab.attentionerrors --out errors.jsonl
    python -m online_softmax.lab.attentionerrors --memory --out memory.jsonl

The truth is the whole matrix of scores in float64, a head at a time, on the values as they were
rounded. An error is of a row that sees a key; what comes of others is said beside. What a backend
refuses is a line with its reason. A file that is there is written anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from online_softmax import attention
from online_softmax.lab import gradients, scriptlog
from online_softmax.lab.benchfile import header_line

Call = Callable[[Tensor, Tensor, Tensor, "Case", Tensor | None], Tensor]
LARGE = 30.0  # times q: scores of several hundred, so that a row is almost one key
MASKED = 8  # of so many rows one sees no key
MEMORY_TOKENS, MEMORY_DIM = 1 << 17, 128
FLOAT_BYTES = 4
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """What is computed: (batch, heads, length, head_dim), of standard normal numbers."""

    kind: str  # "normal", "large", "causal", "masked", "long" or "decode"
    head_dim: int
    dtype: str = "bfloat16"
    q_len: int = 1024
    k_len: int = 1024
    batch: int = 1
    heads: int = 4

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient by out, of the case's dtype."""
        generator = torch.Generator().manual_seed(self.head_dim)

        def normal(length: int, times: float = 1.0) -> Tensor:
            shape = (self.batch, self.heads, length, self.head_dim)
            made = torch.randn(shape, generator=generator) * times
            return made.to(device, getattr(torch, self.dtype))

        q = normal(self.q_len, LARGE if self.kind == "large" else 1.0)
        return q, normal(self.k_len), normal(self.k_len), normal(self.q_len)

    def mask(self, device: str) -> Tensor | None:
        """(q_len, k_len) bool, True takes part: a half of all, in some rows nothing."""
        if self.kind != "masked":
            return None
        generator = torch.Generator().manual_seed(1)
        made = torch.rand((self.q_len, self.k_len), generator=generator) < 0.5
        made[::MASKED] = False
        return made.to(device)


def cases(dtypes: tuple[str, ...] = ("bfloat16", "float16")) -> list[Case]:
    """The table's."""
    found = []
    for dtype, dim in itertools.product(dtypes, (64, 128, 256)):
        found += [Case(kind, dim, dtype) for kind in ("normal", "large", "causal", "masked")]
        found.append(Case("long", dim, dtype, q_len=128, k_len=1 << 16))
        found.append(Case("decode", dim, dtype, q_len=1, k_len=1 << 16))
    return found


# ---- who computes it


def ours(q: Tensor, k: Tensor, v: Tensor, case: Case, mask: Tensor | None) -> Tensor:
    return attention(q, k, v, causal=case.kind == "causal", mask=mask)  # type: ignore[return-value]


def torchs(backend: SDPBackend) -> Call:
    """PyTorch's own, by one of its backends."""

    def call(q: Tensor, k: Tensor, v: Tensor, case: Case, mask: Tensor | None) -> Tensor:
        with sdpa_kernel(backend):
            is_causal = case.kind == "causal"
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)

    return call


FLASH, CUDNN = "torch, flash", "torch, cudnn"
CONTENDERS: dict[str, Call] = {
    "ours": ours,
    FLASH: torchs(SDPBackend.FLASH_ATTENTION),
    CUDNN: torchs(SDPBackend.CUDNN_ATTENTION),
}


def results(call: Call, case: Case, inputs: tuple[Tensor, ...], mask: Tensor | None) -> Any:
    """out, dq, dk and dv."""
    q, k, v, dout = inputs
    kept: list[Tensor] = []

    def loss(*tensors: Tensor) -> Tensor:
        out = call(*tensors, case, mask)  # type: ignore[call-arg, arg-type]
        kept.append(out.detach())
        return (out * dout).sum()

    by = gradients.of(loss, q, k, v)
    return kept[0], *by


def truth(case: Case, inputs: tuple[Tensor, ...], mask: Tensor | None) -> tuple[Tensor, ...]:
    """The same in float64; of rows without a key 0."""
    q, k, v, dout = (t.double() for t in inputs)
    seen = torch.ones((case.q_len, case.k_len), dtype=torch.bool, device=q.device)
    if mask is not None:
        seen &= mask
    if case.kind == "causal":
        seen = seen.tril()
    is_empty = ~seen.any(-1, keepdim=True)

    def of_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = torch.where(seen | is_empty, q @ k.mT * case.head_dim**-0.5, -math.inf)
        return torch.where(is_empty, 0.0, torch.softmax(z, -1) @ v)

    heads = []
    for q_h, k_h, v_h, d_h in zip(*(t.flatten(0, 1) for t in (q, k, v, dout)), strict=True):
        by = gradients.of(lambda *t, d=d_h: (of_head(*t) * d).sum(), q_h, k_h, v_h)
        heads.append((of_head(q_h, k_h, v_h), *by))
    shape = (case.batch, case.heads)
    return tuple(torch.stack(each).unflatten(0, shape) for each in zip(*heads, strict=True))


# ---- how far it is


class Errors(NamedTuple):
    """Of one tensor; None: NaN or infinite."""

    max: float | None  # the largest, in parts of the truth's largest
    rms: float | None  # the root of the sum of squares, in parts of the truth's

    @classmethod
    def of(cls, got: Tensor, want: Tensor) -> Errors:
        error = got.double() - want
        most, size = float(want.abs().max()), float(want.norm())
        found = float(error.abs().max()) / (most or 1.0), float(error.norm()) / (size or 1.0)
        return cls(*(each if math.isfinite(each) else None for each in found))


def measured(case: Case, contenders: dict[str, Call], device: str) -> dict[str, Any]:
    """A line: each contender's errors, or why it has none."""
    inputs, mask = case.inputs(device), case.mask(device)
    want = truth(case, inputs, mask)
    rows = torch.ones(case.q_len, dtype=torch.bool) if mask is None else mask.any(-1).cpu()
    found: dict[str, Any] = {}
    for name, call in contenders.items():
        try:
            got = results(call, case, inputs, mask)
        except RuntimeError as error:
            found[name] = {"refused": str(error).strip().splitlines()[0]}
            continue
        pairs = {}
        for what, one, other in zip(NAMES, got, want, strict=True):
            is_by_row = what in ("out", "dq")  # the others sum over rows
            cut = (one[:, :, rows], other[:, :, rows]) if is_by_row else (one, other)
            pairs[what] = Errors.of(*cut)._asdict()
        found[name] = pairs
        if not bool(rows.all()):
            empty = got[0][:, :, ~rows]
            found[name]["rows without a key"] = "NaN" if bool(empty.isnan().any()) else (
                "0" if not bool(empty.any()) else "other numbers"
            )  # fmt: skip
    return {"kind": "attention_error", "case": asdict(case), "errors": found}


def said(line: dict[str, Any]) -> str:
    """A line for people: the errors of out and the worst gradient, in parts of the truth's size."""
    case, words = line["case"], []
    for name, found in line["errors"].items():
        if "refused" in found:
            words.append(f"{name} refuses")
            continue
        out, *by = (found[what]["rms"] for what in NAMES)
        worst = None if None in by else max(by)
        both = ("n/a" if each is None else f"{each:.1e}" for each in (out, worst))
        words.append(f"{name} {', '.join(both)}")
    return f"{case['kind']} {case['dtype']} {case['head_dim']}: {'; '.join(words)}"


# ---- memory


def memory(contenders: dict[str, Call], tokens: int = MEMORY_TOKENS) -> Iterator[dict[str, Any]]:
    """Bytes at the most above what was there, of one head of so many keys; and of the matrix."""
    case = Case("normal", MEMORY_DIM, "bfloat16", tokens, tokens, heads=1)
    q, k, v, dout = case.inputs("cuda")

    def peak(run: Callable[..., object], *given: object) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = run(*given)
        torch.cuda.synchronize()
        del made
        return torch.cuda.max_memory_allocated() - before

    for name, call in contenders.items():
        forward = peak(call, q, k, v, case, None)
        both = peak(results, call, case, (q, k, v, dout), None)
        yield {
            "kind": "attention_memory", "contender": name, "tokens": tokens,
            "head_dim": case.head_dim, "dtype": case.dtype, "forward_bytes": forward,
            "with_backward_bytes": both, "inputs_bytes": 3 * q.numel() * q.element_size(),
            "matrix_bytes_computed": tokens**2 * FLOAT_BYTES,
        }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--memory", action="store_true", help="peak memory in place of errors")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("attentionerrors needs a CUDA GPU, and torch sees none here")
    lines: Iterator[dict[str, Any]]
    if given.memory:
        lines = memory(CONTENDERS)
    else:
        lines = (measured(case, CONTENDERS, "cuda") for case in cases())
    given.out.unlink(missing_ok=True)
    command = "python -m online_softmax.lab.attentionerrors" + " --memory" * given.memory
    log, header = scriptlog.begin(given.out, command, "nothing is timed")
    log.write(header_line(header))
    for line in lines:
        log.write(json.dumps(line) + "\n")
        typer.echo(said(line) if line["kind"] == "attention_error" else json.dumps(line), err=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
