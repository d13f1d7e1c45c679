"""What reward models learn from: pairs of texts, one better than the other, or texts with their ratings.

    {"prompt": ..., "chosen": ..., "rejected": ...}      loss = -log sigmoid(r(chosen) - r(rejected))   (Bradley-Terry)
    {"prompt": ..., "completion": ..., "score": ...}     loss = mean (output - score)^2, of a number or a list of them

Prompt and what follows are joined as the reward client joins them. What is no example is a DataError that names file
and line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    texts: tuple[str, ...]  # a pair: the better one first
    scores: tuple[float, ...] = ()  # of the one text; empty: a pair


def read_pairs(path: Path) -> list[Example]:
    return _read(path, _pair, what="preference pairs")


def read_ratings(path: Path) -> list[Example]:
    examples = _read(path, _rating, what="ratings")
    if len({len(example.scores) for example in examples}) > 1:
        raise DataError(f"{path}: the ratings differ in how many numbers they have")
    return examples


def _read(path: Path, read: Callable[[Any], Example], *, what: str) -> list[Example]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read the {what} {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"the {what} {str(path)!r} are no UTF-8 text: {error}") from None
    examples = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            example = read(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}; got {line:.80}") from None
        if not all(example.texts):
            raise DataError(f"{path}:{number}: an empty text cannot be scored")
        examples.append(example)
    if len(examples) < 2:
        raise DataError(f"{path} holds {len(examples)} {what}; at least 2 are needed")
    return examples


def _pair(row: Any) -> Example:
    prompt, chosen, rejected = _texts(row, "prompt", "chosen", "rejected")
    return Example(texts=(prompt + chosen, prompt + rejected))


def _rating(row: Any) -> Example:
    prompt, completion = _texts(row, "prompt", "completion")
    score = row.get("score")
    scores = score if isinstance(score, list) else [score]
    if not scores or not all(type(one) in (int, float) and math.isfinite(one) for one in scores):
        raise ValueError("expected `score` to be a finite number or a list of them")
    return Example(texts=(prompt + completion,), scores=tuple(map(float, scores)))


def _texts(row: Any, *keys: str) -> list[str]:
    texts = [row[key] for key in keys if isinstance(row, dict) and isinstance(row.get(key), str)]
    if len(texts) < len(keys):
        raise ValueError("expected {" + ", ".join(f'"{key}": text' for key in keys) + "}")
    return texts
