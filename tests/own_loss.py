"""A loss as a user would write it, for tests whose ranks are processes."""

from __future__ import annotations

import os

from streamrl.errors import TrainingError
from streamrl.recipe.losses import Losses, TokenBatch, needs, truncated


@needs("entropy", "reference")
def with_bonus(batch: TokenBatch, *, bonus: float = 0.1) -> Losses:
    assert batch.entropy is not None
    assert batch.reference_logprobs is not None
    values, metrics = truncated(batch)
    apart = (batch.logprobs - batch.reference_logprobs) ** 2
    return values - bonus * batch.entropy + bonus * apart, {**metrics, "apart": apart, "tokens": (len(apart), 1)}


def failing_on_rank_1(batch: TokenBatch) -> Losses:
    if os.environ["RANK"] == "1":
        raise TrainingError("something that only this rank meets")
    return truncated(batch)


def without_values(batch: TokenBatch) -> None:
    return None
