"""Plain agents that share a process by its threads: each has one, and keeps it until it has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.errors import SampleError
from streamrl.workers.environments.own_child import THREADS
from streamrl.workers.sessions.trace import Played
from tests.helpers import wait_until_async
from tests.session_world import PLAIN, Teller, agent_world

# Plays until a file appears.
WAITS = """
def waits(session, row):
    ask(session)
    while not os.path.exists(row["until"]): time.sleep(0.1)
    return 1.0
"""


async def test_a_late_plain_rollout_ends_without_its_process(tmp_path: Path) -> None:
    """It stands for up to 63 healthy ones there."""
    async with agent_world(
        tmp_path, PLAIN, "talks", rollout_timeout_s=1.0, max_turns=1000, max_tokens=100_000
    ) as world:
        engine = world.teller(sample_s=0.05)  # the agent would take 5 s
        [place] = world.player._children._places
        child = await place.child()
        with pytest.raises(SampleError, match=r"environment\.rollout_timeout_s"):
            await world.play_with(engine)

        async def has_ended() -> bool:
            return not world.player.num_ending

        await wait_until_async(has_ended, description="its thread was refused")
        assert not child.lost
        assert await place.child() is child


async def test_a_rollout_that_nobody_waits_for_ends_in_the_child_too(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "talks", max_turns=1000, max_tokens=100_000) as world:
        engine = world.teller(sample_s=0.01)
        playing = asyncio.create_task(world.play_with(engine))

        async def has_asked() -> bool:
            return len(engine.said) > 2

        await wait_until_async(has_asked, description="the agent asks")
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert world.num_open == 0
        assert engine.stats().in_flight == 0
        asked = len(engine.requests)

        async def has_ended() -> bool:
            return not world.player.num_ending

        await wait_until_async(has_ended, description="the child has ended it")
        assert len(engine.requests) == asked


async def test_a_process_gets_no_more_plain_rollouts_than_it_has_threads(tmp_path: Path) -> None:
    """Of two full processes one is emptied. It gets all new rollouts: in the other one they would wait for a thread,
    send no request and fail."""
    full, emptied, later = (tmp_path / name for name in ("full", "emptied", "later"))
    async with agent_world(tmp_path, PLAIN + WAITS, "waits", processes=2) as world:
        engine = world.teller()

        def play(until: Path) -> asyncio.Task[Played]:
            return asyncio.create_task(world.play_with(engine, {"until": str(until)}))

        first = [play(until) for _ in range(THREADS) for until in (full, emptied)]
        await has_told(engine, 2 * THREADS)
        emptied.touch()
        await asyncio.gather(*first[1::2])
        second = [play(later) for _ in range(THREADS)]
        await has_told(engine, 3 * THREADS)
        third = play(later)
        await everything_that_can_go_on()
        assert world.num_open == 2 * THREADS, "it waits before its session, and its timeouts"
        for until in (full, later):
            until.touch()
        assert {played.reward for played in await asyncio.gather(*first[::2], *second, third)} == {1.0}


async def test_a_plain_rollout_that_nobody_waits_for_keeps_its_thread_until_it_has_ended(tmp_path: Path) -> None:
    ends = [tmp_path / str(i) for i in range(THREADS)]
    async with agent_world(tmp_path, PLAIN + WAITS, "waits") as world:
        engine = world.teller()
        playing = [asyncio.create_task(world.play_with(engine, {"until": str(end)})) for end in ends]
        await has_told(engine, THREADS)
        waiting = asyncio.create_task(world.play_with(engine, {"until": str(ends[0])}))
        playing[0].cancel()
        await asyncio.wait(playing[:1])
        await everything_that_can_go_on()
        assert (world.player.num_ending, world.num_open) == (1, THREADS - 1)
        for end in ends:
            end.touch()
        assert {played.reward for played in await asyncio.gather(*playing[1:], waiting)} == {1.0}
        assert world.player.num_ending == 0


async def has_told(engine: Teller, count: int) -> None:
    async def has() -> bool:
        return len(engine.said) == count

    await wait_until_async(has, description=f"the engine has told {count} answers")


async def everything_that_can_go_on() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
