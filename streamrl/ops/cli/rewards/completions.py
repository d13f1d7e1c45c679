"""The texts that `streamrl reward try` scores: one for all rows, a field of each row, or those of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamrl.data.lines import UNREADABLE, Malformed, parse_line, read_lines
from streamrl.data.prompts import PromptRow
from streamrl.errors import ConfigError, DataError


def completions_of(
    rows: Sequence[PromptRow], data: Path, *, completion: str | None, completions: Path | None, field: str | None
) -> list[list[str]]:
    """Return one or several completions per row; for fewer rows if the file has fewer."""
    if sum(given is not None for given in (completion, completions, field)) != 1:
        raise ConfigError("exactly one of --completion, --completions and --field is needed, for the texts to score")
    if completion is not None:
        return [[completion]] * len(rows)
    if completions is not None:
        return list(_read_completions(completions))
    assert field is not None, "one of the three is given"
    for row in rows:
        if field not in row.fields:
            has = ", ".join(sorted(row.fields)) or "none"
            raise DataError(f"--field: {data}:{row.line} has no field {field!r}; it has: {has}")
    return [[str(row.fields[field])] for row in rows]


def _read_completions(path: Path) -> Iterator[list[str]]:
    try:
        lines = list(read_lines(path))
    except UNREADABLE as error:
        raise DataError(f"--completions: {path} cannot be read: {error}") from None
    for number, line in lines:
        try:
            value, why = parse_line(line), ""
        except Malformed as error:
            value, why = None, f": {error}"
        text = value.get("completion") if isinstance(value, dict) else value
        texts: list[Any] = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f'--completions: {path}:{number} must be a JSON string, or {{"completion": text}}, or a list{why}'
            )
        yield texts
