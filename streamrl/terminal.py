"""Text for terminals: sanitised strings, one-line curves, numbers in a readable form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

SPARKS = "▁▂▃▄▅▆▇█"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Replace control characters, which a terminal would obey: names and errors may come from other machines."""
    return _CONTROL.sub(" ", text)


def can_redraw(console: Console) -> bool:
    """Whether shown text can be replaced: not in a file, even if FORCE_COLOR calls it a terminal, nor on a terminal
    that only prints, such as an editor's (TERM=dumb)."""
    return console.is_interactive and console.file.isatty()


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve one line high: each mark is the mean of its share of the values."""
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


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def age(seconds: float | None) -> str:
    """Format in about four characters: 0.4s, 12s, 3m, 2h, 5d."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{max(0.0, seconds):.1f}s"
    for limit, divisor, unit in ((100, 1, "s"), (6000, 60, "m"), (100 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def number(value: float | None) -> str:
    """Format briefly, without exponents: 0.123, 12.3, 1 234, 3.1M."""
    if value is None:
        return "-"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.1f}M"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
