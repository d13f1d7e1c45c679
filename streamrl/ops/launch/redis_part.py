"""The Redis of a run on this machine: started first, ended last, and restarted from its append-only file if it dies.

Each start blocks while the server loads that file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from streamrl.errors import PartError, ResourceError
from streamrl.ops.launch.processes import HEALTHY_AFTER_S
from streamrl.protocol.transport.embedded import EmbeddedRedis

_MAX_DEATHS = 5  # in a row
_PAUSE_S = 2.0  # between two starts, at least


class RedisPart:
    def __init__(
        self,
        folder: Path,
        *,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._notify, self._clock = folder, notify, clock
        self._server = EmbeddedRedis.start(folder)
        self._ready_at, self._num_deaths, self._restart_at = clock(), 0, 0.0
        self.url = self._server.url  # the same after each start
        self.num_restarts = 0

    def look(self) -> None:
        """Restart it if it died. Parts wait meanwhile, and detect by themselves what it may have lost."""
        now = self._clock()
        if self._server.running or now < self._restart_at:
            return
        was_healthy = now - self._ready_at >= HEALTHY_AFTER_S
        self._num_deaths = 1 if was_healthy else self._num_deaths + 1
        if self._num_deaths > _MAX_DEATHS:
            raise PartError(
                f"the embedded Redis died {self._num_deaths} times, each before it had served for {HEALTHY_AFTER_S:g} "
                f"s (see {self._folder / 'redis.log'})"
            )
        self.num_restarts += 1
        self._notify("the embedded Redis died; restarting it")
        self._server.stop()  # removes its socket
        self._ready_at, self._restart_at = math.inf, now + _PAUSE_S
        try:
            self._server = EmbeddedRedis.start(self._folder)
        except (OSError, ResourceError) as error:  # perhaps for a moment: no process, memory or room on the disk
            self._notify(f"the embedded Redis could not be started: {error}")
        else:
            self._ready_at = self._clock()

    def close(self) -> None:
        self._server.stop()
