"""What judged runs lean on: a server that returns to what it was, a road with TLS, a recorder that misses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from streamrl.config import schema
from streamrl.protocol.transport.acl import rules
from streamrl.protocol.transport.clients import open_client
from streamrl.protocol.transport.connection import connect
from tests.faults.judge.recorder import GROUPS, TICKETS, Recorder, look
from tests.faults.judged.server import ADMIN, MortalRedis
from tests.faults.judged.tls import TlsRoad
from tests.helpers import wait_until

RUN = "run"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MortalRedis]:
    users = [f"user worker on >secret {rules('worker', run=RUN)}"]
    server = MortalRedis(tmp_path / "redis", users=users)
    yield server
    server.kill()


def add(server: MortalRedis, kind: str, number: int) -> None:
    with server.client() as client:
        client.xadd(f"streamrl:{{{RUN}}}:{kind}:train", {"n": str(number), "u": "uid"})


def numbers(server: MortalRedis) -> frozenset[int]:
    with server.client() as client:
        return look(client, RUN, "uid").tickets


def test_a_server_that_is_put_back_knows_what_it_knew_then(server: MortalRedis) -> None:
    add(server, TICKETS, 1)
    older = server.copy()
    add(server, TICKETS, 2)
    newer = server.copy()
    server.put_back(older)
    assert numbers(server) == {1}
    add(server, TICKETS, 3)
    server.put_back(newer)
    assert numbers(server) == {1, 2}


def test_what_was_written_since_a_moment_is_lost_with_the_file_s_tail(server: MortalRedis) -> None:
    add(server, TICKETS, 1)
    sizes = server.sizes()
    add(server, TICKETS, 2)
    server.kill()
    server.cut(sizes)
    server.start()
    assert numbers(server) == {1}


def test_every_entry_that_ever_lay_there_is_recorded_once_whatever_becomes_of_the_server(
    server: MortalRedis, tmp_path: Path
) -> None:
    recorder = Recorder(server.client, RUN, to=tmp_path / "seen")
    add(server, TICKETS, 0)
    recorder.start()
    wait_until(lambda: len(recorder.record.seen) == 1, description="the first entry")
    older = server.copy()
    add(server, GROUPS, 1)
    wait_until(lambda: len(recorder.record.seen) == 2, description="the second entry")
    recorder.note("older copy")
    server.put_back(older)
    add(server, TICKETS, 2)
    wait_until(lambda: len(recorder.record.seen) == 3, description="an entry of the older copy")
    with server.client() as client:
        client.flushall()
    add(server, GROUPS, 3)
    wait_until(lambda: len(recorder.record.seen) == 4, description="an entry after all were deleted")
    record = recorder.stop()
    assert record.eras == ["begin", "older copy"]
    assert [(seen.kind, seen.fields[b"n"], seen.eras) for seen in record.seen.values()] == [
        (TICKETS, b"0", [0, 1]),
        (GROUPS, b"1", [0]),
        (TICKETS, b"2", [1]),
        (GROUPS, b"3", [1]),
    ]


def test_of_a_server_that_is_held_everything_is_seen_before_it_dies(server: MortalRedis, tmp_path: Path) -> None:
    recorder = Recorder(server.client, RUN, to=tmp_path / "seen")
    recorder.start()
    with server.client() as client, client.pipeline(transaction=False) as many:
        for number in range(2000):
            many.xadd(f"streamrl:{{{RUN}}}:{GROUPS}:train", {"n": str(number), "u": "uid"})
        many.execute()
    server.hold()
    client = redis.Redis(unix_socket_path=str(server.socket), username=ADMIN, socket_timeout=0.2, retry=None)
    with client, pytest.raises(redis.TimeoutError):
        client.set("anything", "new")
    assert recorder.catch_up()
    assert len(recorder.record.seen) == 2000
    server.kill()
    assert not recorder.catch_up(0.5)
    recorder.stop()


def test_a_role_speaks_tls_and_is_held_to_its_rights(
    server: MortalRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_REDIS_PASSWORD", "secret")
    with TlsRoad(server.socket, tmp_path) as road:
        with connect(road.url_of("worker"), schema.Redis()) as client:
            assert client.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.flushall()
        unchecked = road.url_of("worker").partition("?")[0]
        with open_client(unchecked, socket_timeout=5.0) as client, pytest.raises(redis.ConnectionError):
            client.ping()
