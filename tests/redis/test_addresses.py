"""Where a Redis is and who we are to it: passwords outside of URLs, TLS, and a server that sentinels find."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamrl.config import schema
from streamrl.errors import ConfigError, ResourceError
from streamrl.ops.cli.main import main
from streamrl.process import free_port
from streamrl.protocol.transport.acl import SERVERS
from streamrl.protocol.transport.address import PASSWORD, SENTINEL_PASSWORD, masked, split_password
from streamrl.protocol.transport.clients import open_client, server_name
from streamrl.protocol.transport.connection import connect, connect_async, repeat, repeat_async
from streamrl.protocol.transport.embedded import EmbeddedRedis, find_server
from streamrl.protocol.transport.entries import PagedReader
from streamrl.tasks import cancel_all, close_server
from tests.helpers import wait_until
from tests.redis.two_servers import TwoServers

SETTINGS = schema.Redis(connect_timeout_s=2.0, reply_timeout_s=5.0)
SECRET = "s3cret/with:signs@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A server that knows only the user `part`."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://part@127.0.0.1:{self.port}"


@contextlib.contextmanager
def serve(folder: Path, *words: str, config: str = "") -> Iterator[Guarded]:
    """The server program on a port of its own, as it is told; gone with the context."""
    port = free_port("127.0.0.1")
    file = folder / f"{port}.conf"
    file.write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\nsave ''\n{config}")
    process = subprocess.Popen([str(find_server()), str(file), *words], stdout=subprocess.DEVNULL)
    try:
        yield Guarded(port=port, process=process)
    finally:
        process.terminate()
        process.wait(10)


def answers(port: int) -> bool:
    at_once = Retry(NoBackoff(), 0)
    with contextlib.suppress(redis.ConnectionError), redis.Redis(port=port, protocol=2, retry=at_once) as client:
        with contextlib.suppress(redis.AuthenticationError):
            client.ping()
        return True
    return False


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    tmp_path = tmp_path_factory.mktemp("guarded")
    users = tmp_path / "users.acl"
    users.write_text(f"user part on >{SECRET} ~* +@all\nuser default off\n")
    with serve(tmp_path, config=f"aclfile {users}\n") as server:
        wait_until(lambda: answers(server.port), description="the guarded server answers")
        yield server


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


# TLS. The server that comes with the tests is built without it: a proxy in front of it speaks TLS instead.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, public = folder / "key.pem", folder / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        *names,
    ]
    subprocess.run([*make, "-keyout", key, "-out", public], check=True, capture_output=True, timeout=240)
    return key, public


@pytest.fixture
def tls_port(certificate: tuple[Path, Path], redis_server: EmbeddedRedis) -> Iterator[int]:
    key, public = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, key)
    path = redis_server.url.removeprefix("unix://")
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # a client that refuses the certificate is what a test wants

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
            sink.close()
        except (OSError, asyncio.CancelledError):
            sink.transport.abort()

    async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    server = loop.run_until_complete(asyncio.start_server(through, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, name="tls proxy")
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()

    async def end() -> None:
        await close_server(server)
        await cancel_all(list(asyncio.all_tasks() - {asyncio.current_task()}))
        await asyncio.sleep(0)  # the loop closes the sockets of closed writers in its next turn

    loop.run_until_complete(end())
    loop.close()


async def test_tls_checks_the_server_against_the_authority_that_the_url_names(
    tls_port: int, certificate: tuple[Path, Path]
) -> None:
    url = f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={certificate[1]}"
    with connect(url, SETTINGS) as client:
        assert client.ping()
    async with connect_async(url, SETTINGS) as client:
        assert await client.ping()


def test_tls_that_does_not_work_says_what_would(tls_port: int, guarded: Guarded) -> None:
    settings = schema.Redis(connect_timeout_s=3.0, reply_timeout_s=0.3)
    with pytest.raises(ResourceError, match="ssl_ca_certs=FILE"):
        connect(f"rediss://127.0.0.1:{tls_port}", settings)
    with pytest.raises(ResourceError, match="check TLS, which only one side may be using"):
        connect(f"rediss://127.0.0.1:{guarded.port}", settings)
    with pytest.raises(ResourceError, match="ssl_ca_certs=FILE"):
        connect(f"rediss://127.0.0.1:{tls_port}", settings, patience_s=0.3)


# Sentinels


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
