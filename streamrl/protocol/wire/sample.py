"""A scored sample of a ticket, as the worker produced it and the learner trains on it.

It has token ids, a loss mask in runs (alternating lengths, trained tokens first), the behaviour policy's logprobs,
version spans, rewards by source and by turn, and a finish reason. Tokens within a span were sampled; tokens between
spans came from an environment between two turns of the model, and never have a loss; their logprobs are 0. A rollout
whose turns do not all continue one another has branches (`wire.branches`): several rows of one sample.
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
from streamrl.protocol.wire.teacher_logprobs import TeacherLogprobs

FinishReason = Literal["stop", "length"]


class Span(NamedTuple):
    """The version that sampled tokens [start, end), and its optimizer step."""

    version: Count
    step: Count
    start: Count
    end: Count


class Sample(NamedTuple):
    """A named tuple, because many are built at a time; `mask_runs` to `branches` form its row in the group's body."""

    token_ids: npt.NDArray[np.int32]  # [T] the response only
    logprobs: npt.NDArray[np.float32]  # [T] of the distribution that was sampled from
    mask_runs: tuple[int, ...]  # lengths, alternating trained / not trained, summing to T
    spans: tuple[Span, ...]  # in order; every token with a loss lies in one
    finish_reason: FinishReason
    rewards: Mapping[str, float]  # by source, before weights
    reward: float  # the weighted sum
    turn_rewards: tuple[float, ...] = ()  # the share of each of `turns()`, after weights; empty: no rewards by turn
    branches: tuple[Branch, ...] = ()  # rows beside the first, in order
    token_rewards: Earned = None  # [T] the share of each token, after weights
    teacher_logprobs: TeacherLogprobs = None  # [T] if the worker asked a teacher
    routes: Routes | None = None  # [T, layers, experts a token] chosen by the engine

    def loss_mask(self) -> npt.NDArray[np.bool_]:  # [T]
        values = np.arange(len(self.mask_runs)) % 2 == 0
        return np.repeat(values, self.mask_runs)

    def num_context_tokens(self, num_prompt: int) -> int:
        """Tokens of all rows that were context there, not sampled."""
        sampled = sum(span.end - span.start for span in self.spans)
        return num_prompt + len(self.token_ids) - sampled + sum(branch.keep for branch in self.branches)

    def turns(self) -> list[tuple[int, int]]:
        """Return [start, end) of each turn of the model; given tokens separate them."""
        return turns_of(self.spans, self.branches)


def turns_of(spans: Iterable[Span], branches: Iterable[Branch]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    fresh = {branch.start for branch in branches}
    for span in spans:
        goes_on = bool(found) and found[-1][1] == span.start and span.start not in fresh
        begin = found.pop()[0] if goes_on else span.start
        found.append((begin, span.end))
    return found
