"""Serves a run for as long as there is something to do, with the settings of whichever learner has it.

    wait for the run ─► read its settings ─► serve ─► the run is over: return
          ▲                                    │
          └─ a learner has taken it up with other settings, as after a crash

Workers outlive learners, and not everybody who starts a worker starts it again when it ends. So it begins anew by
itself, with a new engine, where a new learner's configuration differs in what a worker reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from streamrl.config.changes import changes, is_read_by_workers
from streamrl.config.load import config_from_json
from streamrl.protocol.transport.types import RunInfo
from streamrl.telemetry.progress import Progress
from streamrl.workers.await_run import Run, await_run

log = structlog.get_logger(__name__)


class RunSettings:
    """A run's settings as this worker has read them. `have_differed`: the run has had others since."""

    def __init__(self, info: RunInfo) -> None:
        self.config = config_from_json(info.config_json)
        self.have_differed = False
        self._same = info.config_json  # the latest text known to say the same to a worker

    def differ_in(self, info: RunInfo) -> bool:
        """Return whether the run has others now. Those that only a learner reads do not count."""
        if info.config_json == self._same:
            return False
        found = changes(self.config, config_from_json(info.config_json))
        if any(is_read_by_workers(change.key) for change in found):
            self.have_differed = True
            return True
        self._same = info.config_json
        return False


async def follow_run(
    run: Run,
    *,
    name: str,
    stop: asyncio.Event,
    progress: Progress,
    serve: Callable[[RunInfo, RunSettings], Awaitable[None]],  # returns when the run is over or its settings differ
) -> None:
    while (info := await await_run(run, name=name, stop=stop, progress=progress)) is not None:
        settings = RunSettings(info)
        await serve(info, settings)
        now = await run.run_info()
        if stop.is_set() or (now is not None and now.state != "running"):
            return
        # It may have been served until its settings differed, and be lost from Redis now until its learner restores it.
        if not settings.have_differed and (now is None or not settings.differ_in(now)):
            return
        log.info("run_has_other_settings", run=name)
