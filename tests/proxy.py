"""A proxy before Redis that loses replies: the server does what it was told, and the client never learns of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self


class ReplyDroppingProxy:
    """Listens on a unix socket of its own. After `drop_reply_to(word)` the connection breaks instead of bringing the
    reply to the next request that holds the word."""

    def __init__(self, upstream_url: str) -> None:
        self._upstream = upstream_url.removeprefix("unix://")
        self._folder = Path(tempfile.mkdtemp(prefix="proxy-"))
        self._lock = threading.Lock()
        self._words: list[bytes] = []
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self.num_dropped = 0
        self.num_connections = 0

    @property
    def url(self) -> str:
        return f"unix://{self._folder / 'redis.sock'}"

    def drop_reply_to(self, word: bytes, *, times: int = 1) -> None:
        with self._lock:
            self._words.extend([word] * times)

    def break_connections(self) -> None:
        """Every open connection ends, as when the server is replaced."""
        with self._lock:
            for one in self._open:
                _end(one)
            self._open.clear()

    def __enter__(self) -> Self:
        self._listener.bind(os.fspath(self._folder / "redis.sock"))
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="proxy accepts", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _end(self._listener)
        self.break_connections()
        shutil.rmtree(self._folder)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._upstream)
                with self._lock:
                    self._open += [client, server]
                    self.num_connections += 1
                doomed = threading.Event()
                for name, pump in (("requests", self._requests), ("replies", self._replies)):
                    threading.Thread(
                        target=pump, args=(client, server, doomed), name=f"proxy {name}", daemon=True
                    ).start()

    def _requests(self, client: socket.socket, server: socket.socket, doomed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                with self._lock:
                    word = next((word for word in self._words if word in data), None)
                    if word is not None:
                        self._words.remove(word)
                        doomed.set()
                server.sendall(data)
        _end(client)
        _end(server)

    def _replies(self, client: socket.socket, server: socket.socket, doomed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                if doomed.is_set():
                    with self._lock:
                        self.num_dropped += 1
                    break
                client.sendall(data)
        _end(client)
        _end(server)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
