"""Bounds how many samples vLLM has at once, one less than it can run, so that a canary always finds room.

vLLM admits nothing while all its seats are taken, and what has a seat keeps it to the end of its response: a canary
that waited there for minutes would pass for an engine that hangs.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count


class Seats:
    """Seats for samples. Waiting samples are seated by priority, the lowest number first, then as they came."""

    def __init__(self, num: int) -> None:
        self._num_free = num
        self._numbers = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap of (priority, number, seated)

    @asynccontextmanager
    async def taken(self, priority: int) -> AsyncIterator[None]:
        await self._take(priority)
        try:
            yield
        finally:
            self._leave()

    async def _take(self, priority: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        seated: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._numbers), seated))
        try:
            await seated
        except asyncio.CancelledError:
            if not seated.cancelled():  # it was given a seat at the same moment
                self._leave()
            raise

    def _leave(self) -> None:
        """Pass the seat on, or free it."""
        while self._waiting:
            _, _, seated = heapq.heappop(self._waiting)
            if not seated.cancelled():
                seated.set_result(None)
                return
        self._num_free += 1
