"""The task that writes a worker's reports ends with the worker, whatever becomes of its cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.reports import report_progress
from streamrl.telemetry.progress import Progress


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
    assert (await asyncio.wait([reporting], timeout=30))[0] == {reporting}
