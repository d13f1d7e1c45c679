"""Kills a run's Redis and starts it again, in a thread of its own, since an embedded server ends with the thread that
started it. On request the append-only file loses its last second before the restart, as in a power failure."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from streamrl.protocol.transport.embedded import EmbeddedRedis
from tests.helpers import wait_until

_LOOK_EVERY_S = 0.02


class RedisKeeper:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._orders: queue.Queue[float | None] = queue.Queue()  # seconds to cut off; None: stop
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="redis keeper", daemon=True)
        self._sizes: list[tuple[float, dict[Path, int]]] = []  # of the append-only files, over time
        self.url = ""
        self.back_at: list[float] = []  # when it answered again after each kill
        self.num_bytes_cut = 0

    @property
    def num_kills(self) -> int:
        return len(self.back_at)

    def kill(self, *, cut_s: float = 0.0) -> None:
        """Kill it by SIGKILL; it is restarted automatically. Does not wait."""
        self._orders.put(cut_s)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(self._started.is_set, description="the first server answers", timeout_s=240)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._orders.put(None)
        self._thread.join(30.0)

    def _keep(self) -> None:
        server = self._start()
        self.url = server.url
        self._started.set()
        try:
            while (cut_s := self._next_order()) is not None:
                os.kill(server.pid, signal.SIGKILL)
                wait_until(lambda: not server.running, description="the server is dead")  # noqa: B023
                if cut_s:
                    self._cut(time.monotonic() - cut_s)
                server = self._start()
                self.back_at.append(time.monotonic())
        finally:
            server.stop()

    def _start(self) -> EmbeddedRedis:
        server = EmbeddedRedis.start(self._folder)
        self._sizes.clear()
        self._sizes.append((0.0, self._measure()))  # what it has loaded is on disk
        return server

    def _next_order(self) -> float | None:
        while True:
            self._sizes.append((time.monotonic(), self._measure()))
            try:
                return self._orders.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                continue

    def _measure(self) -> dict[Path, int]:
        return {file: file.stat().st_size for file in self._files()}

    def _files(self) -> list[Path]:
        """Return the files being appended to: one up to Redis 6.2, a numbered one since."""
        return [*self._folder.glob("appendonly.aof"), *self._folder.glob("appendonlydir/*.incr.aof")]

    def _cut(self, since: float) -> None:
        """Cut off what was written since then, as if it had never reached the disk."""
        kept = [sizes for at, sizes in self._sizes if at <= since][-1]
        for file in self._files():
            self.num_bytes_cut += file.stat().st_size - kept[file]
            os.truncate(file, kept[file])
