"""The seam between a worker and the stream: `transport.worker.WorkerStream` on Redis, doubles in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from streamrl.errors import RunGone
from streamrl.protocol.transport.types import Announcement, Control, Leased, RunInfo, RunState
from streamrl.protocol.wire.ticket import Ticket


class Tickets(Protocol):
    """Tickets in, groups out. TransportError when Redis stays away for too long, RunGone when the run was removed."""

    async def run_info(self) -> RunInfo | None: ...

    async def control(self) -> Control: ...

    async def lease(self, *, max_tickets: int, block_ms: int) -> list[Leased]: ...

    async def renew(self, leased: Sequence[Leased]) -> list[Leased]:
        """Returns those that are not ours any more."""
        ...

    async def deliver(self, leased: Leased, header: bytes, body: bytes) -> bool:
        """False: the ticket is not ours any more; drop the group."""
        ...

    async def hand_back(self, leased: Sequence[Leased]) -> None: ...


class Announcements(Protocol):
    """What the learner says of its weights."""

    async def latest(self, *, anew: bool = False) -> Announcement | None:
        """`anew`: not as it was when it was read first; an anchor may lie beside it by now."""
        ...

    async def beyond(self, version: int, *, within_s: float) -> bool:
        """Wait until a newer version is announced. False: none was heard, and `latest` tells whether there is one."""
        ...

    async def manifest(self, version: int) -> bytes | None: ...


class TicketsDouble:
    """A run in memory with one worker: tests put tickets in, and read what was delivered and handed back."""

    def __init__(self, info: RunInfo) -> None:
        self.info: RunInfo | None = info
        self.mode: Control = "run"
        self.waiting: list[Ticket] = []
        self.delivered: list[tuple[int, bytes, bytes]] = []  # (ticket number, header, body)
        self.handed_back: list[int] = []
        self.taken_away: set[int] = set()  # numbers whose leases others have got
        self.renewals = 0
        self._num_leased = 0

    def end(self, state: RunState) -> None:
        assert self.info is not None
        self.info = replace(self.info, state=state)

    async def run_info(self) -> RunInfo | None:
        if self.info is None:
            raise RunGone("the run was removed")
        return self.info

    async def control(self) -> Control:
        return self.mode

    async def lease(self, *, max_tickets: int, block_ms: int) -> list[Leased]:
        if not self.waiting:
            await asyncio.sleep(min(block_ms, 10) / 1000)
        taken = self.waiting[:max_tickets]
        del self.waiting[:max_tickets]  # in place: several workers may have it
        return [self._leased(ticket) for ticket in taken]

    async def renew(self, leased: Sequence[Leased]) -> list[Leased]:
        self.renewals += 1
        return [one for one in leased if one.ticket.number in self.taken_away]

    async def deliver(self, leased: Leased, header: bytes, body: bytes) -> bool:
        if leased.ticket.number in self.taken_away:
            return False
        self.delivered.append((leased.ticket.number, header, body))
        return True

    async def hand_back(self, leased: Sequence[Leased]) -> None:
        self.handed_back += [one.ticket.number for one in leased]

    def _leased(self, ticket: Ticket) -> Leased:
        self._num_leased += 1
        return Leased(entry_id=f"{self._num_leased}-0", ticket=ticket, purpose=ticket.purpose)


class AnnouncementsDouble:
    """Versions by hand: the newest manifest, and those before it."""

    def __init__(self) -> None:
        self.newest: Announcement | None = None
        self.manifests: dict[int, bytes] = {}
        self._bell = asyncio.Event()

    def announce(self, announcement: Announcement) -> None:
        self.newest = announcement
        self.manifests[announcement.version] = announcement.manifest
        self._bell.set()

    async def latest(self, *, anew: bool = False) -> Announcement | None:
        if anew and self.newest is not None:
            self.newest = replace(self.newest, manifest=self.manifests[self.newest.version])
        return self.newest

    async def beyond(self, version: int, *, within_s: float) -> bool:
        if self.newest is None or self.newest.version <= version:
            self._bell.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), within_s)
        return self.newest is not None and self.newest.version > version

    async def manifest(self, version: int) -> bytes | None:
        return self.manifests.get(version)
