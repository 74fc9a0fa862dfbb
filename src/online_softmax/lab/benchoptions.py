"""What `bench` says of itself: help text and options."""

from __future__ import annotations

from typing import Annotated

import typer

from online_softmax.lab.options import Json, option

NARROWEST = 110  # columns that the tables need

HELP = """Time operations beside what memory allows and beside rivals, on a grid of shapes.

OP: softmax, log_softmax, softmax_backward, log_softmax_backward, logsumexp; cross_entropy, \
cross_entropy_both (with its gradient), cross_entropy_in_forward (which makes it in the forward), \
token_stats, as their public functions. Every contender is compared with float64 first: what is \
wrong gets no time. Rivals other than torch are timed where the grid asks for them; one that \
refuses is a row with its reason.

\b
Examples:
  online-softmax bench softmax --grid big --save run.jsonl
  online-softmax bench softmax logsumexp --grid all --shard 0/4 --resume --save run.jsonl
  online-softmax bench softmax --cells 4096x50257,1x1048576 --dtype bf16
  online-softmax bench softmax --grid small --list
  online-softmax bench cross_entropy token_stats --grid all --dtype bf16,fp32 --save loss.jsonl
  online-softmax bench --from run.jsonl more.jsonl
  online-softmax bench --from part0.jsonl part1.jsonl --save whole.jsonl
  online-softmax bench softmax --grid all --prepare
  online-softmax bench softmax logsumexp --accuracy --save accuracy.jsonl
  online-softmax bench --tune softmax --grid odd --save tuning.jsonl
  online-softmax bench --host 8,1024"""

Ops = Annotated[list[str] | None, typer.Argument(metavar="OP", show_default=False, hidden=True)]
Grid = Annotated[
    str,
    option(
        "big (2^27 elements a cell, of losses 2^28), small (few rows), odd (vocabularies) or all.",
        "NAME",
    ),
]
Cells = Annotated[
    str | None, option("These shapes in place of a grid.", "ROWSxCOLS,...", "--cells")
]
Types = Annotated[str, option("Default: bf16,fp16,fp32.", "TYPE,TYPE", "--dtype")]
Against = Annotated[
    str | None,
    option(
        "Rivals; torch always is one. Default: torch,compile,quack,liger; with --host torch,quack.",
        "NAME,NAME",
    ),
]
Values = Annotated[
    str, option("normal, or ascending in each row, the worst for a running maximum.", "NAME")
]
Shard = Annotated[str, option("Every n-th cell from the i-th.", "I/N")]
Seconds = Annotated[
    str | None, option("Of the whole run: begin no cell after so many; --resume goes on.", "S")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the file of --save; what it has is skipped.")
]
Save = Annotated[str | None, option("Keep each cell as a JSON line, when it is done.", "FILE")]
Listed = Annotated[
    bool, typer.Option("--list", help="Run nothing; show the cells and their bytes.")
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
    "--grid": "big, small, odd or all",
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

__all__ = ["HELP", "NARROWEST", "WANTED", "Accuracy", "Against", "Cells", "Grid", "Host", "Json"]
__all__ += ["Listed", "Ops", "Prepare", "Resume", "Save", "Seconds", "Shard", "Stored", "Tune"]
__all__ += ["Types", "Values", "Workers"]
