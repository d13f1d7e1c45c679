"""A worker's wait for its run: until a learner has taken it up, as long as there is a sign of a learner.

A learner takes a run up once it has loaded its model, which can take an hour; long before, it writes a report each
second. The sign of life is that the report *changes*, so clocks need not agree. Without a sign the wait is bounded; the
learner itself bounds how long it may take while it reports. Behind a run that an older streamrl has left running,
since it was killed, a newer learner may still load, so a schema that is not ours is waited out, for some minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

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
