"""What a contender raises that does not have an operation."""

from __future__ import annotations


class Refusal(Exception):  # noqa: N818 a state of a contender, told in its row
    """A contender does not have this operation; the message is a sentence."""
