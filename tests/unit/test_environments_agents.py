"""Agents in their child processes: what they ask is their rollout, whatever becomes of them, and nothing of them
outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from streamrl.errors import ConfigError, EngineError, SampleError
from streamrl.permissions import Permissions
from streamrl.versions import make_version
from streamrl.workers.environments.agents import AgentPlayer
from streamrl.workers.environments.own_child import THREADS
from streamrl.workers.environments.playing import playing
from streamrl.workers.sessions.trace import Played
from tests.helpers import wait_until_async
from tests.session_world import CALL, PLAIN, AgentWorld, Teller, agent_world

# Plays until a file appears.
DIES = """
def dies(session, row):
    try:
        for _ in range(100): ask(session)
    except urllib.error.HTTPError:
        os._exit(3)
"""
WAITS = """
def waits(session, row):
    ask(session)
    while not os.path.exists(row["until"]): time.sleep(0.1)
    return 1.0
"""
NAMES = """
async def names(session, row):
    for _ in range(row["turns"]): await asyncio.to_thread(ask, session)
    return {"right": 1.0, "short": 0.5}
"""

OF_OPENAI = '''
import json
from openai import AsyncOpenAI, OpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {
    "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}]

async def calculator(session, row):
    """As anybody writes it."""
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(4):
        answer = await client.chat.completions.create(model="gpt", messages=messages, tools=TOOLS, temperature=0.0)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(message.content == row["answer"])
        for call in message.tool_calls:
            wanted = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(wanted["a"] + wanted["b"])})
    return 0.0

def streamed(session, row):
    """A plain function, which reads a stream."""
    client = OpenAI(base_url=session.base_url, api_key=session.api_key)
    assert [model.id for model in client.models.list()] == [session.model]
    messages, options = [{"role": "user", "content": row["prompt"]}], {"include_usage": True}
    said, usage = "", None
    for chunk in client.chat.completions.create(
        model=session.model, messages=messages, stream=True, stream_options=options
    ):
        said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert usage.total_tokens > 0
    return {"right": float(said == row["answer"]), "polite": 0.5}
'''


def well(_: object) -> str:
    return "well"


async def test_an_agent_of_the_openai_package_with_tools_is_a_rollout(tmp_path: Path) -> None:
    async with agent_world(tmp_path, OF_OPENAI, "calculator") as world:
        played, engine = await world.play(lambda asked: CALL if len(asked) == 1 else "5", {"answer": "5"})
        (first, called), (second, answered) = engine.said
        assert second[: len(first) + len(called.token_ids)] == [*first, *called.token_ids.tolist()]
        tail = world.facts.tokenizer.decode(second[len(first) + len(called.token_ids) :])
        assert tail == "\n<|im_start|>user\n<tool_response>5</tool_response><|im_end|>\n<|im_start|>assistant\n"
        assert (played.reward, played.sample.finish_reason) == (1.0, "stop")
        sample = played.sample
        assert sample.token_ids[sample.loss_mask()].tolist() == [*called.token_ids, *answered.token_ids]
        assert world.num_open == 0


async def test_a_plain_function_may_stream_and_give_several_rewards(tmp_path: Path) -> None:
    async with agent_world(tmp_path, OF_OPENAI, "streamed") as world:
        played, _ = await world.play(lambda asked: "5", {"answer": "5"})
        assert played.reward == 1.5
        assert played.rewards == {"environment.right": 1.0, "environment.polite": 0.5}


async def test_a_rollout_that_fails_at_a_bound_counts_0_under_each_name_given_so_far(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN + NAMES, "names", max_turns=2) as world:
        first, _ = await world.play(well, {"turns": 3})
        assert (first.reward, first.rewards) == (0.0, {})
        ended, _ = await world.play(well, {"turns": 2})
        assert (ended.reward, ended.rewards) == (1.5, {"environment.right": 1.0, "environment.short": 0.5})
        spent, _ = await world.play(well, {"turns": 3})
        assert (spent.reward, spent.rewards) == (0.0, {"environment.right": 0.0, "environment.short": 0.0})
        assert spent.sample.finish_reason == "length"


OF_A_CLASS = """
import asyncio, itertools
from openai import AsyncOpenAI

class Agent:
    def __init__(self, *, worth):
        self.worth, self.calls = worth, itertools.count(1)

    async def rollout(self, session, row):
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        await client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "2 + 3"}])
        return self.worth * next(self.calls)
