"""A master that sentinels have replaced, and that still takes writes: it slept, and nobody has told it yet."""

from __future__ import annotations

import asyncio
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.entries import PagedReader
from tests.helpers import wait_until, wait_until_async
from tests.redis.server_program import SETTINGS, answers, serve


class SentinelDouble(socketserver.ThreadingTCPServer):
    """Says which server is the master, and does nothing about it."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, master: int) -> None:
        self.master, self.num_asked = master, 0
        super().__init__(("127.0.0.1", 0), _Answers)

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.server_address[1]}/run"

    def reply_to(self, words: list[bytes]) -> bytes:
        if [word.upper() for word in words] != [b"SENTINEL", b"MASTERS"]:
            return b"+OK\r\n"
        self.num_asked += 1
        known = {"name": "run", "ip": "127.0.0.1", "port": self.master, "flags": "master", "num-other-sentinels": 2}
        parts = [str(part) for pair in known.items() for part in pair]
        packed = "".join(f"${len(part)}\r\n{part}\r\n" for part in parts)
        return f"*1\r\n*{len(parts)}\r\n{packed}".encode()


class _Answers(socketserver.StreamRequestHandler):
    server: SentinelDouble

    def handle(self) -> None:
        while head := self.rfile.readline():
            words = []
            for _ in range(int(head[1:])):
                length = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(length + 2)[:-2])
            self.wfile.write(self.server.reply_to(words))


@contextmanager
def sentinel_of(master: int) -> Iterator[SentinelDouble]:
    with SentinelDouble(master) as sentinel:
        thread = threading.Thread(target=sentinel.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield sentinel
        finally:
            sentinel.shutdown()
            thread.join(10.0)


@pytest.fixture
def masters(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Ports of two servers, each of which takes writes."""
    with serve(tmp_path) as old, serve(tmp_path) as new:
        for server in (old, new):
            wait_until(lambda server=server: answers(server.port), description="the server answers")
        yield old.port, new.port


def port_of(client: redis.Redis) -> int:
    return int(client.info("server")["tcp_port"])


def test_a_client_leaves_a_master_that_was_replaced_though_it_still_takes_writes(masters: tuple[int, int]) -> None:
    old, new = masters
    with sentinel_of(old) as sentinel, connect(sentinel.url, SETTINGS) as client:
        assert port_of(client) == old
        sentinel.master = new
        wait_until(lambda: port_of(client) == new, description="the client is at the new master")


async def test_a_workers_client_leaves_it_too_with_all_its_connections(masters: tuple[int, int]) -> None:
    old, new = masters
    with sentinel_of(old) as sentinel:
        async with connect_async(sentinel.url, SETTINGS) as client:
            waits = asyncio.create_task(client.xread({"tickets": "$"}, block=2000))
            assert (await client.info("server"))["tcp_port"] == old
            sentinel.master = new

            async def all_moved() -> bool:
                found = await asyncio.gather(*(client.info("server") for _ in range(3)))
                return {info["tcp_port"] for info in found} == {new}

            await wait_until_async(all_moved, description="the worker is at the new master")
            assert not await waits
            await wait_until_async(all_moved, description="and so is who waited meanwhile")


def test_a_reader_with_a_connection_of_its_own_finds_what_is_written_there(masters: tuple[int, int]) -> None:
    old, new = masters
    with sentinel_of(old) as sentinel, connect(sentinel.url, SETTINGS) as client:
        reader = PagedReader(client, "groups")
        assert reader.read(after="0-0", count=1, block_ms=10) == []
        sentinel.master = new
        with redis.Redis(port=new, protocol=2) as there:
            there.xadd("groups", {"n": 1})
        wait_until(lambda: reader.read(after="0-0", count=1, block_ms=10), description="the reader has moved")
        reader.forget()


def test_a_client_stays_where_it_is_while_no_sentinel_answers_and_waits_for_none(masters: tuple[int, int]) -> None:
    old, _ = masters
    with sentinel_of(old) as sentinel, connect(sentinel.url, SETTINGS) as client:
        assert client.set("x", 1)
        until = time.monotonic() + 1.2  # when they are due to be asked again
        sentinel.reply_to = lambda words: b"-ERR not now\r\n"  # type: ignore[method-assign]
        wait_until(lambda: time.monotonic() > until, description="they are asked again")
        assert client.get("x") == b"1"


def test_sentinels_are_asked_about_once_a_second_and_not_before_each_command(masters: tuple[int, int]) -> None:
    old, _ = masters
    with sentinel_of(old) as sentinel, connect(sentinel.url, SETTINGS) as client:
        began = time.monotonic()
        for number in range(300):
            client.set("x", number)
        assert sentinel.num_asked <= 3 + (time.monotonic() - began)
