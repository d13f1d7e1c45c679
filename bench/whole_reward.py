"""The reward of whole runs. Uses only the standard library, since TRL imports this file in its own environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def reward(prompt: str, completion: str, token_ids: Sequence[int], fields: Mapping[str, Any]) -> float:
    """Return the fraction of even tokens: it varies between answers, and costs nothing."""
    return sum(token % 2 == 0 for token in token_ids) / max(1, len(token_ids))
