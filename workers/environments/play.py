"""One rollout of several turns: the model speaks, the environment answers, until it is done or a bound is reached.

Each turn is asked for with the very tokens so far (`trace.py` keeps them), so what was sampled is what is trained, and
the engine finds the keys and values of all earlier turns in its cache. Weights may change within a turn and between
two: spans say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from streamrl.config import schema
from streamrl.errors import SampleError
from streamrl.protocol.wire.ticket import Ticket
from streamrl.workers.engines.base import Engine, SampleRequest
from streamrl.workers.environments.base import Environment, Episode
from streamrl.workers.environments.tail import Tail
from streamrl.workers.environments.trace import Played, Trace


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
        if episode.opening and is_chat:
            raise SampleError("reset() must return nothing where prompts are messages: put the opening into the row")
        trace, given = Trace(request.prompt_ids), episode.opening
        context_ids = _behind(request.prompt_ids, self._tail.of_text(given) if given else [])
        rewards: list[float] = []
        most = len(request.prompt_ids) + self._settings.max_tokens
        for turn in range(self._settings.max_turns):
            if len(context_ids) >= most:
                break
            generated = await engine.generate(_bounded(request, turn, context_ids, most - len(context_ids)))
            if not len(generated.token_ids):
                raise SampleError(
                    "the engine made no token in a turn: there is nothing that an environment could answer"
                )
            trace.take(context_ids, generated, given=given)
            answer = await episode.step(generated.text)
            rewards.append(answer.reward)
            if answer.done:
                return trace.played("stop", rewards)
            given, last = answer.given, int(generated.token_ids[-1])
            given_ids = self._tail.of_chat(given, last=last) if is_chat else self._tail.of_text(given)
            if not given_ids:
                raise SampleError("the environment is not done and says nothing: the model could only talk to itself")
            context_ids = _behind(_behind(context_ids, generated.token_ids), given_ids)
        return trace.played("length", rewards)


def _behind(context_ids: npt.NDArray[np.int32], more: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.concatenate([context_ids, np.asarray(more, dtype=np.int32)])


def _bounded(request: SampleRequest, turn: int, context_ids: npt.NDArray[np.int32], left: int) -> SampleRequest:
    """The request of a later turn, which may say `left` tokens at most."""
    sampling = request.sampling
    if left < sampling.max_tokens:
        sampling = sampling.model_copy(update={"max_tokens": left, "min_tokens": min(left, sampling.min_tokens)})
    return replace(request, request_id=f"{request.request_id}-{turn}", prompt_ids=context_ids, sampling=sampling)
