"""What is written in a picture, and whether it can be read."""

from __future__ import annotations

from typing import Any


def texts(figure: Any) -> list[Any]:
    from matplotlib.text import Text

    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]


def said(figure: Any) -> list[str]:
    return [each.get_text() for each in texts(figure)]


def covered(figure: Any) -> list[str]:
    """Texts that lie on others. Of words that are turned alike only the frames would overlap."""
    boxes = [
        (t.get_text(), t.get_window_extent().shrunk(0.98, 0.9), t.get_rotation())
        for t in texts(figure)
    ]
    return [
        f"{one!r} covers {other!r}"
        for i, (one, box, turned) in enumerate(boxes)
        for other, second, also in boxes[i + 1 :]
        if box.overlaps(second) and one != other and not turned == also == 45
    ]
