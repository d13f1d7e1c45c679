"""Reward functions, the user's and the built-in ones, each in child processes that may loop, exit, raise or eat memory.

A function is

    def reward(prompt: str, completion: str, token_ids: list[int], fields: Mapping) -> float

where `token_ids` are the completion's and `fields` the further fields of the prompt's row, `answer` for one. It may be
`async def`, and may take keyword arguments, set by `options`. It is named by `package.module:function` or
`path/to/file.py:function`, and is run only if the worker was started with permission for just this target.

    score ──► its turn at a place ──► child: one call at a time (async def: up to 32) ──► number or error
                       ▲                │ dies, or no answer in time: killed, its place begins another
                       └────────────────┘

A child that dies with several calls in it does not tell whose fault it was, so each of them is tried once more alone.
The only waits are for a turn (bounded by the limits of the calls before) and for the answer (`timeout_s`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardError
from streamrl.permissions import Permissions
from streamrl.recipe.own import FORMS, is_own
from streamrl.recipe.rewards import REWARDS
from workers.rewards.base import Health, ScoreItem
from workers.rewards.child import CallFailed, CannotLoad, Child, ChildLost

CONCURRENT_CALLS = 32  # of an `async def` in one process


def build_function_reward(name: str, source: schema.FunctionReward, permissions: Permissions) -> FunctionReward:
    """Checks the target's form and this worker's permission for it; loads nothing yet."""
    key = f"rewards.{name}.target"
    if source.target not in REWARDS:
        if not is_own(source.target):
            raise ConfigError(f"{key}: {source.target!r} is neither built in ({', '.join(REWARDS)}) nor {FORMS}")
        if _canonical(source.target) not in map(_canonical, permissions.reward_code):
            raise ConfigError(
                f"{key}: this worker may not run {source.target!r}; if you trust that code, start the worker with "
                f"--allow-reward-code {source.target}"
            )
    return FunctionReward(source, key=key)


def _canonical(target: str) -> str:
    place, _, function = target.rpartition(":")
    return f"{Path(place).resolve()}:{function}" if place.endswith(".py") else target


class FunctionReward:
    """One function on a pool of child processes."""

    def __init__(self, source: schema.FunctionReward, *, key: str) -> None:
        self._key = key
        self._places = [_Place(source) for _ in range(source.processes)]
        self._solo = _Place(source)
        self._solo_turn = asyncio.Lock()
        # Each place is in here as many times as it may have calls, so that taking one is waiting for a turn.
        self._turns: asyncio.Queue[_Place] = asyncio.Queue()

    async def start(self) -> None:
        try:
            children = [await place.child() for place in self._places]
        except CannotLoad as error:
            raise ConfigError(f"{self._key}: cannot use it: {error}") from None
        for _ in range(CONCURRENT_CALLS if children[0].concurrent else 1):
            for place in self._places:
                self._turns.put_nowait(place)

    async def score(self, item: ScoreItem) -> float:
        arguments = (item.prompt, item.completion, item.token_ids.tolist(), dict(item.fields))
        try:
            return await self._call(arguments)
        except CallFailed as error:
            raise RewardError(f"the function failed: {error}") from None

    def health(self) -> Health:
        return Health()  # a function is always to be had: what fails is a sample's

    async def close(self) -> None:
        for place in (*self._places, self._solo):
            await place.close()

    async def _call(self, arguments: tuple[Any, ...]) -> float:
        place = await self._turns.get()
        try:
            return await place.call(arguments)
        except ChildLost as lost:
            if lost.alone:
                raise
        finally:
            self._turns.put_nowait(place)
        async with self._solo_turn:
            return await self._solo.call(arguments)


class _Place:
    """Where one child lives: begun on first use, and again after each death."""

    def __init__(self, source: schema.FunctionReward) -> None:
        self._source = source
        self._child: Child | None = None
        self._beginning = asyncio.Lock()

    async def child(self) -> Child:
        async with self._beginning:
            if self._child is not None and self._child.lost:
                await self.close()
            if self._child is None:
                self._child = await Child.begin(self._source)
            return self._child

    async def call(self, arguments: tuple[Any, ...]) -> float:
        return await (await self.child()).call(arguments)

    async def close(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            await child.close()
