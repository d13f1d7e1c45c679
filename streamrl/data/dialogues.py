"""Preference dialogues as in Anthropic's HH: two dialogues that part in the assistant's last words.

    {"chosen": "\\n\\nHuman: Hi\\n\\nAssistant: Hello.", "rejected": "\\n\\nHuman: Hi\\n\\nAssistant: Go away."}

become a pair (`prompt` up to the turn where they part, `chosen`, `rejected`) and a prompt; a prompt that comes again is
written once. Reads line by line; both files appear whole or not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from streamrl.data.texts import read_texts
from streamrl.errors import DataError
from streamrl.files import write_durably

ASSISTANT = "\n\nAssistant:"


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
        raise DataError(f"{source} holds no two dialogues that part in the words after {ASSISTANT.strip()!r}")
    unique = dict.fromkeys(pair["prompt"] for pair in kept)
    write_durably(pairs, _lines(kept))
    write_durably(prompts, _lines([{"prompt": prompt} for prompt in unique]))
    return Converted(num_pairs=len(kept), num_prompts=len(unique), num_skipped=len(found) - len(kept))


def split(chosen: str, rejected: str) -> dict[str, str] | None:
    """The pair of two dialogues; None when no turn of the assistant begins alike in both, or they do not differ."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    end = chosen.rfind(ASSISTANT, 0, len(list(same)))
    if end < 0 or chosen == rejected:
        return None
    end += len(ASSISTANT)
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _lines(rows: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
