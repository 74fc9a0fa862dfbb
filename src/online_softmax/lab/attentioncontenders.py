"""Who runs in a cell of attention: each a call on (q, kv, out), of a backward on (q, kv, g).

kv holds keys and values, one behind the other: a ceiling reads both at once. A forward is timed
without gradients recorded; a backward alone, of a forward that ran before and kept what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import online_softmax
from online_softmax.lab import ceilings, gradients
from online_softmax.lab.contender import Contender
from online_softmax.lab.fusedsizes import parsed
from online_softmax.lab.grid import Cell
from online_softmax.lab.rotation import Call, Follows

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q, k, v
BACKENDS = {  # a line each, on a GPU
    "torch, flash": SDPBackend.FLASH_ATTENTION,
    "torch, cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch, efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SIDE, LEAST_SIDE = 4096, 64  # of the square matrices whose product is the ceiling
SEED = 1


def _ours(cell: Cell, causal: bool) -> Attend:
    return lambda q, k, v: online_softmax.attention(q, k, v, causal=causal)  # type: ignore[return-value]


def _torchs(backend: SDPBackend | None) -> Callable[[Cell, bool], Attend]:
    """PyTorch's own by one of its backends; by the one that it chooses itself where None is."""

    def make(cell: Cell, causal: bool) -> Attend:
        grouped = _is_grouped(cell)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        def by_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):  # type: ignore[arg-type]
                return attend(q, k, v)

        return attend if backend is None else by_backend

    return make


def _is_grouped(cell: Cell) -> bool:
    sizes = parsed(cell.sizes)
    return sizes["heads"] != sizes["kv_heads"]


def _flex(cell: Cell, causal: bool) -> Attend:
    """flex_attention as torch.compile makes it, for these sizes alone."""
    flex = import_module("torch.nn.attention.flex_attention")
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    grouped = _is_grouped(cell)
    masks: list[Any] = []  # made once: it takes longer than a call

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if causal and not masks:
            size = (q.shape[-2], k.shape[-2])
            made = flex.create_block_mask(_is_seen, None, None, *size, device=q.device)
            masks.append(made)
        found: Tensor = compiled(
            q, k, v, block_mask=masks[0] if masks else None, enable_gqa=grouped
        )
        return found

    return attend


def _is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _flash_attn(cell: Cell, causal: bool) -> Attend:
    """The package flash-attn, or flash-attn-4, whose heads come after the tokens."""
    module = import_module("flash_attn")
    if not hasattr(module, "flash_attn_func"):
        module = import_module("flash_attn.cute.interface")
    function = module.flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned = (t.transpose(1, 2) for t in (q, k, v))
        found = function(*turned, causal=causal)
        out: Tensor = found[0] if isinstance(found, tuple) else found  # beside lse
        return out.transpose(1, 2)

    return attend


def _tutorial(cell: Cell, causal: bool) -> Attend:
    function = import_module("online_softmax.lab.tutorial").attention
    return lambda q, k, v: function(q, k, v, causal)  # type: ignore[no-any-return]


def _lines(
    op: str, rivals: tuple[str, ...], is_gpu: bool
) -> dict[str, Callable[[Cell, bool], Attend]]:
    """Of the rivals asked for, by the names of their lines."""
    found: dict[str, Callable[[Cell, bool], Attend]] = {}
    if "torch" in rivals:
        names = BACKENDS if is_gpu else {"torch": None}
        found |= {name: _torchs(backend) for name, backend in names.items()}
    others = {"compile": _flex, "flash-attn": _flash_attn}
    if op == "attention":  # of which alone it is a kernel
        others["tutorial"] = _tutorial
    return found | {name: make for name, make in others.items() if name in rivals}


# ---- as calls on a set


def _forward(attend: Attend) -> Call:
    def call(q: Tensor, kv: Tensor, out: Tensor) -> Tensor:
        with torch.no_grad():
            return attend(q, kv[0], kv[1])

    return call


def _backward(attend: Attend) -> Call:
    def first(q: Tensor, kv: Tensor, g: Tensor) -> Any:
        return gradients.recorded(attend, q, kv[0], kv[1])

    return Follows(first, lambda made, q, kv, g: gradients.by(made, g))


def products(cell: Cell) -> Call:
    """As many products as the cell's, as one matrix product of torch's, in square blocks where the
    cell has enough of them."""
    side = SIDE
    while side > LEAST_SIDE and cell.flops < 2 * side**3:
        side //= 2
    tall = max(cell.flops // (2 * side * side), 1)
    step = min(tall, 4 * side)
    held: list[Tensor] = []

    def call(q: Tensor, *others: Tensor) -> None:
        if not held:
            generator = torch.Generator(q.device).manual_seed(SEED)  # a cell's own, as for its sets
            held.extend(q.new_empty(each, side) for each in (step, side, step))
            for each in held:
                each.normal_(generator=generator)
        a, b, c = held
        for start in range(0, tall, step):
            rows = min(step, tall - start)
            torch.mm(a[:rows], b, out=c[:rows])

    return call


def _read(q: Tensor, kv: Tensor, out: Tensor) -> None:
    ceilings.read_call(kv, out)


def contenders(cell: Cell, rivals: tuple[str, ...], is_gpu: bool) -> list[Contender]:
    """The lines of a cell, the ceiling first: a read of keys and values of a decode, else as many
    products as one matrix product."""
    causal = bool(parsed(cell.sizes)["causal"])

    def line(kind: str, name: str, make: Callable[[Cell, bool], Attend]) -> Contender:
        wrap = _backward if cell.op == "attention_backward" else _forward
        return Contender(name, kind, lambda: wrap(make(cell, causal)))

    ceiling = (lambda: _read) if cell.op == "attention_decode" else (lambda: products(cell))
    return [
        Contender("ceiling", "ceiling", ceiling),
        line("ours", "ours", _ours),
        *(line("rival", name, make) for name, make in _lines(cell.op, rivals, is_gpu).items()),
    ]
