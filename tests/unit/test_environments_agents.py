"""Agents in their child processes: what they ask is their rollout, what it is worth, and what they can reach."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from streamrl.errors import ConfigError, SampleError
from streamrl.permissions import Permissions
from streamrl.workers.environments.agents import AgentPlayer
from streamrl.workers.environments.playing import playing
from tests.session_world import CALL, PLAIN, AgentWorld, agent_world, well

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


async def test_no_key_opens_anothers_session_and_none_opens_one_that_is_over(tmp_path: Path) -> None:
    async with agent_world(tmp_path, PLAIN, "afterwards") as world:
        for _ in range(2):
            played, _ = await world.play(well, {"place": str(tmp_path / "place")})
            assert played.reward == 1.0


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


async def test_a_function_that_takes_no_session_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.target: .*ask\(session, row.*cannot be called"):
        async with agent_world(tmp_path, "def ask(session): pass", "ask"):
            pass
