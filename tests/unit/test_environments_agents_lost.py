"""Agents that fail, hang or are lost: their rollout ends, the others play on, and no key is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.errors import EngineError, SampleError
from tests.helpers import wait_until_async
from tests.session_world import PLAIN, agent_world, well

DIES = """
def dies(session, row):
    try:
        for _ in range(100): ask(session)
    except urllib.error.HTTPError:
        os._exit(3)
"""


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("raise", r"KeyError: 'what' \(agent.py:\d+"),
        ("text", "must return a finite number as reward, not 'good'"),
        ("nothing", "must return a finite number as reward, not None"),
        ("nan", "must return a finite number as reward, not nan"),
        ("names", "rewards must be at most 8, named by"),
        ("eat", "MemoryError"),
    ],
)
async def test_what_fails_a_rollout_fails_no_other(tmp_path: Path, what: str, why: str) -> None:
    async with agent_world(tmp_path, PLAIN, "bad", memory_mb=1024) as world:
        good = asyncio.create_task(world.play(well))
        with pytest.raises(SampleError, match=f"the agent failed: .*{why}"):
            await world.play(well, {"what": what})
        assert (await good)[0].reward == 1.0
        assert world.num_open == 0


@pytest.mark.parametrize(
    ("what", "why"),
    [("exit", "ended with status 3"), ("kill", "ended with status -9"), ("hang", "sent no request for 1 s")],
)
async def test_an_agent_that_is_lost_ends_its_rollout_and_the_next_one_plays(
    tmp_path: Path, what: str, why: str
) -> None:
    async with agent_world(tmp_path, PLAIN, "bad", timeout_s=1.0 if what == "hang" else 60.0) as world:
        with pytest.raises(SampleError, match=why):
            await world.play(well, {"what": what})
        assert world.num_open == 0
        for _ in range(2):
            played, _ = await world.play(well)
            assert played.reward == 1.0


@pytest.mark.parametrize(("name", "is_async"), [("bad", True), ("plain", False)])
async def test_one_that_blocks_its_process_is_killed_and_the_next_one_plays(
    tmp_path: Path, name: str, is_async: bool
) -> None:
    async with agent_world(tmp_path, PLAIN, name, timeout_s=1.0) as world:
        with pytest.raises(SampleError, match="sent no request for 1 s"):
            await world.play(well, {"what": "block"})

        async def plays() -> bool:
            try:
                return (await world.play(well))[0].reward == 1.0
            except SampleError:  # it began in the process that is about to be killed
                return False

        await wait_until_async(plays, description="another process plays")
        assert world.num_open == 0


async def test_a_rollout_has_its_time(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "bad", rollout_timeout_s=1.0) as world:
        with pytest.raises(SampleError, match=r"did not end within 1 s \(environment\.rollout_timeout_s\)"):
            await world.play(well, {"what": "hang"})
        assert (await world.play(well))[0].reward == 1.0


async def test_one_whose_process_is_lost_gets_no_reward_of_0(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN + DIES, "dies", max_turns=3) as world:
        with pytest.raises(SampleError, match="ended with status 3"):
            await world.play(well)


async def test_a_request_of_a_gigabyte_is_refused_and_the_agent_goes_on(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "bad") as world:
        played, engine = await world.play(well, {"what": "huge"})
        assert (played.reward, len(engine.said)) == (7.0, 1)


@pytest.mark.parametrize("key_in_url", [False, True])
async def test_no_error_tells_a_key(tmp_path: Path, key_in_url: bool) -> None:
    async with agent_world(tmp_path, PLAIN, "bad", key_in_url=key_in_url) as world:
        with pytest.raises(SampleError) as failed:
            await world.play(well, {"what": "tell"})
        assert str(failed.value).count("[key]") == 1 + key_in_url


async def test_an_engine_that_dies_is_not_the_agents_fault(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "plain") as world:
        engine = world.teller(trouble=lambda request: EngineError("it died"))
        with pytest.raises(EngineError, match="it died"):
            await world.play_with(engine)
        assert world.num_open == 0
