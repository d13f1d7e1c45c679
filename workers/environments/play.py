"""Plays one multi-turn rollout: the model generates, the environment answers, until it is done or a bound is reached.

Each turn's prompt is exactly the tokens so far (kept by `trace.py`), so the learner trains on what was sampled, and the
engine finds the KV of all earlier turns in its cache. Weights may change within a turn or between turns; spans record
this.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from streamrl.config import schema
from streamrl.data.messages import read_tools
from streamrl.errors import SampleError
from streamrl.protocol.wire.ticket import Ticket
from streamrl.workers.engines.base import Engine, SampleRequest
from streamrl.workers.environments.base import Environment, Episode, check_given, check_opening
from streamrl.workers.environments.tail import Tail
from streamrl.workers.sessions.trace import Played, Trace


class Player:
    def __init__(self, environment: Environment, *, tail: Tail, settings: schema.Environment) -> None:
        self.environment = environment
        self._tail, self._settings = tail, settings

    def outage(self) -> str | None:
        return self.environment.outage()

    async def play(self, ticket: Ticket, engine: Engine, request: SampleRequest) -> Played:
        """Play a rollout; `request` is the first turn's. SampleError if the engine or the environment fails."""
        clock = _Clock()
        with clock.in_environment():
            episode = await self.environment.begin(ticket.fields)
        try:
            played = await self._play(episode, ticket, engine, request, clock)
        finally:
            await episode.close()
        return played._replace(model_s=clock.model_s, environment_s=clock.environment_s)

    async def _play(
        self, episode: Episode, ticket: Ticket, engine: Engine, request: SampleRequest, clock: _Clock
    ) -> Played:
        is_chat = "messages" in ticket.fields
        check_opening(episode.opening, is_chat=is_chat)
        trace, given = Trace(request.prompt_ids, num_samples=ticket.num_samples), episode.opening
        context_ids = _appended(request.prompt_ids, self._tail.of_text(given) if given else [])
        messages = list(ticket.fields["messages"]) if is_chat else []
        tools = read_tools(ticket.fields.get("tools"))
        rewards: list[float] = []
        for turn in range(self._settings.max_turns):
            left = self._settings.max_tokens - trace.num_tokens - trace.num_given(context_ids)
            if left < 1:
                break
            with clock.in_model():
                generated = await engine.generate(_bounded(request, turn, context_ids, left))
            if not len(generated.token_ids):
                raise SampleError("the engine generated no token in a turn: the environment has nothing to answer")
            trace.take(context_ids, generated, given=given)
            with clock.in_environment():
                answer = await episode.step(generated.text)
            rewards.append(answer.reward)
            if answer.done:
                return trace.played("stop", sum(rewards), rewards)
            if turn + 1 == self._settings.max_turns:
                break  # nobody would read its answer
            given, so_far = answer.observation, _appended(context_ids, generated.token_ids)
            if is_chat:
                messages += [{"role": "assistant", "content": generated.text}, {"role": "user", "content": given}]
                context_ids = _appended(*self._tail.of_chat(messages, so_far, tools=tools))
                continue
            check_given(given_ids := self._tail.of_text(given))
            context_ids = _appended(so_far, given_ids)
        if not rewards:  # there is nothing to train on, and no reward that anybody gave
            raise SampleError(
                f"the opening has {trace.num_given(context_ids)} tokens: environment.max_tokens = "
                f"{self._settings.max_tokens} leaves no room for a turn"
            )
        return trace.played("length", sum(rewards), rewards)


@dataclass(slots=True)
class _Clock:
    """Seconds spent waiting for the model and for the environment."""

    model_s: float = 0.0
    environment_s: float = 0.0

    @contextmanager
    def in_model(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.model_s += time.monotonic() - began

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.environment_s += time.monotonic() - began


def _appended(context_ids: npt.NDArray[np.int32], more: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.concatenate([context_ids, np.asarray(more, dtype=np.int32)])


def _bounded(request: SampleRequest, turn: int, context_ids: npt.NDArray[np.int32], left: int) -> SampleRequest:
    """Return the request of a later turn, limited to `left` tokens."""
    sampling = request.sampling
    if left < sampling.max_tokens:
        sampling = sampling.model_copy(update={"max_tokens": left, "min_tokens": min(left, sampling.min_tokens)})
    return replace(request, request_id=f"{request.request_id}-{turn}", prompt_ids=context_ids, sampling=sampling)
