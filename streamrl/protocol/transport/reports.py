"""Reports: the state of each process, written to Redis once a second beside its work.

Owns one thread (`write_reports`, for the learner and the launcher) or one task (`report_progress`, for workers) per
process. A failure is logged once, until a report is written again. It never affects the work, and does not end the
reports, since a process without reports is considered gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import redis
import redis.asyncio
import structlog

from streamrl.protocol.transport import operator_scripts as scripts
from streamrl.protocol.transport.entries import encode_report
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.script import run, run_async
from streamrl.tasks import cancel_all
from streamrl.telemetry.progress import Progress


@contextlib.contextmanager
def write_reports(client: redis.Redis, keys: Keys, progress: Progress, *, period_s: float = 1.0) -> Iterator[None]:
    """Write the process's reports in a thread that ends with the context."""
    outcome, stop = _Outcome(progress.part), threading.Event()

    def write_until_stopped() -> None:
        while not stop.is_set():
            with outcome.noted():
                run(client, scripts.report(keys, progress.part, encode_report(progress.report())))
            stop.wait(period_s)
        with outcome.noted():
            run(client, scripts.withdraw(keys, progress.part))

    thread = threading.Thread(target=write_until_stopped, name=f"reports of {progress.part}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.asynccontextmanager
async def report_progress(
    client: redis.asyncio.Redis, keys: Keys, progress: Progress, *, period_s: float = 1.0
) -> AsyncIterator[None]:
    """Write the process's reports in a task that ends with the context."""
    outcome = _Outcome(progress.part)

    async def write_for_ever() -> None:
        while True:
            with outcome.noted():
                await run_async(client, scripts.report(keys, progress.part, encode_report(progress.report())))
            await asyncio.sleep(period_s)

    task = asyncio.create_task(write_for_ever(), name=f"reports of {progress.part}")
    try:
        yield
    finally:
        await cancel_all([task])
        with outcome.noted():
            await run_async(client, scripts.withdraw(keys, progress.part))


class _Outcome:
    """Logs the first of consecutive failures, and the recovery."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._failing = False

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._failing:
                is_defect = not isinstance(error, redis.RedisError)
                log = structlog.get_logger()
                log.warning("reports_failing", reporter=self._part, error=str(error), exc_info=is_defect)
            self._failing = True
        else:
            if self._failing:
                structlog.get_logger().info("reports_written_again", reporter=self._part)
            self._failing = False
