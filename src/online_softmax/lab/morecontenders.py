"""Who runs in the further cells of moresizes.py: each a call on a set that morecells.py made."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import online_softmax
from online_softmax import rowops
from online_softmax.lab import ceilings, gradients, losscontenders
from online_softmax.lab.attentioncontenders import products
from online_softmax.lab.contender import Contender
from online_softmax.lab.fusedsizes import parsed
from online_softmax.lab.grid import Cell
from online_softmax.lab.moresizes import (
    FP8,
    LSE_BACKWARD,
    OUTER_OPS,
    STATS_BOTH,
    VARLEN,
    lengths,
)
from online_softmax.lab.rotation import Call, Follows

Lines = dict[str, Callable[[], Call]]  # what makes the call of a line
Torchs = Callable[..., Tensor]


def _compiled(function: Torchs) -> Torchs:
    """As torch.compile makes it, for these sizes alone."""
    torch.compiler.reset()
    made: Torchs = torch.compile(function, dynamic=False)
    return made


# ---- logsumexp's gradient


def _by_autograd(logsumexp: Torchs) -> Call:
    """The gradient alone, of a forward that ran before and kept its own result."""

    def first(x: Tensor, dlse: Tensor, lse: Tensor, dx: Tensor) -> Any:
        return gradients.recorded(logsumexp, x)

    return Follows(first, lambda made, x, dlse, lse, dx: gradients.by(made, dlse)[0])


def _torchs_lse(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


def _lse_backward() -> Lines:
    return {
        "ceiling": lambda: lambda x, dlse, lse, dx: ceilings.copy_call(x, dx),
        "ours": lambda: (
            lambda x, dlse, lse, dx: rowops.logsumexp_backward(
                dlse, x, lse, (-1,), False, None, 1.0, False
            )
        ),
        "torch": lambda: _by_autograd(_torchs_lse),
        "compile": lambda: _by_autograd(_compiled(_torchs_lse)),
    }


# ---- the gradient of a token's numbers


def _stats(x: Tensor, target: Tensor) -> Tensor:
    """What a policy's step asks for: the token's log-probability, and the entropy."""
    found = online_softmax.token_stats(x, target)
    return (found.target_log_prob + found.entropy).sum()  # type: ignore[operator]


def _torchs_stats(x: Tensor, target: Tensor) -> Tensor:
    log_p = torch.log_softmax(x, -1, dtype=torch.float32)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return (log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1) + entropy).sum()


def _stats_both() -> Lines:
    def gradient(stats: Torchs) -> Call:
        return lambda x, target, dx: gradients.of(lambda leaf: stats(leaf, target), x)[0]

    return {
        "ceiling": lambda: losscontenders.read_and_copy,
        "ours": lambda: gradient(_stats),
        "torch": lambda: gradient(_torchs_stats),
        "compile": lambda: gradient(_compiled(_torchs_stats)),
    }


# ---- along an outer dim


def _outer(op: str) -> Lines:
    name = op.removesuffix("_outer")
    is_lse = op == OUTER_OPS[2]
    torchs = getattr(torch, name)

    def ours(x: Tensor, y: Tensor) -> Tensor:
        if is_lse:
            return rowops.logsumexp(x, (1,), False, None, 1.0, "")
        return rowops.forward(name, x, 1, None, 1.0, False, "", y)

    def compiled() -> Call:
        function = _compiled(lambda x: torchs(x, 1))
        return lambda x, y: function(x)

    return {
        "ceiling": lambda: ceilings.read_call if is_lse else ceilings.copy_call,
        "ours": lambda: ours,
        "torch": lambda: lambda x, y: torchs(x, 1, out=y),
        "compile": compiled,
    }


# ---- fp8


def _copied(x: Tensor, source: Tensor, y: Tensor) -> None:
    """A copy that moves as many bytes as the operation: half of them read, half written."""
    ceilings.copy_call(source, y.view(-1).view(torch.uint8)[: len(source)])


def _fp8(dtype: torch.dtype) -> Lines:
    def compiled() -> Call:
        function = _compiled(lambda x: torch.softmax(x, -1, dtype=dtype))
        return lambda x, source, y: function(x)

    return {
        "ceiling": lambda: _copied,
        "ours": lambda: (
            lambda x, source, y: rowops.forward("softmax", x, -1, dtype, 1.0, False, "", y)
        ),
        "torch": lambda: lambda x, source, y: torch.softmax(x, -1, dtype=dtype, out=y),
        "compile": compiled,
    }


# ---- packed sequences


class _Packed:
    """The calls of a cell of packed sequences; where they begin is on the device from the first."""

    def __init__(self, cell: Cell) -> None:
        sizes = parsed(cell.sizes)
        self.lengths, self.longest = lengths(sizes["batch"], cell.cols), cell.cols
        self.is_causal = bool(sizes["causal"])
        self._ends: Tensor | None = None

    def ends(self, q: Tensor) -> Tensor:
        """(sequences + 1,) int32, made once."""
        if self._ends is None:
            found = torch.tensor([0, *self.lengths]).cumsum(0)
            self._ends = found.to(dtype=torch.int32, device=q.device)
        return self._ends

    def ours(self, q: Tensor, kv: Tensor, out: Tensor) -> Any:
        ends = self.ends(q)
        most = (self.longest, self.longest)
        with torch.no_grad():
            return online_softmax.attention_varlen(
                q, kv[0], kv[1], ends, ends, *most, causal=self.is_causal
            )

    def torchs(self) -> Call:
        varlen = import_module("torch.nn.attention.varlen").varlen_attn

        def call(q: Tensor, kv: Tensor, out: Tensor) -> Any:
            ends, window = self.ends(q), (-1, 0) if self.is_causal else (-1, -1)
            with torch.no_grad():
                return varlen(
                    q, *kv.unbind(), ends, ends, self.longest, self.longest, window_size=window
                )

        return call

    def one_by_one(self, q: Tensor, kv: Tensor, out: Tensor) -> Tensor:
        """A call of torch's attention for each sequence."""
        begin = 0
        with torch.no_grad():
            for length in self.lengths:
                part = slice(begin, begin + length)
                one, k, v = (t[part].transpose(0, 1).unsqueeze(0) for t in (q, kv[0], kv[1]))
                found = scaled_dot_product_attention(one, k, v, is_causal=self.is_causal)
                out[part] = found.squeeze(0).transpose(0, 1)
                begin += length
        return out

    def flash_attn(self) -> Call:
        """The package flash-attn, or flash-attn-4."""
        module = import_module("flash_attn")
        if not hasattr(module, "flash_attn_varlen_func"):
            module = import_module("flash_attn.cute.interface")
        function = module.flash_attn_varlen_func

        def call(q: Tensor, kv: Tensor, out: Tensor) -> Any:
            ends = self.ends(q)
            with torch.no_grad():
                found = function(
                    q, *kv.unbind(), cu_seqlens_q=ends, cu_seqlens_k=ends,
                    max_seqlen_q=self.longest, max_seqlen_k=self.longest, causal=self.is_causal,
                )  # fmt: skip
            return found[0] if isinstance(found, tuple) else found  # beside lse

        return call

    def flex(self) -> Call:
        """flex_attention as torch.compile makes it, of one sequence in which tokens see those of
        their own document."""
        flex = import_module("torch.nn.attention.flex_attention")
        function = _compiled(flex.flex_attention)
        masks: list[Any] = []  # made once: it takes longer than a call

        def call(q: Tensor, kv: Tensor, out: Tensor) -> Tensor:
            if not masks:
                masks.append(self._mask(flex, q))
            turned = (t.transpose(0, 1).unsqueeze(0) for t in (q, kv[0], kv[1]))
            with torch.no_grad():
                found: Tensor = function(*turned, block_mask=masks[0])
            return found.squeeze(0).transpose(0, 1)

        return call

    def _mask(self, flex: Any, q: Tensor) -> Any:
        counts = torch.tensor(self.lengths, device=q.device)
        document = torch.arange(len(self.lengths), device=q.device).repeat_interleave(counts)
        is_causal = self.is_causal

        def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            same = document[query] == document[key]
            return same & (query >= key) if is_causal else same

        return flex.create_block_mask(is_seen, None, None, len(q), len(q), device=q.device)


