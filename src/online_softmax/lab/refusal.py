"""What a contender raises that does not have an operation; and an error as a row tells it."""

from __future__ import annotations

REASON = 300  # characters of a message that are kept


class Refusal(Exception):  # noqa: N818 a state of a contender, told in its row
    """A contender does not have this operation; the message is a sentence."""


def one_line(error: BaseException) -> str:
    """An error on one line.

    >>> one_line(ValueError("no\\n  such"))
    'ValueError: no such'
    """
    return " ".join(f"{type(error).__name__}: {error}".split())[:REASON]
