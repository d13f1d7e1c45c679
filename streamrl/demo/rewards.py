"""The demo's reward function, as anybody's: `target: streamrl.demo.rewards:right`, run in a limited process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.demo import sums


def right(prompt: str, completion: str, token_ids: Sequence[int], fields: Mapping[str, Any]) -> float:
    """1 when the answer is right, by reasoning-gym; else 0. The fields of a prompt are its entry there."""
    return float(sums.is_right(completion, fields))
