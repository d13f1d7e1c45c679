"""What a rollout of several turns consists of, token for token: what was sampled, and what the model was given.

    prompt | given | turn | given | turn | given | turn
                     ^^^^           ^^^^           ^^^^   sampled: log-probs, versions, a loss; the rest has none

Whoever asks the model tells the trace the whole context of each turn, and what came. Where that context begins with the
very tokens so far, the rest of it was given and the turn goes on from there; nothing is ever tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamrl.errors import SampleError
from streamrl.protocol.wire.group import FinishReason, Sample, Span
from streamrl.workers.engines.base import Generated


class Played(NamedTuple):
    sample: Sample  # not scored yet; its finish reason is stop where the environment was done
    text: str  # of all turns, and of what was given between them
    reward: float = 0.0  # the environment's
    rewards: Mapping[str, float] = MappingProxyType({})  # what it consists of, by source


class Trace:
    def __init__(self, prompt_ids: npt.NDArray[np.int32]) -> None:
        self._so_far = prompt_ids
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._runs = [0]  # alternately sampled and given
        self._spans: list[Span] = []
        self._texts: list[str] = []
        self.num_turns = 0
        self.num_tokens = 0  # behind the prompt, sampled and given

    def take(self, context_ids: npt.NDArray[np.int32], generated: Generated, *, given: str = "") -> None:
        """A turn: what the model was asked with, all of it, and what it said. `given` is what rewards read of the rest
        of the context, behind the tokens so far. SampleError where the context does not begin with these."""
        reached = len(self._so_far)
        if not np.array_equal(context_ids[:reached], self._so_far):
            raise SampleError("a turn's context does not begin with the tokens so far: what was sampled would be lost")
        rest = context_ids[reached:]
        if len(rest):
            self._turn_to(sampled=False)
            self._add(given, rest, np.zeros(len(rest), dtype=np.float32))
        self._turn_to(sampled=True)
        at = self.num_tokens
        self._spans += [span._replace(start=span.start + at, end=span.end + at) for span in generated.spans]
        self._add(generated.text, generated.token_ids, generated.logprobs)
        self.num_turns += 1

    def played(self, finish_reason: FinishReason, reward: float) -> Played:
        sample = Sample(
            token_ids=np.concatenate([np.zeros(0, np.int32), *self._tokens]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *self._logprobs]),
            mask_runs=tuple(self._runs) if self.num_tokens else (),
            spans=tuple(self._spans),
            finish_reason=finish_reason,
            rewards={},
            reward=0.0,
        )
        return Played(sample=sample, text="".join(self._texts), reward=reward)

    def _turn_to(self, *, sampled: bool) -> None:
        if (len(self._runs) % 2 == 1) != sampled:
            self._runs.append(0)

    def _add(self, text: str, token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
        self._so_far = np.concatenate([self._so_far, token_ids])
        self._tokens.append(token_ids)
        self._logprobs.append(logprobs)
        self._texts.append(text)
        self._runs[-1] += len(token_ids)
        self.num_tokens += len(token_ids)
