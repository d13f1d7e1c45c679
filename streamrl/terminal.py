"""Text for a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Names and errors may come from other machines; a terminal would obey their control characters."""
    return _CONTROL.sub(" ", text)
