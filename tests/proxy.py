"""A proxy in front of Redis that degrades the network: lost replies, latency, and blocked connections."""

from __future__ import annotations

import contextlib
import os
import random
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
_CONNECTS_WITHIN_S = 5.0
_ENDS_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """A client's connection, and ours to the server on its behalf.

    Any thread may end it. The thread that carries it closes it once no other uses it: a descriptor closed while another
    thread reads from it may already be a new connection's.
    """

    client: socket.socket
    server: socket.socket
    doomed: threading.Event = field(default_factory=threading.Event)  # break it instead of sending the next reply

    def end(self) -> None:
        _end(self.client)
        _end(self.server)


class Proxy:
    """Listens on its own unix socket, in front of a server at a unix or TCP address.

    - `drop_reply_to(word)`: the connection breaks instead of delivering the reply to the next request with this word;
      the server has executed it, and the client never learns of it.
    - `loss`: the share of all replies that are lost like this, at random.
    - `delay_s`: extra latency of each message in each direction.
    - `blackhole()`: connections stay open, new ones are accepted, and nothing is forwarded.
    """

    def __init__(self, upstream_url: str, *, seed: int = 0) -> None:
        self.loss = 0.0
        self.delay_s = 0.0
        self.num_dropped = 0  # replies
        self.num_connections = 0
        self._upstream = upstream_url
        self._random = random.Random(seed)
        self._path = Path(tempfile.mkdtemp(prefix="proxy-")) / "redis.sock"
        self._lock = threading.Lock()
        self._words: list[bytes] = []
        self._links: list[_Link] = []
        self._threads: set[threading.Thread] = set()  # one per connection
        self._listener = socket.socket(socket.AF_UNIX)
        self._acceptor = threading.Thread(target=self._accept, name="proxy accepts", daemon=True)
        self._road_is_open = threading.Event()
        self._road_is_open.set()
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        return f"unix://{self._path}"

    def drop_reply_to(self, word: bytes, *, times: int = 1) -> None:
        with self._lock:
            self._words.extend([word] * times)

    def break_connections(self) -> None:
        """Break every open connection, as when the server is replaced."""
        with self._lock:
            for link in self._links:
                link.end()

    @contextmanager
    def blackhole(self) -> Iterator[None]:
        self._road_is_open.clear()
        try:
            yield
        finally:
            self._road_is_open.set()

    def __enter__(self) -> Self:
        self._listener.bind(os.fspath(self._path))
        self._listener.listen(64)
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close everything and join all threads."""
        self._closed.set()
        self._road_is_open.set()
        self._path.unlink()
        _end(self._listener)
        _join(self._acceptor)
        self._listener.close()
        self.break_connections()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            _join(thread)
        self._path.parent.rmdir()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                raise
            thread = threading.Thread(target=self._carry, args=(client,), name="proxy carries", daemon=True)
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _carry(self, client: socket.socket) -> None:
        """Carry one connection from start to end; if there is no server now, the client's connection ends."""
        with client, contextlib.suppress(OSError), _connect(self._upstream) as server:
            link = _Link(client, server)
            replies = threading.Thread(target=self._replies, args=(link,), name="proxy replies", daemon=True)
            with self._lock:
                self._links.append(link)
                self.num_connections += 1
                if self._closed.is_set():  # too late for `break_connections`
                    link.end()
            replies.start()
            self._requests(link)
            replies.join()
            with self._lock:
                self._links.remove(link)
        with self._lock:
            self._threads.remove(threading.current_thread())

    def _requests(self, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.client.recv(_CHUNK_BYTES):
                if self._is_doomed(data):
                    link.doomed.set()
                self._travel()
                link.server.sendall(data)
        link.end()

    def _replies(self, link: _Link) -> None:
        with contextlib.suppress(OSError):
            while data := link.server.recv(_CHUNK_BYTES):
                if link.doomed.is_set() or self._random.random() < self.loss:
                    with self._lock:
                        self.num_dropped += 1
                    break
                self._travel()
                link.client.sendall(data)
        link.end()

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
    """Connect; OSError if nothing answers."""
    where = urlsplit(url)
    if where.scheme != "unix":
        server = socket.create_connection((where.hostname, where.port), _CONNECTS_WITHIN_S)
        server.settimeout(None)
        return server
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(where.path)
    except OSError:
        server.close()
        raise
    return server


def _end(one: socket.socket) -> None:
    """Shut the socket down, which wakes waiting threads on both sides."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _join(thread: threading.Thread) -> None:
    thread.join(_ENDS_WITHIN_S)
    assert not thread.is_alive(), f"{thread.name} has not ended in {_ENDS_WITHIN_S:g} s"
