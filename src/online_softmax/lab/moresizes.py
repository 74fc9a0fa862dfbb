"""The sizes of further cells that are more than a matrix, as fusedsizes has them of others.

| operation | rows | columns | sizes |
|---|---|---|---|
| logsumexp_backward, softmax_fp8, token_stats_both | rows | columns | |
| softmax_outer, log_softmax_outer, logsumexp_outer | planes | elements along the dim | inner: \
slices side by side in a plane, each element that far from the next |
| attention_varlen | queries of all heads and sequences | the longest sequence | batch, heads, \
head_dim, causal |
"""

from __future__ import annotations

LSE_BACKWARD, FP8, VARLEN = "logsumexp_backward", "softmax_fp8", "attention_varlen"
STATS_BOTH = "token_stats_both"  # its numbers, and the gradient of a sum of them
OUTER_OPS = ("softmax_outer", "log_softmax_outer", "logsumexp_outer")
MORE_OPS = (LSE_BACKWARD, *OUTER_OPS, FP8, STATS_BOTH, VARLEN)

WHOLE = 2**27  # elements of a large cell
COLS = (1024, 4096, 32768, 131072)
ODD_COLS = (50257, 128257)
LOGITS = {  # tokens and classes
    "big": ((4096, 32000), (4096, 128256), (2048, 262144)), "odd": ((4096, 50257),),
    "small": ((16, 128256), (256, 128256)), "cpu": ((64, 32000),),
}  # fmt: skip
FEW_ROWS, FEW_COLS = (16, 256), (32000, 131072)
# (planes, along, inner): scores over heads or positions, channels of pictures, few wide planes.
OUTER = ((4096, 64, 512), (32, 1024, 4096), (1, 32768, 4096), (8192, 1024, 16), (64, 128, 16384))
ODD_OUTER = ((16, 19, 512 * 1024), (16, 1000, 8189))
FEW_OUTER = ((1, 128, 256), (8, 1024, 64), (1, 4096, 1024))
# Of packed sequences: how many, heads, the longest, head_dim.
PACKED = ((16, 16, 2048, 128), (4, 16, 8192, 128), (8, 32, 4096, 64))
ODD_PACKED, FEW_PACKED = ((7, 16, 3333, 128),), ((4, 16, 256, 128),)
CPU_ROWS, CPU_OUTER, CPU_PACKED = (1024, 1024), (16, 256, 256), (4, 4, 128, 64)

LEAST = 64  # below which a length is made no smaller
Triple = tuple[int, int, str]  # rows, columns, sizes
ROWS = "ROWSxCOLS"
WANTED = {  # what --cells names of an operation
    **dict.fromkeys((LSE_BACKWARD, FP8, STATS_BOTH), ROWS),
    **dict.fromkeys(OUTER_OPS, "ROWSxCOLSxINNER"),
    VARLEN: "BATCHxHEADSxLONGESTxHEAD_DIM",
}
SIZES = {
    **dict.fromkeys(OUTER_OPS, ("inner",)),
    VARLEN: ("batch", "heads", "head_dim", "causal"),
}


