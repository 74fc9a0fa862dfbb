"""What the command line says of itself: help texts and options."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from online_softmax.arches import ARCHES, DEFAULT_ARCH

SECONDS = 30.0

ABOUT = """Softmax kernels, from three passes over memory to one: run them, watch them, ask which.

\b
Start here:
  online-softmax ladder                every kernel, checked, counted, timed
  online-softmax trace 1 5 3 9 2       the two numbers that make it work
  online-softmax trace --attention     the same two, and attention's output
  online-softmax explain 4096 4096     which kernel to choose, and why
  online-softmax check --quick         is everything right on this machine?
  online-softmax report --open         what an H200 measured, as a page
  online-softmax info                  what is installed, what is missing"""
LADDER = """Run every rung of the ladder: is it right, what does it cost, how fast is it?

On a GPU rungs are timed, L2 cold, beside a copy and torch.softmax. Without one the same kernels \
run on the CPU, where reads, writes and exponentials are counted.

\b
Examples:
  online-softmax ladder
  online-softmax ladder --rows 64 --cols 131072 --dtype bf16
  online-softmax ladder --input scores.npy --only v2,v3,torch
  online-softmax ladder --sample --arch sm_80,sm_120 --plot ladder.png
  online-softmax ladder --against compile --save run.jsonl
  online-softmax ladder --from run.jsonl --plot run.png"""
TRACE = """Watch the running pair (m, d) over a few numbers: the maximum, and the sum of exp(x - m).

With --attention (m, d, o) over tiles of keys, o the sum of exp(score - m) times values; queries, \
keys and values are small whole numbers by a fixed rule.

With --html also a page for a browser, on which numbers can be changed and steps taken one by one.

\b
Examples:
  online-softmax trace 1 5 3 9 2
  online-softmax trace 1 5 3 9 2 --block 3
  online-softmax trace 1000 -inf -3 nan
  online-softmax trace --attention
  online-softmax trace --attention --keys 8 --block 4 --causal
  online-softmax trace 1 5 3 9 2 --html page.html"""
EXPLAIN = """Say which kernel an operation on ROWS x COLS takes, and why.

Of a loss these are tokens and classes, of attention the queries and keys of a sequence.

\b
Examples:
  online-softmax explain 4096 4096
  online-softmax explain 8192 128256 --dtype bf16 --op cross_entropy
  online-softmax explain 1 1048576 --dtype bf16 --arch sm_80,sm_90
  online-softmax explain 1 131072 --dtype bf16 --op attention --kv-heads 8"""
INFO = "Show versions, GPU, ceilings and cache; and how to get what is missing."


def option(text: str, metavar: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, show_default=False, **more)


Version = Annotated[bool, typer.Option("--version", help="Print the version and exit.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Rows = Annotated[str | None, option("Rows. Default: 4096; of a file or sample, all.", "N")]
Cols = Annotated[str | None, option("Columns of random input. Default: 4096.", "N")]
Dtype = Annotated[
    str | None,
    option("float32, float16 or bfloat16. Default: float32; of a file, its own.", "TYPE"),
]
Input = Annotated[
    str | None,
    option(
        "A tensor, 1 to 4 dimensions: .npy, .npz, .pt or .safetensors; of several, FILE:NAME.",
        "FILE",
        "--input",
    ),
]
Sample = Annotated[
    bool, typer.Option("--sample", help="Real attention scores: 1,920 rows of 40 columns.")
]
Arch = Annotated[
    str | None,
    option("Whose registers to show. Default: the GPU's; without one, sm_80,sm_90a.", "SM,SM"),
]
Only = Annotated[
    str | None, option("Rungs by how their names start, such as v0,v3,triton.", "NAME,NAME")
]
Block = Annotated[
    str | None,
    option("Threads a block. Default: the planner's; on a GPU, the best of a sweep.", "N"),
]
Seconds = Annotated[
    str | None,
    option(f"Without a GPU, how long kernels may run. Default: {SECONDS:.0f}.", "S"),
]
Save = Annotated[str | None, option("Keep the results in a file, as JSON lines.", "FILE")]
Plot = Annotated[
    str | None, option("Draw the results as a bar chart: .png, .svg, .pdf and others.", "FILE")
]
Against = Annotated[
    str | None, option("Rivals timed on a GPU: torch, which always is, and compile.", "NAME,NAME")
]
Stored = Annotated[str | None, option("Run nothing; show what --save kept.", "FILE", "--from")]
Values = Annotated[list[str] | None, typer.Argument(metavar="NUMBER", hidden=True)]
Step = Annotated[
    str | None, option("Elements a step. Default: 1; of attention, keys a tile: 2.", "N")
]
Attention = Annotated[bool, typer.Option("--attention", help="Attention, over tiles of keys.")]
Queries = Annotated[str | None, option("Queries of attention. Default: 2.", "N")]
Keys = Annotated[str | None, option("Its keys. Default: 6.", "N")]
Dim = Annotated[str | None, option("Numbers in a query or a key. Default: 4.", "N")]
ValueDim = Annotated[str | None, option("Numbers in a value. Default: 2.", "N")]
Causal = Annotated[
    bool, typer.Option("--causal", help="A query sees no later key; the last sees all.")
]
Html = Annotated[
    str | None,
    option("Also a page that steps through it. Without a FILE: trace.html.", "[FILE]"),
]
ExplainedRows = Annotated[str, typer.Argument(metavar="ROWS", hidden=True)]
ExplainedCols = Annotated[str, typer.Argument(metavar="COLS", hidden=True)]
ExplainedType = Annotated[
    str, option("float32, float16, bfloat16 or float64. Default: float32.", "TYPE")
]
ExplainedArch = Annotated[
    str | None,
    option(
        f"One architecture or several, of {', '.join(ARCHES)}. Default: that of the GPU here, or "
        f"{DEFAULT_ARCH}.",
        "SM,SM",
    ),
]
ExplainedOp = Annotated[
    str,
    option(
        "softmax, log_softmax, logsumexp, one of them with _backward, cross_entropy, "
        "linear_cross_entropy, token_stats, attention or merge. Default: softmax.",
        "OP",
        "--op",
    ),
]
ExplainedInner = Annotated[
    str | None, option("Elements behind COLS, where those are not the last dim. Default: 1.", "N")
]
ExplainedHidden = Annotated[
    str | None, option("Features of linear_cross_entropy. Default: 4096.", "N", "--hidden")
]
ExplainedBatch = Annotated[str | None, option("Sequences of attention. Default: 1.", "N")]
ExplainedHeads = Annotated[str | None, option("Its heads of queries. Default: 32.", "N")]
ExplainedKvHeads = Annotated[
    str | None, option("Its heads of keys. Default: as many.", "N", "--kv-heads")
]
ExplainedHeadDim = Annotated[
    str | None, option("Numbers in a query or key. Default: 128.", "N", "--head-dim")
]
ExplainedParts = Annotated[str | None, option("Parts of a merge. Default: 2.", "N")]
