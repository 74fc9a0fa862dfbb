"""What float32 can calculate with. Standard library only."""

# Between these a number is a normal one of float32, and log2(e) times it is finite.
NORMAL = (2.0**-126, 2.0**127)


def held(softcap: float) -> float:
    """A softcap that float32 can calculate with: one that is further off does the same to scores.

    >>> held(30.0), held(1e-60) == 2.0**-126, held(1e60) == 2.0**100
    (30.0, True, True)
    """
    return min(max(softcap, NORMAL[0]), 2.0**100)
