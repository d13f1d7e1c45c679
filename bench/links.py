"""Simulated links: proxies on loopback addresses that limit bandwidth.

    client at 127.0.0.HOST ─► proxy ─► server          replies pass the server's link and the link of the client's host
                      ◄── link of that host ◄── link of the server ◄──

One thread with an event loop runs all of them. Connections on the same link share it, taking turns block by block.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_BLOCK_BYTES = 32 << 10
_ENDS_WITHIN_S = 10.0


class Link:
    """One direction of a network interface."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self.num_bytes = 0

    def pass_at(self, num_bytes: int) -> float:
        """Return when the last of these bytes gets through."""
        self.num_bytes += num_bytes
        self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_s
        return self._free_at


class Network:
    """Hosts are numbered by their addresses, 127.0.0.NUMBER."""

    def __init__(self, *, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._into: dict[str, Link] = {}  # one per receiving host
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []

    def add(self, host: str, upstream: str | tuple[str, int], link: Link) -> int:
        """Return the port of a proxy on this host to the server, whose replies pass `link`."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = writer.get_extra_info("peername")[0]
            into = self._into.setdefault(peer, Link(self.bytes_per_s))
            if isinstance(upstream, str):
                up_reader, up_writer = await asyncio.open_unix_connection(upstream)
            else:
                up_reader, up_writer = await asyncio.open_connection(*upstream)
            with contextlib.suppress(ConnectionError):
                tasks = [asyncio.create_task(_carry(reader, up_writer))]
                tasks.append(asyncio.create_task(_carry(up_reader, writer, link, into)))
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in tasks:
                        task.cancel()
            for end in (writer, up_writer):
                end.close()

        async def start() -> int:
            server = await asyncio.start_server(serve, host, 0, limit=_BLOCK_BYTES)
            self._servers.append(server)
            port: int = server.sockets[0].getsockname()[1]
            return port

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(_ENDS_WITHIN_S)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        thread.start()
        try:
            yield
        finally:
            for server in self._servers:
                self._loop.call_soon_threadsafe(server.close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(_ENDS_WITHIN_S)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *links: Link) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_BLOCK_BYTES):
            if links:
                await asyncio.sleep(max(link.pass_at(len(data)) for link in links) - time.monotonic())
            writer.write(data)
            await writer.drain()


def free_socket(host: str) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind((host, 0))
    return bound