def lengths(batch: int, longest: int) -> list[int]:
    """Of packed sequences: evenly spread up to the longest, in an order that is none of size.

    >>> lengths(4, 100)
    [25, 75, 100, 50]
    """
    found = [-(-longest * (i + 1) // batch) for i in range(batch)]
    return [*found[::2], *reversed(found[1::2])]


def outer(rows: int, cols: int, inner: int) -> Triple:
    """So many planes of cols x inner, softmax along cols."""
    return rows, cols, f"inner={inner}"


def packed(batch: int, heads: int, longest: int, head_dim: int, causal: bool) -> Triple:
    """Sequences of many lengths, each with as many queries as keys."""
    sizes = f"batch={batch} heads={heads} head_dim={head_dim} causal={int(causal)}"
    return heads * sum(lengths(batch, longest)), longest, sizes


def _packed_grid(shapes: tuple[tuple[int, int, int, int], ...]) -> list[Triple]:
    return [packed(*shape, causal) for shape in shapes for causal in (False, True)]


def grid(op: str) -> dict[str, list[Triple]]:
    """The cells of each grid by its name, but for "all"."""
    if op in OUTER_OPS:
        shapes = {"big": OUTER, "odd": ODD_OUTER, "small": FEW_OUTER, "cpu": (CPU_OUTER,)}
        return {name: [outer(*each) for each in found] for name, found in shapes.items()}
    if op == VARLEN:
        given = {"big": PACKED, "odd": ODD_PACKED, "small": FEW_PACKED, "cpu": (CPU_PACKED,)}
        return {name: _packed_grid(found) for name, found in given.items()}
    if op == STATS_BOTH:
        return {name: [(*each, "") for each in found] for name, found in LOGITS.items()}
    return {
        "big": [(WHOLE // cols, cols, "") for cols in COLS],
        "odd": [(WHOLE // cols, cols, "") for cols in ODD_COLS],
        "small": [(rows, cols, "") for cols in FEW_COLS for rows in FEW_ROWS],
        "cpu": [(*CPU_ROWS, "")],
    }


def by_hand(op: str, numbers: list[int]) -> list[Triple]:
    """The cells of a shape that a person named; attention with and without a causal mask.

    >>> by_hand("softmax_outer", [2, 3, 4])
    [(2, 3, 'inner=4')]
    """
    if op in OUTER_OPS:
        return [outer(*numbers)]
    if op == VARLEN:
        batch, heads, longest, head_dim = numbers
        return _packed_grid(((batch, heads, longest, head_dim),))
    return [(numbers[0], numbers[1], "")]


def smaller(op: str, rows: int, cols: int, sizes: dict[str, int]) -> Triple | None:
    """A cell with half the work, or a quarter where only a length is left; None: none is less."""
    if op == VARLEN:
        batch, heads = sizes["batch"], sizes["heads"]
        if batch > 1:
            batch //= 2
        elif heads > 1:
            heads //= 2
        elif cols > LEAST:
            cols //= 2
        else:
            return None
        return packed(batch, heads, cols, sizes["head_dim"], bool(sizes["causal"]))
    inner = sizes.get("inner", 1)
    if rows > 1:
        rows //= 2
    elif inner > LEAST:
        inner //= 2
    elif cols > LEAST:
        cols //= 2
    else:
        return None
    return outer(rows, cols, inner) if op in OUTER_OPS else (rows, cols, "")


# ---- what they move and count


def elements(op: str, rows: int, cols: int, sizes: dict[str, int]) -> int:
    """Of the largest tensor."""
    if op == VARLEN:
        return rows * sizes["head_dim"]
    return rows * cols * sizes.get("inner", 1)


def ideal_bytes(op: str, rows: int, cols: int, sizes: dict[str, int], item: int) -> int:
    """The least that an operation moves: what goes in and what comes out, once."""
    count = elements(op, rows, cols, sizes)
    if op == VARLEN:  # q, k, v, out
        return 4 * count * item
    if op == FP8:
        return count * (1 + item)
    if op == STATS_BOTH:  # a forward and a backward: read, read, write; the target
        return 3 * count * item + 8 * rows
    if op == LSE_BACKWARD:  # also the upstream gradient, and the float32 log-sum-exp
        return 2 * count * item + rows * (item + 4)
    return (count + (rows * sizes["inner"] if op.startswith("logsumexp") else count)) * item


def flops(op: str, cols: int, sizes: dict[str, int]) -> int:
    """Of the products: 4 q k d of each sequence, half of it where causal. 0: memory bounds it."""
    if op != VARLEN:
        return 0
    squares = sum(length**2 for length in lengths(sizes["batch"], cols))
    return 4 * squares * sizes["heads"] * sizes["head_dim"] // (2 if sizes["causal"] else 1)


def memory_bytes(op: str, rows: int, cols: int, sizes: dict[str, int], item: int, sets: int) -> int:
    """Device memory that a cell takes: its sets, the outputs of rivals, what an eager one works
    with, and the judge's float64."""
    ideal, count = ideal_bytes(op, rows, cols, sizes, item), elements(op, rows, cols, sizes)
    return 3 * sets * ideal + (48 if op == STATS_BOTH else 16) * count + 2**31
