"""The reward of whole runs. Python's own library alone: TRL imports this file in an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def reward(prompt: str, completion: str, token_ids: Sequence[int], fields: Mapping[str, Any]) -> float:
    """The share of even tokens: it differs from answer to answer, and costs nothing."""
    return sum(token % 2 == 0 for token in token_ids) / max(1, len(token_ids))
