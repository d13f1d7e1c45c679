"""A worker's wait for its run: until a learner is at it, as long as there is a learner to be waited for.

A learner takes a run up when it has loaded its model, which may last an hour; long before, it shows itself by a report
each second. That its report *changes* is the sign, so clocks need not agree. Without a sign the wait is bounded; how
long a learner that shows itself may take is bounded by the learner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from streamrl.errors import ResourceError
from streamrl.protocol.transport.types import RunInfo
from streamrl.tasks import unless
from streamrl.telemetry.progress import Progress, Wait

_UNMADE_S = 600.0  # without a sign of a learner that would make the run
_ENDED_S = 300.0  # without a sign of one that would take up a run which has ended
_POLL_S = 0.5

log = structlog.get_logger(__name__)


class Run(Protocol):
    """What is used of `transport.worker.WorkerStream`."""

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
    """The run, once a learner is at it; None when told to stop, or when it has ended and nobody takes it up."""
    last_sign, last_report = clock(), b""
    with progress.waiting(Wait.RUN):
        while not stop.is_set():
            info = await run.run_info()
            if info is not None and info.state == "running":
                return info
            report = await run.learner_report()
            if report is not None and report != last_report:
                last_sign, last_report = clock(), report
            silent_s = clock() - last_sign
            if info is not None and silent_s > _ENDED_S:
                log.info("run_ended", state=info.state)
                return None
            if silent_s > _UNMADE_S:
                raise ResourceError(f"no learner made the run {name!r} in this Redis within {_UNMADE_S:g} s")
            await unless(stop, sleep(_POLL_S))
    return None
