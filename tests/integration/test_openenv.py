"""A server of OpenEnv's own package, which cannot be installed beside vLLM and has an environment to itself."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, SampleError
from streamrl.permissions import Permissions
from streamrl.process import free_port
from streamrl.workers.environments.base import Answer
from streamrl.workers.environments.own import OwnEnvironment, build_children
from tests.helpers import wait_until
from tests.own_packages import python_with

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    message: str

class Hint(Observation):
    text: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.steps = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number = int(kwargs.get("number", 7))
        return Hint(text="Which number?", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if action.message == "raise":
            raise KeyError("what")
        off = int(action.message) - self.number
        return Hint(text="lower" if off > 0 else "higher" if off else "yes", done=off == 0, reward=float(off == 0))

    @property
    def state(self):
        return State(episode_id="x", step_count=self.steps)

uvicorn.run(create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=64), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = python_with("openenv==0.10.0", beside_ours=False)
    folder = tmp_path_factory.mktemp("openenv")
    port = free_port("127.0.0.1")
    log = folder / "log"
    with log.open("w") as out:
        server = subprocess.Popen([str(python), "-c", SERVER, str(port)], cwd=folder, stdout=out, stderr=out)
    try:
        wait_until(lambda: _listens(server, port, log), description="the server listens", timeout_s=240)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=240)


def _listens(server: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    assert server.poll() is None, log.read_text()
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@asynccontextmanager
async def played_at(url: str, *, network: bool = True, **options: Any) -> AsyncIterator[OwnEnvironment]:
    settings = schema.Environment(
        target="openenv", network=network, timeout_s=60.0, options={"url": url, "observation": "text", **options}
    )
    environment = OwnEnvironment(build_children(settings, Permissions(reward_network=("openenv",))))
    await environment.start()
    try:
        yield environment
    finally:
        await environment.close()


async def test_rollouts_have_sessions_of_their_own_and_say_and_hear_what_the_server_does(url: str) -> None:
    async def find(environment: OwnEnvironment, number: int) -> list[Answer]:
        rollout = await environment.begin({"openenv": {"number": number}})
        assert rollout.opening == "Which number?"
        told = [await rollout.step("0"), await rollout.step("99"), await rollout.step(str(number))]
        await rollout.close()
        return told

    async with played_at(url) as environment:
        found = await asyncio.gather(*(find(environment, number) for number in range(1, 33)))

    right = [
        Answer(observation="higher"),
        Answer(observation="lower"),
        Answer(observation="yes", reward=1.0, done=True),
    ]
    assert found == [right] * 32


async def test_a_chat_hears_no_opening_and_without_a_field_the_observation_is_json(url: str) -> None:
    async with played_at(url, observation="") as environment:
        rollout = await environment.begin({"messages": [{"role": "user", "content": "Guess."}]})
        assert rollout.opening == ""
        assert '"text": "higher"' in (await rollout.step("1")).observation


async def test_what_the_server_or_the_machine_refuses_fails_the_sample_and_says_why(url: str) -> None:
    async with played_at(url) as environment:
        rollout = await environment.begin({})
        with pytest.raises(SampleError, match="the server answered 'error'"):
            await rollout.step("raise")
    async with played_at(url, observation="words") as environment:
        with pytest.raises(SampleError, match="no field 'words'; it has: metadata, text"):
            await environment.begin({})
    async with played_at("ws://127.0.0.1:9") as environment:
        with pytest.raises(SampleError, match=r"Connect call failed \('127.0.0.1', 9\)"):
            await environment.begin({})
    async with played_at("127.0.0.1:9") as environment:
        with pytest.raises(SampleError, match="must be ws://host:port"):
            await environment.begin({})


async def test_a_worker_gives_it_a_network_only_where_it_is_told_to(url: str) -> None:
    settings = schema.Environment(target="openenv", network=True, options={"url": url})
    with pytest.raises(ConfigError, match="--allow-reward-network openenv"):
        build_children(settings, Permissions())
