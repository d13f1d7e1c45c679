"""The run's private Redis server: started first, ended last, and started again on its append-only file if it dies.

The run's own reward server: started, waited for, and kept at one address for as long as the run lasts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from streamrl.config import schema
from streamrl.errors import PartError
from streamrl.ops.launch.parts import REWARD, RunFolder, reward_command
from streamrl.ops.launch.processes import Command, Kept, Process
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.telemetry.progress import Progress

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


_READY_S = 300.0  # a large reward model takes long to load


class RewardPart:
    """It reports for the server, which does not know Redis."""

    def __init__(
        self,
        server: schema.RewardServer,
        folder: RunFolder,
        *,
        say: Callable[[str], None],
        start: Callable[[Command], Process] = Process.start,
    ) -> None:
        self._server, self._folder = server, folder
        folder.reward_url.unlink(missing_ok=True)
        self.progress = Progress(part=REWARD, role="reward")
        self.progress.working("load the model")
        self.kept = Kept(reward_command(server, folder, port=server.port), say=say, start=start)
        self.url: str | None = None  # once it is ready
        self._ready_by = time.monotonic() + _READY_S

    def look(self) -> None:
        self.kept.look(is_needed=True)
        if self.kept.process.poll() is not None:
            self.progress.working("start again")
            self._folder.reward_url.unlink(missing_ok=True)  # written anew by the one that comes, once it is ready
            self._ready_by = time.monotonic() + _READY_S
        elif self._folder.reward_url.exists():
            self._note_ready(self._folder.reward_url.read_text())
        elif time.monotonic() > self._ready_by:
            raise PartError(f"the reward server was not ready in {_READY_S:g} s (see {self.kept.command.log})")

    def _note_ready(self, url: str) -> None:
        self.progress.working("serve")
        self.progress.advanced(restarts=self.kept.num_restarts)
        if self.url is None:
            # Workers have this address for good, so another start must come up at the same port.
            self.url = url
            self.kept.command = reward_command(self._server, self._folder, port=urlsplit(url).port or 0)
