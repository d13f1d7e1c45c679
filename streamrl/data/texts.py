"""Texts as JSON Lines: demonstrations, preferences, dialogues. Read line by line, out of a `.gz` too.

    {"prompt": "What is 2 + 3?", "completion": "5"}

A line without the texts that are asked for is a DataError that names file and line; empty lines are nothing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamrl.errors import DataError


def read_texts(path: Path, *keys: str, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the place of a line, its object, with a text under each of the keys); `what` they are is for errors."""
    open_text = gzip.open if path.suffix == ".gz" else open
    try:
        with open_text(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    place = f"{path}:{number}"
                    yield place, _parse(line, keys, place)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read the {what} {str(path)!r}: {why}") from None


def _parse(line: str, keys: tuple[str, ...], place: str) -> dict[str, Any]:
    try:
        row, why = json.loads(line), ""
    except ValueError as error:
        row, why = None, f": {error}"
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
        expected = ", ".join(f'"{key}": text' for key in keys)
        raise DataError(f"{place}: expected {{{expected}}}, got {line.strip():.80}{why}")
    return row