"""


async def test_an_agent_may_be_a_class_and_rollouts_of_a_process_share_what_it_has_made(tmp_path: Path) -> None:
    async with agent_world(tmp_path, OF_A_CLASS, "Agent", network=True, options={"worth": 0.5}) as world:
        assert [(await world.play(well))[0].reward for _ in range(3)] == [0.5, 1.0, 1.5]
    with pytest.raises(ConfigError, match="missing a required argument: 'worth'"):
        async with agent_world(tmp_path, OF_A_CLASS, "Agent", network=True):
            pass


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


async def test_a_late_plain_rollout_ends_without_its_process(tmp_path: Path) -> None:
    """It stands for up to 63 healthy ones there."""
    async with agent_world(
        tmp_path, PLAIN, "talks", rollout_timeout_s=1.0, max_turns=1000, max_tokens=100_000
    ) as world:
        engine = teller(world, sample_s=0.05)  # the agent would take 5 s
        [place] = world.player._children._places
        child = await place.child()
        with pytest.raises(SampleError, match=r"environment\.rollout_timeout_s"):
            await world.play_with(engine)

        async def has_ended() -> bool:
            return not world.player.num_ending

        await wait_until_async(has_ended, description="its thread was refused")
        assert not child.lost
        assert await place.child() is child


async def test_one_whose_process_is_lost_gets_no_reward_of_0(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN + DIES, "dies", max_turns=3) as world:
        with pytest.raises(SampleError, match="ended with status 3"):
            await world.play(well)


async def test_a_request_of_a_gigabyte_is_refused_and_the_agent_goes_on(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "bad") as world:
        played, engine = await world.play(well, {"what": "huge"})
        assert (played.reward, len(engine.said)) == (7.0, 1)


async def test_no_key_opens_anothers_session_and_none_opens_one_that_is_over(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "afterwards") as world:
        for _ in range(2):
            played, _ = await world.play(well, {"place": str(tmp_path / "place")})
            assert played.reward == 1.0


@pytest.mark.parametrize("key_in_url", [False, True])
async def test_no_error_tells_a_key(tmp_path: Path, key_in_url: bool) -> None:
    async with agent_world(tmp_path, PLAIN, "bad", key_in_url=key_in_url) as world:
        with pytest.raises(SampleError) as failed:
            await world.play(well, {"what": "tell"})
        assert str(failed.value).count("[key]") == 1 + key_in_url


async def test_a_rollout_that_reaches_a_bound_is_unfinished_and_counts(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "talks", max_turns=3) as world:
        played, engine = await world.play(well)
        assert (played.reward, played.sample.finish_reason, len(engine.said)) == (0.0, "length", 3)


async def test_an_agent_that_asks_nothing_has_nothing_to_train(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "silent") as world:
        with pytest.raises(SampleError, match="sent the model no request"):
            await world.play(well)


async def test_without_a_network_an_agent_reaches_its_session_and_nothing_else(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens, socket.socket(socket.AF_UNIX) as by_path:
        by_path.bind(str(tmp_path / "redis.sock"))
        by_path.listen()
        async with agent_world(tmp_path, PLAIN, "connects") as world:
            row = {"port": listens.getsockname()[1], "path": str(tmp_path / "redis.sock")}
            played, _ = await world.play(well, row)
            assert played.reward == 2.0, "so many were refused"


@pytest.mark.parametrize(("host", "network"), [("::1", False), ("::1", True), ("127.0.0.1", False)])
async def test_without_a_network_an_agent_has_its_session_by_ipv4(tmp_path: Path, host: str, network: bool) -> None:
    if host == "::1" and network and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    async with agent_world(tmp_path, PLAIN, "plain") as world:
        settings = world.config.environment
    assert settings is not None
    config = world.config.model_copy(update={"environment": settings.model_copy(update={"network": network})})
    allowed = Permissions(reward_code=(str(settings.target),), reward_network=(str(settings.target),))
    refused = host == "::1" and not network
    says = pytest.raises(ConfigError, match=r"--sessions \[::1\]: .* set environment\.network: true")
    with says if refused else contextlib.nullcontext():
        async with playing(config, allowed, world.facts, (host, 0)) as player:
            assert not refused
            assert isinstance(player, AgentPlayer)
            assert (await AgentWorld(player, world.facts, config).play(well))[0].reward == 1.0


async def test_an_agent_may_have_a_network_where_its_worker_allows_it(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "plain", network=True) as world:
        assert (await world.play(well))[0].reward == 1.0


async def test_an_engine_that_dies_is_not_the_agents_fault(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "plain") as world:
        engine = teller(world, trouble=lambda request: EngineError("it died"))
        with pytest.raises(EngineError, match="it died"):
            await world.play_with(engine)
        assert world.num_open == 0


async def test_a_rollout_that_nobody_waits_for_ends_in_the_child_too(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "talks", max_turns=1000, max_tokens=100_000) as world:
        engine = teller(world, sample_s=0.01)
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
        engine = teller(world)

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
        engine = teller(world)
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


async def test_a_function_that_takes_no_session_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.target: .*ask\(session, row.*cannot be called"):
        async with agent_world(tmp_path, "def ask(session): pass", "ask"):
            pass


async def has_told(engine: Teller, count: int) -> None:
    async def has() -> bool:
        return len(engine.said) == count

    await wait_until_async(has, description=f"the engine has told {count} answers")


async def everything_that_can_go_on() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def teller(world: AgentWorld, **others: object) -> Teller:
    engine = Teller(world.facts, well, **others)
    engine.loads.append((Path("weights"), make_version(1, 1), 1))
    return engine
