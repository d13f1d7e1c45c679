"""Serves a run for as long as there is something to do, with the settings of whichever learner has it.

    wait for the run ─► read its settings ─► serve ─► the run is over: return
          ▲                                    │
          └─ a learner has taken it up with other settings, as after a crash

Workers outlive learners, and not everybody who starts a worker starts it again when it ends. So it begins anew by
itself, with a new engine, where a new learner's configuration differs in what a worker reads.

A learner takes a run up once it has loaded its model, which can take an hour; long before, it writes a report each
second. The sign of life is that the report *changes*, so clocks need not agree. Without a sign the wait for the run is
bounded; the learner itself bounds how long it may take while it reports. Behind a run that an older streamrl has left
running, since it was killed, a newer learner may still load, so a schema that is not ours is waited out, for some
minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from streamrl.config.changes import changes, is_read_by_workers
from streamrl.config.load import config_from_json
from streamrl.errors import OtherSchema, ResourceError
from streamrl.protocol.transport.types import RunInfo
from streamrl.tasks import unless
from streamrl.telemetry.progress import Progress, Wait

_NOT_CREATED_S = 600.0  # without a sign of a learner that will create the run
_ENDED_S = 300.0  # without a sign of a learner that will resume a run which has ended
_OTHER_SCHEMA_S = 600.0  # for a learner of our version to take the run up
_POLL_S = 0.5

log = structlog.get_logger(__name__)


class Run(Protocol):
    """The part of `transport.worker.WorkerStream` used here."""

    async def run_info(self) -> RunInfo | None: ...

    async def learner_report(self) -> bytes | None: ...


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


async def await_run(
    run: Run,
    *,
    name: str,
    stop: asyncio.Event,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> RunInfo | None:
    """Return the run once a learner is running it; None if told to stop, or if it has ended and nobody resumes it."""
    began = last_sign = clock()
    last_report = b""
    with progress.waiting(Wait.RUN):
        while not stop.is_set():
            try:
                info = await run.run_info()
            except OtherSchema:
                if clock() - began > _OTHER_SCHEMA_S:
                    raise
                info = None
            if info is not None and info.state == "running":
                return info
            report = await run.learner_report()
            if report is not None and report != last_report:
                last_sign, last_report = clock(), report
            silent_s = clock() - last_sign
            if info is not None and silent_s > _ENDED_S:
                log.info("run_ended", state=info.state)
                return None
            if silent_s > _NOT_CREATED_S:
                raise ResourceError(f"no learner created the run {name!r} in this Redis within {_NOT_CREATED_S:g} s")
            await unless(stop, sleep(_POLL_S))
    return None
