"""A run on the real server: learners and workers that share it, each as the user of its role."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from streamrl.config import schema
from streamrl.protocol.transport.acl import ROLES, Role, rules
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.worker import WorkerStream
from tests.helpers import wait_until
from tests.proxy import Proxy
from tests.redis.monitor_world import Watched
from tests.redis.run_world import RunWorld
from tests.redis.server_program import SECRET, Guarded, answers, serve

UID = "uid"
LEASE_S = 0.3  # of those whose leases are to run out; no test that wants them kept may take less than a minute

MakeLearner = Callable[..., LearnerStream]
MakeWorker = Callable[..., WorkerStream]
MakeWorld = Callable[..., RunWorld]


@pytest.fixture(scope="session")
def is_redis_7(redis_server: EmbeddedRedis) -> bool:
    """Whether the server has what came with Redis 7: selectors, `ACL DRYRUN`, streams that count what was added."""
    with connect(redis_server.url, schema.Redis()) as client:
        return int(client.info("server")["redis_version"].split(".")[0]) >= 7


@pytest.fixture(scope="session")
def role_urls(redis_server: EmbeddedRedis, is_redis_7: bool) -> Mapping[Role, str]:
    """The session's server, as seen by users who may do what `streamrl redis acl` prints."""
    with connect(redis_server.url, schema.Redis()) as client:
        for role in ROLES:
            granted = rules(role, selectors=is_redis_7).split()
            client.execute_command("ACL", "SETUSER", role, "reset", "on", f">of-{role}", *granted)
    return {role: redis_server.url.replace("unix://", f"unix://{role}:of-{role}@") for role in ROLES}


@pytest.fixture
def learner_client(role_urls: Mapping[Role, str], redis_settings: schema.Redis) -> Iterator[redis.Redis]:
    with connect(role_urls["learner"], redis_settings) as client:
        yield client


@pytest.fixture
async def worker_client(
    role_urls: Mapping[Role, str], redis_settings: schema.Redis
) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(role_urls["worker"], redis_settings) as client:
        yield client


@pytest.fixture
def make_learner(learner_client: redis.Redis, keys: Keys) -> MakeLearner:
    """A learner that has claimed the run, unless `claim=False`."""

    def make(
        *,
        term: int = 1,
        holder: str = "job",
        uid: str = UID,
        lease_s: float = 30.0,
        claim: bool = True,
        of: Keys = keys,
    ) -> LearnerStream:
        stream = LearnerStream(
            learner_client, of, run_uid=uid, term=term, holder=holder, lease_s=lease_s, give_up_after_s=5.0
        )
        if claim:
            stream.claim(config_json='{"name": "x"}', fingerprint="model", wait_s=0.0)
            stream.restore(cursor="0-0")
        return stream

    return make


@pytest.fixture
def learner(make_learner: MakeLearner) -> LearnerStream:
    return make_learner()


@pytest.fixture
def make_worker(worker_client: redis.asyncio.Redis, keys: Keys) -> MakeWorker:
    def make(name: str = "w", *, lease_s: float = 60.0) -> WorkerStream:
        return WorkerStream(worker_client, keys, worker=name, lease_s=lease_s, give_up_after_s=5.0)

    return make


@pytest.fixture
def worker(make_worker: MakeWorker) -> WorkerStream:
    return make_worker()


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    """A road to the server that a test may make bad."""
    with Proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
def make_world(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> MakeWorld:
    """A run of doubles' workers and a learner's own half of the stream, by sections of its configuration."""

    def make(**sections: dict[str, Any]) -> RunWorld:
        return RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url, **sections)

    return make


@pytest.fixture
def run(make_world: MakeWorld) -> Watched:
    """That run, as monitors see it."""
    return Watched(make_world())


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server that wants a password."""
    tmp_path = tmp_path_factory.mktemp("guarded")
    users = tmp_path / "users.acl"
    users.write_text(f"user part on >{SECRET} ~* +@all\nuser default off\n")
    with serve(tmp_path, config=f"aclfile {users}\n") as server:
        wait_until(lambda: answers(server.port), description="the guarded server answers")
        yield server