def _varlen(cell: Cell, is_gpu: bool) -> Lines:
    made = _Packed(cell)
    lines: Lines = {"ceiling": lambda: products(cell), "ours": lambda: made.ours}
    if is_gpu:
        lines |= {"torch": made.torchs, "torch, one by one": lambda: made.one_by_one}
    else:  # on which varlen_attn has no kernel
        lines["torch"] = lambda: made.one_by_one
    return lines | {"compile": made.flex, "flash-attn": made.flash_attn}


# ---- all of them


def contenders(cell: Cell, rivals: tuple[str, ...], is_gpu: bool) -> list[Contender]:
    """The lines of a cell, the ceiling first."""
    if cell.op == VARLEN:
        lines = _varlen(cell, is_gpu)
    elif cell.op == LSE_BACKWARD:
        lines = _lse_backward()
    elif cell.op == STATS_BOTH:
        lines = _stats_both()
    else:
        is_fp8 = cell.op == FP8
        lines = _fp8(getattr(torch, cell.dtype)) if is_fp8 else _outer(cell.op)
    kinds = {"ceiling": "ceiling", "ours": "ours"}
    return [
        Contender(name, kinds.get(name, "rival"), make)
        for name, make in lines.items()
        if name in kinds or name.partition(",")[0] in rivals
    ]
