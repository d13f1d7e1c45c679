"""Rate limit of requests: a turn at a time, at least `1 / per_s` apart. Blocks until the next turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class RequestPace:
    """Turns are as far apart also after a late turn, so a busy loop causes no burst."""

    def __init__(self, per_s: float | None) -> None:
        self._every_s = 0.0 if per_s is None else 1 / per_s
        self._next = 0.0  # on the event loop's clock
        self._turn_lock = asyncio.Lock()

    async def turn(self, take: Callable[[], T | None]) -> T | None:
        """Wait for a turn and call `take`. A turn for which it returns None is left to the next caller."""
        loop = asyncio.get_running_loop()
        async with self._turn_lock:
            if (left_s := self._next - loop.time()) > 0:
                await asyncio.sleep(left_s)
            if (taken := take()) is not None:
                self._next = loop.time() + self._every_s
            return taken
