"""A reward that runs programs in a sandbox, under one keeper or another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from streamrl.config import schema
from streamrl.workers.rewards.code import CodeReward
from tests.tiny_rewards import make_item

KEEPER = "streamrl.workers.confined.sandbox_keeper"
PROMPT, NOBODY, STARVED = "tests.keepers.prompt", "tests.keepers.nobody", "tests.keepers.starved"
USERS = [PROMPT, NOBODY]  # the first is root's where the tests are


@asynccontextmanager
async def sandbox(keeper: str = PROMPT, *, timeout_s: float = 60.0, **tests: Any) -> AsyncIterator[CodeReward]:
    source = schema.CodeReward(type="code", timeout_s=timeout_s, tests=schema.Tests(**{"time_s": 20.0, **tests}))
    reward = CodeReward(source, key="rewards.mine", keeper=keeper)
    try:
        yield reward
    finally:
        await reward.close()


async def outcomes(program: str, tests: Any, *, keeper: str = PROMPT, **settings: Any) -> list[str]:
    """Of each test, empty: it passed."""
    async with sandbox(keeper, **settings) as reward:
        return [one.why for one in await reward.judge(make_item(program, tests=tests))]


def keeper_of(reward: CodeReward) -> int:
    child = reward._cells._keeper
    assert child is not None
    [keeper] = children(child._process.pid)  # of its reaper
    return keeper


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # also one that is buried while it is read (ESRCH)
        return []
