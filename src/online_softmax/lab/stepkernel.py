"""Attention's forward with a switch for each of its steps, so that a clock can tell them apart.

For the lesson's size alone: as many queries as keys, each head with its own keys, head_dim 64 or
128, no option but causal. The recurrence and the tiles are the package's own.

What Triton 3.6 and 3.9 make of warp_specialize on Hopper, read in their code for sm_90a: with 4
warps it adds a warp group, and setmaxnreg leaves the one that loads 40 registers a thread and gives
232 to the two that calculate, each a half of the queries. With 8 warps it does nothing, nor where
the loop has an `if`; with a second loop, or queries by pointer, the compiler fails. A descriptor
that comes as an argument keeps its tile, and so cannot be halved with the queries: theirs is made
in the kernel. So this step has one loop, and where causal its mask in every tile.

T. Dao: FlashAttention-2, arXiv:2307.08691; J. Shah et al.: FlashAttention-3, arXiv:2407.08608;
Triton's tutorial 06, triton-lang.org, for descriptors and tl.range.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from online_softmax import attentionplan
from online_softmax.attentionplan import Options, Tiles
from online_softmax.lab.fusedsizes import HEAD_DIMS
from online_softmax.plan import ceil_div
from online_softmax.triton import attention_launch
from online_softmax.triton.launcher import Launch
from online_softmax.triton.online import INF, LOG2_E, absorb_tile, join, row_max
from online_softmax.triton.tiles import (
    add_product,
    load_tile,
    product,
    store_tile,
    tile_range,
)

SHIPPED = "shipped"
STEPS: dict[str, dict[str, bool]] = {  # of each step those before it too
    "natural exp": {},
    "folded exp2": {"FOLDS": True},
    "whole tiles": {"SPLITS": True},
    "descriptors": {"TMA": True},
    "warp groups": {"SPECIALIZES": True},
}
NAMES = (*STEPS, SHIPPED)
SWITCHES = ("FOLDS", "SPLITS", "TMA", "SPECIALIZES")
# What is tried, by head_dim: block_q, block_k, warps, stages.
TILES = {
    64: (Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 3), Tiles(128, 64, 4, 3), Tiles(256, 64, 8, 2)),
    128: (Tiles(128, 128, 8, 3), Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3)),
}
SPECIALIZED = {  # 4 warps, or nothing is specialised; buffers hold K and V twice or thrice
    64: (Tiles(128, 64, 4, 3), Tiles(128, 128, 4, 2), Tiles(128, 128, 4, 3), Tiles(256, 64, 4, 3)),
    128: (Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 3), Tiles(128, 128, 4, 2)),
}


@triton.jit
def absorb_natural(m: tl.tensor, d: tl.tensor, z: tl.tensor) -> tl.tuple:
    """absorb_tile of finished scores in natural units: a subtraction and tl.exp an element."""
    m, w, _ = join(m, row_max(z, 1))
    shift = tl.where(m == -INF, 0.0, m)
    p = tl.exp(z - shift[:, None])
    return m, d * w + tl.sum(p, 1), p, w


@triton.jit
def load_rows(
    x: tl.tensor,  # (rows, DIM) contiguous; with TMA its descriptor, whose tiles are of BLOCK rows
    first: tl.tensor,  # row of the tile's first
    is_row: tl.tensor,  # (BLOCK,) bool, or None: all are there
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """(BLOCK, DIM)."""
    if TMA:
        tile = x.load([first, 0])
        if WIDEN:
            tile = tile.to(tl.float32)
        return tile
    else:  # noqa: RET505
        at = tl.arange(0, BLOCK) * DIM
        return load_tile(x + first.to(tl.int64) * DIM, at, is_row, DIM, DIM, WIDEN)


@triton.jit(do_not_specialize=["length", "heads", "blocks"])
def attend(
    q_ptr: tl.tensor,  # (heads, length, DIM) contiguous; as a descriptor, (heads * length, DIM)
    k_ptr: tl.tensor,  # the same
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,  # (heads, length, DIM) contiguous
    length: tl.int32,
    heads: tl.int32,
    blocks: tl.int32,  # tiles of queries of a head
    scale: tl.float32,
    CAUSAL: tl.constexpr,
    FOLDS: tl.constexpr,  # 2^x, with the scale in its multiply-add; else exp of scaled scores
    SPLITS: tl.constexpr,  # tiles that are seen whole have no mask, and the longest rows are first
    TMA: tl.constexpr,  # tiles come by descriptors; length is a multiple of both blocks
    SPECIALIZES: tl.constexpr,  # a warp group loads, others calculate
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """A tile of queries of a head, over all keys up to its last."""
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    after = None
    if CAUSAL:
        after = 0
        if SPLITS:
            block = blocks - 1 - block
    base = head * length
    first = block * BLOCK_Q
    query = first + tl.arange(0, BLOCK_Q)
    is_row = query < length
    if SPECIALIZES:  # the compiler halves this tile, and the descriptor with it
        q_ptr = tl.make_tensor_descriptor(q_ptr, [heads * length, DIM], [DIM, 1], [BLOCK_Q, DIM])
    q = load_rows(q_ptr, base + first, is_row, DIM, BLOCK_Q, TMA, WIDEN)
    last = tl.minimum(first + BLOCK_Q, length) - 1
    begin, _, edge, end = tile_range(first, last, 0, length, 0, None, after, BLOCK_K)
    HAS_WHOLE: tl.constexpr = SPLITS and not (SPECIALIZES and CAUSAL)
    HAS_EDGE: tl.constexpr = CAUSAL or not TMA
    if not HAS_WHOLE:
        edge = begin

    m = tl.full((BLOCK_Q,), -INF, tl.float32)
    d = tl.zeros((BLOCK_Q,), tl.float32)
    o = tl.zeros((BLOCK_Q, DIM), tl.float32)
    for phase in tl.static_range(2):
        start, stop = begin, edge
        if phase == 1:
            start, stop = edge, end
        if (phase == 0 and HAS_WHOLE) or (phase == 1 and HAS_EDGE):
            for tile in tl.range(start, stop, BLOCK_K, warp_specialize=SPECIALIZES):
                key = tile + tl.arange(0, BLOCK_K)
                is_key = None
                if phase == 1:
                    is_key = key < length
                k = load_rows(k_ptr, base + tile, is_key, DIM, BLOCK_K, TMA, WIDEN)
                z = product(q, tl.trans(k))
                if not FOLDS:
                    z *= scale
                if phase == 1:
                    is_seen = key[None, :] < length
                    if CAUSAL and TMA:  # the last query is there, so are all keys up to its own
                        is_seen = key[None, :] <= query[:, None]
                    elif CAUSAL:
                        is_seen &= key[None, :] <= query[:, None]
                    z = tl.where(is_seen, z, -INF)
                if FOLDS:
                    m, d, p, w = absorb_tile(m, d, z, scale * LOG2_E)
                else:
                    m, d, p, w = absorb_natural(m, d, z)
                v = load_rows(v_ptr, base + tile, is_key, DIM, BLOCK_K, TMA, WIDEN)
                o = add_product(o * w[:, None], p.to(v.dtype), v)

    at = base.to(tl.int64) * DIM + query * DIM
    store_tile(out_ptr, at, is_row, o / d[:, None], DIM, DIM)


@dataclass(frozen=True)
class Variant:
    """A step with its launch numbers, for one kind of call."""

    step: str  # of NAMES
    head_dim: int
    causal: bool
    block_q: int
    block_k: int
    warps: int
    stages: int

    @property
    def tiles(self) -> Tiles:
        return Tiles(self.block_q, self.block_k, self.warps, self.stages)

    @property
    def numbers(self) -> str:
        return f"{self.block_q} x {self.block_k}, {self.warps} warps, {self.stages} stages"


def variants(head_dim: int, causal: bool, arch: str = "sm_90a") -> list[Variant]:
    """Every step with every tile that is tried of it, and what ships, for bfloat16."""
    found = []
    for step in STEPS:
        tried = SPECIALIZED if switches(step)["SPECIALIZES"] else TILES
        found += [Variant(step, head_dim, causal, **asdict(each)) for each in tried[head_dim]]
    ships: Tiles = attentionplan.tiles("forward", arch, 2, head_dim)
    return [*found, Variant(SHIPPED, head_dim, causal, **asdict(ships))]


def switches(step: str) -> dict[str, bool]:
    """The kernel's switches of a step: its own and those of the steps before.

    >>> switches("folded exp2")
    {'FOLDS': True, 'SPLITS': False, 'TMA': False, 'SPECIALIZES': False}
    """
    found = dict.fromkeys(SWITCHES, False)
    for name, own in STEPS.items():
        found |= own
        if name == step:
            return found
    raise ValueError(f"step is {step!r}, where there are {', '.join(STEPS)}")


def launch(variant: Variant, q: Tensor, k: Tensor, v: Tensor, arch: str) -> tuple[Launch, Tensor]:
    """What computes a variant, and the output that it fills.

    Args:
        q, k, v: (batch, heads, length, head_dim) bfloat16, contiguous and of one shape; of
            descriptors the length is a multiple of the variant's blocks.
        arch: the architecture of the device.
    """
    if not (q.shape == k.shape == v.shape and q.shape[-1] == variant.head_dim in HEAD_DIMS):
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(f"q, k and v are {shapes}, where one shape with {variant.head_dim} wanted")
    if variant.step == SHIPPED:
        o = Options(0, 0, None, -1, 0 if variant.causal else -1, False, None, False)
        given = attention_launch.Inputs(q, k, v, None, None, None, None, None)
        made = attention_launch.forward(given, o, arch, False, variant.tiles)
        return made.launches[0], made.out
    batch, heads, length, dim = q.shape
    known, out = switches(variant.step), torch.empty_like(q)
    block_q, block_k = variant.block_q, variant.block_k
    given_k, given_v, given_q = k, v, q
    if known["TMA"]:
        if length % block_q or length % block_k:
            blocks = f"{block_q} x {block_k}"
            raise ValueError(f"length is {length}, where a multiple of {blocks} is wanted")
        given_k, given_v = (described(t, block_k) for t in (k, v))
        if not known["SPECIALIZES"]:
            given_q = described(q, block_q)
    tiles = ceil_div(length, block_q)
    names = {
        "q_ptr": given_q, "k_ptr": given_k, "v_ptr": given_v, "out_ptr": out, "length": length,
        "heads": batch * heads, "blocks": tiles, "scale": dim**-0.5, "CAUSAL": variant.causal,
        **known, "DIM": dim, "BLOCK_Q": block_q, "BLOCK_K": block_k,
        "WIDEN": attention_launch.interpreted(),
    }  # fmt: skip
    programs = tiles * batch * heads
    return Launch(attend, programs, names, variant.warps, variant.stages), out


def described(t: Tensor, rows: int) -> Any:
    """A tensor as a descriptor of all its rows, so many a tile."""
    matrix = t.view(-1, t.shape[-1])
    return TensorDescriptor(matrix, [*matrix.shape], [*matrix.stride()], [rows, t.shape[-1]])


def allocate() -> None:
    """Tell Triton where descriptors that a kernel makes may lie; the warp groups' queries have
    one a program. It holds for this thread."""

    def empty(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device="cuda")

    triton.set_allocator(empty)
