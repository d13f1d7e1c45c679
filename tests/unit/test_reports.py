"""What writes a part's reports ends with the part, and not before."""

from __future__ import annotations

import asyncio
from typing import Any

from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.reports import report_progress, write_reports
from streamrl.telemetry.progress import Progress
from tests.helpers import wait_until


class ForgetfulClient:
    """Its first call takes a cancellation for an answer, as `asyncio.wait_for` may before Python 3.12, through which
    the library sends."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._is_first = True

    async def evalsha(self, *_: Any) -> None:
        self.asked.set()
        if self._is_first:
            self._is_first = False
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return


async def test_a_cancellation_that_was_forgotten_holds_up_nobody() -> None:
    client: Any = ForgetfulClient()

    async def report() -> None:
        async with report_progress(client, Keys("run"), Progress(part="worker/0", role="worker")):
            await client.asked.wait()

    reporting = asyncio.create_task(report())
    assert (await asyncio.wait([reporting], timeout=240))[0] == {reporting}


class Counting:
    """Takes whatever it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def evalsha(self, *_: Any) -> None:
        self.num_calls += 1


def test_a_report_that_cannot_be_written_is_not_the_last() -> None:
    client: Any = Counting()
    progress = Progress(part="learner/0", role="learner")
    progress.note(loss=object())  # type: ignore[arg-type]

    with write_reports(client, Keys("run"), progress, period_s=0.01):
        progress.note(loss=0.5)
        wait_until(lambda: client.num_calls >= 2, description="reports are written")
