"""A scored sample of a ticket, as the worker made it and the learner trains it.

Token ids, a loss mask in runs (alternating lengths, trained tokens first), the behaviour's log-probs, version spans,
rewards by source, what each turn earned, finish reason. Tokens within a span were sampled; what lies between spans was
given, by an environment between two turns of the model, and never has a loss. Its log-probs are 0. A rollout whose
turns do not all go on behind one another has branches (`wire.branches`): several rows of one sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from streamrl.protocol.wire.branches import Branch
from streamrl.protocol.wire.codec import Count
from streamrl.protocol.wire.earned import Earned
from streamrl.protocol.wire.routes import Routes
from streamrl.protocol.wire.taught import Taught

FinishReason = Literal["stop", "length"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")


class Span(NamedTuple):
    """Tokens [start, end) of a sample were made by this version, which carries this optimizer step."""

    version: Count
    step: Count
    start: Count
    end: Count


class Sample(NamedTuple):
    """Named tuples, for many are built at a time; from `mask_runs` to `branches` it is a row of its group's body."""

    token_ids: npt.NDArray[np.int32]  # [T] the response alone
    logprobs: npt.NDArray[np.float32]  # [T] of the distribution really sampled from
    mask_runs: tuple[int, ...]  # lengths, alternating trained / not trained, summing to T
    spans: tuple[Span, ...]  # in order; all that has a loss lies in one
    finish_reason: FinishReason
    rewards: Mapping[str, float]  # by source, before weights
    reward: float  # the weighted sum
    turn_rewards: tuple[float, ...] = ()  # what each of `turns()` has in it, after weights; none: only the whole earns
    branches: tuple[Branch, ...] = ()  # rows beside the first, in order
    token_rewards: Earned = None  # [T] likewise
    teacher_logprobs: Taught = None  # [T] of a teacher that the worker has asked
    routes: Routes | None = None  # [T, layers, experts a token] by which the engine made them

    def loss_mask(self) -> npt.NDArray[np.bool_]:  # [T]
        values = np.arange(len(self.mask_runs)) % 2 == 0
        return np.repeat(values, self.mask_runs)

    def num_context_tokens(self, num_prompt: int) -> int:
        """Of all rows, that were not sampled there."""
        sampled = sum(span.end - span.start for span in self.spans)
        return num_prompt + len(self.token_ids) - sampled + sum(branch.keep for branch in self.branches)

    def turns(self) -> list[tuple[int, int]]:
        """Where the model spoke: [start, end) of each turn, given tokens between them."""
        return turns_of(self.spans, self.branches)


def turns_of(spans: Iterable[Span], branches: Iterable[Branch]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    fresh = {branch.start for branch in branches}
    for span in spans:
        goes_on = bool(found) and found[-1][1] == span.start and span.start not in fresh
        begin = found.pop()[0] if goes_on else span.start
        found.append((begin, span.end))
    return found
