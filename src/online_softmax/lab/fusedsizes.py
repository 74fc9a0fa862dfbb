"""The sizes of cells that are more than a matrix: attention, a linear layer's loss, a merge.

A cell says rows and columns as any other does, and in words of its own what these leave open:

| operation | rows | columns | sizes |
|---|---|---|---|
| attention, attention_backward, attention_decode | queries of all heads | keys | batch, heads, \
kv_heads, head_dim, causal |
| merge | rows of a part | columns of out | parts |
| linear_cross_entropy | tokens | classes | features |

Those of a few further operations are in moresizes.py.
"""

from __future__ import annotations

from online_softmax.lab import moresizes
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.moresizes import MORE_OPS, ROWS

ATTENTION_OPS = ("attention", "attention_backward", "attention_decode")
MERGE, LINEAR = "merge", "linear_cross_entropy"
FUSED_OPS = (*ATTENTION_OPS, MERGE, *MORE_OPS, LINEAR)

TOKENS, FEATURES = 16384, 2048  # of attention's large cells: so many sequences as make them up
LENGTHS = (1024, 2048, 4096, 8192, 16384)
ODD_LENGTHS = (1000, 3333, 16381)
HEAD_DIMS = (128, 64)
# Decode: one query of 32 heads on 8 heads of keys, which have at most 2^21 tokens in all: 8 GiB.
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BATCHES, KEYS, MOST_KEYS = (1, 8, 64), (4096, 32768, 131072, 524288), 2**21
PARTS, MERGED = (2, 4, 16), (16384 * 16, 128)  # rows and columns of a part
LINEAR_SIZES = ((8192, 4096, 128256), (8192, 4096, 32000), (4096, 2048, 128256))
SMALL_LINEAR = ((1024, 4096, 128256),)
BACKWARD_TIMES = 2.5  # the products of attention's backward beside its forward's

Triple = tuple[int, int, str]  # rows, columns, sizes
WANTED = {  # what --cells names of an operation
    "attention": "BATCHxHEADSxLENGTHxHEAD_DIM",
    "attention_backward": "BATCHxHEADSxLENGTHxHEAD_DIM",
    "attention_decode": "BATCHxKEYS",
    MERGE: "PARTSxROWSxCOLS",
    LINEAR: "TOKENSxFEATURESxCLASSES",
    **moresizes.WANTED,
}

SIZES = {  # what the sizes of a cell name, at least
    **dict.fromkeys(ATTENTION_OPS, ("batch", "heads", "kv_heads", "head_dim", "causal")),
    MERGE: ("parts",), LINEAR: ("features",), **moresizes.SIZES,
}  # fmt: skip


def written(**sizes: int) -> str:
    """Sizes as a cell has them.

    >>> written(parts=2)
    'parts=2'
    """
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def parsed(text: str) -> dict[str, int]:
    """The same, read.

    >>> parsed("batch=1 heads=16")
    {'batch': 1, 'heads': 16}
    """
    return {name: int(value) for name, _, value in (each.partition("=") for each in text.split())}


def check(op: str, text: str) -> None:
    """ValueError for sizes that are not those of an operation: one is missing, or not above 0."""
    wanted = SIZES.get(op, ())
    try:
        found = parsed(text)
    except ValueError:
        raise ValueError(
            f"sizes is {text!r} there, where names and whole numbers are wanted, as parts=2"
        ) from None
    if not all(found.get(name, 0) > 0 or (name == "causal" and name in found) for name in wanted):
        raise ValueError(f"sizes is {text!r} there, where {op} has {' and '.join(wanted)}")


# ---- which there are


def attention(batch: int, heads: int, length: int, head_dim: int, causal: bool) -> Triple:
    """Queries that are as many as keys, and heads of keys as of queries."""
    sizes = written(batch=batch, heads=heads, kv_heads=heads, head_dim=head_dim, causal=int(causal))
    return batch * heads * length, length, sizes


def decode(batch: int, keys: int, heads: int = HEADS, kv_heads: int = KV_HEADS) -> Triple:
    """One query a sequence."""
    sizes = written(batch=batch, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, causal=0)
    return batch * heads, keys, sizes


