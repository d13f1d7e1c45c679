"""Servers that close in the very turn in which somebody connects: each accepted connection is ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette

from streamrl.process import bind, parse_address
from streamrl.telemetry.progress import Progress
from streamrl.web import Server
from streamrl.workers.hosts.first import Hosts, open_hosts

TURNS = 8  # of the loop; an accepted connection needs three until its protocol has it


@contextlib.asynccontextmanager
async def hosts() -> AsyncIterator[tuple[str, int]]:
    progress = Progress(part="worker/0", role="worker")
    waiting = Hosts(num=2, secret=b"secret", run_uid="run", progress=progress, start_timeout_s=1.0)
    async with open_hosts(waiting, ("127.0.0.1", 0)):
        yield parse_address(waiting.address, what="first")


@contextlib.asynccontextmanager
async def web() -> AsyncIterator[tuple[str, int]]:
    bound = bind("127.0.0.1", 0, what="the page")
    server = Server(Starlette(), timeout_graceful_shutdown=1)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[bound])
    yield bound.getsockname()[:2]
    await server.shutdown(sockets=[bound])


@pytest.mark.parametrize("open_server", [hosts, web])
@pytest.mark.parametrize("turns", range(TURNS))
def test_who_connects_while_a_server_closes_is_closed_too(open_server: object, turns: int) -> None:
    async def connect() -> bytes:
        with socket.socket() as client:
            async with open_server() as address:
                client.connect(address)
                for _ in range(turns):
                    await asyncio.sleep(0)
            client.settimeout(5)
            try:
                return client.recv(1)
            except ConnectionResetError:  # it was not accepted any more
                return b""

    gc.collect()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        answer = asyncio.run(connect())
        gc.collect()
    assert [str(one.message) for one in warned if one.category is ResourceWarning] == []
    assert answer in (b"", b"{")  # the first host's greeting
