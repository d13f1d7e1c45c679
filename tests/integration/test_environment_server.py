"""`streamrl environment serve`: real servers, one of which is killed while rollouts are under way, and comes again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.errors import RewardOutage, SampleError
from streamrl.permissions import Permissions
from streamrl.workers.environments.base import Answer
from streamrl.workers.environments.remote import RemoteEnvironment, build_remote
from tests.helpers import wait_until

ROOT = Path(__file__).resolve().parents[2]
GAME = """
class Count:
    def __init__(self, *, to): self.to = to
    def reset(self, row): self.said = []
    def step(self, completion):
        if completion == "raise": raise KeyError("what")
        self.said.append(completion)
        return " ".join(self.said), 1.0, len(self.said) == self.to
"""


class Server:
    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder, self.port = folder, port
        (folder / "url").unlink(missing_ok=True)
        words = ["environment", "serve", str(folder / "game.py:Count"), "--option", "to=3", "--port", str(port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "streamrl.ops.cli.main", *words, "--url-file", str(folder / "url")], cwd=ROOT
        )
        self.url = wait_until(self._url, description="the server listens")
        self.port = int(self.url.rpartition(":")[2])

    def _url(self) -> str:
        assert self.process.poll() is None, "it ended at once"
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "url").read_text()
        return ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "game.py").write_text(GAME)
        made.append(Server(tmp_path / name))
    try:
        yield made
    finally:
        for server in made:
            server.process.terminate()
        assert {server.process.wait(timeout=240) for server in made} == {0}, "SIGTERM ends it in order"


async def play(environment: RemoteEnvironment) -> Answer:
    rollout = await environment.begin({})
    try:
        for said in "ab":
            assert not (await rollout.step(said)).done
        return await rollout.step("c")
    finally:
        await rollout.close()


async def test_a_killed_replica_costs_its_own_rollouts_and_one_that_comes_again_is_asked_again(
    servers: list[Server],
) -> None:
    settings = schema.Environment(urls=tuple(server.url for server in servers), timeout_s=20.0, outage_s=60.0)
    environment = build_remote(settings, Permissions(hosts=("127.0.0.1",)), first_pause_s=0.05)
    done = Answer(observation="a b c", reward=1.0, done=True)
    try:
        assert await asyncio.gather(*(play(environment) for _ in range(16))) == [done] * 16
        rollouts = [await environment.begin({}) for _ in range(16)]
        servers[0].kill()
        told = await asyncio.gather(*(one.step("a") for one in rollouts), return_exceptions=True)
        assert 0 < sum(isinstance(one, SampleError) for one in told) < 16
        assert all(isinstance(one, SampleError) or one == Answer(observation="a", reward=1.0) for one in told)
        assert await asyncio.gather(*(play(environment) for _ in range(16))) == [done] * 16, "the other one plays"

        servers[1].kill()
        waiting = [asyncio.create_task(play(environment)) for _ in range(16)]
        servers[0] = await asyncio.to_thread(Server, servers[0].folder, servers[0].port)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert outcomes == [done] * 16, "who found nobody waited"
        servers[1] = await asyncio.to_thread(Server, servers[1].folder, servers[1].port)

        with pytest.raises(SampleError, match="KeyError: 'what'"):
            await (await environment.begin({})).step("raise")
        assert await play(environment) == done
    finally:
        await environment.close()


async def test_where_the_only_server_is_begun_anew_its_rollouts_go_back(servers: list[Server]) -> None:
    settings = schema.Environment(urls=(servers[0].url,), timeout_s=20.0, outage_s=60.0)
    environment = build_remote(settings, Permissions(hosts=("127.0.0.1",)), first_pause_s=0.05)
    try:
        rollout = await environment.begin({})
        servers[0].kill()
        servers[0] = await asyncio.to_thread(Server, servers[0].folder, servers[0].port)
        with pytest.raises(RewardOutage, match="answered 410"):
            await rollout.step("a")
        assert (await play(environment)).done
    finally:
        await environment.close()


@pytest.mark.parametrize(
    ("name", "told"),
    [("Count", "missing a required argument: 'to'"), ("play", "is an agent: there is no environment to serve")],
)
def test_what_cannot_be_served_is_one_line(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "game.py").write_text(GAME + "\nasync def play(session, row): return 1.0\n")
    words = [sys.executable, "-m", "streamrl.ops.cli.main", "environment", "serve", f"{tmp_path}/game.py:{name}"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)

    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert told in line
