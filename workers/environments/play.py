"""One rollout of several turns: the model speaks, the environment answers, until it is done or a bound is reached.

    prompt | opening | turn | given | turn | given | turn
                       ^^^^           ^^^^           ^^^^   sampled: log-probs, versions, a loss; the rest has none

Each turn is asked for with the very tokens so far, so what was sampled is what is trained, and the engine finds the
keys and values of all earlier turns in its cache. Weights may change within a turn and between two: spans say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamrl.config import schema
from streamrl.errors import SampleError
from streamrl.protocol.wire.group import FinishReason, Sample, Span
from streamrl.protocol.wire.ticket import Ticket
from streamrl.workers.engines.base import Engine, Generated, SampleRequest
from streamrl.workers.environments.base import Environment, Episode
from streamrl.workers.environments.tail import Tail


class Played(NamedTuple):
    sample: Sample  # not scored yet; its finish reason is stop where the environment was done
    text: str  # of all turns, and of what was given between them
    reward: float = 0.0  # the environment's


class Player:
    def __init__(self, environment: Environment, *, tail: Tail, settings: schema.Environment) -> None:
        self.environment = environment
        self._tail, self._settings = tail, settings

    async def play(self, ticket: Ticket, engine: Engine, request: SampleRequest) -> Played:
        """`request` is that of the first turn. SampleError where engine or environment fails."""
        episode = await self.environment.begin(ticket.fields)
        try:
            return await self._play(episode, engine, request, is_chat="messages" in ticket.fields)
        finally:
            await episode.close()

    async def _play(self, episode: Episode, engine: Engine, request: SampleRequest, *, is_chat: bool) -> Played:
        tape = _Tape(request.prompt_ids)
        if episode.opening and is_chat:
            raise SampleError("reset() must return nothing where prompts are messages: put the opening into the row")
        if episode.opening:
            tape.give(episode.opening, self._tail.of_text(episode.opening))
        reward, room = 0.0, self._settings.max_tokens
        for turn in range(self._settings.max_turns):
            left = room - tape.num_tokens
            if left < 1:
                return tape.played("length", reward)
            sampling = request.sampling
            if left < sampling.max_tokens:
                sampling = sampling.model_copy(
                    update={"max_tokens": left, "min_tokens": min(left, sampling.min_tokens)}
                )
            asked = replace(
                request, request_id=f"{request.request_id}-{turn}", prompt_ids=tape.so_far(), sampling=sampling
            )
            generated = await engine.generate(asked)
            tape.take(generated)
            answer = await episode.step(generated.text)
            reward += answer.reward
            if answer.done:
                return tape.played("stop", reward)
            last = int(generated.token_ids[-1]) if len(generated.token_ids) else -1
            given = self._tail.of_chat(answer.given, last=last) if is_chat else self._tail.of_text(answer.given)
            if not given:
                raise SampleError("the environment is not done and says nothing: the model could only talk to itself")
            if turn + 1 < self._settings.max_turns and tape.num_tokens + len(given) < room:
                tape.give(answer.given, given)
            else:
                break  # no turn follows that could make use of it
        return tape.played("length", reward)


class _Tape:
    """What was said so far, token for token."""

    def __init__(self, prompt_ids: npt.NDArray[np.int32]) -> None:
        self._prompt_ids = prompt_ids
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._runs = [0]  # alternately sampled and given
        self._spans: list[Span] = []
        self._texts: list[str] = []
        self.num_tokens = 0

    def so_far(self) -> npt.NDArray[np.int32]:
        return np.concatenate([self._prompt_ids, *self._tokens])

    def take(self, generated: Generated) -> None:
        if len(self._runs) % 2 == 0:
            self._runs.append(0)
        at = self.num_tokens
        self._spans += [span._replace(start=span.start + at, end=span.end + at) for span in generated.spans]
        self._add(generated.text, generated.token_ids, generated.logprobs)

    def give(self, text: str, token_ids: Sequence[int]) -> None:
        if len(self._runs) % 2 == 1:
            self._runs.append(0)
        self._add(text, np.asarray(token_ids, dtype=np.int32), np.zeros(len(token_ids), dtype=np.float32))

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

    def _add(self, text: str, token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
        self._tokens.append(token_ids)
        self._logprobs.append(logprobs)
        self._texts.append(text)
        self._runs[-1] += len(token_ids)
        self.num_tokens += len(token_ids)
