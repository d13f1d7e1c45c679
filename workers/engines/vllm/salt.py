"""The salt of vLLM's prefix cache: a request reuses only cache entries that were made under its own salt.

pause begins ──► requests wait ──► scheduler paused, new salt ──► requests go on, and are prefilled under new weights
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class CacheSalt:
    def __init__(self) -> None:
        self._salt = ""
        self._num_salts = 0
        self._is_known = asyncio.Event()  # of the weights under which a request would be prefilled
        self._is_known.set()

    async def known(self) -> str:
        """Return the salt of a request that is made now; wait while the scheduler is being paused."""
        await self._is_known.wait()
        return self._salt

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Let requests wait meanwhile."""
        self._is_known.clear()
        try:
            yield
        finally:
            self._is_known.set()

    def renew(self, version: int) -> None:
        # A rejected version is loaded again, and cache entries of its first load must not be read.
        self._num_salts += 1
        self._salt = f"{version}:{self._num_salts}"
