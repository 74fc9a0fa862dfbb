"""What `bench` says of itself: help text and options."""

from __future__ import annotations

from typing import Annotated

import typer

from online_softmax.lab.options import Json, option

NARROWEST = 110  # columns that the help takes at least

HELP = """Time operations beside what memory allows and beside rivals, on a grid of shapes.

OP: softmax, log_softmax, softmax_backward, log_softmax_backward, logsumexp; cross_entropy, \
cross_entropy_both (with its gradient), cross_entropy_in_forward (which makes it in the forward), \
token_stats, token_stats_both; attention, attention_backward, attention_decode, attention_varlen, \
merge (of parts of the keys), linear_cross_entropy, as their public functions; \
logsumexp_backward; softmax_outer, log_softmax_outer, logsumexp_outer (along a dim that is not \
the last); softmax_fp8. Every contender is compared with float64 first: what is wrong gets no \
time. Rivals other than torch are timed where the grid asks for them; one \
that refuses is a row with its reason. Behind a time, ! says that it beats its limit: it is \
counted nowhere. A cell whose clock was throttled is listed, and counts. Without a GPU the CPU is \
timed, on small fixed sizes: calls repeat until 22 seconds are used, at most 8 of them in a cell, \
and the least counts; ~ says that its rounds are far apart.

\b
Examples:
  online-softmax bench softmax
  online-softmax bench --list
  online-softmax bench softmax --grid small --list
  online-softmax bench softmax --cells 1024x4096,8x50257 --dtype fp32
  online-softmax bench softmax logsumexp --accuracy --save accuracy.jsonl
  online-softmax bench --compare old.jsonl new.jsonl
  online-softmax bench --from run.jsonl more.jsonl
  online-softmax bench --from part0.jsonl part1.jsonl --save whole.jsonl

\b
On a GPU:
  online-softmax bench softmax --grid big --save run.jsonl
  online-softmax bench softmax logsumexp --grid all --shard 0/4 --resume --save run.jsonl
  online-softmax bench softmax --cells 4096x50257,1x1048576 --dtype bf16
  online-softmax bench cross_entropy token_stats --grid all --dtype bf16,fp32 --save loss.jsonl
  online-softmax bench attention attention_backward attention_decode --dtype bf16
  online-softmax bench softmax_outer attention_varlen --dtype bf16
  online-softmax bench attention --cells 4x16x4096x128,1x32x16384x64 --dtype bf16
  online-softmax bench linear_cross_entropy --cells 8192x4096x128256 --dtype bf16
  online-softmax bench softmax --grid odd --repeat 5 --save new.jsonl
  online-softmax bench softmax --grid all --prepare
  online-softmax bench --tune softmax --grid odd --save tuning.jsonl
  online-softmax bench --host 8,1024"""

NOTHING = (
    "bench takes operations, or --tune OP, or --host ROWS,COLS, or --from FILE; `bench --list` "
    "says which operations there are"
)

Ops = Annotated[list[str] | None, typer.Argument(metavar="OP", show_default=False, hidden=True)]
Grid = Annotated[
    str | None,
    option(
        "big (2^27 elements a cell, of losses 2^28; attention: 16,384 tokens), small (few rows), "
        "odd (vocabularies), all, or cpu (small, fixed). Default: big; without a GPU cpu.",
        "NAME",
    ),
]
Cells = Annotated[
    str | None,
    option(
        "These shapes in place of a grid. Of attention BATCHxHEADSxLENGTHxHEAD_DIM, of "
        "attention_decode BATCHxKEYS, of merge PARTSxROWSxCOLS, of linear_cross_entropy "
        "TOKENSxFEATURESxCLASSES, along an outer dim ROWSxCOLSxINNER, of attention_varlen "
        "BATCHxHEADSxLONGESTxHEAD_DIM.",
        "ROWSxCOLS,...",
        "--cells",
    ),
]
Types = Annotated[
    str | None, option("Default: bf16,fp16,fp32; without a GPU fp32.", "TYPE,TYPE", "--dtype")
]
Against = Annotated[
    str | None,
    option(
        "Of torch, compile, quack, liger, tutorial, flash-attn, cut-cross-entropy; torch always is "
        "one. Default: all that have the operation; with --host torch,quack; without a GPU torch.",
        "NAME,NAME",
    ),
]
Repeat = Annotated[
    str | None, option("Measure each cell so many times, to know its noise. Default: 1.", "N")
]
Compare = Annotated[
    str | None,
    option(
        "Run nothing; what is slower in the second file, beyond the noise of both. Exit code 1 if "
        "something is.",
        "OLD NEW",
        "--compare",
    ),
]
Values = Annotated[
    str, option("normal, or ascending in each row, the worst for a running maximum.", "NAME")
]
Shard = Annotated[str, option("Every n-th cell from the i-th.", "I/N")]
Seconds = Annotated[
    str | None,
    option(
        "Of the whole run: begin no cell after so many; --resume goes on. Default without a GPU: "
        "22, which its cells share, and no cell that would end later.",
        "S",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the file of --save; what it has is skipped.")
]
Save = Annotated[str | None, option("Keep each cell as a JSON line, when it is done.", "FILE")]
Listed = Annotated[
    bool,
    typer.Option(
        "--list", help="Run nothing; show the cells and their bytes; alone, every operation."
    ),
]
Stored = Annotated[
    list[str] | None,
    option(
        "Run nothing; show what was kept, of several files too. With --save: each cell once, as "
        "measured last, in one file.",
        "FILE...",
        "--from",
    ),
]
Tune = Annotated[
    str | None,
    option("Rank every variant of an operation's kernels on the cells, and keep it.", "OP"),
]
Host = Annotated[
    str | None,
    option("What a softmax call of that size costs the host, such as 8,1024.", "ROWS,COLS"),
]
Prepare = Annotated[
    bool,
    typer.Option(
        "--prepare",
        help="Time nothing; compile what the cells and rivals run, in many processes at once.",
    ),
]
Workers = Annotated[
    str | None, option("Processes of --prepare. Default: one for each CPU core.", "N")
]
Accuracy = Annotated[
    bool,
    typer.Option(
        "--accuracy",
        help="Time nothing; compare with float64, beside torch. On a CPU too.",
    ),
]

WANTED = {  # what to give where an option's text is blank
    "--grid": "big, small, odd, all or cpu",
    "--compare": "two files, OLD and NEW",
    "--cells": "shapes, such as 4096x50257,1x1048576",
    "--dtype": "float32, float16 or bfloat16, or several",
    "--against": "names of rivals, such as torch,quack",
    "--values": "normal or ascending",
    "--shard": "i/n, such as 0/4",
    "--tune": "an operation, such as softmax",
    "--host": "ROWS,COLS, such as 8,1024",
    "--save": "a file",
    "--from": "a file",
}

__all__ = [
    "HELP",
    "NARROWEST",
    "NOTHING",
    "WANTED",
    "Accuracy",
    "Against",
    "Cells",
    "Compare",
    "Grid",
]
__all__ += ["Host", "Json", "Listed", "Ops", "Prepare", "Repeat", "Resume", "Save", "Seconds"]
__all__ += ["Shard", "Stored", "Tune", "Types", "Values", "Workers"]
