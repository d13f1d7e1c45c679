"""The hosts of one engine in one process: the first, and further ones whose weights and ranks are doubles."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from streamrl.errors import WeightsError
from streamrl.process import parse_address
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import Meeting
from streamrl.workers.hosts.first import Hosts, open_hosts
from streamrl.workers.hosts.further import FirstHost, FurtherHost
from tests.helpers import wait_until_async

RUN_UID, SECRET = "run-of-hosts", b"known to hosts of this run"


class CopyDouble:
    """Has every version but `missing` at once."""

    def __init__(self) -> None:
        self.brought: list[tuple[int, bool]] = []
        self.missing: set[int] = set()
        self.error: Exception | None = None
        self.arrived = 0  # bytes
        self.may_end = asyncio.Event()  # until then, bytes go on arriving
        self.may_end.set()

    def num_read(self) -> int:
        self.arrived += not self.may_end.is_set()
        return self.arrived

    async def bring(self, version: int, *, refetch: bool) -> None:
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        if version in self.missing:
            raise WeightsError("its manifest is gone")
        self.brought.append((version, refetch))


class RanksDouble:
    """Stand at once; end when they are killed, or told why."""

    def __init__(self, meeting: Meeting, seed: int) -> None:
        self.meeting, self.seed = meeting, seed
        self.error: Exception | None = None
        self.killed = False
        self._ended: queue.Queue[str] = queue.Queue()

    def start(self) -> None:
        if self.error is not None:
            raise self.error

    def wait(self) -> str:
        return self._ended.get()

    def die(self, why: str) -> None:
        self._ended.put(why)

    def kill(self) -> None:
        self.killed = True
        self._ended.put("it was killed")


class Further:
    """One further host, which joins as soon as it is made."""

    def __init__(self, address: str, name: str = "other", **first: Any) -> None:
        self.copy = CopyDouble()
        self.ranks: list[RanksDouble] = []
        self.progress = Progress(part=f"host/{name}", role="host")
        self.stop = asyncio.Event()
        self.over = False  # the run
        self.secret = SECRET
        self.start_error: Exception | None = None
        limits = {"run_uid": RUN_UID, "start_timeout_s": 10.0, "grace_s": 0.1, "silent_s": 5.0, **first}
        self.host = FurtherHost(
            name=name,
            first=FirstHost(at=parse_address(address, what="first"), **limits),
            secret=self._secret,
            copy=self.copy,
            make_ranks=self._make,
            progress=self.progress,
        )
        self.task = asyncio.create_task(self.host.run(self.stop), name=name)

    async def _secret(self) -> bytes | None:
        return None if self.over else self.secret

    def _make(self, meeting: Meeting, seed: int) -> RanksDouble:
        self.ranks.append(RanksDouble(meeting, seed))
        self.ranks[-1].error = self.start_error
        return self.ranks[-1]

    async def does(self, doing: str) -> None:
        async def done() -> bool:
            if self.task.done():
                self.task.result()
            return self.progress.report().doing == doing

        await wait_until_async(done, description=f"the further host is at: {doing}")


class HostsWorld:
    def __init__(self, *, num: int = 2, start_timeout_s: float = 10.0, silent_s: float = 5.0) -> None:
        self.progress = Progress(part="worker/0", role="worker")
        self.hosts = Hosts(
            num=num,
            secret=SECRET,
            run_uid=RUN_UID,
            progress=self.progress,
            start_timeout_s=start_timeout_s,
            silent_s=silent_s,
        )
        self._made: list[Further] = []
        self._first = AsyncExitStack()

    def further(self, name: str = "other", **first: Any) -> Further:
        self._made.append(Further(self.hosts.address, name, **first))
        return self._made[-1]

    async def leave(self) -> None:
        """As the worker of the first host does in the end."""
        await self._first.aclose()

    async def fail(self, error: Exception) -> None:
        """As the worker of the first host does on an error."""
        await self._first.__aexit__(type(error), error, None)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HostsWorld]:
        try:
            await self._first.enter_async_context(open_hosts(self.hosts, ("127.0.0.1", 0)))
            yield self
        finally:
            await self.leave()
            for one in self._made:
                one.task.cancel()
            await asyncio.gather(*(one.task for one in self._made), return_exceptions=True)
