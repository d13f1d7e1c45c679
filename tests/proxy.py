"""A proxy before Redis that makes the network bad: lost replies, latency, and roads on which nothing moves."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Link:
    """A client's connection, and ours to the server in its name."""

    client: socket.socket
    server: socket.socket
    doomed: threading.Event = field(default_factory=threading.Event)  # it breaks in place of the next reply


class Proxy:
    """Listens on a unix socket of its own, before a server at a unix or TCP address.

    - `drop_reply_to(word)`: the connection breaks instead of bringing the reply to the next request with this word; the
      server did what it was told, and the client never learns of it.
    - `loss`: the share of all replies to which that happens, by chance.
    - `delay_s`: what each way of each message takes longer.
    - `blackhole()`: connections stay, new ones are accepted, and nothing moves on any of them.
    """

    def __init__(self, upstream_url: str, *, seed: int = 0) -> None:
        self.loss = 0.0
        self.delay_s = 0.0
        self.num_dropped = 0  # replies
        self.num_connections = 0
        self._upstream = upstream_url
        self._random = random.Random(seed)
        self._folder = Path(tempfile.mkdtemp(prefix="proxy-"))
        self._lock = threading.Lock()
        self._words: list[bytes] = []
        self._links: list[_Link] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._road_is_open = threading.Event()
        self._road_is_open.set()
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        return f"unix://{self._folder / 'redis.sock'}"

    def drop_reply_to(self, word: bytes, *, times: int = 1) -> None:
        with self._lock:
            self._words.extend([word] * times)

    def break_connections(self) -> None:
        """Every open connection ends, as when the server is replaced."""
        with self._lock:
            for link in self._links:
                _end(link.client, link.server)
            self._links.clear()

    @contextmanager
    def blackhole(self) -> Iterator[None]:
        self._road_is_open.clear()
        try:
            yield
        finally:
            self._road_is_open.set()

    def __enter__(self) -> Self:
        self._listener.bind(os.fspath(self._folder / "redis.sock"))
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="proxy accepts", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._road_is_open.set()
        _end(self._listener)
        self.break_connections()
        shutil.rmtree(self._folder)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    link = _Link(client, _connect(self._upstream))
                except OSError:  # no server there just now: so the client shall see it
                    _end(client)
                    continue
                with self._lock:
                    self._links.append(link)
                    self.num_connections += 1
                for pump in (self._requests, self._replies):
                    threading.Thread(target=pump, args=(link,), name=f"proxy {pump.__name__}", daemon=True).start()

    def _requests(self, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.client.recv(_CHUNK_BYTES):
                if self._is_doomed(data):
                    link.doomed.set()
                self._travel()
                link.server.sendall(data)
        _end(link.client, link.server)

    def _replies(self, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.server.recv(_CHUNK_BYTES):
                if link.doomed.is_set() or self._random.random() < self.loss:
                    with self._lock:
                        self.num_dropped += 1
                    break
                self._travel()
                link.client.sendall(data)
        _end(link.client, link.server)

    def _is_doomed(self, data: bytes) -> bool:
        with self._lock:
            word = next((word for word in self._words if word in data), None)
            if word is not None:
                self._words.remove(word)
        return word is not None

    def _travel(self) -> None:
        self._closed.wait(self.delay_s)
        self._road_is_open.wait()


def _connect(url: str) -> socket.socket:
    where = urlsplit(url)
    if where.scheme == "unix":
        server = socket.socket(socket.AF_UNIX)
        server.connect(where.path)
        return server
    return socket.create_connection((where.hostname, where.port))


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
