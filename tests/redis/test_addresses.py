"""Where a Redis is, as a URL says it: brackets, masked passwords, and connections to what it leads to."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.ops.cli.main import main
from streamrl.protocol.transport.address import PASSWORD, masked, split_password
from streamrl.protocol.transport.clients import open_client
from streamrl.protocol.transport.connection import connect, connect_async, repeat, repeat_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from tests.redis.server_program import SETTINGS
from tests.redis.two_servers import TwoServers


def test_a_url_is_taken_apart_and_masked() -> None:
    assert split_password("redis://u:p%40q@h:1/0?x=1") == ("redis://u@h:1/0?x=1", "p@q")
    assert split_password("redis://:p@h:1") == ("redis://h:1", "p")
    assert split_password("redis://u@h") == ("redis://u@h", None)
    assert masked("see redis://u:p@q@h:1 and redis://h:1") == "see redis://u:***@h:1 and redis://h:1"
    assert masked(f"worker.engine_args={{hf_token: hf_{'a1B2' * 8}}}") == "worker.engine_args={hf_token: hf_***}"


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel"])
@pytest.mark.parametrize("environment", [{}, {f"{PASSWORD}_FILE": "/secret"}])
def test_an_address_with_an_open_bracket_is_a_mistake_in_a_line(scheme: str, environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"'redis.*://\[::1:6379/x' is not a server address; must be redis://"):
        open_client(f"{scheme}://u:p@[::1:6379/x", environment=environment)


def test_commands_tell_of_an_open_bracket_too(capsys: pytest.CaptureFixture[str]) -> None:
    url, data = "redis://u:hunter2@[::1:6379", ["model.path=x", "data.train=x", "data.validation=x"]
    for command in (["learn", "conf/reinforce.yaml", *data, "--redis", url], ["status", "--redis", url, "--run", "x"]):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ")
        assert "must be redis://host:port/0" in told
        assert "hunter2" not in told


def test_what_is_large_is_written_to_the_server_as_it_is(redis_url: str) -> None:
    body = bytes(1 << 20)
    with connect(redis_url, SETTINGS) as client:
        pieces = client.connection_pool.make_connection().pack_command("SET", "body", body)
    assert any(piece is body for piece in pieces)


async def test_a_workers_unix_socket_has_room_for_a_whole_delivery(tmp_path: Path) -> None:
    allowed = min(1 << 20, int(Path("/proc/sys/net/core/wmem_max").read_text()))
    with EmbeddedRedis.start(tmp_path / "redis") as server:
        async with connect_async(server.url, SETTINGS) as client:
            assert await client.ping()
            connection = await client.connection_pool.get_connection()
            found = connection._writer.get_extra_info("socket")
            assert found.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * allowed, "the kernel doubles it"
            await client.connection_pool.release(connection)


async def test_a_primary_that_became_a_replica_is_left_for_the_one_that_its_address_leads_to(tmp_path: Path) -> None:
    """Its connections stay open, and each retry on them would be answered by READONLY again."""
    with TwoServers(tmp_path) as servers, connect(servers.url, SETTINGS) as client:
        async with connect_async(servers.url, SETTINGS) as async_client:
            assert client.set("x", 1)
            assert await async_client.set("x", 2)
            servers.admin.replicaof("127.0.0.1", "1")
            servers.fail_over({})
            assert repeat(client, "write", lambda: client.set("x", 3), give_up_after_s=5.0)
            assert await repeat_async(async_client, "write", lambda: async_client.set("y", 4), give_up_after_s=5.0)
            assert servers.admin.mget("x", "y") == [b"3", b"4"]
