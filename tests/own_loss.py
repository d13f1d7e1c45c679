"""A loss as a user would write it, for tests whose ranks are processes."""

from __future__ import annotations

from streamrl.recipe.losses import Losses, TokenBatch, needs, truncated


@needs("entropy", "reference")
def with_bonus(batch: TokenBatch, *, bonus: float = 0.1) -> Losses:
    assert batch.entropy is not None
    assert batch.reference_logprobs is not None
    values, metrics = truncated(batch)
    apart = (batch.logprobs - batch.reference_logprobs) ** 2
    return values - bonus * batch.entropy + bonus * apart, {**metrics, "apart": apart, "tokens": (len(apart), 1)}


def without_values(batch: TokenBatch) -> None:
    return None
