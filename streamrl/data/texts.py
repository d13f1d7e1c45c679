"""Texts as JSON Lines: demonstrations, preferences, dialogues. Read line by line, optionally from `.gz`.

    {"prompt": "What is 2 + 3?", "completion": "5"}

A line without the required texts is a DataError with file and line; empty lines are ignored.

A preference dialogue as in Anthropic's HH is a pair of dialogues that differ in the assistant's last turn:

    {"chosen": "\\n\\nHuman: Hi\\n\\nAssistant: Hello.", "rejected": "\\n\\nHuman: Hi\\n\\nAssistant: Go away."}

It is converted to a pair (`prompt` up to the turn where they differ, `chosen`, `rejected`) and a prompt; repeated
prompts are written once. Each file is written completely or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from streamrl.data.lines import UNREADABLE, Malformed, parse_line, read_lines, why_not_lines
from streamrl.errors import DataError
from streamrl.files import write_durably

ASSISTANT = "\n\nAssistant:"


def read_texts(path: Path, *keys: str, what: str, expected: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (a line's place, its object) with a text under each key. For errors, `what` describes the file, and
    `expected` the form of a line if the keys do not show it."""
    expected = expected or "{" + ", ".join(f'"{key}": text' for key in keys) + "}"
    try:
        for number, line in read_lines(path):
            place = f"{path}:{number}"
            if number == 1 and (remark := why_not_lines(line)) is not None:
                raise DataError(f"{place}: {remark}")
            yield place, _parse(line, keys, place, expected)
    except UNREADABLE as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read the {what} {str(path)!r}: {why}") from None


def _parse(line: bytes, keys: tuple[str, ...], place: str, expected: str) -> dict[str, Any]:
    try:
        row, why = parse_line(line), ""
    except Malformed as error:
        row, why = None, f": {error}"
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
        raise DataError(f"{place}: expected {expected}, got {line.decode(errors='replace'):.80}{why}")
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    num_pairs: int
    num_prompts: int
    num_skipped: int


def convert(source: Path, *, pairs: Path, prompts: Path) -> Converted:
    rows = read_texts(source, "chosen", "rejected", what="dialogues")
    found = [split(row["chosen"], row["rejected"]) for _, row in rows]
    kept = [pair for pair in found if pair is not None]
    if not kept:
        raise DataError(f"{source} holds no pair of dialogues that differ only after the last {ASSISTANT.strip()!r}")
    unique = dict.fromkeys(pair["prompt"] for pair in kept)
    write_durably(pairs, _lines(kept))
    write_durably(prompts, _lines([{"prompt": prompt} for prompt in unique]))
    return Converted(num_pairs=len(kept), num_prompts=len(unique), num_skipped=len(found) - len(kept))


def split(chosen: str, rejected: str) -> dict[str, str] | None:
    """Return the pair; None if the dialogues do not share the start of an assistant's turn, or do not differ."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    end = chosen.rfind(ASSISTANT, 0, len(list(same)))
    if end < 0 or chosen == rejected:
        return None
    end += len(ASSISTANT)
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _lines(rows: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
