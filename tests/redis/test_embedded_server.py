"""The private server: starts, keeps its data, ends with its parent, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, ResourceError, TransportError
from streamrl.protocol.transport.address import PASSWORD, has_secret, masked
from streamrl.protocol.transport.clients import open_async_client, open_client, server_name
from streamrl.protocol.transport.connection import check_server, connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis, find_server, serving
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.types import START
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.group import encode_group
from tests.helpers import make_group, make_ticket, wait_until

SETTINGS = schema.Redis(connect_timeout_s=1.0, reply_timeout_s=5.0)


def gone(pid: int) -> bool:
    """Neither running nor waiting to be buried by us."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:  # also one that is buried while it is read (ESRCH)
        return True


def test_data_outlives_the_server_and_the_url_stays(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as first, connect(first.url, SETTINGS) as client:
        client.set("kept", "yes")
        url, pid = first.url, first.pid
    assert gone(pid)
    assert not (tmp_path / "redis.sock").exists()
    with EmbeddedRedis.start(tmp_path) as second, connect(url, SETTINGS) as client:
        assert client.get("kept") == b"yes"
        assert second.url == url


def test_the_server_is_private_durable_and_never_evicts(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as server, connect(server.url, SETTINGS) as client:
        check_server(client)
        wanted = {"port": "0", "appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        client.set("secret", "of the hosts")
        assert (tmp_path / "redis.sock").stat().st_mode & 0o777 == 0o700
        written = [path for path in (tmp_path / "appendonlydir").rglob("*") if path.is_file()]
        assert written
        assert {path.stat().st_mode & 0o077 for path in [*written, tmp_path / "appendonlydir"]} == {0}


def test_a_deep_folder_gets_a_short_socket_path_that_is_removed(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a" * 40] * 4, "with space")
    with EmbeddedRedis.start(deep) as server, connect(server.url, SETTINGS) as client:
        socket = Path(server.url.removeprefix("unix://"))
        assert len(os.fsencode(socket)) < 100
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert client.ping()
    assert not socket.parent.exists()
    assert (deep / "redis.log").exists()


@pytest.mark.parametrize("name", ["a#b", "a?b=c", "a%41b", "me@here", "a:b@c", "a b'c\"d", "größe"])
async def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    password = {PASSWORD: "meant for another server"}
    with EmbeddedRedis.start(folder) as server:
        assert serving(folder) == server.url
        assert masked(server.url) == server.url
        assert not has_secret(server.url)
        with open_client(server.url, environment=password, protocol=2) as client:
            assert client.ping()
            assert server_name(client) == f"unix://{folder.resolve()}/redis.sock"
        async with open_async_client(server.url, environment=password, protocol=2) as client:
            assert await client.ping()
    assert serving(folder) is None


def test_an_at_sign_in_the_path_of_a_socket_is_no_user(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path / "me@here") as server:
        for path in (f"{tmp_path.resolve()}/me@here", f"{tmp_path.resolve()}/me%40here"):
            with open_client(f"unix://{path}/redis.sock", environment={PASSWORD: "for another"}, protocol=2) as client:
                assert client.ping()
    assert not server.running


def test_a_second_server_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as server:
        with pytest.raises(ResourceError, match="already serves"):
            EmbeddedRedis.start(tmp_path, lock_timeout_s=0.1)
        assert server.running


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from streamrl.protocol.transport.embedded import EmbeddedRedis;"
        "server = EmbeddedRedis.start(pathlib.Path(sys.argv[1])); print(server.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: gone(pid), description="the server follows its parent")
    wait_until(lambda: not (tmp_path / "redis.sock").exists(), description="its socket is removed")
    with EmbeddedRedis.start(tmp_path) as again:  # and the folder is free for the next
        assert again.running


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as server:
        assert os.getpgid(server.pid) != os.getpgid(0)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("a file where a folder must be")
    (tmp_path / "appendonly.aof").mkdir()
    with pytest.raises(ResourceError, match=r"embedded Redis .*redis\.log"):
        EmbeddedRedis.start(tmp_path, ready_timeout_s=5.0)
    assert not (tmp_path / "redis.sock").exists()


_LOADS = """#!{python} -IS
import socket, sys, time
path, began = sys.argv[sys.argv.index("--unixsocket") + 1], time.monotonic()
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
while True:
    connection, _ = server.accept()
    with connection:
        while asked := connection.recv(4096):
            is_loading = time.monotonic() < began + {loads_s}
            answer = b"-LOADING Redis is loading the dataset in memory\\r\\n" if is_loading else {then!r}
            connection.sendall(b"+OK\\r\\n" * asked.count(b"SETINFO") + answer * asked.count(b"PING"))
            if not answer:
                break
"""


def loading_server(folder: Path, *, loads_s: float, then: bytes) -> str:
    """The PATH of a server that loads for so long before it answers this."""
    folder.mkdir()
    program = folder / "redis-server"
    program.write_text(_LOADS.format(python=sys.executable, loads_s=loads_s, then=then))
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_a_server_that_reads_a_long_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", loading_server(tmp_path / "bin", loads_s=3.0, then=b"+PONG\r\n"))
    with EmbeddedRedis.start(tmp_path / "redis", ready_timeout_s=2.0) as server:
        assert server.running


def test_a_server_that_says_nothing_any_more_while_it_reads_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", loading_server(tmp_path / "bin", loads_s=0.5, then=b""))
    with pytest.raises(ResourceError, match=r"the embedded Redis did not answer for 2 s"):
        EmbeddedRedis.start(tmp_path / "redis", ready_timeout_s=2.0)


def test_the_server_on_the_path_is_preferred(tmp_path: Path) -> None:
    assert find_server(which=lambda name: f"/somewhere/{name}") == Path("/somewhere/redis-server")
    assert find_server(which=lambda name: None).is_file()


async def test_a_run_goes_on_after_the_server_was_killed(tmp_path: Path) -> None:
    keys = Keys("x")
    server = EmbeddedRedis.start(tmp_path)
    try:
        with connect(server.url, SETTINGS) as client:
            async with connect_async(server.url, SETTINGS) as async_client:
                learner = LearnerStream(client, keys, run_uid="uid", term=1, holder="job", lease_s=30.0)
                learner.claim(config_json="{}", fingerprint="model", wait_s=0.0)
                learner.restore(cursor=START)
                learner.issue([make_ticket(0), make_ticket(1)])
                worker = WorkerStream(async_client, keys, worker="w", lease_s=30.0)
                first, second = await worker.lease(max_tickets=2, block_ms=0)
                assert await worker.deliver(first, *encode_group(make_group(first.ticket)))
                assert not learner.disturbed

                os.kill(server.pid, signal.SIGKILL)
                wait_until(lambda: not server.running, description="the server is dead")
                server.stop()
                server = EmbeddedRedis.start(tmp_path)

                learner.renew()
                assert learner.disturbed
                assert await worker.renew([second]) == []
                assert await worker.deliver(second, *encode_group(make_group(second.ticket)))
                learner.restore(cursor=START)
                assert not learner.disturbed
                assert [group.number for group in learner.present_groups("train", after=START)] == [0, 1]
    finally:
        server.stop()


def test_a_server_that_is_replaced_between_two_calls_is_noticed(tmp_path: Path) -> None:
    """No call fails: the pool reconnects silently, and only the server's run id tells."""
    keys = Keys("x")
    with EmbeddedRedis.start(tmp_path) as server, connect(server.url, SETTINGS) as client:
        learner = LearnerStream(client, keys, run_uid="uid", term=1, holder="job", lease_s=30.0)
        learner.claim(config_json="{}", fingerprint="model", wait_s=0.0)
        server.stop()
        with EmbeddedRedis.start(tmp_path):
            client.connection_pool.disconnect()
            learner.renew()
            assert learner.disturbed


def test_a_server_that_does_not_answer_is_one_clear_error(tmp_path: Path) -> None:
    settings = schema.Redis(connect_timeout_s=0.2)
    with pytest.raises(ResourceError, match=r"Redis at unix:///.*/nobody\.sock could not answer.*redis\.url"):
        connect(f"unix://{tmp_path}/nobody.sock", settings)
    with pytest.raises(ResourceError, match=r"Redis at localhost:1/0 could not answer") as caught:
        connect("redis://user:secret@localhost:1/0", settings)
    assert "secret" not in str(caught.value)


def test_a_server_that_was_there_before_is_waited_for_and_then_away(tmp_path: Path) -> None:
    settings = schema.Redis(connect_timeout_s=0.05)
    with pytest.raises(TransportError, match=r"nobody\.sock could not answer within 0\.2 s"):
        connect(f"unix://{tmp_path}/nobody.sock", settings, patience_s=0.2)
    with ThreadPoolExecutor(max_workers=1) as thread:
        connecting = thread.submit(connect, f"unix://{tmp_path.resolve()}/redis.sock", settings, patience_s=30.0)
        wait_until(lambda: connecting.running(), description="it tries")
        with EmbeddedRedis.start(tmp_path), connecting.result(timeout=240) as client:
            assert client.ping()


def test_a_url_that_is_none_is_one_clear_error_without_its_password() -> None:
    for url in ("http://user:secret@host:1", "embedded", "redis://user:secret@host:port"):
        with pytest.raises(ConfigError, match=r"redis\.url") as caught:
            connect(url, SETTINGS)
        assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"redis\.url"):
        connect_async("embedded", SETTINGS)


async def test_a_server_that_would_evict_is_refused(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as server, connect(server.url, SETTINGS) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        check_server(client)  # without a limit nothing is evicted
        client.config_set("maxmemory", 100 << 20)
        with pytest.raises(ResourceError, match="allkeys-lru"):
            check_server(client)
        async with connect_async(server.url, SETTINGS) as async_client:
            assert server_name(async_client) == server_name(client) == server.url


def test_a_server_that_may_not_hold_the_backlog_is_refused(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as server, connect(server.url, SETTINGS) as client:
        check_server(client, max_backlog_bytes=1 << 40)
        client.config_set("maxmemory", 100 << 20)
        check_server(client, max_backlog_bytes=80 << 20)
        with pytest.raises(ResourceError, match=r"needs 104857601, a quarter more than the data;"):
            check_server(client, max_backlog_bytes=(80 << 20) + 1)
        with pytest.raises(ResourceError, match=r"redis\.max_backlog_bytes = 209715200.*104857600 bytes"):
            check_server(client, max_backlog_bytes=200 << 20)
        with pytest.raises(ResourceError, match=r"= 52428800 and weights\.max_store_bytes = 62914560"):
            check_server(client, max_backlog_bytes=50 << 20, max_store_bytes=60 << 20)
