"""The run's own reward server: started, waited for, and kept at one address for as long as the run lasts."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlsplit

from streamrl.config import schema
from streamrl.errors import PartError
from streamrl.launch.parts import REWARD, RunFolder, reward_command
from streamrl.launch.processes import Command, Kept, Process
from streamrl.telemetry.progress import Progress

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
