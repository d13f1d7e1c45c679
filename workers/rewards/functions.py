"""Reward functions, user-defined and built-in, each in child processes that may loop, exit, raise or run out of memory.

A function has the form

    def reward(prompt: str, completion: str, token_ids: list[int], fields: Mapping) -> float

where `token_ids` are the completion's and `fields` the other fields of the prompt's row, such as `answer`. It may also
have the form of TRL's functions (`trl_form`), which may return None for "does not apply", or score all samples of a
prompt together (`of_group`). It may be `async def`, and may take keyword arguments, set by `options`; `finish_reason`
and `truncated` are passed if it has parameters of these names. It is named `package.module:function` or
`path/to/file.py:function`, and runs only if the worker was started with permission for exactly this target. Its process
has no network (`confine`), and of the worker's possibly secret variables only those that its source asks for and its
worker allows.

    score ──► a slot of a place ──► child: one call at a time (async def: up to 32) ──► number or error
                       ▲                │ dies, or times out: killed, and its place starts another
                       └────────────────┘

When a child dies with several calls in it, the culprit is unknown, so each of them is retried alone. Blocks only on a
slot (bounded by the limits of the calls before) and on the answer (`timeout_s`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardError
from streamrl.permissions import Permissions
from streamrl.recipe.own import FORMS, canonical, is_own
from streamrl.recipe.rewards import REWARDS
from streamrl.workers.rewards.base import Score, ScoreItem, SourceHealth
from streamrl.workers.rewards.child import CallFailed, Child, ChildLost, NoProcess

CONCURRENT_CALLS = 32  # of an `async def` in one process


def build_function_reward(
    name: str, source: schema.FunctionReward, permissions: Permissions
) -> FunctionReward | FunctionOfGroups:
    """Check the target's form and this worker's permission for it; loads nothing yet."""
    key = f"rewards.{name}.target"
    check_target(source.target, key=key)
    if source.target not in REWARDS:
        may_run(source, permissions, section=f"rewards.{name}")
    return FunctionOfGroups(source, key=key) if source.of_group else FunctionReward(source, key=key)


def may_run(source: schema.FunctionReward | schema.Environment, permissions: Permissions, *, section: str) -> None:
    """ConfigError if this worker has no permission to run the code, or to give it what it asks for."""
    target = source.target
    assert target is not None, "a service has no target"
    if canonical(target) not in map(canonical, permissions.reward_code):
        raise ConfigError(
            f"{section}.target: this worker may not run {target!r}; if you trust that code, start the worker with "
            f"--allow-reward-code {target}"
        )
    if source.network and canonical(target) not in map(canonical, permissions.reward_network):
        raise ConfigError(
            f"{section}.network: this worker gives {target!r} no network; to allow it, start the worker with "
            f"--allow-reward-network {target}"
        )
    for variable in source.environment:
        if variable not in permissions.reward_environment:
            raise ConfigError(
                f"{section}.environment: this worker does not pass {variable} to users' code; to allow it, start the "
                f"worker with --allow-reward-env {variable}"
            )


def check_target(target: str, *, key: str) -> None:
    if target not in REWARDS and not is_own(target):
        raise ConfigError(f"{key}: {target!r} is neither built in ({', '.join(REWARDS)}) nor {FORMS}")


class _Pool:
    """One function in child processes."""

    def __init__(self, source: schema.FunctionReward, *, key: str) -> None:
        self._key = key
        self._places = [_ChildPlace(source) for _ in range(source.processes)]
        self._solo = _ChildPlace(source)
        self._solo_lock = asyncio.Lock()
        # Holds each place once per call that it may run at a time, so that getting one means getting a slot.
        self._slots: asyncio.Queue[_ChildPlace] = asyncio.Queue()

    async def start(self) -> None:
        try:
            children = [await place.child() for place in self._places]
        except NoProcess as error:
            raise RewardError(f"{self._key}: {error}") from None
        except CallFailed as error:
            raise ConfigError(f"{self._key}: cannot use it: {error}") from None
        for _ in range(CONCURRENT_CALLS if children[0].concurrent else 1):
            for place in self._places:
                self._slots.put_nowait(place)

    async def values_for(self, items: Sequence[ScoreItem]) -> list[Any]:
        """Return the function's values for these samples of one prompt, or raise RewardError."""
        try:
            return await self._call((items[0].prompt, dict(items[0].fields), [item.sample for item in items]))
        except CallFailed as error:
            raise RewardError(f"the function failed: {error}") from None

    def health(self) -> SourceHealth:
        return SourceHealth()  # a function is always available: failures concern single samples

    async def close(self) -> None:
        for place in (*self._places, self._solo):
            await place.close()

    async def _call(self, arguments: tuple[Any, ...]) -> list[Any]:
        place = await self._slots.get()
        try:
            return await place.call(arguments)
        except ChildLost as lost:
            if lost.alone:
                raise
        finally:
            self._slots.put_nowait(place)
        async with self._solo_lock:
            return await self._solo.call(arguments)


class FunctionReward(_Pool):
    async def score(self, item: ScoreItem) -> Score:
        [score] = await self.values_for([item])
        return np.array(score, dtype=np.float64) if isinstance(score, list) else score


class FunctionOfGroups(_Pool):
    async def score_group(self, items: Sequence[ScoreItem]) -> list[float | None]:
        return await self.values_for(items)


class _ChildPlace:
    """The place of one child, which starts on first use and again after each death."""

    def __init__(self, source: schema.FunctionReward) -> None:
        self._source = source
        self._child: Child | None = None
        self._start_lock = asyncio.Lock()

    async def child(self) -> Child:
        async with self._start_lock:
            if self._child is not None and self._child.lost:
                await self.close()
            if self._child is None:
                self._child = await Child.begin(self._source)
            return self._child

    async def call(self, arguments: tuple[Any, ...]) -> list[Any]:
        values: list[Any] = await (await self.child()).call(arguments)
        return values

    async def close(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            await child.close()
