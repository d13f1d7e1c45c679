"""The one way out of a process without a network: to its worker's endpoint, for it and for whatever it starts."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator

import pytest

from streamrl.workers.confined.door import Door

CHILD = """
import json, socket, subprocess, sys
from streamrl.workers.confined import confine, door

handed, port, other, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
confine.keep_apart()
door.shut_in(handed)
told = {}

def greet(address, family=socket.AF_INET, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as one:
        one.settimeout(30)
        one.connect(address)
        one.sendall(b"hello")
        return one.recv(100).decode()

def by_a_program(port):
    code = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); s.sendall(b'hello'); print(s.recv(9))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

def fast_open(port):
    with socket.socket() as one: return one.sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", port))

for name, attempt in {
    "endpoint": lambda: greet(("127.0.0.1", port)),
    "by a program": lambda: by_a_program(port),
    "another port": lambda: greet(("127.0.0.1", other)),
    "another host": lambda: greet(("192.0.2.1", port)),
    "a path": lambda: greet(path, socket.AF_UNIX),
    "datagrams": lambda: greet(("127.0.0.1", port), kind=socket.SOCK_DGRAM),
    "IPv6": lambda: greet(("::1", port), socket.AF_INET6),
    "fast open": lambda: fast_open(other),
    "another port by a program": lambda: by_a_program(other),
}.items():
    try: told[name] = attempt()
    except OSError as error: told[name] = error.errno
    except subprocess.CalledProcessError as error: told[name] = "not on the network" in error.stderr
print(json.dumps(told))
"""
REFUSED = 64  # ENONET


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[str, int]]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"well " + await reader.read(5))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()


async def tried(address: tuple[str, int] | None, port: int) -> dict[str, object]:
    door = Door(address)
    try:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as other:
            handed = door.theirs.fileno()
            words = [str(handed), str(port), str(other.sockets[0].getsockname()[1]), "/tmp/no.sock"]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CHILD, *words, pass_fds=(handed,), stdout=PIPE
            )
            out, _ = await asyncio.wait_for(process.communicate(), 60)
            return dict(json.loads(out))
    finally:
        door.close()


async def test_a_process_reaches_its_endpoint_and_nothing_else(endpoint: tuple[str, int]) -> None:
    told = await tried(endpoint, endpoint[1])
    assert (told.pop("endpoint"), told.pop("by a program")) == ("well hello", "b'well hell'\n")
    assert told.pop("another port by a program") is True
    assert set(told.values()) == {REFUSED}, told


async def test_while_there_is_no_endpoint_nothing_is_reached(endpoint: tuple[str, int]) -> None:
    told = await tried(None, endpoint[1])
    assert (told.pop("by a program"), told.pop("another port by a program")) == (True, True)
    assert set(told.values()) == {REFUSED}, told
