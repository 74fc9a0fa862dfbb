"""How the command line says that something is wrong: one line, `error: ...`, and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import typer
from typer.core import TyperGroup

from online_softmax.lab import fitting

USAGE = 2  # the exit code
# What Typer raises at words that it does not know; the class has no public name of its own.
_BadUsage = cast("type[typer.BadParameter]", typer.BadParameter.__base__)


class Context(typer.Context):
    """What a command was called with; its help is no wider than the terminal."""

    def get_help(self) -> str:
        """Help, as it is printed."""
        said, width = super().get_help(), fitting.columns()
        return fitting.examples(said, width) if width else said


class Group(TyperGroup):
    """The commands; whatever a person can mend, in the words or in what they name, is one line."""

    context_class = Context

    def get_command(self, *given: Any) -> Any:
        """A command by its name."""
        found: Any = super().get_command(*given)
        if found:
            found.context_class = Context
        return found

    def make_context(self, *given: Any, **more: Any) -> Any:
        """Read the words before the command."""
        with plainly():
            return super().make_context(*given, **more)

    def invoke(self, *given: Any, **more: Any) -> Any:
        """Read a command's words and run it."""
        with plainly():
            return super().invoke(*given, **more)


@contextmanager
def plainly() -> Iterator[None]:
    """What a person can mend becomes one line and exit code 2; other errors stay what they are."""
    from online_softmax import jit
    from online_softmax.cuda import host
    from online_softmax.lab.inputs import BadInput

    try:
        yield
    except _BadUsage as error:
        tell(_sentence(error))
    except (BadInput, jit.Unavailable, host.CompilerMissing) as error:
        tell(str(error))
    else:
        return
    raise typer.Exit(USAGE)


def tell(sentence: str) -> None:
    """Say on standard error what is wrong."""
    fitting.say(f"error: {' '.join(sentence.split())}", err=True)


def _sentence(error: typer.BadParameter) -> str:
    """Typer's words in our form, and where help is."""
    said = " ".join(error.format_message().split()).rstrip(".")
    where = error.ctx.command_path if error.ctx else "online-softmax"
    return f"{said[:1].lower()}{said[1:]}; see {where} --help"
