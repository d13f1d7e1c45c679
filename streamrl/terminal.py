"""Text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

SPARKS = "▁▂▃▄▅▆▇█"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Names and errors may come from other machines; a terminal would obey their control characters."""
    return _CONTROL.sub(" ", text)


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve one line high: each mark is the mean of its share of the values."""
    if not values:
        return ""
    width = min(width, len(values))
    means = []
    for mark in range(width):
        part = values[mark * len(values) // width : (mark + 1) * len(values) // width]
        means.append(sum(part) / len(part))
    low, span = min(means), max(means) - min(means)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((mean - low) / span * top) if span else 0] for mean in means)
