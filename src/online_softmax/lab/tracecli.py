"""The command `trace`: a walk printed, as JSON, and as a page for a browser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from online_softmax.lab import options

FILE = "trace.html"  # where --html names none


class Command(TyperCommand):
    """`trace`, whose --html may stand without a file: what follows may be a number to trace."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Write the file's name out where it was left away."""
        return super().parse_args(ctx, with_file(args))


def with_file(words: Sequence[str]) -> list[str]:
    """The words with a name behind --html, if none is there.

    >>> with_file(["--html", "1", "5"]), with_file(["1", "--html", "a.html"])
    (['--html=trace.html', '1', '5'], ['1', '--html', 'a.html'])
    """
    found: list[str] = []
    for place, word in enumerate(words):
        after = words[place + 1] if place + 1 < len(words) else "--"
        is_bare = word == "--html" and "--" not in found and _is_no_file(after)
        found.append(f"--html={FILE}" if is_bare else word)
    return found


def _is_no_file(text: str) -> bool:
    """An option, a number, or several: "-3", "1,5"."""
    parts = text.strip("[]()").replace(",", " ").split()
    return text.startswith("-") or (bool(parts) and all(map(_is_number, parts)))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def trace(
    values: options.Values = None,
    block: options.Step = None,
    attention: options.Attention = False,
    queries: options.Queries = None,
    keys: options.Keys = None,
    dim: options.Dim = None,
    value_dim: options.ValueDim = None,
    causal: options.Causal = False,
    as_json: options.Json = False,
    html: options.Html = None,
) -> None:
    """Print a walk over numbers, or over the keys of an attention; make a page of it."""
    from rich.console import Console

    from online_softmax.lab import arguments, attentiontrace, places, trace, tracehtml, tracepage

    console = Console(highlight=False)
    given = {"--queries": queries, "--keys": keys, "--dim": dim, "--value-dim": value_dim}
    if attention:
        sizes = arguments.attention_sizes(values or [], given | {"--block": block}, causal)
        page = tracehtml.Page.of_sizes(html, sizes)
        if as_json:
            typer.echo(attentiontrace.to_json(sizes))
        else:
            tracepage.render(sizes, console)
    else:
        arguments.only_with("--attention", given | {"--causal": causal})
        numbers = arguments.numbers(values or [])
        step = min(arguments.whole("--block", block) or 1, len(numbers))
        page = tracehtml.Page.of_numbers(html, numbers, step)
        if as_json:
            typer.echo(trace.to_json(numbers, step))
        else:
            trace.render(numbers, step, console)
    if page:
        places.kept("--html", page.path, page.write)
