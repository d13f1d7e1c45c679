"""Who we are to a Redis: passwords from files, the environment and URLs, and what the refused are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from streamrl.errors import ConfigError, ResourceError
from streamrl.ops.cli.main import main
from streamrl.protocol.transport.address import PASSWORD
from streamrl.protocol.transport.clients import open_client, server_name
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from tests.redis.server_program import SECRET, SETTINGS, Guarded


async def test_a_password_comes_from_a_file_named_in_the_environment(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    monkeypatch.setenv(f"{PASSWORD}_FILE", str(file))
    with connect(guarded.url, SETTINGS) as client:
        assert client.execute_command("ACL", "WHOAMI") == b"part"
        assert SECRET not in server_name(client)
    async with connect_async(guarded.url, SETTINGS) as client:
        assert await client.execute_command("ACL", "WHOAMI") == b"part"


async def test_a_password_is_read_for_each_connection_so_that_it_may_change(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET)
    monkeypatch.setenv(f"{PASSWORD}_FILE", str(file))
    with connect(guarded.url, SETTINGS) as client, redis.Redis.from_url(guarded.url, password=SECRET) as admin:
        async with connect_async(guarded.url, SETTINGS) as beside:
            assert await beside.ping()
            admin.execute_command("ACL", "SETUSER", "part", ">another")
            file.write_text(f"another\n{SECRET}\n")  # the first is given, both are good
            admin.execute_command("ACL", "SETUSER", "part", f"<{SECRET}")
            try:
                client.connection_pool.disconnect()
                assert client.ping()
                await beside.connection_pool.disconnect()
                assert await beside.ping()
                file.write_text("")  # somebody writes it just now
                client.connection_pool.disconnect()
                assert client.ping()
            finally:
                admin.execute_command("ACL", "SETUSER", "part", f">{SECRET}", "<another")


def test_a_password_may_stand_in_the_environment_or_in_the_url(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(guarded.url.replace("part@", "part:s3cret%2Fwith%3Asigns%40@"), SETTINGS) as client:
        assert client.ping()
    monkeypatch.setenv(PASSWORD, SECRET)
    with connect(guarded.url, SETTINGS) as client:
        assert client.ping()


def test_who_is_refused_learns_where_a_password_goes(guarded: Guarded) -> None:
    for url in (guarded.url, guarded.url.replace("part@", ""), guarded.url.replace("part@", "part:wrong@")):
        with pytest.raises(ResourceError, match=f"{PASSWORD}_FILE") as caught:
            connect(url, SETTINGS)
        assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
        with pytest.raises(ResourceError, match=f"{PASSWORD}_FILE"):  # at once, for no waiting changes it
            connect(url, SETTINGS, patience_s=600.0)


def test_who_is_refused_on_a_socket_learns_that_only_a_user_has_a_password_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD, SECRET)
    server = EmbeddedRedis.start(tmp_path / "redis")
    try:
        with connect(server.url, SETTINGS) as client:
            client.config_set("requirepass", SECRET)
        with pytest.raises(ResourceError, match="without a user in the URL, no password is sent") as caught:
            connect(server.url, SETTINGS)
        assert "unix://default@/PATH" in str(caught.value)
        with connect(server.url.replace("unix://", "unix://default@"), SETTINGS) as client:
            assert client.ping()
    finally:
        server.stop()


def test_a_file_of_a_password_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{PASSWORD}_FILE = '/nowhere': cannot read"):
        open_client("redis://h", environment={f"{PASSWORD}_FILE": "/nowhere"})
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="the file is empty"):
        open_client("redis://h", environment={f"{PASSWORD}_FILE": str(tmp_path / "empty")})


def test_the_embedded_server_is_not_offered_a_password(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, SECRET)
    with connect(redis_url, SETTINGS) as client:
        assert client.ping()


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+sentinel"])
def test_a_configuration_with_a_password_is_refused_without_showing_it(
    scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{scheme}://part:hunter2@host:1/service"
    words = ["model.path=x", "data.train=x", "data.validation=x", f"redis.url={url}"]
    assert main(["config", "check", "conf/reinforce.yaml", *words]) == 2
    told = capsys.readouterr().err
    assert f"{PASSWORD}_FILE" in told
    assert "part:***@host" in told
    assert "hunter2" not in told
