"""A Redis that sentinels find, and find again when they have made another server the master."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from streamrl.config import schema
from streamrl.errors import ConfigError, ResourceError
from streamrl.protocol.transport.acl import SERVERS
from streamrl.protocol.transport.address import SENTINEL_PASSWORD
from streamrl.protocol.transport.clients import server_name
from streamrl.protocol.transport.connection import connect, connect_async, repeat
from streamrl.protocol.transport.entries import PagedReader
from tests.helpers import wait_until
from tests.redis.server_program import SETTINGS, answers, serve

_WATCH = """sentinel monitor run 127.0.0.1 {port} 1
sentinel auth-user run sentinel
sentinel auth-pass run of-sentinel
sentinel down-after-milliseconds run 60000
sentinel failover-timeout run 10000
requirepass of-sentinel
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A master, and a sentinel that decides alone, under the users that `streamrl redis acl` has for them."""

    url: str
    users: str  # of its servers, a line of their configuration
    master: int
    sentinel: int


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv(SENTINEL_PASSWORD, "of-sentinel")
    file = tmp_path / "users.acl"
    lines = [f"user {name} on >of-{name} {granted}" for name, granted in SERVERS.items()]
    file.write_text("\n".join([*lines, "user default on nopass ~* &* +@all"]))
    users = f"aclfile {file}\n"
    with serve(tmp_path, config=users) as master:
        wait_until(lambda: answers(master.port), description="the master answers")
        with serve(tmp_path, "--sentinel", config=_WATCH.format(port=master.port)) as sentinel:
            wait_until(lambda: answers(sentinel.port), description="the sentinel answers")
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/run"
            yield Service(url=url, users=users, master=master.port, sentinel=sentinel.port)


async def test_a_sentinel_url_finds_the_master(service: Service) -> None:
    with connect(service.url, SETTINGS) as client:
        assert server_name(client) == "service run of its sentinels"
        assert client.info()["tcp_port"] == service.master
        client.set("x", 1)
        ids = [client.xadd("groups", {"n": number}) for number in range(2)]
        reader = PagedReader(client, "groups")  # on a connection of its own
        for after, found in zip(("0-0", ids[0].decode()), ids, strict=True):
            assert [entry_id for entry_id, _ in reader.read(after=after, count=1, block_ms=None)] == [found]
        reader.forget()
    async with connect_async(service.url, SETTINGS) as other:
        assert await other.get("x") == b"1"


def asked_to_move(sentinel: redis.Redis) -> bool:
    with contextlib.suppress(redis.ResponseError):  # NOGOODSLAVE: not yet
        sentinel.execute_command("SENTINEL", "FAILOVER", "run")
        return True
    return False


@pytest.mark.long
def test_a_client_follows_when_sentinels_make_another_master(service: Service, tmp_path: Path) -> None:
    follows = f"replicaof 127.0.0.1 {service.master}\nmasteruser replica\nmasterauth of-replica\n"
    with (
        serve(tmp_path, config=service.users + follows) as replica,
        connect(service.url, SETTINGS) as client,
        redis.Redis(port=service.sentinel, password="of-sentinel", protocol=2) as sentinel,
    ):
        client.set("before", 1)
        wait_until(lambda: client.wait(1, 100), description="the replica has it", timeout_s=240)
        wait_until(
            lambda: sentinel.execute_command("SENTINEL", "REPLICAS", "run"),
            description="the sentinel knows the replica",
            timeout_s=30.0,
        )
        wait_until(lambda: asked_to_move(sentinel), description="the sentinel takes the replica for fit", timeout_s=240)

        def moved() -> bool:
            info = repeat(client, "answer", client.info, give_up_after_s=20.0)
            return bool(info["tcp_port"] == replica.port and info["role"] == "master")

        wait_until(moved, description="the client is at the new master", timeout_s=240)
        repeat(client, "write", lambda: client.set("after", 1), give_up_after_s=20.0)
        assert client.mget("before", "after") == [b"1", b"1"]
        for port in (service.master, replica.port):
            with redis.Redis(port=port, protocol=2) as admin:
                assert [(entry["username"], entry["object"]) for entry in admin.acl_log()] == []


def test_a_service_that_cannot_be_found_is_one_clear_error() -> None:
    settings = schema.Redis(connect_timeout_s=0.3)
    with pytest.raises(ResourceError, match="Its sentinels must run and know the service"):
        connect("redis+sentinel://127.0.0.1:1/other", settings)
    wrong = ("redis+sentinel://host:1", "redis+sentinel:///run", "redis+sentinel://host:port/run", "redis://host/one")
    for url in wrong:
        with pytest.raises(ConfigError, match=r"redis\.url"):
            connect(url, settings)
