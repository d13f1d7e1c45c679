"""The run's private Redis server: started first, ended last, and started again on its append-only file if it dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from streamrl.errors import PartError
from streamrl.transport.embedded import EmbeddedRedis

_MAX_RESTARTS = 5


class RedisPart:
    def __init__(self, folder: Path, *, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._server = EmbeddedRedis.start(folder)
        self.url = self._server.url  # the same after each start
        self.num_restarts = 0

    def look(self) -> None:
        """Parts wait for it meanwhile, and find out by themselves what it may have lost."""
        if self._server.running:
            return
        self.num_restarts += 1
        if self.num_restarts > _MAX_RESTARTS:
            raise PartError(f"the embedded Redis died {self.num_restarts} times (see {self._folder / 'redis.log'})")
        self._say("the embedded Redis died; starting it again")
        self._server.stop()  # removes its socket
        self._server = EmbeddedRedis.start(self._folder)

    def close(self) -> None:
        self._server.stop()
