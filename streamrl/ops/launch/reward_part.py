"""The reward server of a run on this machine, at one address for the run's life; or one outside of any run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

from streamrl.config import schema
from streamrl.config.placement import REWARD, Placement
from streamrl.errors import PartError
from streamrl.held_folders import scratch_folder
from streamrl.ops.launch.parts import NO_PLACEMENT, RunFolder, reward_command
from streamrl.ops.launch.processes import Command, Process, SupervisedProcess, end_all, part_error
from streamrl.process import LOOPBACK
from streamrl.telemetry.progress import Progress

_LOOK_EVERY_S = 0.2
_END_S = 10.0


class RewardPart:
    """The run's own reward server, kept at one address for the life of the run. Workers wait only for that address, not
    for the model: they take no tickets until it answers. A first load that takes too long ends the run; a later one is
    only reported, since to workers it is an outage. This object reports for the server, which has no access to Redis.
    """

    def __init__(
        self,
        server: schema.OwnRewardServer,
        folder: RunFolder,
        *,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Command], Process] = Process,
        placement: Placement = NO_PLACEMENT,
    ) -> None:
        self._command = partial(reward_command, server, folder, placement=placement)
        self._folder, self._notify, self._clock = folder, notify, clock
        self._start_timeout_s = server.start_timeout_s
        self.forget_address()
        self.progress = Progress(part=REWARD, role="reward")
        self.progress.working("load the model")
        self.supervised = SupervisedProcess(self._command(port=server.port), notify=notify, clock=clock, start=start)
        self.url: str | None = None  # set once its port is bound
        self.is_ready = False  # it has answered once
        self._ready_by = clock() + self._start_timeout_s

    def look(self) -> None:
        self.supervised.look(is_needed=True)
        if self.supervised.process.poll() is not None:
            self.progress.working("restart")
            self.forget_address()  # its successor writes it again
            self._ready_by = self._clock() + self._start_timeout_s
            return
        if self.url is None and self._folder.reward_bound.exists():
            self._note_bound(self._folder.reward_bound.read_text())
        if self._folder.reward_url.exists():
            self.is_ready = True
            self.progress.working("serve")
            self.progress.advanced(restarts=self.supervised.num_restarts)
        elif self._clock() > self._ready_by:
            self._report_late()

    def _report_late(self) -> None:
        late = (
            f"the reward server was not ready within reward_server.start_timeout_s={self._start_timeout_s:g} "
            f"(see {self.supervised.command.log}); if its model takes longer to load, raise that setting"
        )
        if not self.is_ready:
            raise PartError(late)
        self._ready_by = self._clock() + self._start_timeout_s
        self._notify(f"{late}; samples wait for it meanwhile")

    def _note_bound(self, url: str) -> None:
        # Workers keep this address, so a restart must use the same port.
        self.url = url
        self.supervised.command = self._command(port=urlsplit(url).port or 0)

    def forget_address(self) -> None:
        """Delete address files left by an earlier launcher, or for a later one."""
        for file in (self._folder.reward_url, self._folder.reward_bound):
            file.unlink(missing_ok=True)


@contextmanager
def reward_server(
    server: schema.OwnRewardServer,
    *,
    notify: Callable[[str], None],
    show: Callable[[str], None],
    start: Callable[[Command], Process] = Process,
) -> Iterator[RewardPart]:
    """Run a reward server outside of any run: on any free port, ready at once, ended with the context. `show` is called
    now and then with its loading time; if it cannot load, UserError or PartError."""
    with scratch_folder() as folder:
        local_server = server.model_copy(update={"host": LOOPBACK[0], "port": 0})
        part, began = RewardPart(local_server, RunFolder(folder), notify=notify, start=start), time.monotonic()
        try:
            while not part.is_ready:
                if part.supervised.process.poll() is not None:
                    raise part_error(part.supervised.process)
                part.look()
                show(f"loading the reward model {server.model}: {time.monotonic() - began:.0f} s")
                time.sleep(_LOOK_EVERY_S)
            yield part
        finally:
            end_all([part.supervised.process], within_s=_END_S)
