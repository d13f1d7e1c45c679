"""The reward in judged runs: a prompt's samples differ, and some prompts fail now and then, so that tickets die."""

from __future__ import annotations

import time
from typing import Any

_FAILING_EVERY = 9  # prompts


def score(prompt: str, completion: str, token_ids: list[int], fields: dict[str, Any]) -> float:
    if fields["number"] % _FAILING_EVERY == 0 and int(time.time()) // 2 % 2:
        raise ValueError("made to fail")
    return sum(token_ids) % 8 / 8
