"""Who gets a seat in vLLM: samples by priority, and never the last seat, which is a canary's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.workers.engines.vllm.arguments import samples_at_once
from streamrl.workers.engines.vllm.seats import Seats

EVALUATION, TRAINING = 1, 2


class Table:
    """Its guests stay until they are told to go."""

    def __init__(self, num: int) -> None:
        self._seats = Seats(num)
        self.seated: list[str] = []  # as they came to sit
        self._guests: dict[str, asyncio.Task[None]] = {}
        self._may_go: dict[str, asyncio.Event] = {}

    async def come(self, name: str, priority: int = TRAINING) -> None:
        self._may_go[name] = asyncio.Event()
        self._guests[name] = asyncio.create_task(self._sit(name, priority))
        await settle()

    async def _sit(self, name: str, priority: int) -> None:
        async with self._seats.taken(priority):
            self.seated.append(name)
            await self._may_go[name].wait()

    async def go(self, *names: str) -> None:
        for name in names:
            self._may_go[name].set()
        await settle()

    async def cancel(self, name: str, *, as_goes: str | None = None) -> None:
        if as_goes is not None:
            self._may_go[as_goes].set()
            await asyncio.sleep(0)  # it has left, and whom its seat was given to does not know yet
        self._guests[name].cancel()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_sample_waits_while_all_seats_are_taken_and_an_evaluations_is_seated_first() -> None:
    table = Table(2)
    for name in ("a", "b", "c", "d"):
        await table.come(name)
    await table.come("held out", EVALUATION)
    assert table.seated == ["a", "b"]
    await table.go("b")
    assert table.seated == ["a", "b", "held out"]
    await table.go("a", "held out")
    assert table.seated[3:] == ["c", "d"]
    await table.go("c", "d")


async def test_a_sample_that_is_cancelled_leaves_its_seat_to_the_next() -> None:
    table = Table(1)
    for name in ("a", "b", "c", "d"):
        await table.come(name)
    await table.cancel("b")
    assert table.seated == ["a"]
    await table.cancel("c", as_goes="a")
    assert table.seated == ["a", "d"]
    await table.cancel("d")
    await table.come("e")
    assert table.seated == ["a", "d", "e"]
    await table.go("e")


@pytest.mark.parametrize(("num_active", "expected"), [(None, 7), (4, 3)])
def test_one_seat_fewer_than_vllm_fills_are_for_samples(num_active: int | None, expected: int) -> None:
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_active_seqs=num_active))
    assert samples_at_once(config) == expected