def _attention_grid(lengths: tuple[int, ...], tokens: int = TOKENS) -> list[Triple]:
    return [
        attention(max(tokens // length, 1), FEATURES // dim, length, dim, causal)
        for dim in HEAD_DIMS
        for causal in (False, True)
        for length in lengths
    ]


def _decode_grid(keys: tuple[int, ...]) -> list[Triple]:
    return [decode(b, k) for b in BATCHES for k in keys if b * k <= MOST_KEYS]


def grid(op: str, name: str) -> list[Triple]:
    """The cells of a grid by its name, as for rows; "cpu" is what a CPU does in a few seconds."""
    if op in MORE_OPS:
        found = moresizes.grid(op)
    elif op in ("attention", "attention_backward"):
        found = {
            "big": _attention_grid(LENGTHS),
            "odd": _attention_grid(ODD_LENGTHS),
            "small": _attention_grid((256, 1024), 1024),
            "cpu": [attention(1, 4, 256, 64, causal) for causal in (False, True)],
        }
    elif op == "attention_decode":
        found = {
            "big": _decode_grid(KEYS),
            "odd": _decode_grid((5000,)),
            "small": _decode_grid((1024,)),
            "cpu": [decode(1, 4096)],
        }
    elif op == MERGE:
        rows, cols = MERGED
        found = {
            "big": [(rows, cols, written(parts=parts)) for parts in PARTS],
            "odd": [(rows - 1, 96, written(parts=3))],
            "small": [(32 * batch, cols, written(parts=parts)) for batch in BATCHES
                      for parts in PARTS],
            "cpu": [(4096, 64, written(parts=4))],
        }  # fmt: skip
    else:
        found = {
            "big": [_linear(*sizes) for sizes in LINEAR_SIZES],
            "odd": [_linear(8192, 4096, 50257)],
            "small": [_linear(*sizes) for sizes in SMALL_LINEAR],
            "cpu": [_linear(256, 256, 4096)],
        }
    found["all"] = [*found["big"], *found["odd"], *found["small"]]
    return list(dict.fromkeys(found[name]))


def _linear(tokens: int, features: int, classes: int) -> Triple:
    return tokens, classes, written(features=features)


def by_hand(op: str, text: str) -> list[Triple]:
    """The cells of shapes that a person named; attention with and without a causal mask.

    >>> by_hand("merge", "2x100x64")
    [(100, 64, 'parts=2')]
    """
    found: list[Triple] = []
    for part in text.split(","):
        numbers = part.strip().lower().split("x")
        least = 0 if WANTED[op] == ROWS else 1  # a matrix may be empty, as softmax's
        if len(numbers) != WANTED[op].count("x") + 1 or not all(
            each.isdecimal() and int(each) >= least for each in numbers
        ):
            raise BadInput(f"--cells {part.strip()}: of {op} give {WANTED[op]}")
        sizes = [int(each) for each in numbers]
        if op in MORE_OPS:
            found += moresizes.by_hand(op, sizes)
        elif op in ("attention", "attention_backward"):
            batch, heads, length, head_dim = sizes
            found += [attention(batch, heads, length, head_dim, c) for c in (False, True)]
        elif op == "attention_decode":
            found.append(decode(*sizes))
        elif op == MERGE:
            found.append((sizes[1], sizes[2], written(parts=sizes[0])))
        else:
            found.append(_linear(*sizes))
    return list(dict.fromkeys(found))


# ---- what they move and count


def ideal_bytes(op: str, rows: int, cols: int, sizes: str, item: int) -> int:
    """The least that an operation moves: what goes in and what comes out, once."""
    given = parsed(sizes)
    if op in MORE_OPS:
        return moresizes.ideal_bytes(op, rows, cols, given, item)
    if op == MERGE:
        return (given["parts"] + 1) * rows * (cols * item + 4)
    if op == LINEAR:  # input, weight, their gradients, the target
        features = given["features"]
        return 2 * (rows + cols) * features * item + 8 * rows
    keys = 2 * given["batch"] * given["kv_heads"] * cols * given["head_dim"] * item
    queries = rows * given["head_dim"] * item
    if op == "attention_backward":  # q, k, v, out, its gradient; the gradients of q, k, v; lse
        return 2 * keys + 4 * queries + 4 * rows
    return keys + 2 * queries


def flops(op: str, rows: int, cols: int, sizes: str) -> int:
    """Of the products, as usual: 4 q k d of attention, half of it where causal, 2.5 times that in
    its backward; six tokens features classes of a linear layer's loss. 0: memory is the limit."""
    if op in (MERGE, "attention_decode"):
        return 0
    given = parsed(sizes)
    if op in MORE_OPS:
        return moresizes.flops(op, cols, given)
    if op == LINEAR:
        return 6 * rows * cols * given["features"]
    forward = 4 * rows * cols * given["head_dim"] // (2 if given["causal"] else 1)
    return int(BACKWARD_TIMES * forward) if op == "attention_backward" else forward


def memory_bytes(op: str, rows: int, cols: int, sizes: str, item: int, sets: int) -> int:
    """Device memory that a cell takes: its sets, what each contender keeps for a backward, and the
    judge's float64."""
    if op in MORE_OPS:
        return moresizes.memory_bytes(op, rows, cols, parsed(sizes), item, sets)
    ideal = ideal_bytes(op, rows, cols, sizes, item)
    if op == MERGE:
        return sets * ideal + 4 * 8 * rows * cols + 2**30
    if op == LINEAR:
        features = parsed(sizes)["features"]
        return ideal + 12 * rows * cols + 3 * 8 * (rows + cols) * features + 2**30
    # Eight matrices of the judge's chunks, and eight of a head of keys.
    return 3 * sets * ideal + 2**31 + 8 * 8 * cols * parsed(sizes)["head_dim"]
