"""The user's environment: a class, in child processes that may loop, exit, raise or eat memory.

    class Guess:
        def __init__(self, *, highest: int = 50): ...                      # `environment.options`
        def reset(self, row: Mapping[str, Any]) -> str | None: ...         # text before the first turn, if any
        def step(self, completion: str) -> tuple[str | None, float, bool]: # what the model reads next, reward, done
        def close(self) -> None: ...                                       # may be left out

An instance for each rollout; its methods may be `async def`, others run in threads of the child, so one that waits
holds up nobody. A rollout stays with the child that began it, since its state is there: a child that dies, or is killed
since an answer was late, takes its rollouts along. They count as failed samples, and another child begins.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from streamrl.config import schema
from streamrl.errors import ConfigError, SampleError
from streamrl.permissions import Permissions
from streamrl.recipe.environments import ENVIRONMENTS
from streamrl.workers.environments.base import Answer, Episode
from streamrl.workers.environments.play import Player
from streamrl.workers.environments.tail import Tail
from streamrl.workers.rewards.functions import CallFailed, Child, may_run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHILD = "streamrl.workers.environments.own_child"


def build_environment(settings: schema.Environment, permissions: Permissions) -> OwnEnvironment:
    """Checks this worker's permission for it; loads nothing yet."""
    if settings.target not in ENVIRONMENTS or settings.network or settings.environment:
        may_run(settings, permissions, section="environment")
    return OwnEnvironment(settings)


@asynccontextmanager
async def playing(
    settings: schema.Environment | None, permissions: Permissions, tokenizer: PreTrainedTokenizerBase
) -> AsyncIterator[Player | None]:
    """Who plays the rollouts of a run, ready to; nobody, where an answer is all there is to a sample."""
    if settings is None:
        yield None
        return
    environment = build_environment(settings, permissions)
    try:
        await environment.start()
        yield Player(environment, tail=Tail(tokenizer), settings=settings)
    finally:
        await environment.close()


class OwnEnvironment:
    def __init__(self, settings: schema.Environment) -> None:
        self._settings = settings
        self._children: list[Child] = []
        self._turn = itertools.count()  # whose turn it is to begin a rollout
        self._numbers = itertools.count()

    async def start(self) -> None:
        try:
            self._children = [await Child.begin(self._settings, _CHILD) for _ in range(self._settings.processes)]
        except CallFailed as error:
            raise ConfigError(f"environment.target: cannot use {self._settings.target}: {error}") from None

    async def begin(self, row: Mapping[str, Any]) -> Episode:
        at = next(self._turn) % len(self._children)
        try:
            if self._children[at].lost:
                self._children[at] = await Child.begin(self._settings, _CHILD)
            child, number = self._children[at], next(self._numbers)
            opening = await child.call(("reset", number, dict(row)))
        except CallFailed as error:
            raise SampleError(f"the environment failed in reset: {error}") from None
        return _OwnEpisode(child, number, opening=opening)

    async def close(self) -> None:
        for child in self._children:
            await child.close()


class _OwnEpisode:
    def __init__(self, child: Child, number: int, *, opening: str) -> None:
        self.opening = opening
        self._child, self._number = child, number

    async def step(self, said: str) -> Answer:
        try:
            given, reward, done = await self._child.call(("step", self._number, said))
        except CallFailed as error:
            raise SampleError(f"the environment failed in step: {error}") from None
        return Answer(given=given, reward=reward, done=done)

    async def close(self) -> None:
        self._child.tell(("close", self._number, None))
